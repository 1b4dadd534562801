"""The oracle: paged attention as its definition reads, one query token at a time. For tests; slow on purpose."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jaxpaged.cache.kv_cache import LayerView
from jaxpaged.cache.quantize import layer_scale
from jaxpaged.cache.ragged import Ragged, locate_tokens
from jaxpaged.config import NULL_PAGE
from jaxpaged.ops.attention.merge import sum_dtype
from jaxpaged.ops.attention.options import AttentionOptions


def paged_attention_reference(
    q: Float[Array, "num_tokens num_q_heads head_dim"], view: LayerView, ragged: Ragged, options: AttentionOptions
) -> tuple[Array, Array]:
    """`paged_attention` by a dense gather and a plain softmax, in float32 (float64 where the inputs are).

    Arguments and results are those of `jaxpaged.ops.attention.attend`. Work and memory follow the width of the table.
    """
    dtype = sum_dtype(q.dtype)
    num_tokens, num_q_heads, head_dim = q.shape
    cache, layer, seq_lens, cu_q_lens = view.cache, view.row, ragged.seq_lens, ragged.cu_q_lens
    page_size, num_kv_heads, tree_mask = cache.page_size, cache.num_kv_heads, ragged.tree_mask
    sm_scale = options.scale(head_dim)
    row, position, live = locate_tokens(seq_lens, cu_q_lens, num_tokens)
    key = jnp.arange(ragged.max_pages * page_size, dtype=jnp.int32)

    def attend(token: Array) -> tuple[Array, Array]:
        n, query_position = seq_lens[row[token]], position[token]
        seen = live[token] & (key < n)
        if options.causal:
            seen &= key <= query_position
        if options.sliding_window is not None:
            seen &= key > query_position - options.sliding_window
        if tree_mask is not None:
            num_new = 1 if cu_q_lens is None else cu_q_lens[row[token] + 1] - cu_q_lens[row[token]]
            draft = key - (n - num_new)
            in_tree = tree_mask[token, jnp.clip(draft, 0, tree_mask.shape[1] - 1)] & (draft < tree_mask.shape[1])
            seen &= (draft < 0) | in_tree
        # Entries past the last page may hold anything: they are not followed.
        ids = jnp.where(jnp.arange(ragged.max_pages) * page_size < n, ragged.page_table[row[token]], NULL_PAGE)

        def dense(pages: Array, scale: Array | None) -> Array:  # [num_q_heads, max_len, head_dim]
            tokens = pages[layer, ids].astype(dtype)  # [max_pages, num_kv_heads, page_size, head_dim]
            if scale is not None and scale.ndim == 4:
                tokens *= scale[layer, ids][..., None].astype(dtype)
            elif scale is not None:
                tokens *= layer_scale(scale, layer)[None, :, None, None].astype(dtype)
            by_head = tokens.swapaxes(0, 1).reshape(num_kv_heads, -1, head_dim)
            # A slot without an owner may hold NaN, and 0 * NaN is NaN: masking the logits is not enough.
            return jnp.repeat(jnp.where(seen[None, :, None], by_head, 0), num_q_heads // num_kv_heads, axis=0)

        k, v = dense(cache.k_pages, cache.k_scale), dense(cache.v_pages, cache.v_scale)
        logits = jnp.einsum("hd,hkd->hk", q[token].astype(dtype), k, precision=lax.Precision.HIGHEST) * sm_scale
        if options.logits_soft_cap is not None:
            logits = options.logits_soft_cap * jnp.tanh(logits / options.logits_soft_cap)
        if options.alibi_slopes is not None:
            logits += options.alibi_slopes.astype(dtype)[:, None] * (key - query_position).astype(dtype)[None, :]
        logits = jnp.where(seen[None, :], logits, -jnp.inf)
        if options.sinks is not None:
            sink = jnp.where(seen.any(), options.sinks.astype(dtype), -jnp.inf)
            lse = jax.nn.logsumexp(jnp.concatenate([logits, sink[:, None]], axis=1), axis=1)
        else:
            lse = jax.nn.logsumexp(logits, axis=1)
        p = jnp.exp(logits - jnp.where(jnp.isneginf(lse), 0, lse)[:, None])
        out = jnp.einsum("hk,hkd->hd", p, v, precision=lax.Precision.HIGHEST)
        return out.astype(q.dtype), lse

    return lax.map(attend, jnp.arange(num_tokens))


def why_not_by_reference(_q: Array, _view: LayerView, _ragged: Ragged, options: AttentionOptions) -> str | None:
    """Return the reason why it cannot do this, or None."""
    if options.is_batch_invariant:
        return "it has no batch-invariant mode: its sums are as long as the page table is wide"
    return None
