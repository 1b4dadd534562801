"""A product with its norm, activation and residual in XLA operations: the formula, and what a gradient goes through."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float


def rms_norm(
    x: Float[Array, "num_tokens num_in"], scale: Float[Array, " num_in"], eps: float
) -> Float[Array, "num_tokens num_in"]:
    """`scale * x / sqrt(mean(x^2) + eps)` over each row, computed in float32."""
    wide = x.astype(jnp.float32)
    wide = wide * lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return scale[None, :] * wide.astype(x.dtype)


def linear_xla(x: Array, weight: Array, norm: Array | None, residual: Array | None, eps: float, gated: bool) -> Array:
    """`linear` in XLA operations."""
    if norm is not None:
        x = rms_norm(x, norm, eps)
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    out = lax.dot_general(x, weight, (((1,), (1,)), ((), ())), precision=precision)
    if gated:
        gate, up = jnp.split(out, 2, axis=1)
        out = jax.nn.silu(gate) * up
    return out if residual is None else residual + out
