"""Paged attention in plain `jnp`: the production path wherever Triton cannot run, first of all on a CPU.

Softmax runs over chunks of pages with a running maximum, so that memory does not grow with the context and work follows
the live length of each sequence, never the width of the page table.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jaxpaged.cache.kv_cache import LayerView
from jaxpaged.cache.quantize import MAX_VALUE, layer_scale
from jaxpaged.cache.ragged import Ragged
from jaxpaged.config import NULL_PAGE
from jaxpaged.ops.attention.options import AttentionOptions

# Tokens a chunk, measured on two CPU cores with SmolLM2's heads on JAX 0.10.2 and 0.12.0.1. A chunk of a decode step is
# little work: past 32 tokens XLA splits it over threads, which took 68 ms instead of 33 (16 sequences of 130 tokens, 30
# layers). Prompts have enough of it: 512 tokens behind 512 others took 14 ms a layer with 128, 17 with 64.
_DECODE_CHUNK = 32
_PROMPT_CHUNK = 128
# XLA's gather moves one value after another. A few page slices joined move whole runs: 37 ms instead of 50 in the same
# trial, but not from eight pages on, where they no longer fuse.
_MAX_SLICES = 4
_BLOCK_Q, _FEW = 64, 8
# Bytes of the narrowest floats that XLA on a CPU moves as they are.
_NARROWEST_READ = 2 if jax.__version_info__ >= (0, 11) else 4


class _Tile(NamedTuple):
    """Query tokens of one sequence that attend together."""

    q: Array  # [num_kv_heads, block_q, q_per_kv, head_dim]
    position: Array  # [block_q], of each token in its sequence
    seq_len: Array  # scalar
    page_ids: Array  # [max_pages]
    num_old: Array  # scalar, KV tokens of the sequence before this step's
    tree_mask: Array | None  # [block_q, max_q_len]


Attend = Callable[[_Tile], tuple[Array, Array]]
"""From a tile to its output, in the shape of its `q`, and log-sum-exp, without head_dim; both float32."""


def paged_attention_xla(
    q: Float[Array, "num_tokens num_q_heads head_dim"], view: LayerView, ragged: Ragged, options: AttentionOptions
) -> tuple[Array, Array]:
    """`paged_attention` in XLA operations. Arguments and results are those of `jaxpaged.ops.attention.attend`.

    In batch-invariant mode tiles are of one size, one after another, on every device: then a sequence's result has the
    same bits in any batch, and a few tokens cost as much as 64.

    Numerics: Logits, softmax and sums in float32; a float32 cache is multiplied in float32, not TF32.

    Source: FlashAttention (Dao et al., 2022, algorithm 1), without its tiles' memory hierarchy.
    """
    num_tokens, num_q_heads, head_dim = q.shape
    num_kv_heads = view.cache.num_kv_heads
    q_per_kv = num_q_heads // num_kv_heads
    attend = functools.partial(_attend, view=view, options=options)
    by_kv_head = q.reshape(num_tokens, num_kv_heads, q_per_kv, head_dim)
    if ragged.cu_q_lens is None:
        out, lse = _decode(attend, by_kv_head, ragged, options.is_batch_invariant)
    else:
        block_q = _BLOCK_Q if options.is_batch_invariant else min(_BLOCK_Q, num_tokens)
        out, lse = _ragged(attend, by_kv_head, ragged, ragged.cu_q_lens, block_q)
    out, lse = out.reshape(q.shape), lse.reshape(q.shape[:2])
    if options.sinks is not None:
        # A sink adds to the denominator and nothing to the numerator: scale by what it leaves.
        with_sink = jnp.where(jnp.isneginf(lse), lse, jnp.logaddexp(lse, options.sinks.astype(jnp.float32)[None, :]))
        share = jnp.where(jnp.isneginf(lse), 0, jnp.exp(lse - with_sink))
        out, lse = out * share[..., None], with_sink
    return out.astype(q.dtype), lse


def _decode(attend: Attend, q: Array, ragged: Ragged, one_by_one: bool) -> tuple[Array, Array]:
    """Return one token a sequence; `q` is [num_seqs, num_kv_heads, q_per_kv, head_dim].

    On a CPU one sequence after another: a chunk then stays in the cache of a core, and each sequence takes as long as
    its own length says. Elsewhere all at once, as long as the longest.
    """
    seq_lens = ragged.seq_lens
    tree_mask = None if ragged.tree_mask is None else ragged.tree_mask[:, None]
    tiles = _Tile(q[:, :, None], seq_lens[:, None] - 1, seq_lens, ragged.page_table, seq_lens - 1, tree_mask)
    in_turn = functools.partial(lax.map, attend)
    out, lse = lax.platform_dependent(tiles, cpu=in_turn, default=in_turn if one_by_one else jax.vmap(attend))
    return out[:, :, 0], lse[:, :, 0]


def _ragged(attend: Attend, q: Array, ragged: Ragged, cu_q_lens: Array, block_q: int) -> tuple[Array, Array]:
    """Return any number of tokens a sequence, a tile after another; `q` is [num_tokens, num_kv_heads, q_per_kv,
    head_dim].

    Sequences with a few tokens, which decode or check drafts beside prompts, have small tiles.
    """
    num_tokens, seq_lens, tree_mask = q.shape[0], ragged.seq_lens, ragged.tree_mask
    # By head first, as a tile needs its rows. The last tile may reach past the last token.
    q = jnp.pad(q.swapaxes(0, 1), ((0, 0), (0, block_q), (0, 0), (0, 0)))
    if tree_mask is not None:
        tree_mask = jnp.pad(tree_mask, ((0, block_q), (0, 0)))

    def in_tiles(block_q: int, at_least: int, at_most: int, results: tuple[Array, Array]) -> tuple[Array, Array]:
        def sequence(i: Array, results: tuple[Array, Array]) -> tuple[Array, Array]:
            begin, end = cu_q_lens[i], cu_q_lens[i + 1]
            q_len = end - begin

            def tile(t: Array, results: tuple[Array, Array]) -> tuple[Array, Array]:
                first = begin + t * block_q
                rows = lax.dynamic_slice_in_dim(q, first, block_q, axis=1)
                token = first + jnp.arange(block_q, dtype=jnp.int32)
                mask = None if tree_mask is None else lax.dynamic_slice_in_dim(tree_mask, first, block_q)
                position = seq_lens[i] - end + token
                answers = attend(_Tile(rows, position, seq_lens[i], ragged.page_table[i], seq_lens[i] - q_len, mask))

                def put(whole: Array, new: Array) -> Array:
                    """Write a tile whose tail, past its sequence, belongs to the next one."""
                    mine = (token < end).reshape(1, block_q, *(1,) * (new.ndim - 2))
                    new = jnp.where(mine, new, lax.dynamic_slice_in_dim(whole, first, block_q, axis=1))
                    return lax.dynamic_update_slice_in_dim(whole, new, first, axis=1)

                out, lse = results
                return put(out, answers[0]), put(lse, answers[1])

            mine = (q_len >= at_least) & (q_len <= at_most)
            return lax.fori_loop(0, jnp.where(mine, -(-q_len // block_q), 0), tile, results)

        return lax.fori_loop(0, ragged.num_seqs, sequence, results)

    results = jnp.zeros(q.shape, jnp.float32), jnp.full(q.shape[:3], -jnp.inf, jnp.float32)
    few = min(_FEW, block_q)
    results = in_tiles(few, 1, few, results)
    if few < block_q:
        results = in_tiles(block_q, few + 1, num_tokens, results)
    out, lse = (x[:, :num_tokens].swapaxes(0, 1) for x in results)
    return out, lse


def _attend(tile: _Tile, *, view: LayerView, options: AttentionOptions) -> tuple[Array, Array]:
    """Return one tile against the pages of its sequence: an `Attend` with everything else bound."""
    cache, layer = view.cache, view.row
    k_pages, v_pages, k_scale, v_scale = cache.k_pages, cache.v_pages, cache.k_scale, cache.v_scale
    logits_soft_cap, sliding_window = options.logits_soft_cap, options.sliding_window
    num_kv_heads, block_q, q_per_kv, head_dim = tile.q.shape
    page_size = cache.page_size
    sm_scale = options.scale(head_dim)
    pages_per_chunk = max(1, (_DECODE_CHUNK if block_q == 1 else _PROMPT_CHUNK) // page_size)
    chunk = pages_per_chunk * page_size
    page_ids = jnp.pad(tile.page_ids, (0, -tile.page_ids.shape[0] % pages_per_chunk), constant_values=NULL_PAGE)
    q = tile.q.reshape(num_kv_heads, block_q * q_per_kv, head_dim)
    position = jnp.repeat(tile.position, q_per_kv)[:, None]  # [block_q * q_per_kv, 1]
    slopes = None
    if options.alibi_slopes is not None:
        of_head = options.alibi_slopes.astype(jnp.float32).reshape(num_kv_heads, q_per_kv)
        slopes = jnp.tile(of_head, (1, block_q))[:, :, None]
    precision = lax.Precision.HIGHEST if q.dtype == jnp.float32 else None

    def read(pages: Array, ids: Array) -> Array:  # [num_kv_heads, chunk, head_dim]; of scales, [num_kv_heads, chunk]
        if pages_per_chunk > _MAX_SLICES:
            heads = jnp.arange(num_kv_heads, dtype=jnp.int32)[:, None]
            return pages[layer, ids[None, :], heads].reshape(num_kv_heads, chunk, *pages.shape[4:])
        size, rest = (1, 1, *pages.shape[2:]), (jnp.int32(0),) * (pages.ndim - 2)
        row = jnp.asarray(layer, jnp.int32)
        slices = [lax.dynamic_slice(pages, (row, page, *rest), size)[0, 0] for page in ids]
        return jnp.concatenate(slices, axis=1)

    def scale_of(scale: Array, ids: Array) -> Array:  # [num_kv_heads, 1, chunk or 1]
        return (read(scale, ids) if scale.ndim == 4 else layer_scale(scale, layer)[:, None])[:, None]

    def gather(pages: Array, ids: Array) -> Array:
        if pages.dtype.itemsize >= _NARROWEST_READ or pages.dtype == jnp.int8:
            return read(pages, ids)
        # XLA on a CPU reads narrow floats through a wider copy of the pool, which it moves out of a loop, but not out
        # of a branch. The condition always holds; the compiler does not know. (fp8, 50 MB: 1 ms instead of 120.)
        return lax.cond(ids[0] >= 0, read, lambda *args: jnp.zeros_like(read(*args)), pages, ids)

    # A scale that makes the largest value of a token 57344 is a tiny number, of which float16 keeps few bits. Weights
    # are multiplied by that value as long as they are narrow.
    largest = MAX_VALUE.get(v_pages.dtype.name, 1.0)

    # A page before the window of all rows may be somebody else's by now.
    oldest = 0 if sliding_window is None else jnp.maximum(0, tile.position[0] - sliding_window + 1)

    def body(c: Array, state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        acc, running_max, total = state
        key = c * chunk + jnp.arange(chunk, dtype=jnp.int32)
        live = (key >= oldest) & (key < tile.seq_len)
        ids = lax.dynamic_slice_in_dim(page_ids, c * pages_per_chunk, pages_per_chunk)
        # Entries past the last page, and before the window, may hold anything: they are not followed.
        ids = jnp.where(live.reshape(-1, page_size).any(1), ids, NULL_PAGE)
        k = gather(k_pages, ids).astype(q.dtype)
        logits = jnp.einsum("hrd,hkd->hrk", q, k, precision=precision, preferred_element_type=jnp.float32)
        logits *= sm_scale if k_scale is None else sm_scale * scale_of(k_scale, ids)
        if logits_soft_cap is not None:
            logits = logits_soft_cap * jnp.tanh(logits / logits_soft_cap)
        if slopes is not None:
            logits += slopes * (key[None, :] - position).astype(jnp.float32)[None]
        seen = live[None, :]
        if options.causal:
            seen &= key[None, :] <= position
        if sliding_window is not None:
            seen &= key[None, :] > position - sliding_window
        if tile.tree_mask is not None:
            draft, width = key - tile.num_old, tile.tree_mask.shape[1]
            in_tree = tile.tree_mask[:, jnp.clip(draft, 0, width - 1)] & (draft < width)[None, :]  # [block_q, chunk]
            seen &= jnp.repeat((draft < 0)[None, :] | in_tree, q_per_kv, axis=0)
        logits = jnp.where(seen[None], logits, -jnp.inf)
        next_max = jnp.maximum(running_max, logits.max(-1))
        # A row that has seen nothing yet has maximum -inf, and -inf - -inf is NaN: shift it by 0 instead.
        shift = jnp.where(jnp.isneginf(next_max), 0, next_max)
        decay = jnp.exp(running_max - shift)
        p = jnp.exp(logits - shift[..., None])
        # A slot without an owner may hold NaN, and 0 * NaN is NaN.
        v = jnp.where(live[None, :, None], gather(v_pages, ids).astype(q.dtype), 0)
        weight = p if v_scale is None else p * jnp.where(live[None, None, :], scale_of(v_scale, ids), 0) * largest
        product = jnp.einsum(
            "hrk,hkd->hrd", weight.astype(q.dtype), v, precision=precision, preferred_element_type=jnp.float32
        )
        return acc * decay[..., None] + product, next_max, total * decay + p.sum(-1)

    # Only chunks that some row sees are read.
    first, end = oldest // chunk, tile.seq_len
    if options.causal:
        end = jnp.minimum(end, tile.position[-1] + 1)
    acc, running_max, total = lax.fori_loop(
        first,
        -(-end // chunk),
        body,
        tuple(
            jnp.full(shape, x, jnp.float32) for shape, x in ((q.shape, 0), (q.shape[:2], -jnp.inf), (q.shape[:2], 0))
        ),
    )
    lse = jnp.where(total > 0, running_max, -jnp.inf) + jnp.log(jnp.where(total > 0, total, 1))
    out = acc / (largest * jnp.where(total > 0, total, 1))[..., None]
    return out.reshape(tile.q.shape), lse.reshape(tile.q.shape[:3])
