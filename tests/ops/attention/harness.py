"""What the tests of attention share: the arguments of a backend, and partitions."""

import jax
import jax.numpy as jnp

import jaxpaged as jp
from jaxpaged.ops.attention.partition import make_partition


def three_values(
    q, k_pages, v_pages, page_table, seq_lens, *, layer, cu_q_lens=None, tree_mask=None, k_scale=None, v_scale=None,
    partitions=(), **options,
):  # fmt: skip
    """What a backend takes, from the arguments of `paged_attention`."""
    cache = jp.KVCache(k_pages=k_pages, v_pages=v_pages, k_scale=k_scale, v_scale=v_scale)
    ragged = jp.Ragged(
        page_table=page_table, seq_lens=seq_lens, cu_q_lens=cu_q_lens, tree_mask=tree_mask, partitions=partitions
    )
    return q, cache.layer(layer), ragged, jp.AttentionOptions(**options)


def partition_of(
    seq_lens, cu_q_lens=None, *, num_tokens, num_q_heads=32, num_kv_heads=8, max_pages=1, page_size=2**20, **options
):
    """The partition for such lengths; by default of eight KV heads, in a table that holds any length."""
    page_table = jax.ShapeDtypeStruct((len(seq_lens), max_pages), jnp.int32)  # only its width matters
    ragged = jp.Ragged(page_table=page_table, seq_lens=seq_lens, cu_q_lens=cu_q_lens)
    return make_partition(
        ragged,
        jp.AttentionOptions(**options),
        num_tokens=num_tokens,
        num_q_heads=num_q_heads,
        num_kv_heads=num_kv_heads,
        page_size=page_size,
    )
