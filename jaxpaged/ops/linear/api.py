"""A layer's matrix products, with what stands before and after them: RMS norm, gated activation, residual.

On a GPU a decode step reads each weight once and does little else, so that every small launch between two products
shows. With few tokens in bfloat16 each product is therefore one Pallas kernel, norm and residual in it: a layer is four
of them, and the three of attention. More tokens, and other types, are XLA's business on every device.
"""

import functools

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxpaged.checks import require_arrays
from jaxpaged.ops.dispatch import Backend, Op
from jaxpaged.ops.linear.triton import linear_triton, why_unsupported
from jaxpaged.ops.linear.xla import linear_xla

LINEAR = Op(
    Backend("reference", linear_xla, is_differentiable=True),
    Backend("xla", linear_xla, is_differentiable=True),
    Backend("triton", linear_triton, why_unsupported),
    Backend("interpret", functools.partial(linear_triton, interpret=True), why_unsupported),
    formula="xla",
    kernel="triton",
)
"""The backends of a product. Each takes `(x, weight, norm, residual, eps, gated)` and returns what `linear` does."""


def linear(
    x: Float[Array, "num_tokens num_in"],
    weight: Float[Array, "num_out_or_twice num_in"],
    *,
    norm: Float[Array, " num_in"] | None = None,
    eps: float = 1e-5,
    gated: bool = False,
    residual: Float[Array, "num_tokens num_out"] | None = None,
    backend: str = "auto",
) -> Float[Array, "num_tokens num_out"]:
    """Return a product by a weight that stands as checkpoints store it, [out, in].

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
    _validate(x, weight, norm, gated, residual, eps)
    return LINEAR(x, weight, norm, residual, eps, gated, backend=backend)


def _validate(x, weight, norm, gated, residual, eps) -> None:
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
