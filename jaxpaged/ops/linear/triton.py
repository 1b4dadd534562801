"""A product with its norm, activation and residual on NVIDIA GPUs: one Pallas kernel, lowered through Triton."""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array

from jaxpaged.config import cdiv
from jaxpaged.ops.triton_util import count, launch, masked_load, masked_store, plgpu, why_no_triton

# One tile of rows: each weight is read once a call. Beyond it products are bound by arithmetic, and XLA's win.
MAX_TOKENS = 64


def _linear_kernel(
    x_ref,  # [num_tokens, num_in]
    weight_ref,  # [num_out or twice, num_in]
    norm_ref,  # [num_in] or None
    residual_ref,  # [num_tokens, num_out] or None
    out_ref,  # [num_tokens, num_out]
    *,
    eps: float,
    gated: bool,
    block_m: int,
    block_n: int,
    block_k: int,
):
    num_tokens, num_in = x_ref.shape
    num_out = out_ref.shape[1]
    row = count(block_m)[:, None]
    column = pl.program_id(0) * block_n + count(block_n)[None, :]
    in_rows, in_columns = row < num_tokens, column < num_out

    def multiply(i, state):
        products, squares = state  # one or two of [block_m, block_n], [block_m]
        k = i * block_k + count(block_k)
        in_k = k < num_in
        x = masked_load(x_ref.at[row, k[None, :]], in_rows & in_k[None, :])
        if norm_ref is not None:
            # The norm's factor is one number a row: it can wait until all squares are summed.
            wide = x.astype(jnp.float32)
            squares += jnp.sum(wide * wide, axis=1)
            x *= masked_load(norm_ref.at[k], in_k)[None, :]
        halves = [column + half * num_out for half in range(len(products))]
        weights = [masked_load(weight_ref.at[half, k[:, None]], in_columns & in_k[:, None]) for half in halves]
        return [p + plgpu.dot(x, w) for p, w in zip(products, weights, strict=True)], squares

    zeros = jnp.zeros((block_m, block_n), jnp.float32)
    state = [zeros] * (1 + gated), jnp.zeros((block_m,), jnp.float32)
    products, squares = lax.fori_loop(0, cdiv(num_in, block_k), multiply, state)
    if norm_ref is not None:
        factor = lax.rsqrt(squares * (1 / num_in) + eps)[:, None]
        products = [p * factor for p in products]
    out = products[0]
    if gated:
        out *= products[1] / (1 + jnp.exp(-out))
    live = in_rows & in_columns
    if residual_ref is not None:
        out = out.astype(out_ref.dtype).astype(jnp.float32)
        out += masked_load(residual_ref.at[row, column], live).astype(jnp.float32)
    masked_store(out_ref.at[row, column], out, live)


def linear_triton(
    x: Array,
    weight: Array,
    norm: Array | None,
    residual: Array | None,
    eps: float,
    gated: bool,
    *,
    interpret: bool = False,
) -> Array:
    """`linear` in one launch, for what `why_unsupported` lets through."""
    num_tokens, num_out = x.shape[0], weight.shape[0] // (1 + gated)
    block_m, block_n, block_k, num_stages = _tile_sizes(num_tokens, gated, norm is not None)
    results = launch(
        functools.partial(_linear_kernel, eps=eps, gated=gated, block_m=block_m, block_n=block_n, block_k=block_k),
        "linear",
        {"x": x, "weight": weight, "norm": norm, "residual": residual},
        {"out": jax.ShapeDtypeStruct((num_tokens, num_out), x.dtype)},
        grid=(cdiv(num_out, block_n),),
        num_warps=4,
        num_stages=num_stages,
        interpret=interpret,
    )
    return results["out"]


def _tile_sizes(num_tokens: int, gated: bool, has_norm: bool) -> tuple[int, int, int, int]:
    """(block_m, block_n, block_k, num_stages): what keeps the most weights in flight in an L4's 99 KiB.

    A norm costs each program two instructions for each value of `x`, shared by 64 rows of weights; without one, 32 rows
    a program spread a product of 4,096 over the 132 SMs of an H200.
    """
    block_m, block_k = max(16, pl.next_power_of_2(num_tokens)), 128
    num_rows = 64 if has_norm or gated else 32
    stage_bytes = 2 * block_k * (block_m + num_rows)
    return block_m, num_rows // (1 + gated), block_k, min(5, 96 * 1024 // stage_bytes)


def why_unsupported(
    x: Array, weight: Array, _norm: Array | None, _residual: Array | None, _eps: float, _gated: bool
) -> str | None:
    """Return the reason why the kernel leaves a product to XLA, or None.

    Looks at shape and dtype, never at a device.
    """
    if reason := why_no_triton():
        return reason
    if x.dtype != jnp.bfloat16:  # float16 could overflow where the norm's scale comes before its factor
        return f"it multiplies bfloat16; got {x.dtype}"
    if not 0 < x.shape[0] <= MAX_TOKENS:
        return f"it takes 1 to {MAX_TOKENS} tokens; got {x.shape[0]}"
    if 0 in weight.shape:
        return f"it takes a weight with values; got {weight.shape}"
    return None
