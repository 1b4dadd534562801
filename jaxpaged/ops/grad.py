"""The derivative of paged attention, one rule for every backend.

Forward is whatever the backend computes; backward is plain `jnp` over chunks of pages, as in `ops/xla.py`: it computes
probabilities again from the saved log-sum-exp, a tile of queries against a chunk of keys at a time. This module knows
no kernel and chooses no backend.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from jaxpaged.config import NULL_PAGE
from jaxpaged.ops.plan import AttentionPlan
from jaxpaged.quantize import is_quantized, layer_scale

# Keys a chunk and queries a tile, those of `ops/xla.py` for prompts: the sizes of what is computed again at a time.
_CHUNK = 128
_BLOCK_Q = 64

_ARRAYS = ("q", "k_pages", "v_pages", "page_table", "seq_lens")

Attend = Callable[..., tuple[Array, Array]]
"""From `_ARRAYS`, and by name the other arguments of `jaxpaged.paged_attention`, to output and log-sum-exp."""


class _Gradients(NamedTuple):
    """Sums in float32 or wider. None for what has no gradient: quantised pages, slopes that are not there."""

    q: Array  # [num_kv_heads, num_tokens + block_q, q_per_kv, head_dim]
    k: Array | None  # [num_pages, num_kv_heads, page_size, head_dim], of the layer
    v: Array | None
    slopes: Array | None  # [num_kv_heads, q_per_kv]


class _Rows(NamedTuple):
    """What backward needs of the queries, by head and padded by a tile; of one tile, `[num_kv_heads, rows, ...]`."""

    q: Array  # [num_kv_heads, num_tokens + block_q, q_per_kv, head_dim]
    dout: Array
    lse: Array  # [num_kv_heads, num_tokens + block_q, q_per_kv], 0 where a row has no keys
    rest: Array  # dlse - dout . out: with dout . v, the derivative by a logit, over its probability


def attend_with_gradient(attend: Attend, *arrays: Array, **options: Any) -> tuple[Array, Array]:
    """`attend(*arrays, **options)`, with a rule for reverse-mode differentiation. Else it is just that call.

    With P the probabilities, which sum to less than 1 where there are sinks, the rule is

        dS = P (dO v^T - rowsum(dO out) + dlse) (1 - (cap(y) / logits_soft_cap)^2)
        dq = sm_scale dS k,   dk = sm_scale dS^T q,   dv = P^T dO

    summed over the query heads of a KV head, and over all sequences that hold a page. `d alibi_slopes` sums dS (before
    the cap's factor) times distance, `d sinks` is the row of dS that belongs to the sink.

    Args:
        attend: A backend.
        arrays: q, stacked pages of K and V, page table and lengths.
        options: The other arguments of `jaxpaged.paged_attention`, all of them.

    Returns:
        Output and log-sum-exp; both may have cotangents.

    Raises:
        NotImplementedError: When a derivative by fp8 pages or by a scale is asked for.

    Numerics: Products take what forward takes (q's dtype; float32 over quantised pages) and sum in float32, as do the
        gradients of shared pages; the results are rounded once to the dtypes of the arguments. `rowsum(dO out)` is of
        the output as it was returned: in 16 bits its rounding shows where dS nearly cancels. Rows without keys and
        padding get and give exact zeros, even if their cotangent is NaN.
        Memory: a float32 copy of one layer's pages for each of dk and dv (XLA drops what is not used, not so JAX 0.10),
        a few arrays of the size of q, one tile. Gradients of stacked pages are zeros for the other layers.
        Work follows live lengths, one sequence after another on every device.

    Source: FlashAttention-2 (Dao, 2023, arXiv 2307.08691, section 3.1.2, algorithm 2).
    """
    arguments = {**dict(zip(_ARRAYS, arrays, strict=True)), **options}
    # Whatever may be traced has to be an operand of the rule; ints and floats stay what they are.
    operands: dict[str, Any] = {
        name: x for name, x in arguments.items() if isinstance(x, jax.Array | np.ndarray | AttentionPlan)
    }
    static = {name: x for name, x in arguments.items() if name not in operands}

    if is_quantized(operands["k_pages"].dtype):
        for name in ("k_pages", "v_pages", "k_scale", "v_scale"):
            operands[name] = _refuse_gradient(operands[name], name)

    def run(operands: dict[str, Any]) -> tuple[Array, Array]:
        options = {name: x for name, x in operands.items() if name not in _ARRAYS}
        return attend(*(operands[name] for name in _ARRAYS), **options, **static)

    def forward(operands: dict[str, Any]):
        out, lse = run(operands)
        return (out, lse), (operands, out, lse)

    def backward(residuals, cotangents):
        operands, out, lse = residuals
        gradients = _backward(out, lse, *cotangents, **operands, **static)
        return ({name: gradients.get(name) for name in operands},)

    call = jax.custom_vjp(run)
    call.defvjp(forward, backward)
    return call(operands)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def _refuse_gradient(x: Array, name: str) -> Array:
    """`x`. Its rule runs only where `x` depends on what is differentiated."""
    del name
    return x


@_refuse_gradient.defjvp
def _(name: str, primals, tangents):
    del primals, tangents
    raise NotImplementedError(
        f"`{name}` has no derivative in paged_attention: quantised values change in steps. Keep it out of what is "
        "differentiated with jax.lax.stop_gradient, or differentiate over a cache that is not quantised."
    )


def _backward(
    out: Array,
    lse: Array,
    dout: Array,
    dlse: Array,
    *,
    q: Array,
    k_pages: Array,
    v_pages: Array,
    seq_lens: Array,
    cu_q_lens: Array | None,
    layer: int | Array,
    sinks: Array | None,
    alibi_slopes: Array | None,
    plan: AttentionPlan | None,
    **options: Any,
) -> dict[str, Array]:
    """Gradients by name, in the shapes and dtypes of the arguments."""
    del plan  # it cuts the work of the Triton kernel
    num_tokens, num_q_heads, head_dim = q.shape
    _, num_pages, num_kv_heads, page_size, _ = k_pages.shape
    by_head = num_kv_heads, num_q_heads // num_kv_heads
    dtype = jnp.promote_types(q.dtype, jnp.float32)
    operand_dtype = dtype if is_quantized(k_pages.dtype) else q.dtype
    if cu_q_lens is None:
        block_q, cu_q_lens = 1, jnp.arange(num_tokens + 1, dtype=jnp.int32)
    else:
        block_q = min(_BLOCK_Q, num_tokens)
    # Rows without keys, padding tokens among them, have no gradient: zeros here, whatever a caller's cotangent holds.
    live = ~jnp.isneginf(lse)
    lse, dout = jnp.where(live, lse, 0).astype(dtype), jnp.where(live[..., None], dout, 0)
    rest = jnp.where(live, dlse - jnp.sum(dout.astype(dtype) * out.astype(dtype), axis=-1), 0).astype(dtype)

    def by_kv_head(x: Array) -> Array:  # as a tile needs its rows; the last tile may reach past the last token
        x = x.reshape(num_tokens, *by_head, *x.shape[2:]).swapaxes(0, 1)
        return jnp.pad(x, [(0, 0), (0, block_q), *[(0, 0)] * (x.ndim - 2)])

    q_rows, dout = (x.astype(operand_dtype) for x in (jnp.where(live[..., None], q, 0), dout))
    rows = _Rows(*(by_kv_head(x) for x in (q_rows, dout, lse, rest)))
    pool = num_pages, num_kv_heads, page_size, head_dim
    zeros = _Gradients(
        q=jnp.zeros(rows.q.shape, dtype),
        k=None if is_quantized(k_pages.dtype) else jnp.zeros(pool, dtype),
        v=None if is_quantized(v_pages.dtype) else jnp.zeros(pool, dtype),
        slopes=None if alibi_slopes is None else jnp.zeros(by_head, dtype),
    )
    slopes = None if alibi_slopes is None else alibi_slopes.astype(dtype).reshape(by_head)
    sums = _sum_over_sequences(
        zeros, rows, block_q, k_pages, v_pages, seq_lens, cu_q_lens, layer=layer, alibi_slopes=slopes, **options
    )

    gradients = {"q": sums.q[:, :num_tokens].swapaxes(0, 1).reshape(q.shape).astype(q.dtype)}
    for name, pages, x in (("k_pages", k_pages, sums.k), ("v_pages", v_pages, sums.v)):
        if x is not None:
            others = jnp.zeros(pages.shape, pages.dtype)
            gradients[name] = lax.dynamic_update_index_in_dim(others, x.astype(pages.dtype), layer, 0)
    if alibi_slopes is not None and sums.slopes is not None:
        gradients["alibi_slopes"] = sums.slopes.reshape(num_q_heads).astype(alibi_slopes.dtype)
    if sinks is not None:
        share = jnp.where(live, jnp.exp(sinks.astype(dtype) - lse), 0)
        rest = rest.reshape(num_tokens, num_q_heads)
        gradients["sinks"] = jnp.sum(share * rest, axis=0).astype(sinks.dtype)
    return gradients


def _sum_over_sequences(
    zeros: _Gradients,
    rows: _Rows,
    block_q: int,
    k_pages: Array,
    v_pages: Array,
    seq_lens: Array,
    cu_q_lens: Array,
    *,
    page_table: Array,
    layer: int | Array,
    k_scale: Array | None,
    v_scale: Array | None,
    sliding_window: int | Array | None,
    causal: bool,
    **options: Any,
) -> _Gradients:
    """For each chunk of keys of each sequence, the tiles of queries that see it: its dk and dv are stored once."""
    page_size = k_pages.shape[3]
    pages_per_chunk = max(1, _CHUNK // page_size)
    chunk = pages_per_chunk * page_size
    page_table = jnp.pad(page_table, ((0, 0), (0, -page_table.shape[1] % pages_per_chunk)), constant_values=NULL_PAGE)
    read = functools.partial(_read_chunk, layer=layer, dtype=rows.q.dtype)

    def sequence(i: Array, sums: _Gradients) -> _Gradients:
        begin, end, n = cu_q_lens[i], cu_q_lens[i + 1], seq_lens[i]
        num_old = n - (end - begin)
        # A window as wide as the sequence sees all of it; a wider one could overflow when positions are added.
        window = None if sliding_window is None else jnp.minimum(sliding_window, jnp.maximum(n, 1))

        def chunk_of_keys(c: Array, sums: _Gradients) -> _Gradients:
            first_key, last_key = c * chunk, jnp.minimum((c + 1) * chunk, n) - 1
            key = first_key + jnp.arange(chunk)
            ids = lax.dynamic_slice_in_dim(page_table[i], c * pages_per_chunk, pages_per_chunk)
            # Entries past the last page may hold anything: they are not followed.
            ids = jnp.where(key[::page_size] < n, ids, NULL_PAGE)
            k, v = read(k_pages, k_scale, ids, key < n), read(v_pages, v_scale, ids, key < n)

            def tile(t: Array, state: tuple[_Gradients, Array, Array]) -> tuple[_Gradients, Array, Array]:
                first = begin + t * block_q
                position = num_old + t * block_q + jnp.arange(block_q)
                seen = (key < n) & (position < n)[:, None]  # not what belongs to the next sequence
                if causal:
                    seen &= key <= position[:, None]
                if window is not None:
                    seen &= key > position[:, None] - window
                return _tile(state, rows, first, block_q, k, v, key, position, seen, num_old, **options)

            nothing = jnp.zeros(k.shape, sums.q.dtype)
            first_tile = jnp.maximum(0, first_key - num_old) // block_q if causal else 0
            last_query = end - begin if window is None else jnp.minimum(end - begin, last_key + window - num_old)
            sums, dk, dv = lax.fori_loop(first_tile, -(-last_query // block_q), tile, (sums, nothing, nothing))
            # Pages that several sequences share get the sum; dead keys, in the null page too, add exact zeros.
            return sums._replace(k=_add_chunk(sums.k, ids, dk), v=_add_chunk(sums.v, ids, dv))

        first, last = 0, jnp.where(end > begin, n, 0)
        if window is not None:
            first = jnp.maximum(0, num_old - window + 1) // chunk
        return lax.fori_loop(first, -(-last // chunk), chunk_of_keys, sums)

    return lax.fori_loop(0, page_table.shape[0], sequence, zeros)


def _tile(
    state: tuple[_Gradients, Array, Array],
    rows: _Rows,
    first: Array,
    block_q: int,
    k: Array,  # [num_kv_heads, chunk, head_dim], as v
    v: Array,
    key: Array,  # [chunk]
    position: Array,  # [block_q]
    seen: Array,  # [block_q, chunk]
    num_old: Array,
    *,
    sm_scale: float,
    logits_soft_cap: float | None,
    alibi_slopes: Array | None,
    tree_mask: Array | None,
) -> tuple[_Gradients, Array, Array]:
    """Adds what `block_q` queries from packed row `first` on have to do with one chunk of keys."""
    sums, dk, dv = state
    num_kv_heads, _, q_per_kv, head_dim = rows.q.shape
    dtype = sums.q.dtype
    shape = num_kv_heads, block_q, q_per_kv
    q, dout, lse, rest = (
        lax.dynamic_slice_in_dim(x, first, block_q, axis=1).reshape(num_kv_heads, block_q * q_per_kv, *x.shape[3:])
        for x in rows
    )
    product = functools.partial(
        jnp.einsum,
        precision=None if k.dtype.itemsize < 4 else lax.Precision.HIGHEST,
        preferred_element_type=dtype,
    )
    logits = sm_scale * product("hrd,hkd->hrk", q, k)
    cap_factor = 1
    if logits_soft_cap is not None:
        capped = jnp.tanh(logits / logits_soft_cap)
        logits, cap_factor = logits_soft_cap * capped, 1 - capped**2
    distance = jnp.repeat(key - position[:, None], q_per_kv, axis=0).astype(dtype)  # [rows, chunk]
    if alibi_slopes is not None:
        logits += jnp.tile(alibi_slopes, (1, block_q))[:, :, None] * distance
    if tree_mask is not None:
        draft, width = key - num_old, tree_mask.shape[1]
        tree = tree_mask[jnp.clip(first + jnp.arange(block_q), 0, len(tree_mask) - 1)]
        seen &= (draft < 0) | (tree[:, jnp.clip(draft, 0, width - 1)] & (draft < width))
    p = jnp.where(jnp.repeat(seen, q_per_kv, axis=0), jnp.exp(logits - lse[..., None]), 0)
    ds = p * (product("hrd,hkd->hrk", dout, v) + rest[..., None])
    if sums.slopes is not None:
        sums = sums._replace(slopes=sums.slopes + jnp.sum((ds * distance).reshape(*shape, -1), axis=(1, 3)))
    ds = (ds * cap_factor).astype(k.dtype)
    if sums.k is not None:
        dk += sm_scale * product("hrk,hrd->hkd", ds, q)
    if sums.v is not None:
        dv += product("hrk,hrd->hkd", p.astype(k.dtype), dout)
    dq = lax.dynamic_slice_in_dim(sums.q, first, block_q, axis=1)
    dq += sm_scale * product("hrk,hkd->hrd", ds, k).reshape(*shape, head_dim)
    return sums._replace(q=lax.dynamic_update_slice_in_dim(sums.q, dq, first, axis=1)), dk, dv


def _read_chunk(
    pages: Array, scale: Array | None, ids: Array, live: Array, *, layer: int | Array, dtype: jax.typing.DTypeLike
) -> Array:
    """`[num_kv_heads, chunk, head_dim]` of the pages `ids`, zero where not live: 0 * NaN from a stale slot is NaN."""

    def by_head(x: Array) -> Array:
        return x[layer, ids].swapaxes(0, 1).reshape(x.shape[2], -1, *x.shape[4:])

    tokens = by_head(pages)
    if scale is None:
        return jnp.where(live[:, None], tokens.astype(dtype), 0)
    factor = by_head(scale) if scale.ndim == 4 else layer_scale(scale, layer)[:, None]  # [num_kv_heads, chunk or 1]
    return jnp.where(live[:, None], tokens.astype(dtype) * factor[..., None].astype(dtype), 0)


def _add_chunk(pages: Array | None, ids: Array, chunk: Array) -> Array | None:
    if pages is None:
        return None
    num_kv_heads, page_size, head_dim = pages.shape[1:]
    return pages.at[ids].add(chunk.reshape(num_kv_heads, -1, page_size, head_dim).swapaxes(0, 1))
