"""Rotate, quantise and write on NVIDIA GPUs: one Pallas kernel, lowered through Triton."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array

from jaxpaged.cache.kv_cache import LayerView
from jaxpaged.cache.quantize import is_quantized, measure_scale, quantize
from jaxpaged.config import cdiv
from jaxpaged.ops.triton_util import count, launch, masked_load, masked_store, why_no_triton


def _rope_and_write_kernel(
    layer_ref,  # [1]
    slot_ref,  # [num_tokens]
    cos_ref,  # [num_tokens, head_dim / 2] float32, as the next
    sin_ref,
    qkv_ref,  # [num_tokens, num_q_heads + 2 num_kv_heads, head_dim]
    _k_pages_ref,
    _v_pages_ref,
    k_fixed_ref,  # [num_layers, num_kv_heads], as the next; else of no use
    v_fixed_ref,
    q_ref,  # [num_tokens, num_q_heads, head_dim]
    k_ref,  # [num_layers, num_pages, num_kv_heads, page_size, head_dim], as the next
    v_ref,
    k_scale_ref,  # [num_layers, num_pages, num_kv_heads, page_size] or None, as the next
    v_scale_ref,
    *,
    block_h: int,
):
    num_q_heads, num_kv_heads = q_ref.shape[1], k_ref.shape[2]
    num_pages, page_size, half = k_ref.shape[1], k_ref.shape[3], k_ref.shape[4] // 2
    token, layer = pl.program_id(0), layer_ref[0]
    slot = slot_ref[token]
    live = (slot >= 0) & (slot < num_pages * page_size)
    page, offset = slot // page_size, slot % page_size

    head = pl.program_id(1) * block_h + count(block_h)  # of the packed ones: queries, then keys, then values
    k_head = head - num_q_heads
    v_head = k_head - num_kv_heads
    is_v = (v_head >= 0) & (v_head < num_kv_heads)
    # Values cannot be cut in a kernel, so each half of a head is an array of its own.
    dim = count(pl.next_power_of_2(half))[None, :]
    in_half, dims = dim < half, (dim, dim + half)
    cos, sin = (masked_load(ref.at[token, dim], in_half) for ref in (cos_ref, sin_ref))
    in_qkv = (v_head < num_kv_heads)[:, None] & in_half
    first, second = (masked_load(qkv_ref.at[token, head[:, None], d], in_qkv).astype(jnp.float32) for d in dims)
    turned = first * cos - second * sin, second * cos + first * sin
    halves = [
        jnp.where(is_v[:, None], x, y).astype(qkv_ref.dtype) for x, y in zip((first, second), turned, strict=True)
    ]
    for x, d in zip(halves, dims, strict=True):
        masked_store(q_ref.at[token, head[:, None], d], x, (k_head < 0)[:, None] & in_half)

    def write(pages_ref, fixed_ref, scale_ref, kv_head, mine):
        # Where Pallas interprets, a lane that is masked stores what was there before: it needs an index of its own.
        kv_head = jnp.where(mine, kv_head, num_kv_heads + head)
        new = halves
        if is_quantized(pages_ref.dtype):
            if scale_ref is None:
                scale = masked_load(fixed_ref.at[layer, kv_head], mine)
            else:
                scale = jnp.maximum(*(measure_scale(x, pages_ref.dtype) for x in halves))
                masked_store(scale_ref.at[layer, page, kv_head, offset], scale, mine)
            new = [quantize(x, scale, pages_ref.dtype) for x in halves]
        for x, d in zip(new, dims, strict=True):
            masked_store(pages_ref.at[layer, page, kv_head[:, None], offset, d], x, mine[:, None] & in_half)

    write(k_ref, k_fixed_ref, k_scale_ref, k_head, (k_head >= 0) & (v_head < 0) & live)
    write(v_ref, v_fixed_ref, v_scale_ref, v_head, is_v & live)


def rope_and_write_triton(
    qkv: Array, view: LayerView, slot_mapping: Array, cos: Array, sin: Array, *, interpret: bool = False
) -> tuple[Array, LayerView]:
    """Rotate, quantise and write in one launch, in place where the cache is donated.

    The arguments are those of `jaxpaged.rope_and_write`, which validates them.

    Args:
        interpret: Runs under Pallas's interpreter, on any device.
    """
    cache = view.cache
    num_tokens, num_heads, head_dim = qkv.shape
    q = jax.ShapeDtypeStruct((num_tokens, num_heads - 2 * cache.num_kv_heads, head_dim), qkv.dtype)
    if num_tokens == 0:  # a grid of no programs
        return jnp.zeros(q.shape, q.dtype), view
    block_h, num_warps = _tile_sizes(num_heads, head_dim // 2)
    pools = {"k_pages": cache.k_pages, "v_pages": cache.v_pages}
    scales = {"k_scale": cache.k_scale, "v_scale": cache.v_scale}
    written = pools | (scales if cache.has_token_scales else dict.fromkeys(scales))
    results = launch(
        functools.partial(_rope_and_write_kernel, block_h=block_h),
        "rope_and_write",
        {
            "layer": jnp.asarray(view.row, jnp.int32).reshape(1),
            "slot_mapping": slot_mapping,
            "cos": cos,
            "sin": sin,
            "qkv": qkv,
            **pools,
            **scales,
        },
        {"q": q, **{name: x if x is None else jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in written.items()}},
        in_place={name: name for name, x in written.items() if x is not None},
        grid=(num_tokens, cdiv(num_heads, block_h)),
        num_warps=num_warps,
        num_stages=1,
        interpret=interpret,
    )
    cache = dataclasses.replace(cache, **{name: results[name] for name, x in written.items() if x is not None})
    return results["q"], dataclasses.replace(view, cache=cache)


def _tile_sizes(num_heads: int, half: int) -> tuple[int, int]:
    """(block_h, num_warps): a quarter of the heads of a Llama, so that one step fills the device.

    A thread has 8 values of each half of a head, which it loads as 16 bytes.
    """
    width = pl.next_power_of_2(half)
    block_h = min(pl.next_power_of_2(num_heads), max(1, 1024 // width))
    return block_h, max(1, min(4, block_h * width // (8 * 32)))


def why_unsupported(qkv: Array, view: LayerView, _slots: Array, _cos: Array, _sin: Array) -> str | None:
    """Return the reason why the kernel cannot take such arrays, or None.

    Looks at shapes and dtypes, never at a device.
    """
    if reason := why_no_triton():
        return reason
    if qkv.shape[2] > 256:
        return f"head_dim is at most 256; got {qkv.shape[2]}"
    return None
