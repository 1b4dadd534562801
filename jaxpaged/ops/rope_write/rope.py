"""Rotary position embedding, the half-split form that Llama checkpoints use outside GGUF files."""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int


def rope_frequencies(
    head_dim: int, *, theta: float, factor: float = 1.0, freq_factors: tuple[float, ...] | None = None
) -> np.ndarray:
    """Radians a token that each of the head_dim / 2 pairs turns, `[head_dim / 2]` float32.

    `frequency[i] = theta ** (-2 i / head_dim) / (factor * freq_factors[i])`.

    Source: RoFormer (Su et al., 2021, section 3.2.2); `factor` is position interpolation (Chen et al., 2023).
    """
    if head_dim % 2:
        raise ValueError(f"`head_dim` must be even for rotary embedding; got {head_dim}.")
    # In float32 step by step, as PyTorch computes it, so that greedy text of a checkpoint agrees to the token.
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    frequencies = np.float32(1) / np.power(np.float32(theta), exponents)
    divisors = np.float32(factor) * np.asarray(1.0 if freq_factors is None else freq_factors, np.float32)
    return (frequencies / divisors).astype(np.float32)


def rope_angles(
    positions: Int[Array, "num_tokens"], frequencies: Float[Array, "half_dim"] | np.ndarray
) -> tuple[Float[Array, "num_tokens half_dim"], Float[Array, "num_tokens half_dim"]]:
    """Return cosine and sine of each token's angles, float32: once a step, for all layers."""
    angles = positions.astype(jnp.float32)[:, None] * jnp.asarray(frequencies, jnp.float32)[None, :]
    return jnp.cos(angles), jnp.sin(angles)


def apply_rope(
    x: Float[Array, "num_tokens num_heads head_dim"],
    cos: Float[Array, "num_tokens half_dim"],
    sin: Float[Array, "num_tokens half_dim"],
) -> Float[Array, "num_tokens num_heads head_dim"]:
    """Turn the pair (x[i], x[i + head_dim / 2]) by its angle. Computes in float32, returns the dtype of `x`."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos[:, None], sin[:, None]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)
