"""The oracle: paged attention as its definition reads, one query token at a time. For tests; slow on purpose."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxpaged.batch import locate_tokens
from jaxpaged.config import NULL_PAGE
from jaxpaged.quantize import layer_scale


def paged_attention_reference(
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
) -> tuple[Array, Array]:
    """`paged_attention` by a dense gather and a plain softmax, in float32 (float64 where the inputs are).

    Arguments and results are those of `jaxpaged.paged_attention`. Work and memory follow the width of the table.
    """
    dtype = jnp.promote_types(q.dtype, jnp.float32)
    num_tokens, num_q_heads, _ = q.shape
    _, _, num_kv_heads, page_size, head_dim = k_pages.shape
    max_pages = page_table.shape[1]
    row, position, live = locate_tokens(seq_lens, cu_q_lens, num_tokens)
    key = jnp.arange(max_pages * page_size)

    def attend(token: Array) -> tuple[Array, Array]:
        n, query_position = seq_lens[row[token]], position[token]
        seen = live[token] & (key < n)
        if causal:
            seen &= key <= query_position
        if sliding_window is not None:
            seen &= key > query_position - sliding_window
        if tree_mask is not None:
            num_new = 1 if cu_q_lens is None else cu_q_lens[row[token] + 1] - cu_q_lens[row[token]]
            draft = key - (n - num_new)
            in_tree = tree_mask[token, jnp.clip(draft, 0, tree_mask.shape[1] - 1)] & (draft < tree_mask.shape[1])
            seen &= (draft < 0) | in_tree
        # Entries past the last page may hold anything: they are not followed.
        ids = jnp.where(jnp.arange(max_pages) * page_size < n, page_table[row[token]], NULL_PAGE)

        def dense(pages: Array, scale: Array | None) -> Array:  # [num_q_heads, max_len, head_dim]
            tokens = pages[layer, ids].astype(dtype)  # [max_pages, num_kv_heads, page_size, head_dim]
            if scale is not None and scale.ndim == 4:
                tokens *= scale[layer, ids][..., None].astype(dtype)
            elif scale is not None:
                tokens *= layer_scale(scale, layer)[:, None, None].astype(dtype)
            by_head = tokens.swapaxes(0, 1).reshape(num_kv_heads, -1, head_dim)
            # A slot without an owner may hold NaN, and 0 * NaN is NaN: masking the logits is not enough.
            return jnp.repeat(jnp.where(seen[:, None], by_head, 0), num_q_heads // num_kv_heads, axis=0)

        k, v = dense(k_pages, k_scale), dense(v_pages, v_scale)
        logits = jnp.einsum("hd,hkd->hk", q[token].astype(dtype), k, precision=lax.Precision.HIGHEST) * sm_scale
        if logits_soft_cap is not None:
            logits = logits_soft_cap * jnp.tanh(logits / logits_soft_cap)
        if alibi_slopes is not None:
            logits += alibi_slopes.astype(dtype)[:, None] * (key - query_position).astype(dtype)
        logits = jnp.where(seen, logits, -jnp.inf)
        if sinks is not None:
            sink = jnp.where(seen.any(), sinks.astype(dtype), -jnp.inf)
            lse = jax.nn.logsumexp(jnp.concatenate([logits, sink[:, None]], axis=1), axis=1)
        else:
            lse = jax.nn.logsumexp(logits, axis=1)
        p = jnp.exp(logits - jnp.where(jnp.isneginf(lse), 0, lse)[:, None])
        out = jnp.einsum("hk,hkd->hd", p, v, precision=lax.Precision.HIGHEST)
        return out.astype(q.dtype), lse

    return lax.map(attend, jnp.arange(num_tokens))
