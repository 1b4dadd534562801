"""The right answer in float64, one token and one head at a time; and how far from it an answer may be."""

import jax.numpy as jnp
import numpy as np

from jaxpaged.testing.cases import Case

TOLERANCE = {"float32": 2e-5, "float16": 3e-3, "bfloat16": 2e-2}
"""Largest error of an attention output, as a share of the largest value of its row."""


def oracle(
    case: Case,
    *,
    sm_scale: float | None = None,
    logits_soft_cap: float | None = None,
    sliding_window: int | None = None,
    sinks: np.ndarray | None = None,
    alibi_slopes: np.ndarray | None = None,
    causal: bool = True,
    tree_mask: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Attention of `case` in float64, one token and one head at a time, from the dense K and V.

    Returns:
        Output `[num_tokens, num_q_heads, head_dim]`, log-sum-exp `[num_tokens, num_q_heads]`; 0 and -inf for padding.
    """
    num_tokens, num_q_heads, head_dim = case.q.shape
    q_per_kv = num_q_heads // case.k_pages.shape[2]
    scale = head_dim**-0.5 if sm_scale is None else sm_scale
    cu_q_lens = np.arange(len(case.seq_lens) + 1) if case.cu_q_lens is None else case.cu_q_lens
    out = np.zeros(case.q.shape)
    lse = np.full((num_tokens, num_q_heads), -np.inf)
    for i, (k, v) in enumerate(zip(case.dense_k, case.dense_v, strict=True)):
        k, v = k.astype(np.float64), v.astype(np.float64)
        n, m = len(k), cu_q_lens[i + 1] - cu_q_lens[i]
        keys = np.arange(n)
        for token in range(cu_q_lens[i], cu_q_lens[i + 1]):
            position = n - m + token - cu_q_lens[i]
            seen = keys <= position if causal else keys < n
            if sliding_window is not None:
                seen &= keys > position - sliding_window
            if tree_mask is not None:
                seen[n - m :] &= tree_mask[token, :m]
            if not seen.any():
                continue
            for head in range(num_q_heads):
                logits = k[seen, head // q_per_kv] @ case.q[token, head].astype(np.float64) * scale
                if logits_soft_cap is not None:
                    logits = logits_soft_cap * np.tanh(logits / logits_soft_cap)
                if alibi_slopes is not None:
                    logits += float(alibi_slopes[head]) * (keys[seen] - position)
                others = logits if sinks is None else np.append(logits, float(sinks[head]))
                lse[token, head] = np.logaddexp.reduce(others)
                out[token, head] = np.exp(logits - lse[token, head]) @ v[seen, head // q_per_kv]
    return out, lse


def assert_attention_close(actual, expected: np.ndarray, *, tolerance: float | None = None) -> None:
    """Asserts that each row of `actual` is within `tolerance` of the largest value of the same row of `expected`.

    Args:
        actual: `[..., head_dim]` array of the dtype under test.
        tolerance: Share of the row's largest value; None takes `TOLERANCE` of the dtype of `actual`.
    """
    if tolerance is None:
        tolerance = TOLERANCE[jnp.dtype(actual.dtype).name]
    error = np.abs(np.asarray(actual, np.float64) - expected).max(-1)
    error = np.where(np.isnan(error), np.inf, error)  # NaN is the worst answer of all
    allowed = tolerance * np.abs(expected).max(-1)
    worst = np.unravel_index(np.argmax(error - allowed), error.shape) if error.size else ()
    np.testing.assert_array_less(
        error, allowed + 1e-30, err_msg=f"row {worst}: {actual[worst]} against {expected[worst]}", verbose=False
    )
