"""The right gradients of attention: JAX's own derivative of dense attention in float64."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jaxpaged.testing.cases import Case
from jaxpaged.testing.oracle import TOLERANCE, assert_attention_close

DIFFERENTIABLE = ("q", "k_pages", "v_pages", "sinks", "alibi_slopes")
"""Arguments of `paged_attention` that have a derivative."""


def cotangents(case: Case, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Draws the weights of output and log-sum-exp in the loss that is differentiated."""
    rng = np.random.default_rng(seed)
    dout, dlse = rng.standard_normal(case.q.shape), rng.standard_normal(case.q.shape[:2])
    return dout.astype(case.q.dtype), dlse.astype(np.float32)


def expected_gradients(
    case: Case,
    seed: int = 0,
    *,
    sm_scale: float | None = None,
    logits_soft_cap: float | None = None,
    sliding_window: int | None = None,
    causal: bool = True,
    tree_mask: np.ndarray | None = None,
    **vectors: np.ndarray,
) -> dict[str, np.ndarray]:
    """Differentiates `sum(out dout) + sum(lse dlse)` in float64, with the weights of `cotangents(case, seed)`.

    Args:
        vectors: `sinks` and `alibi_slopes`, as far as there are such.

    Returns:
        Gradients by name, in the shapes of the arguments of `paged_attention`: zero in every slot without an owner.
    """
    _, num_q_heads, head_dim = case.q.shape
    cu = np.arange(len(case.seq_lens) + 1) if case.cu_q_lens is None else case.cu_q_lens
    num_new = np.diff(cu) * (case.seq_lens > 0)
    longest, width = max(case.seq_lens), max(num_new)
    num_seqs, num_kv_heads = len(num_new), case.k_pages.shape[2]
    key, query = np.arange(longest), np.arange(width)
    position = (case.seq_lens - num_new)[:, None] + query  # [seqs, queries]
    seen = (key < case.seq_lens[:, None, None]) & (query < num_new[:, None])[..., None]
    distance = key - position[..., None]
    if causal:
        seen &= distance <= 0
    if sliding_window is not None:
        seen &= distance > -int(sliding_window)
    arrays = {name: np.zeros((num_seqs, longest, num_kv_heads, head_dim)) for name in ("k", "v")}
    arrays["q"] = np.zeros((num_seqs, width, num_q_heads, head_dim))
    dout, dlse = np.zeros(arrays["q"].shape), np.zeros(arrays["q"].shape[:3])
    packed_dout, packed_dlse = cotangents(case, seed)
    for i, (n, m) in enumerate(zip(case.seq_lens, num_new, strict=True)):
        arrays["k"][i, :n], arrays["v"][i, :n] = case.dense_k[i], case.dense_v[i]
        mine = slice(cu[i], cu[i] + m)
        arrays["q"][i, :m], dout[i, :m], dlse[i, :m] = case.q[mine], packed_dout[mine], packed_dlse[mine]
        if tree_mask is not None:
            seen[i, :m, n - m : n] &= tree_mask[mine, :m]
    arrays |= {name: np.asarray(x, np.float64) for name, x in vectors.items()}
    with jax.enable_x64(True):
        scale = head_dim**-0.5 if sm_scale is None else sm_scale
        grads = _dense_gradients(
            arrays, dout, dlse, seen, num_q_heads // num_kv_heads, scale, logits_soft_cap, distance
        )
    grads = {name: np.asarray(x) for name, x in grads.items()}
    expected = {name: grads[name] for name in vectors}
    expected["q"], expected["k_pages"], expected["v_pages"] = (
        np.zeros(x.shape) for x in (case.q, case.k_pages, case.v_pages)
    )
    for i, (n, m) in enumerate(zip(case.seq_lens, num_new, strict=True)):
        expected["q"][cu[i] : cu[i] + m] = grads["q"][i, :m]
        page_size = case.k_pages.shape[3]
        page, offset = case.page_table[i, np.arange(n) // page_size], np.arange(n) % page_size
        for name in ("k", "v"):
            pages = expected[f"{name}_pages"][case.layer]
            for page_id, slot, gradient in zip(page, offset, grads[name][i], strict=False):
                pages[page_id, :, slot] += gradient  # sequences may share a page
    return expected


def assert_gradient_close(actual: ArrayLike, expected: np.ndarray, dtype: np.dtype) -> None:
    """Asserts that each row is finite, within the tolerance of its dtype, and exactly 0 where nothing can flow.

    In 16 bits a row whose probability is small may cancel to less than the rounding of the output that it was computed
    from: there, within a fiftieth of the tolerance of the largest row.

    Args:
        dtype: Of the queries.
    """
    np.testing.assert_array_equal(np.isfinite(np.asarray(actual, np.float32)), True)
    if dtype.itemsize == 2:
        largest = np.abs(expected).max()
        nothing = ~expected.any(-1)
        assert not np.asarray(actual, np.float32)[nothing].any()
        if expected.ndim > 1:
            floor = np.where(nothing, 0, largest / 50)[..., None]
            actual, expected = (
                np.concatenate([np.asarray(x, np.float64), y], -1) for x, y in ((actual, floor), (expected, floor))
            )
    assert_attention_close(actual, expected, tolerance=TOLERANCE[dtype.name])


def _dense_loss(arrays, dout, dlse, seen, q_per_kv, sm_scale, logits_soft_cap, distance):
    """Attention as its definition reads, over sequences padded to one length; `seen` is [seqs, queries, keys]."""
    k, v = (jnp.repeat(arrays[name], q_per_kv, axis=2) for name in ("k", "v"))
    logits = jnp.einsum("sqhd,skhd->shqk", arrays["q"], k, precision="highest") * sm_scale
    if logits_soft_cap is not None:
        logits = logits_soft_cap * jnp.tanh(logits / logits_soft_cap)
    if "alibi_slopes" in arrays:
        logits += arrays["alibi_slopes"][:, None, None] * distance[:, None]
    logits = jnp.where(seen[:, None], logits, -1e300)
    if "sinks" in arrays:
        sink = jnp.broadcast_to(arrays["sinks"][:, None, None], (*logits.shape[:3], 1))
        logits, v = jnp.concatenate([logits, sink], axis=3), jnp.pad(v, ((0, 0), (0, 1), (0, 0), (0, 0)))
    p = jax.nn.softmax(logits, axis=3)
    out = jnp.einsum("shqk,skhd->sqhd", p, v, precision="highest")
    lse = jax.nn.logsumexp(logits, axis=3).swapaxes(1, 2)
    live = seen.any(2)[..., None]
    return jnp.sum(jnp.where(live[..., None], out * dout, 0)) + jnp.sum(jnp.where(live, lse * dlse, 0))


# Unoptimised: compiling it would take longer than running it.
_dense_gradients = jax.jit(
    jax.grad(_dense_loss), static_argnums=(4, 5, 6), compiler_options={"xla_backend_optimization_level": 0}
)
