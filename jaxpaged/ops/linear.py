"""A layer's matrix products, with what stands before and after them: RMS norm, gated activation, residual.

On a GPU a decode step reads each weight once and does little else, so that every small launch between two products
shows. With few tokens in bfloat16 each product is therefore one Pallas kernel, norm and residual in it: a layer is four
of them, and the three of attention. More tokens, and other types, are XLA's business on every device.
"""

import functools
from functools import partial
from typing import get_args

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float

from jaxpaged.checks import require_arrays
from jaxpaged.config import cdiv
from jaxpaged.ops.attention import Backend
from jaxpaged.ops.triton import masked_load, masked_store, plgpu

# One tile of rows: each weight is read once a call. Beyond it products are bound by arithmetic, and XLA's win.
MAX_TOKENS = 64


def linear(
    x: Float[Array, "num_tokens num_in"],
    weight: Float[Array, "num_out_or_twice num_in"],
    *,
    norm: Float[Array, " num_in"] | None = None,
    eps: float = 1e-5,
    gated: bool = False,
    residual: Float[Array, "num_tokens num_out"] | None = None,
    backend: Backend = "auto",
) -> Float[Array, "num_tokens num_out"]:
    """A product by a weight that stands as checkpoints store it, [out, in].

        y = rms_norm(x, norm, eps) weight^T;   y = silu(y[:, :num_out]) y[:, num_out:] if gated;   out = y + residual

    Args:
        norm: Scale of the RMS norm before the product; None leaves the norm out.
        eps: Added to the mean square.
        gated: The first half of the weight's rows makes the gate, the second what passes it.
        residual: What the result is added to.
        backend: `"triton"` and `"interpret"` are the kernel, as is `"auto"` on a GPU where it takes such a product.
            Everything else is the formula, compiled by XLA.

    Returns:
        In the dtype of `x`.

    Raises:
        ValueError: A shape or the backend does not fit.
        TypeError: Dtypes differ or are not floating, an argument is not an array, or `eps` is not a number.
        NotImplementedError: The named backend does not do this; the message says why.

    Numerics: the formula rounds to the dtype of `x` after each operation; the kernel only before the product, after it
        where there is a residual, and at the end. A float32 model multiplies in float32 everywhere: a GPU's default
        would be TF32. The derivative is that of the formula, on every backend.

    Source: RMS norm, Zhang and Sennrich (2019, section 3); SwiGLU, Shazeer (2020, section 2).
    """
    _validate(x, weight, norm, gated, residual, eps, backend)
    formula = partial(_by_xla, eps=eps, gated=gated)
    unsupported = None if backend in ("reference", "xla") else why_unsupported(x)
    if unsupported is not None and backend != "auto":
        raise NotImplementedError(f"`backend={backend!r}` cannot run this call: {unsupported}")
    if backend in ("reference", "xla") or unsupported is not None or 0 in weight.shape:
        return formula(x, weight, norm, residual)
    kernel = partial(_by_triton, eps, gated, backend == "interpret")
    if backend == "auto":
        return lax.platform_dependent(x, weight, norm, residual, cuda=kernel, default=formula)
    return kernel(x, weight, norm, residual)


def rms_norm(
    x: Float[Array, "num_tokens num_in"], scale: Float[Array, " num_in"], eps: float
) -> Float[Array, "num_tokens num_in"]:
    """`scale * x / sqrt(mean(x^2) + eps)` over each row, computed in float32."""
    wide = x.astype(jnp.float32)
    wide = wide * lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return scale * wide.astype(x.dtype)


def why_unsupported(x: Array) -> str | None:
    """The reason why the kernel leaves a product to XLA, or None. Looks at shape and dtype, never at a device."""
    if plgpu is None:
        return f"JAX {jax.__version__} has no Pallas Triton backend"
    if x.dtype != jnp.bfloat16:  # float16 could overflow where the norm's scale comes before its factor
        return f"it multiplies bfloat16; got {x.dtype}"
    if not 0 < x.shape[0] <= MAX_TOKENS:
        return f"it takes 1 to {MAX_TOKENS} tokens; got {x.shape[0]}"
    return None


