"""`rope_and_write`: validates its arguments, chooses a backend, calls it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxpaged.cache.kv_cache import LayerView, require_slots
from jaxpaged.cache.ragged import Ragged
from jaxpaged.checks import require_arrays
from jaxpaged.ops.dispatch import Backend, Op
from jaxpaged.ops.rope_write.triton import rope_and_write_triton, why_unsupported
from jaxpaged.ops.rope_write.xla import rope_and_write_xla

ROPE_AND_WRITE = Op(
    Backend("reference", rope_and_write_xla, is_differentiable=True),
    Backend("xla", rope_and_write_xla, is_differentiable=True),
    Backend("triton", rope_and_write_triton, why_unsupported),
    Backend("interpret", functools.partial(rope_and_write_triton, interpret=True), why_unsupported),
    formula="xla",
    kernel="triton",
)
"""Its backends. Each takes `(qkv, view, slot_mapping, cos, sin)` and returns what `rope_and_write` does."""


def rope_and_write(
    qkv: Float[Array, "num_tokens num_heads head_dim"],
    view: LayerView,
    ragged: Ragged,
    cos: Float[Array, "num_tokens half_dim"],
    sin: Float[Array, "num_tokens half_dim"],
    *,
    backend: str = "auto",
) -> tuple[Float[Array, "num_tokens num_q_heads head_dim"], LayerView]:
    """Rotate queries and keys by their positions and store keys and values: what comes before attention.

        q, k, v = split(qkv);  q, k = apply_rope(q, cos, sin), apply_rope(k, cos, sin);  view.write(k, v, ragged)

    On a GPU it is one kernel launch, which writes into the cache where that is donated.

    Args:
        qkv: Queries, then keys, then values, of `num_heads = num_q_heads + 2 * num_kv_heads` heads: what one matrix
            product of a layer leaves, in float32, bfloat16 or float16.
        view: The layer to write to.
        ragged: The sequences of the step, whose `slot_mapping` says where each token goes, all distinct. A number
            below 0, or of `cache.num_slots` or more, marks padding: its K and V are dropped.
        cos: float32, of `rope_angles`, as `sin`. The same for all layers of a step.
        backend: As in `paged_attention`; `"reference"` and `"xla"` are the formula above.

    Returns:
        Rotated queries in the dtype of `qkv`, and the layer with the new tokens in it.

    Raises:
        ValueError: A shape or the backend does not fit, or `ragged` has no slots.
        TypeError: A dtype does not fit, or an argument is not an array.
        NotImplementedError: The named backend does not do this; the message says why.

    Numerics: rotates in float32 and rounds to the dtype of `qkv`, before it quantises. Each compiler contracts the
        products of a rotation in its own way: an ulp of the larger one, which can tip the roundings that follow. The
        derivative is that of the formula, on every backend.

    Source: RoFormer (Su et al., 2021, section 3.4.2).
    """
    if not isinstance(view, LayerView):
        raise TypeError(f"`view` must be a LayerView, from `cache.layer(...)`; got {type(view).__name__}.")
    slot_mapping = require_slots(view.ragged(ragged))
    _validate(qkv, view, slot_mapping, cos, sin)
    arguments = jax.tree.map(
        lambda x: jnp.asarray(x) if isinstance(x, np.ndarray) else x, (qkv, view, slot_mapping, cos, sin)
    )
    return ROPE_AND_WRITE(*arguments, backend=backend)


def _validate(qkv: Array, view: LayerView, slot_mapping: Array, cos: Array, sin: Array) -> None:
    require_arrays(qkv=qkv, cos=cos, sin=sin, slot_mapping=slot_mapping)
    num_kv_heads, head_dim = view.cache.num_kv_heads, view.cache.head_dim
    if head_dim % 2:
        raise ValueError(f"`view` must be of a cache with an even head_dim for rotary embedding; got {head_dim}.")
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
