"""Test helpers, public because whoever builds on the cache needs them too: cases, an oracle, tolerances.

`make_case` draws one ragged batch whose mistakes show: page ids are a permutation, K and V are independent in every
sequence and layer, and every slot that no live token owns holds NaN. `oracle` answers in float64 from the dense K and V
that the case was cut from, so it shares no line with the code under test: no page, no tile, no running maximum.
"""

import dataclasses
from collections.abc import Sequence
from typing import Literal

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jaxpaged.config import NULL_PAGE, cdiv
from jaxpaged.quantize import MAX_VALUE

TOLERANCE = {"float32": 2e-5, "float16": 3e-3, "bfloat16": 2e-2}
"""Largest error of an attention output, as a share of the largest value of its row."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One ragged batch over a paged cache, in numpy. Pass `**case.arguments()` to `paged_attention`.

    Attributes:
        q: `[num_tokens, num_q_heads, head_dim]`, sequence after sequence.
        k_pages: `[num_layers, num_pages, num_kv_heads, page_size, head_dim]`, NaN in every slot without an owner (127
            in int8, which has no NaN).
        k_scale: Of a quantised case, as `v_scale`: a number, `[num_kv_heads]`, or for each token, NaN without an
            owner.
        page_table: `[num_seqs, max_pages]`.
        cu_q_lens: `[num_seqs + 1]`, or None for one query token a sequence.
        dense_k: `[seq_lens[i], num_kv_heads, head_dim]` of each sequence, as stored at `layer`, times its scale.
    """

    q: np.ndarray
    k_pages: np.ndarray
    v_pages: np.ndarray
    page_table: np.ndarray
    seq_lens: np.ndarray
    cu_q_lens: np.ndarray | None
    layer: int
    k_scale: np.ndarray | float | None
    v_scale: np.ndarray | float | None
    dense_k: list[np.ndarray]
    dense_v: list[np.ndarray]

    def arguments(self) -> dict:
        """The arguments of `paged_attention` that hold the batch."""
        arrays = dataclasses.asdict(self)
        del arrays["dense_k"], arrays["dense_v"]
        return {name: jnp.asarray(x) if isinstance(x, np.ndarray) else x for name, x in arrays.items()}


def make_case(
    seq_lens: Sequence[int],
    q_lens: Sequence[int] | None = None,
    *,
    num_q_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 16,
    page_size: int = 4,
    dtype: DTypeLike = np.float32,
    q_dtype: DTypeLike | None = None,
    scale_per: Literal["tensor", "head", "token"] = "token",
    num_layers: int = 2,
    layer: int = 1,
    max_pages: int | None = None,
    unused_entry: int = NULL_PAGE,
    padding_tokens: int = 0,
    seed: int = 0,
) -> Case:
    """Draws a batch of sequences of `seq_lens` KV tokens, N(0, 1) values, in a shuffled pool.

    Args:
        seq_lens: KV tokens of each sequence, this step's included; 0 is a padding row.
        q_lens: Query tokens of each sequence, at most its KV tokens; None is one each, a decode step.
        dtype: Of the pages; of the queries too, if it is not a quantised one.
        q_dtype: Of the queries over quantised pages; None is float32.
        scale_per: What has one scale in quantised pages: all that is stored, a KV head, or a token and KV head.
        max_pages: Width of the page table; None leaves two columns unused.
        unused_entry: What page-table entries past a sequence's last page hold. Nobody may follow them.
        padding_tokens: Query tokens after those of the last sequence; needs `q_lens`.
    """
    if len(seq_lens) == 0 or min(seq_lens) < 0:
        raise ValueError(f"`seq_lens` must hold at least one length, none negative; got {list(seq_lens)}.")
    rng = np.random.default_rng(seed)
    dtype = jnp.dtype(dtype)
    largest = MAX_VALUE.get(dtype.name)
    pages_of = [cdiv(n, page_size) for n in seq_lens]
    width = max(pages_of) + 2 if max_pages is None else max_pages
    num_pages = sum(pages_of) + 3
    ids = iter(rng.permutation(np.arange(1, num_pages)))

    pool_shape = (num_layers, num_pages, num_kv_heads, page_size, head_dim)
    poison = 127 if dtype == np.int8 else np.nan
    k_pages, v_pages = np.full(pool_shape, poison, dtype), np.full(pool_shape, poison, dtype)
    k_scale = v_scale = None
    if largest is not None:
        # Fixed scales fit N(0, 1) up to six standard deviations, and differ from each other.
        shape = {"tensor": (), "head": (num_kv_heads,), "token": pool_shape[:4]}[scale_per]
        k_scale, v_scale = (rng.uniform(6, 7, (2, *shape)) / largest).astype(np.float32)
        if scale_per == "token":
            k_scale, v_scale = np.full_like(k_scale, np.nan), np.full_like(v_scale, np.nan)
    page_table = np.full((len(seq_lens), width), unused_entry, np.int32)
    dense_k, dense_v = [], []
    for row, (n, num) in enumerate(zip(seq_lens, pages_of, strict=True)):
        page_table[row, :num] = [next(ids) for _ in range(num)]
        new_k, new_v = rng.standard_normal((2, num_layers, n, num_kv_heads, head_dim))
        page, offset = page_table[row, np.arange(n) // page_size], np.arange(n) % page_size
        for x, pages, scale, dense in ((new_k, k_pages, k_scale, dense_k), (new_v, v_pages, v_scale, dense_v)):
            if largest is None or scale is None:
                stored = x.astype(dtype)
                dense.append(stored[layer])
            else:
                if scale_per == "token":
                    factor = (np.abs(x).max(-1) / largest).astype(np.float32)  # [num_layers, n, num_kv_heads]
                    scale[:, page, :, offset] = factor.swapaxes(0, 1)
                else:
                    factor = np.broadcast_to(scale, x.shape[:3])
                stored = x / factor[..., None]
                stored = (np.round(stored) if dtype == np.int8 else stored).clip(-largest, largest).astype(dtype)
                dense.append((stored.astype(np.float64) * factor[..., None])[layer])
            pages[:, page, :, offset] = stored.swapaxes(0, 1)

    cu_q_lens = None if q_lens is None else np.cumsum([0, *q_lens], dtype=np.int32)
    num_tokens = len(seq_lens) if cu_q_lens is None else int(cu_q_lens[-1]) + padding_tokens
    return Case(
        q=rng.standard_normal((num_tokens, num_q_heads, head_dim)).astype(q_dtype or (dtype if not largest else "f4")),
        k_pages=k_pages,
        v_pages=v_pages,
        page_table=page_table,
        seq_lens=np.asarray(seq_lens, np.int32),
        cu_q_lens=cu_q_lens,
        layer=layer,
        k_scale=k_scale,
        v_scale=v_scale,
        dense_k=dense_k,
        dense_v=dense_v,
    )


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
