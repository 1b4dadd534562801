"""The derivative of paged attention, one rule for every backend.

Forward is whatever the backend computes; backward is plain `jnp` over chunks of pages, as in `ops/xla.py`: it computes
probabilities again from the saved log-sum-exp, a tile of queries against a chunk of keys at a time. This module knows
no kernel and chooses no backend.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from jaxpaged.cache.kv_cache import LayerView
from jaxpaged.cache.quantize import is_quantized, layer_scale
from jaxpaged.cache.ragged import Ragged
from jaxpaged.config import NULL_PAGE
from jaxpaged.ops.attention.merge import sum_dtype
from jaxpaged.ops.attention.options import AttentionOptions
from jaxpaged.ops.dispatch import Run, take_arrays

# Keys a chunk and queries a tile, those of `ops/xla.py` for prompts: the sizes of what is computed again at a time.
_CHUNK = 128
_BLOCK_Q = 64


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


class Differentiable(NamedTuple):
    """What attention has a derivative by."""

    q: Array
    k_pages: Array | None  # None where they are quantised, as the next
    v_pages: Array | None
    sinks: Array | None
    alibi_slopes: Array | None


def attend_with_gradient(
    run: Run, q: Array, view: LayerView, ragged: Ragged, options: AttentionOptions
) -> tuple[Array, Array]:
    """`run(q, view, ragged, options)`, with a rule for reverse-mode differentiation. Else it is just that call.

    With P the probabilities, which sum to less than 1 where there are sinks, the rule is

        dS = P (dO v^T - rowsum(dO out) + dlse) (1 - (cap(y) / logits_soft_cap)^2)
        dq = sm_scale dS k,   dk = sm_scale dS^T q,   dv = P^T dO

    summed over the query heads of a KV head, and over all sequences that hold a page. `d alibi_slopes` sums dS (before
    the cap's factor) times distance, `d sinks` is the row of dS that belongs to the sink.

    Args:
        run: Computes output and log-sum-exp, on any backend.

    Returns:
        Output and log-sum-exp; both may have cotangents.

    Numerics: Products take what forward takes (q's dtype; float32 over quantised pages) and sum in float32, as do the
        gradients of shared pages; the results are rounded once to the dtypes of the arguments. `rowsum(dO out)` is of
        the output as it was returned: in 16 bits its rounding shows where dS nearly cancels. Rows without keys and
        padding get and give exact zeros, even if their cotangent is NaN.
        Memory: a float32 copy of one layer's pages for each of dk and dv (XLA drops what is not used, not so JAX 0.10),
        a few arrays of the size of q, one tile. Gradients of stacked pages are zeros for the other layers.
        Work follows live lengths, one sequence after another on every device.

    Source: FlashAttention-2 (Dao, 2023, arXiv 2307.08691, section 3.1.2, algorithm 2).
    """
    differentiable = _take(q, view, options)
    # Whatever may be traced has to be an operand of the rule; ints and floats stay what they are.
    others, rebuild = take_arrays((view, ragged, options))

    def put(differentiable: Differentiable, others: list[Array]) -> tuple[Array, LayerView, Ragged, AttentionOptions]:
        return _put(differentiable, *rebuild(others))

    @jax.custom_vjp
    def call(differentiable: Differentiable, others: list[Array]) -> tuple[Array, Array]:
        return run(*put(differentiable, others))

    def forward(differentiable: Differentiable, others: list[Array]):
        differentiable = jax.tree.map(_refuse_second_derivative, differentiable)
        out, lse = run(*put(differentiable, others))
        return (out, lse), (differentiable, others, out, lse)

    def backward(residuals, cotangents):
        differentiable, others, out, lse = residuals
        dout, dlse = jax.tree.map(_refuse_second_derivative, cotangents)
        return _backward(out, lse, dout, dlse, *put(differentiable, others)), None

    call.defvjp(forward, backward)
    return call(differentiable, others)


def refuse_gradients(view: LayerView) -> LayerView:
    """Return the view; of quantised pages, one by whose values and scales nobody can differentiate.

    Raises:
        NotImplementedError: Later, when a derivative by them is asked for.
    """
    cache = view.cache
    if not is_quantized(cache.dtype):
        return view
    names = ("k_pages", "v_pages", "k_scale", "v_scale")
    refusing = {name: _refuse_gradient(getattr(cache, name), name) for name in names}
    return dataclasses.replace(view, cache=dataclasses.replace(cache, **refusing))


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


@jax.custom_jvp
def _refuse_second_derivative(x: Array) -> Array:
    """`x`. Its rule runs only where a gradient is differentiated again."""
    return x


@_refuse_second_derivative.defjvp
def _(primals, tangents):
    del primals, tangents
    raise NotImplementedError(
        "paged_attention has no second derivative: its gradient is computed by loops over the live tokens, which JAX "
        'cannot differentiate. `backend="reference"` has one.'
    )


def _take(q: Array, view: LayerView, options: AttentionOptions) -> Differentiable:
    pages = (None, None) if is_quantized(view.cache.dtype) else (view.cache.k_pages, view.cache.v_pages)
    return Differentiable(q, *pages, options.sinks, options.alibi_slopes)


def _put(
    x: Differentiable, view: LayerView, ragged: Ragged, options: AttentionOptions
) -> tuple[Array, LayerView, Ragged, AttentionOptions]:
    """Return the arguments of a call, with what is differentiated by in its places."""
    if x.k_pages is not None and x.v_pages is not None:
        cache = dataclasses.replace(view.cache, k_pages=x.k_pages, v_pages=x.v_pages)
        view = dataclasses.replace(view, cache=cache)
    return x.q, view, ragged, dataclasses.replace(options, sinks=x.sinks, alibi_slopes=x.alibi_slopes)


def _backward(
    out: Array,
    lse: Array,
    dout: Array,
    dlse: Array,
    q: Array,
    view: LayerView,
    ragged: Ragged,
    options: AttentionOptions,
) -> Differentiable:
    """Gradients, in the shapes and dtypes of the arguments."""
    num_tokens, num_q_heads, _ = q.shape
    cache, sinks, alibi_slopes = view.cache, options.sinks, options.alibi_slopes
    num_kv_heads, has_pages = cache.num_kv_heads, not is_quantized(cache.dtype)
    by_head = num_kv_heads, num_q_heads // num_kv_heads
    dtype = sum_dtype(q.dtype)
    operand_dtype = q.dtype if has_pages else dtype
    block_q = 1 if ragged.cu_q_lens is None else min(_BLOCK_Q, num_tokens)
    # Rows without keys, padding tokens among them, have no gradient: zeros here, whatever a caller's cotangent holds.
    live = ~jnp.isneginf(lse)
    lse, dout = jnp.where(live, lse, 0).astype(dtype), jnp.where(live[..., None], dout, 0)
    rest = jnp.where(live, dlse - jnp.sum(dout.astype(dtype) * out.astype(dtype), axis=-1), 0).astype(dtype)

    def by_kv_head(x: Array) -> Array:  # as a tile needs its rows; the last tile may reach past the last token
        x = x.reshape(num_tokens, *by_head, *x.shape[2:]).swapaxes(0, 1)
        return jnp.pad(x, [(0, 0), (0, block_q), *[(0, 0)] * (x.ndim - 2)])

    q_rows, dout = (x.astype(operand_dtype) for x in (jnp.where(live[..., None], q, 0), dout))
    rows = _Rows(*(by_kv_head(x) for x in (q_rows, dout, lse, rest)))
    pool = cache.k_pages.shape[1:]
    zeros = _Gradients(
        q=jnp.zeros(rows.q.shape, dtype),
        k=jnp.zeros(pool, dtype) if has_pages else None,
        v=jnp.zeros(pool, dtype) if has_pages else None,
        slopes=None if alibi_slopes is None else jnp.zeros(by_head, dtype),
    )
    sums = _sum_over_sequences(zeros, rows, block_q, view, ragged, options)

    def of_stack(pages: Array, of_layer: Array | None) -> Array | None:
        if of_layer is None:
            return None
        return lax.dynamic_update_index_in_dim(
            jnp.zeros(pages.shape, pages.dtype), of_layer.astype(pages.dtype), view.row, 0
        )

    dsinks = dslopes = None
    if sinks is not None:
        share = jnp.where(live, jnp.exp(sinks.astype(dtype)[None, :] - lse), 0)
        dsinks = jnp.sum(share * rest, axis=0).astype(sinks.dtype)
    if alibi_slopes is not None and sums.slopes is not None:
        dslopes = sums.slopes.reshape(num_q_heads).astype(alibi_slopes.dtype)
    return Differentiable(
        q=sums.q[:, :num_tokens].swapaxes(0, 1).reshape(q.shape).astype(q.dtype),
        k_pages=of_stack(cache.k_pages, sums.k),
        v_pages=of_stack(cache.v_pages, sums.v),
        sinks=dsinks,
        alibi_slopes=dslopes,
    )


def _sum_over_sequences(
    zeros: _Gradients, rows: _Rows, block_q: int, view: LayerView, ragged: Ragged, options: AttentionOptions
) -> _Gradients:
    """For each chunk of keys of each sequence, the tiles of queries that see it: its dk and dv are stored once."""
    cache, seq_lens, sliding_window = view.cache, ragged.seq_lens, options.sliding_window
    cu_q_lens = ragged.cu_q_lens
    if cu_q_lens is None:
        cu_q_lens = jnp.arange(ragged.num_seqs + 1, dtype=jnp.int32)
    page_size = cache.page_size
    pages_per_chunk = max(1, _CHUNK // page_size)
    chunk = pages_per_chunk * page_size
    more = -ragged.max_pages % pages_per_chunk
    page_table = jnp.pad(ragged.page_table, ((0, 0), (0, more)), constant_values=NULL_PAGE)
    read = functools.partial(_read_chunk, layer=view.row, dtype=rows.q.dtype)
    add_tile = functools.partial(_tile, rows=rows, block_q=block_q, ragged=ragged, options=options)

    def sequence(i: Array, sums: _Gradients) -> _Gradients:
        begin, end, n = cu_q_lens[i], cu_q_lens[i + 1], seq_lens[i]
        num_old = n - (end - begin)
        # A window as wide as the sequence sees all of it; a wider one could overflow when positions are added.
        window = None if sliding_window is None else jnp.minimum(sliding_window, jnp.maximum(n, 1))

        def chunk_of_keys(c: Array, sums: _Gradients) -> _Gradients:
            first_key, last_key = c * chunk, jnp.minimum((c + 1) * chunk, n) - 1
            key = first_key + jnp.arange(chunk, dtype=jnp.int32)
            ids = lax.dynamic_slice_in_dim(page_table[i], c * pages_per_chunk, pages_per_chunk)
            # Entries past the last page may hold anything: they are not followed.
            ids = jnp.where(key[::page_size] < n, ids, NULL_PAGE)
            k = read(cache.k_pages, cache.k_scale, ids, key < n)
            v = read(cache.v_pages, cache.v_scale, ids, key < n)

            def tile(t: Array, state: tuple[_Gradients, Array, Array]) -> tuple[_Gradients, Array, Array]:
                first = begin + t * block_q
                position = num_old + t * block_q + jnp.arange(block_q, dtype=jnp.int32)
                seen = (key < n)[None, :] & (position < n)[:, None]  # not what belongs to the next sequence
                if options.causal:
                    seen &= key[None, :] <= position[:, None]
                if window is not None:
                    seen &= key[None, :] > position[:, None] - window
                return add_tile(state, first, k, v, key, position, seen, num_old)

            nothing = jnp.zeros(k.shape, sums.q.dtype)
            first_tile = jnp.maximum(0, first_key - num_old) // block_q if options.causal else 0
            last_query = end - begin if window is None else jnp.minimum(end - begin, last_key + window - num_old)
            sums, dk, dv = lax.fori_loop(first_tile, -(-last_query // block_q), tile, (sums, nothing, nothing))
            # Pages that several sequences share get the sum; dead keys, in the null page too, add exact zeros.
            return sums._replace(k=_add_chunk(sums.k, ids, dk), v=_add_chunk(sums.v, ids, dv))

        first, last = 0, jnp.where(end > begin, n, 0)
        if window is not None:
            first = jnp.maximum(0, num_old - window + 1) // chunk
        return lax.fori_loop(first, -(-last // chunk), chunk_of_keys, sums)

    return lax.fori_loop(0, ragged.num_seqs, sequence, zeros)


def _tile(
    state: tuple[_Gradients, Array, Array],
    first: Array,
    k: Array,  # [num_kv_heads, chunk, head_dim], as v
    v: Array,
    key: Array,  # [chunk]
    position: Array,  # [block_q]
    seen: Array,  # [block_q, chunk]
    num_old: Array,
    *,
    rows: _Rows,
    block_q: int,
    ragged: Ragged,
    options: AttentionOptions,
) -> tuple[_Gradients, Array, Array]:
    """Add what `block_q` queries from packed row `first` on have to do with one chunk of keys."""
    sums, dk, dv = state
    num_kv_heads, _, q_per_kv, head_dim = rows.q.shape
    dtype, sm_scale, tree_mask = sums.q.dtype, options.scale(head_dim), ragged.tree_mask
    logits_soft_cap, alibi_slopes = options.logits_soft_cap, options.alibi_slopes
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
    distance = jnp.repeat(key[None, :] - position[:, None], q_per_kv, axis=0).astype(dtype)  # [rows, chunk]
    if alibi_slopes is not None:
        slopes = alibi_slopes.astype(dtype).reshape(num_kv_heads, q_per_kv)
        logits += jnp.tile(slopes, (1, block_q))[:, :, None] * distance[None]
    if tree_mask is not None:
        draft, width = key - num_old, tree_mask.shape[1]
        tree = tree_mask[jnp.clip(first + jnp.arange(block_q, dtype=jnp.int32), 0, len(tree_mask) - 1)]
        seen &= (draft < 0)[None, :] | (tree[:, jnp.clip(draft, 0, width - 1)] & (draft < width)[None, :])
    p = jnp.where(jnp.repeat(seen, q_per_kv, axis=0)[None], jnp.exp(logits - lse[..., None]), 0)
    ds = p * (product("hrd,hkd->hrk", dout, v) + rest[..., None])
    if sums.slopes is not None:
        sums = sums._replace(slopes=sums.slopes + jnp.sum((ds * distance[None]).reshape(*shape, -1), axis=(1, 3)))
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
        return jnp.where(live[None, :, None], tokens.astype(dtype), 0)
    factor = by_head(scale) if scale.ndim == 4 else layer_scale(scale, layer)[:, None]  # [num_kv_heads, chunk or 1]
    return jnp.where(live[None, :, None], tokens.astype(dtype) * factor[..., None].astype(dtype), 0)


def _add_chunk(pages: Array | None, ids: Array, chunk: Array) -> Array | None:
    if pages is None:
        return None
    num_kv_heads, page_size, head_dim = pages.shape[1:]
    return pages.at[ids].add(chunk.reshape(num_kv_heads, -1, page_size, head_dim).swapaxes(0, 1))
