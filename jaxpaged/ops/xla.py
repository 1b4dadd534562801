"""Paged attention in plain `jnp`: the production path wherever Triton cannot run, first of all on a CPU.

Softmax runs over chunks of pages with a running maximum, so that memory does not grow with the context and work follows
the longest live sequence, never the width of the page table.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxpaged.config import NULL_PAGE, cdiv

# Measured on two CPU cores, SmolLM2's heads: 128 tokens a chunk beat 64 and 256 at 60, 120 and 640 tokens, batch 16.
_CHUNK_TOKENS = 128
_BLOCK_Q = 64


class _Rows(NamedTuple):
    """Rows that attend together, each to one sequence: all sequences of a decode step, or one tile of a longer one."""

    q: Array  # [num_rows, num_kv_heads, row_size, head_dim], row_size = block_q * q_per_kv
    position: Array  # [num_rows, row_size], of the query in its sequence
    seq_lens: Array  # [num_rows], 0 where the row is padding
    page_table: Array  # [num_rows, max_pages], a whole number of chunks wide


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
    sliding_window: int | None,
    sinks: Float[Array, "num_q_heads"] | None,
    alibi_slopes: Float[Array, "num_q_heads"] | None,
    causal: bool,
) -> tuple[Array, Array]:
    """`paged_attention` in XLA operations. Arguments and results are those of `jaxpaged.paged_attention`.

    Numerics: Logits, softmax and sums in float32; a float32 cache is multiplied in float32, not TF32.

    Source: FlashAttention (Dao et al., 2022, algorithm 1), without its tiles' memory hierarchy.
    """
    num_tokens, num_q_heads, head_dim = q.shape
    num_kv_heads, page_size = k_pages.shape[2:4]
    q_per_kv = num_q_heads // num_kv_heads
    pages_per_chunk = min(max(1, _CHUNK_TOKENS // page_size), page_table.shape[1])
    spare = -page_table.shape[1] % pages_per_chunk
    page_table = jnp.pad(page_table, ((0, 0), (0, spare)), constant_values=NULL_PAGE)

    def attend(rows: _Rows) -> tuple[Array, Array]:
        return _attend(
            rows, k_pages, v_pages, layer, pages_per_chunk, sm_scale, logits_soft_cap, sliding_window, by_head(sinks),
            by_head(alibi_slopes), causal,
        )  # fmt: skip

    def by_head(x: Array | None) -> Array | None:
        """[num_q_heads] to [num_kv_heads, row_size]: a row lists its tokens, and each token its q_per_kv heads."""
        return None if x is None else jnp.tile(x.astype(jnp.float32).reshape(num_kv_heads, q_per_kv), (1, block_q))

    if cu_q_lens is None:
        block_q = 1
        position = jnp.broadcast_to(seq_lens[:, None] - 1, (num_tokens, q_per_kv))
        out, lse = attend(_Rows(q.reshape(num_tokens, num_kv_heads, q_per_kv, head_dim), position, seq_lens, page_table))
        return out.reshape(q.shape).astype(q.dtype), lse.reshape(q.shape[:2])

    block_q = min(_BLOCK_Q, num_tokens)
    q_lens = jnp.diff(cu_q_lens)
    last_tile = jnp.cumsum(-(-q_lens // block_q))  # of each sequence, exclusive
    q = jnp.pad(q, ((0, block_q), (0, 0), (0, 0)))

    def tile(t: Array, results: tuple[Array, Array]) -> tuple[Array, Array]:
        seq = jnp.searchsorted(last_tile, t, side="right")
        tiles_after = last_tile[seq] - t
        first = cu_q_lens[seq + 1] - q_lens[seq] + (-(-q_lens[seq] // block_q) - tiles_after) * block_q
        token = first + jnp.arange(block_q)
        position = seq_lens[seq] - cu_q_lens[seq + 1] + token
        block = lax.dynamic_slice_in_dim(q, first, block_q).reshape(block_q, num_kv_heads, q_per_kv, head_dim)
        block = block.swapaxes(0, 1).reshape(1, num_kv_heads, block_q * q_per_kv, head_dim)
        rows = _Rows(block, jnp.repeat(position, q_per_kv)[None], seq_lens[seq][None], page_table[seq][None])
        answers = []
        # A tile's tail past its sequence belongs to the next one, whose own tile comes later and overwrites it.
        for x, whole, empty in zip(attend(rows), results, (0, -jnp.inf), strict=True):
            x = x[0].reshape(num_kv_heads, block_q, q_per_kv, *x.shape[3:]).swapaxes(0, 1)
            x = x.reshape(block_q, num_q_heads, *x.shape[3:])
            owned = (token < cu_q_lens[seq + 1]).reshape(-1, *[1] * (x.ndim - 1))
            x = jnp.where(owned, x, empty).astype(whole.dtype)
            answers.append(lax.dynamic_update_slice_in_dim(whole, x, first, 0))
        return tuple(answers)

    out, lse = jnp.zeros(q.shape, q.dtype), jnp.full(q.shape[:2], -jnp.inf)
    out, lse = lax.fori_loop(0, last_tile[-1], tile, (out, lse))
    return out[:num_tokens], lse[:num_tokens]


def _attend(
    rows: _Rows,
    k_pages: Array,
    v_pages: Array,
    layer: int | Array,
    pages_per_chunk: int,
    sm_scale: float,
    logits_soft_cap: float | None,
    sliding_window: int | None,
    sinks: Array | None,
    alibi_slopes: Array | None,
    causal: bool,
) -> tuple[Array, Array]:
    """Output [num_rows, num_kv_heads, row_size, head_dim] and log-sum-exp [num_rows, num_kv_heads, row_size], float32."""
    num_rows, num_kv_heads, row_size, head_dim = rows.q.shape
    page_size = k_pages.shape[3]
    chunk = pages_per_chunk * page_size
    heads = jnp.arange(num_kv_heads)[None, :, None]
    precision = lax.Precision.HIGHEST if k_pages.dtype == jnp.float32 else None
    position = rows.position[:, None, :, None]  # [num_rows, 1, row_size, 1]

    def gather(pages: Array, ids: Array) -> Array:  # [num_rows, num_kv_heads, chunk, head_dim]
        return pages[layer, ids[:, None], heads].reshape(num_rows, num_kv_heads, chunk, head_dim)

    def body(c: Array, state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        acc, running_max, total = state
        key = c * chunk + jnp.arange(chunk)
        live = key < rows.seq_lens[:, None]  # [num_rows, chunk]
        ids = lax.dynamic_slice_in_dim(rows.page_table, c * pages_per_chunk, pages_per_chunk, axis=1)
        # Entries past the last page may hold anything: they are not followed.
        ids = jnp.where(live[:, ::page_size], ids, NULL_PAGE)
        logits = jnp.einsum(
            "nhrd,nhkd->nhrk", rows.q, gather(k_pages, ids), precision=precision, preferred_element_type=jnp.float32
        )
        logits *= sm_scale
        if logits_soft_cap is not None:
            logits = logits_soft_cap * jnp.tanh(logits / logits_soft_cap)
        if alibi_slopes is not None:
            logits += alibi_slopes[:, :, None] * (key - position).astype(jnp.float32)
        seen = live[:, None, None, :]
        if causal:
            seen &= key <= position
        if sliding_window is not None:
            seen &= key > position - sliding_window
        logits = jnp.where(seen, logits, -jnp.inf)
        new_max = jnp.maximum(running_max, logits.max(-1))
        # A row that has seen nothing yet has maximum -inf, and -inf - -inf is NaN: shift it by 0 instead.
        shift = jnp.where(jnp.isneginf(new_max), 0, new_max)
        decay = jnp.exp(running_max - shift)
        p = jnp.exp(logits - shift[..., None])
        # A slot without an owner may hold NaN, and 0 * NaN is NaN.
        v = jnp.where(live[:, None, :, None], gather(v_pages, ids), 0)
        product = jnp.einsum(
            "nhrk,nhkd->nhrd", p.astype(v.dtype), v, precision=precision, preferred_element_type=jnp.float32
        )
        return acc * decay[..., None] + product, new_max, total * decay + p.sum(-1)

    # Only chunks that some row sees are read.
    first, end = 0, rows.seq_lens
    if sliding_window is not None:
        oldest = jnp.where(rows.seq_lens > 0, rows.position.min(1), jnp.iinfo(jnp.int32).max)
        first = jnp.maximum(0, oldest.min() - sliding_window + 1) // chunk
    if causal:
        end = jnp.minimum(end, rows.position.max(1) + 1)
    state_shape = (num_rows, num_kv_heads, row_size)
    acc, running_max, total = lax.fori_loop(
        first,
        -(-end.max() // chunk),
        body,
        (jnp.zeros((*state_shape, head_dim)), jnp.full(state_shape, -jnp.inf), jnp.zeros(state_shape)),
    )
    lse = jnp.where(total > 0, running_max, -jnp.inf) + jnp.log(jnp.where(total > 0, total, 1))
    out = acc / jnp.where(total > 0, total, 1)[..., None]
    if sinks is None:
        return out, lse
    # A sink adds to the denominator and nothing to the numerator: scale by what it leaves.
    with_sink = jnp.where(total > 0, jnp.logaddexp(lse, sinks), -jnp.inf)
    return out * jnp.exp(lse - jnp.where(total > 0, with_sink, 0))[..., None], with_sink
