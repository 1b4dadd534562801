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
from jaxtyping import Array, Bool, Float, Int

from jaxpaged.config import NULL_PAGE
from jaxpaged.quantize import MAX_VALUE, layer_scale

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
    q: Float[Array, "num_tokens num_q_heads head_dim"],
    k_pages: Float[Array, "num_layers num_pages num_kv_heads page_size head_dim"],
    v_pages: Float[Array, "num_layers num_pages num_kv_heads page_size head_dim"],
    page_table: Int[Array, "num_seqs max_pages"],
    seq_lens: Int[Array, "num_seqs"],
    *,
    layer: int | Int[Array, ""],
    cu_q_lens: Int[Array, "num_seqs_plus_1"] | None,
    sm_scale: float,
    logits_soft_cap: float | None,
    sliding_window: int | Int[Array, ""] | None,
    sinks: Float[Array, "num_q_heads"] | None,
    alibi_slopes: Float[Array, "num_q_heads"] | None,
    causal: bool,
    tree_mask: Bool[Array, "num_tokens max_q_len"] | None,
    k_scale: Float[Array, "layers *scales"] | None,
    v_scale: Float[Array, "layers *scales"] | None,
    batch_invariant: bool = False,
) -> tuple[Array, Array]:
    """`paged_attention` in XLA operations. Arguments and results are those of `jaxpaged.paged_attention`.

    Args:
        batch_invariant: Takes tiles of one size, one after another, on every device: then a sequence's result has the
            same bits in any batch, and a few tokens cost as much as 64.

    Numerics: Logits, softmax and sums in float32; a float32 cache is multiplied in float32, not TF32.

    Source: FlashAttention (Dao et al., 2022, algorithm 1), without its tiles' memory hierarchy.
    """
    num_tokens, num_q_heads, head_dim = q.shape
    num_kv_heads = k_pages.shape[2]
    q_per_kv = num_q_heads // num_kv_heads
    attend = functools.partial(
        _attend,
        k_pages=k_pages,
        v_pages=v_pages,
        layer=layer,
        sm_scale=sm_scale,
        logits_soft_cap=logits_soft_cap,
        sliding_window=sliding_window,
        alibi_slopes=None if alibi_slopes is None else alibi_slopes.astype(jnp.float32).reshape(num_kv_heads, q_per_kv),
        causal=causal,
        k_scale=k_scale,
        v_scale=v_scale,
    )
    by_kv_head = q.reshape(num_tokens, num_kv_heads, q_per_kv, head_dim)
    if cu_q_lens is None:
        out, lse = _decode(attend, by_kv_head, page_table, seq_lens, tree_mask, batch_invariant)
    else:
        block_q = _BLOCK_Q if batch_invariant else min(_BLOCK_Q, num_tokens)
        out, lse = _ragged(attend, by_kv_head, page_table, seq_lens, cu_q_lens, tree_mask, block_q)
    out, lse = out.reshape(q.shape), lse.reshape(q.shape[:2])
    if sinks is not None:
        # A sink adds to the denominator and nothing to the numerator: scale by what it leaves.
        with_sink = jnp.where(jnp.isneginf(lse), lse, jnp.logaddexp(lse, sinks.astype(jnp.float32)))
        share = jnp.where(jnp.isneginf(lse), 0, jnp.exp(lse - with_sink))
        out, lse = out * share[..., None], with_sink
    return out.astype(q.dtype), lse


def _decode(
    attend: Attend, q: Array, page_table: Array, seq_lens: Array, tree_mask: Array | None, one_by_one: bool
) -> tuple[Array, Array]:
    """One token a sequence; `q` is [num_seqs, num_kv_heads, q_per_kv, head_dim].

    On a CPU one sequence after another: a chunk then stays in the cache of a core, and each sequence takes as long as
    its own length says. Elsewhere all at once, as long as the longest.
    """
    tree_mask = None if tree_mask is None else tree_mask[:, None]
    tiles = _Tile(q[:, :, None], seq_lens[:, None] - 1, seq_lens, page_table, seq_lens - 1, tree_mask)
    in_turn = functools.partial(lax.map, attend)
    out, lse = lax.platform_dependent(tiles, cpu=in_turn, default=in_turn if one_by_one else jax.vmap(attend))
    return out[:, :, 0], lse[:, :, 0]


