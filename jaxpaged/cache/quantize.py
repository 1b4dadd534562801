"""Keys and values in one byte each: a stored value x stands for `x * scale`, and scales are float32.

A scale holds for one KV head of a layer, fixed when the cache is made, or for one head of one token, measured when it
is written. Values are clipped before they are cast: a cast of what does not fit gives NaN on one device and the largest
number on another.

Source: per-token scales as in KVQuant (Hooper et al., 2024, section 3.1) and FlashInfer's quantised KV cache.
"""

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

MAX_VALUE = {"int8": 127.0, "float8_e4m3fn": 448.0, "float8_e5m2": 57344.0}
"""The largest number of each one-byte dtype that a cache may have."""


def is_quantized(dtype: DTypeLike) -> bool:
    """Return whether a cache of this dtype needs scales."""
    return jnp.dtype(dtype).name in MAX_VALUE


def measure_scale(x: Float[Array, "*rows head_dim"], dtype: DTypeLike) -> Float[Array, "*rows"]:
    """Return the scale of each row that makes its largest magnitude the largest number of `dtype`; 0 for a row of
    zeros.
    """
    return jnp.max(jnp.abs(x.astype(jnp.float32)), axis=-1) / MAX_VALUE[jnp.dtype(dtype).name]


def quantize(x: Float[Array, "*rows head_dim"], scale: Float[Array, "*rows"], dtype: DTypeLike) -> Array:
    """Return `x / scale` to the nearest number of `dtype`.

    What is larger than its largest number becomes that number.
    """
    largest = MAX_VALUE[jnp.dtype(dtype).name]
    scaled = x.astype(jnp.float32) / jnp.where(scale == 0, 1, scale)[..., None]
    if jnp.dtype(dtype) == jnp.int8:
        scaled = jnp.floor(scaled + 0.5)
    return jnp.clip(scaled, -largest, largest).astype(dtype)


def dequantize(x: Array, scale: Float[Array, "*rows"]) -> Float[Array, "*rows head_dim"]:
    """Return `x * scale` in float32."""
    return x.astype(jnp.float32) * scale[..., None]


def layer_scale(scale: Float[Array, "layers num_kv_heads"], layer: int | Array) -> Float[Array, "num_kv_heads"]:
    """Return the fixed scales of one layer, from those of every layer or from one row that serves all."""
    return scale[0 if scale.shape[0] == 1 else layer]
