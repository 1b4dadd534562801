"""The algebra of partial attention: results over disjoint keys combine exactly, by their log-sum-exp."""

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jaxpaged.checks import require_arrays


def sum_dtype(dtype: DTypeLike) -> jnp.dtype:
    """Return what values of a dtype are summed in: float32, or float64 where they are that."""
    return jnp.dtype(jnp.float64 if dtype == jnp.float64 else jnp.float32)


def merge_attention(
    out_a: Float[Array, "... head_dim"],
    lse_a: Float[Array, "..."],
    out_b: Float[Array, "... head_dim"],
    lse_b: Float[Array, "..."],
) -> tuple[Float[Array, "... head_dim"], Float[Array, "..."]]:
    """Combine attention over two disjoint sets of keys into attention over their union.

    `out = (e^lse_a out_a + e^lse_b out_b) / (e^lse_a + e^lse_b)` and `lse = log(e^lse_a + e^lse_b)`. A monoid: it is
    associative, and `(0, -inf)`, the answer over no keys, is its identity.

    Args:
        out_a: Normalised output over the first set; `out_b` has the same shape and dtype.
        lse_a: Natural log of the sum of the exponentials of its logits, without the last axis of `out_a`.

    Returns:
        Output in the dtype of `out_a`, and log-sum-exp in float32 or wider.

    Raises:
        ValueError: The shapes do not fit.
        TypeError: An argument is not an array.

    Numerics: Weights are `e^(lse - max)`, in float32 or wider. Where both sides are empty the maximum is -inf, and
        `-inf - -inf` is NaN: it is replaced by 0 there, so that both weights are 0.

    Source: Online normaliser calculation for softmax (Milakov, Gimelshein, 2018, section 3.1); Cascade inference
        (FlashInfer, Ye et al., 2025, section 2.2).
    """
    require_arrays(out_a=out_a, lse_a=lse_a, out_b=out_b, lse_b=lse_b)
    if out_a.shape != out_b.shape or lse_a.shape != out_a.shape[:-1] or lse_b.shape != out_b.shape[:-1]:
        raise ValueError(
            "`out_a` and `out_b` must have one shape (..., head_dim), and `lse_a` and `lse_b` that shape without "
            f"head_dim; got {out_a.shape}, {out_b.shape}, {lse_a.shape} and {lse_b.shape}."
        )
    dtype = sum_dtype(lse_a.dtype)
    lse_a, lse_b = lse_a.astype(dtype), lse_b.astype(dtype)
    lse_max = jnp.maximum(lse_a, lse_b)
    shift = jnp.where(jnp.isneginf(lse_max), 0, lse_max)
    weight_a, weight_b = jnp.exp(lse_a - shift), jnp.exp(lse_b - shift)
    total = weight_a + weight_b
    norm = jnp.where(total > 0, total, 1)
    out = (weight_a / norm)[..., None] * out_a.astype(dtype) + (weight_b / norm)[..., None] * out_b.astype(dtype)
    # Not log(total): at 0 its derivative is infinite, and 0 * inf is NaN.
    return out.astype(out_a.dtype), jnp.where(total > 0, shift + jnp.log(norm), -jnp.inf)