def _ragged(
    attend: Attend,
    q: Array,
    page_table: Array,
    seq_lens: Array,
    cu_q_lens: Array,
    tree_mask: Array | None,
    block_q: int,
) -> tuple[Array, Array]:
    """Any number of tokens a sequence, a tile after another; `q` is [num_tokens, num_kv_heads, q_per_kv, head_dim].

    Sequences with a few tokens, which decode or check drafts beside prompts, have small tiles.
    """
    num_tokens = q.shape[0]
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
                token = first + jnp.arange(block_q)
                mask = None if tree_mask is None else lax.dynamic_slice_in_dim(tree_mask, first, block_q)
                position = seq_lens[i] - end + token
                answers = attend(_Tile(rows, position, seq_lens[i], page_table[i], seq_lens[i] - q_len, mask))

                def put(whole: Array, new: Array) -> Array:
                    """A tile's tail past its sequence belongs to the next one."""
                    mine = (token < end).reshape(1, block_q, *(1,) * (new.ndim - 2))
                    new = jnp.where(mine, new, lax.dynamic_slice_in_dim(whole, first, block_q, axis=1))
                    return lax.dynamic_update_slice_in_dim(whole, new, first, axis=1)

                out, lse = results
                return put(out, answers[0]), put(lse, answers[1])

            mine = (q_len >= at_least) & (q_len <= at_most)
            return lax.fori_loop(0, jnp.where(mine, -(-q_len // block_q), 0), tile, results)

        return lax.fori_loop(0, page_table.shape[0], sequence, results)

    results = jnp.zeros(q.shape), jnp.full(q.shape[:3], -jnp.inf)
    few = min(_FEW, block_q)
    results = in_tiles(few, 1, few, results)
    if few < block_q:
        results = in_tiles(block_q, few + 1, num_tokens, results)
    out, lse = (x[:, :num_tokens].swapaxes(0, 1) for x in results)
    return out, lse


def _attend(
    tile: _Tile,
    *,
    k_pages: Array,
    v_pages: Array,
    layer: int | Array,
    sm_scale: float,
    logits_soft_cap: float | None,
    sliding_window: int | Array | None,
    alibi_slopes: Array | None,
    causal: bool,
    k_scale: Array | None,
    v_scale: Array | None,
) -> tuple[Array, Array]:
    """One tile against the pages of its sequence: an `Attend` with everything else bound."""
    num_kv_heads, block_q, q_per_kv, head_dim = tile.q.shape
    page_size = k_pages.shape[3]
    pages_per_chunk = max(1, (_DECODE_CHUNK if block_q == 1 else _PROMPT_CHUNK) // page_size)
    chunk = pages_per_chunk * page_size
    page_ids = jnp.pad(tile.page_ids, (0, -tile.page_ids.shape[0] % pages_per_chunk), constant_values=NULL_PAGE)
    q = tile.q.reshape(num_kv_heads, block_q * q_per_kv, head_dim)
    position = jnp.repeat(tile.position, q_per_kv)[:, None]  # [block_q * q_per_kv, 1]
    slopes = None if alibi_slopes is None else jnp.tile(alibi_slopes, (1, block_q))[:, :, None]
    precision = lax.Precision.HIGHEST if q.dtype == jnp.float32 else None

    def read(pages: Array, ids: Array) -> Array:  # [num_kv_heads, chunk, head_dim]; of scales, [num_kv_heads, chunk]
        if pages_per_chunk > _MAX_SLICES:
            heads = jnp.arange(num_kv_heads)[:, None]
            return pages[layer, ids, heads].reshape(num_kv_heads, chunk, *pages.shape[4:])
        size, rest = (1, 1, *pages.shape[2:]), (0,) * (pages.ndim - 2)
        slices = [lax.dynamic_slice(pages, (layer, page, *rest), size)[0, 0] for page in ids]
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
        key = c * chunk + jnp.arange(chunk)
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
            logits += slopes * (key - position).astype(jnp.float32)
        seen = live
        if causal:
            seen &= key <= position
        if sliding_window is not None:
            seen &= key > position - sliding_window
        if tile.tree_mask is not None:
            draft, width = key - tile.num_old, tile.tree_mask.shape[1]
            in_tree = tile.tree_mask[:, jnp.clip(draft, 0, width - 1)] & (draft < width)  # [block_q, chunk]
            seen &= jnp.repeat((draft < 0) | in_tree, q_per_kv, axis=0)
        logits = jnp.where(seen, logits, -jnp.inf)
        new_max = jnp.maximum(running_max, logits.max(-1))
        # A row that has seen nothing yet has maximum -inf, and -inf - -inf is NaN: shift it by 0 instead.
        shift = jnp.where(jnp.isneginf(new_max), 0, new_max)
        decay = jnp.exp(running_max - shift)
        p = jnp.exp(logits - shift[..., None])
        # A slot without an owner may hold NaN, and 0 * NaN is NaN.
        v = jnp.where(live[:, None], gather(v_pages, ids).astype(q.dtype), 0)
        weight = p if v_scale is None else p * jnp.where(live, scale_of(v_scale, ids), 0) * largest
        product = jnp.einsum(
            "hrk,hkd->hrd", weight.astype(q.dtype), v, precision=precision, preferred_element_type=jnp.float32
        )
        return acc * decay[..., None] + product, new_max, total * decay + p.sum(-1)

    # Only chunks that some row sees are read.
    first, end = oldest // chunk, tile.seq_len
    if causal:
        end = jnp.minimum(end, tile.position[-1] + 1)
    acc, running_max, total = lax.fori_loop(
        first,
        -(-end // chunk),
        body,
        (jnp.zeros(q.shape), jnp.full(q.shape[:2], -jnp.inf), jnp.zeros(q.shape[:2])),
    )
    lse = jnp.where(total > 0, running_max, -jnp.inf) + jnp.log(jnp.where(total > 0, total, 1))
    out = acc / (largest * jnp.where(total > 0, total, 1))[..., None]
    return out.reshape(tile.q.shape), lse.reshape(tile.q.shape[:3])