def _by_xla(x: Array, weight: Array, norm: Array | None, residual: Array | None, *, eps: float, gated: bool) -> Array:
    if norm is not None:
        x = rms_norm(x, norm, eps)
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    out = lax.dot_general(x, weight, (((1,), (1,)), ((), ())), precision=precision)
    if gated:
        gate, up = jnp.split(out, 2, axis=1)
        out = jax.nn.silu(gate) * up
    return out if residual is None else residual + out


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
    row = jnp.arange(block_m)[:, None]
    column = pl.program_id(0) * block_n + jnp.arange(block_n)[None, :]
    in_rows, in_columns = row < num_tokens, column < num_out

    def multiply(i, state):
        products, squares = state  # one or two of [block_m, block_n], [block_m]
        k = i * block_k + jnp.arange(block_k)
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
        out = out.astype(out_ref.dtype).astype(jnp.float32) + masked_load(residual_ref.at[row, column], live)
    masked_store(out_ref.at[row, column], out, live)


@partial(jax.custom_jvp, nondiff_argnums=(0, 1, 2))
def _by_triton(
    eps: float, gated: bool, interpret: bool, x: Array, weight: Array, norm: Array | None, residual: Array | None
) -> Array:
    num_tokens, num_out = x.shape[0], weight.shape[0] // (1 + gated)
    block_m, block_n, block_k, num_stages = _tile_sizes(num_tokens, gated, norm is not None)
    return pl.pallas_call(
        functools.partial(_linear_kernel, eps=eps, gated=gated, block_m=block_m, block_n=block_n, block_k=block_k),
        grid=(cdiv(num_out, block_n),),
        out_shape=jax.ShapeDtypeStruct((num_tokens, num_out), x.dtype),
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=num_stages),
        interpret=interpret,
        name="linear",
    )(x, weight, norm, residual)


@_by_triton.defjvp
def _(eps: float, gated: bool, _interpret: bool, primals, tangents):
    """The derivative is that of the formula: XLA's products are the right ones for training."""
    return jax.jvp(partial(_by_xla, eps=eps, gated=gated), primals, tangents)


def _tile_sizes(num_tokens: int, gated: bool, has_norm: bool) -> tuple[int, int, int, int]:
    """(block_m, block_n, block_k, num_stages): what keeps the most weights in flight in an L4's 99 KiB.

    A norm costs each program two instructions for each value of `x`, shared by 64 rows of weights; without one, 32 rows
    a program spread a product of 4,096 over the 132 SMs of an H200.
    """
    block_m, block_k = max(16, pl.next_power_of_2(num_tokens)), 128
    num_rows = 64 if has_norm or gated else 32
    stage_bytes = 2 * block_k * (block_m + num_rows)
    return block_m, num_rows // (1 + gated), block_k, min(5, 96 * 1024 // stage_bytes)


def _validate(x, weight, norm, gated, residual, eps, backend) -> None:
    given = {"x": x, "weight": weight, "norm": norm, "residual": residual}
    given = {name: array for name, array in given.items() if array is not None}
    require_arrays(**given)
    if not isinstance(eps, int | float):
        raise TypeError(f"`eps` must be a number, static; got {type(eps).__name__}.")
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(f"`x` must be of a floating dtype; got {x.dtype}.")
    if x.ndim != 2 or weight.ndim != 2 or weight.shape[1] != x.shape[1]:
        raise ValueError(
            "`weight` must have shape (num_out, num_in) for `x` (num_tokens, num_in); "
            f"got {weight.shape} and {x.shape}."
        )
    if gated and weight.shape[0] % 2:
        raise ValueError(f"`weight` must have an even number of rows where `gated`; got {weight.shape[0]}.")
    num_out = weight.shape[0] // (1 + gated)
    for name, array, shape in (("norm", norm, x.shape[1:]), ("residual", residual, (x.shape[0], num_out))):
        if array is not None and array.shape != shape:
            raise ValueError(f"`{name}` must have shape {shape}; got {array.shape}.")
    for name, array in given.items():
        if array.dtype != x.dtype:
            raise TypeError(f"`{name}` must be of the dtype of `x`, {x.dtype}; got {array.dtype}.")
    if backend not in get_args(Backend):
        raise ValueError(f"`backend` must be one of {', '.join(get_args(Backend))}; got {backend!r}.")
