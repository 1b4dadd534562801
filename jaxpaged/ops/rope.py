"""Rotary position embedding, the half-split form that Llama checkpoints use outside GGUF files.

`rope_and_write` does it together with the write into the cache: validates, chooses a backend, calls it.
"""

from functools import partial
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int, Int32

from jaxpaged.checks import require_arrays
from jaxpaged.kv_cache import KVCache, check_layer
from jaxpaged.ops import triton
from jaxpaged.ops.attention import Backend


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
    """Cosine and sine of each token's angles, float32: once a step, for all layers."""
    angles = positions.astype(jnp.float32)[:, None] * jnp.asarray(frequencies)
    return jnp.cos(angles), jnp.sin(angles)


def apply_rope(
    x: Float[Array, "num_tokens num_heads head_dim"],
    cos: Float[Array, "num_tokens half_dim"],
    sin: Float[Array, "num_tokens half_dim"],
) -> Float[Array, "num_tokens num_heads head_dim"]:
    """Turns the pair (x[i], x[i + head_dim / 2]) by its angle. Computes in float32, returns the dtype of `x`."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos[:, None], sin[:, None]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


def rope_and_write(
    cache: KVCache,
    layer: int | Int[Array, ""],
    qkv: Float[Array, "num_tokens num_heads head_dim"],
    cos: Float[Array, "num_tokens half_dim"],
    sin: Float[Array, "num_tokens half_dim"],
    slot_mapping: Int32[Array, "num_tokens"],
    *,
    backend: Backend = "auto",
) -> tuple[Float[Array, "num_tokens num_q_heads head_dim"], KVCache]:
    """Rotates queries and keys by their positions and stores keys and values: what comes before attention.

        q, k, v = split(qkv);  q, k = apply_rope(q, cos, sin), apply_rope(k, cos, sin);  cache.write(layer, k, v, slots)

    On a GPU it is one kernel launch, which writes into the cache where that is donated.

    Args:
        layer: Which layer; an int or traced.
        qkv: Queries, then keys, then values, of `num_heads = num_q_heads + 2 * num_kv_heads` heads: what one matrix
            product of a layer leaves, in float32, bfloat16 or float16.
        cos: float32, of `rope_angles`, as `sin`. The same for all layers of a step.
        slot_mapping: int32 `page_id * page_size + offset` of each token, all distinct, as in `KVCache.write`. A number
            below 0, or of `cache.num_slots` or more, marks padding: its K and V are dropped.
        backend: As in `paged_attention`; `"reference"` and `"xla"` are the formula above.

    Returns:
        Rotated queries in the dtype of `qkv`, and the cache with the new tokens in it.

    Raises:
        ValueError: A shape, the layer or the backend does not fit.
        TypeError: A dtype does not fit, or an argument is not an array.
        NotImplementedError: The named backend does not do this; the message says why.

    Numerics: rotates in float32 and rounds to the dtype of `qkv`, before it quantises. Each compiler contracts the
        products of a rotation in its own way: an ulp of the larger one, which can tip the roundings that follow. The
        derivative is that of the formula, on every backend.

    Source: RoFormer (Su et al., 2021, section 3.4.2).
    """
    _validate(cache, layer, qkv, cos, sin, slot_mapping, backend)
    arguments = (cache, jnp.asarray(layer, jnp.int32), *(jnp.asarray(x) for x in (qkv, cos, sin, slot_mapping)))
    if qkv.shape[0] == 0 or backend in ("reference", "xla"):
        return _by_xla(*arguments)
    if unsupported := triton.why_unsupported(qkv, cache.k_pages, cache.v_pages):
        if backend != "auto":
            raise NotImplementedError(f"`backend={backend!r}` cannot run this call: {unsupported}")
        return _by_xla(*arguments)
    if backend == "auto":
        return lax.platform_dependent(*arguments, cuda=partial(_by_triton, False), default=_by_xla)
    return _by_triton(backend == "interpret", *arguments)


def _by_xla(
    cache: KVCache, layer: Array, qkv: Array, cos: Array, sin: Array, slot_mapping: Array
) -> tuple[Array, KVCache]:
    num_q_heads = qkv.shape[1] - 2 * cache.num_kv_heads
    q, k, v = jnp.split(qkv, (num_q_heads, num_q_heads + cache.num_kv_heads), axis=1)
    q, k = apply_rope(q, cos, sin), apply_rope(k, cos, sin)
    return q, cache.write(layer, k, v, slot_mapping)


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _by_triton(interpret: bool, cache: KVCache, *arguments: Array) -> tuple[Array, KVCache]:
    return triton.rope_and_write_triton(cache, *arguments, interpret=interpret)


@_by_triton.defjvp
def _(_interpret: bool, primals, tangents):
    """Pallas cannot differentiate a kernel that writes in place: the derivative is that of the formula."""
    return jax.jvp(_by_xla, primals, tangents)


def _validate(cache, layer, qkv, cos, sin, slot_mapping, backend) -> None:
    if not isinstance(cache, KVCache):
        raise TypeError(f"`cache` must be a KVCache; got {type(cache).__name__}.")
    require_arrays(qkv=qkv, cos=cos, sin=sin, slot_mapping=slot_mapping)
    check_layer(layer, cache.num_layers)
    num_kv_heads, head_dim = cache.num_kv_heads, cache.head_dim
    if head_dim % 2:
        raise ValueError(f"`cache` must have an even head_dim for rotary embedding; got {head_dim}.")
    if qkv.ndim != 3 or qkv.shape[2] != head_dim:
        raise ValueError(f"`qkv` must have shape (num_tokens, num_heads, head_dim = {head_dim}); got {qkv.shape}.")
    num_q_heads = qkv.shape[1] - 2 * num_kv_heads
    if num_q_heads < 1 or num_q_heads % num_kv_heads:
        raise ValueError(
            f"`qkv` must have num_q_heads + 2 * {num_kv_heads} heads, num_q_heads a multiple of num_kv_heads = "
            f"{num_kv_heads}; got {qkv.shape[1]}. Queries, keys and values stand in it one after the other."
        )
    if qkv.dtype.name not in ("float32", "bfloat16", "float16"):
        raise TypeError(f"`qkv` must be float32, bfloat16 or float16; got {qkv.dtype}.")
    num_tokens = qkv.shape[0]
    for name, x, shape, dtype in (
        ("cos", cos, (num_tokens, head_dim // 2), jnp.float32),
        ("sin", sin, (num_tokens, head_dim // 2), jnp.float32),
        ("slot_mapping", slot_mapping, (num_tokens,), jnp.int32),
    ):
        if x.shape != shape:
            raise ValueError(f"`{name}` must have shape {shape} for {num_tokens} tokens; got {x.shape}.")
        if x.dtype != dtype:
            raise TypeError(f"`{name}` must be {jnp.dtype(dtype)}; got {x.dtype}.")
    if backend not in get_args(Backend):
        raise ValueError(f"`backend` must be one of {', '.join(get_args(Backend))}; got {backend!r}.")
