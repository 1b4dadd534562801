"""Rotate, quantise and write in XLA operations: the formula that the kernel is held against."""

import jax.numpy as jnp
from jaxtyping import Array

from jaxpaged.cache.kv_cache import LayerView
from jaxpaged.ops.rope_write.rope import apply_rope


def rope_and_write_xla(
    qkv: Array, view: LayerView, slot_mapping: Array, cos: Array, sin: Array
) -> tuple[Array, LayerView]:
    """`rope_and_write` in XLA operations."""
    num_kv_heads = view.cache.num_kv_heads
    num_q_heads = qkv.shape[1] - 2 * num_kv_heads
    q, k, v = jnp.split(qkv, (num_q_heads, num_q_heads + num_kv_heads), axis=1)
    q, k = apply_rope(q, cos, sin), apply_rope(k, cos, sin)
    return q, view.write_slots(k, v, slot_mapping)
