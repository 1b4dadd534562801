"""What all Pallas Triton kernels share: the module itself where JAX has it, a launch, loads and stores under a mask."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Int32

try:
    from jax.experimental.pallas import triton
except ImportError:  # deprecated upstream since JAX 0.11: a later JAX may lack it
    triton = None
plgpu: Any = triton


def why_no_triton() -> str | None:
    """Return the reason why no kernel can be lowered, or None."""
    return None if plgpu is not None else f"JAX {jax.__version__} has no Pallas Triton backend"


def launch(
    kernel: Callable[..., None],
    name: str,
    operands: Mapping[str, Array | None],
    outputs: Mapping[str, jax.ShapeDtypeStruct | None],
    *,
    grid: tuple[int, ...],
    num_warps: int,
    num_stages: int,
    in_place: Mapping[str, str] | None = None,
    interpret: bool,
) -> dict[str, Any]:
    """Run a kernel, and return the outputs by name.

    Args:
        kernel: Takes a reference for each operand and then for each output, in their order; None for what is None.
        in_place: Outputs that lie in the memory of an operand, by the names of operand and output.
        interpret: Run under Pallas's interpreter, on any device.
    """
    places = [[key for key, x in arrays.items() if x is not None] for arrays in (operands, outputs)]
    aliases = {places[0].index(a): places[1].index(b) for a, b in (in_place or {}).items()}
    results = pl.pallas_call(
        kernel,
        grid=grid,
        out_shape=tuple(outputs.values()),
        input_output_aliases=aliases,
        compiler_params=plgpu.CompilerParams(num_warps=num_warps, num_stages=num_stages),
        interpret=interpret,
        name=name,
    )(*operands.values())
    return dict(zip(outputs, results, strict=True))


def count(num: int) -> Int32[Array, "num"]:
    """0, 1, ... in 32 bits, whatever JAX's default is."""
    return jnp.arange(num, dtype=jnp.int32)


def ceil_div(a: Array, b: int) -> Array:
    """Return `a / b` rounded up, for a >= 0, in the dtype of `a`. Pallas's own takes `b` for 64 bits under x64."""
    return lax.div(a + (b - 1), jnp.asarray(b, a.dtype))


def masked_load(ref, mask):
    """Return what lies at `ref` where `mask` says so, else 0."""
    return plgpu.load(ref, mask=mask, other=jnp.zeros((), ref.dtype))


def masked_store(ref, value, mask):
    """Store where `mask` says so, in the dtype of `ref`."""
    plgpu.store(ref, value.astype(ref.dtype), mask=mask)


def dot(a, b, allow_tf32):
    """float32 stays IEEE float32 unless asked (the default is TF32); 16-bit types multiply exactly anyway."""
    return plgpu.dot(a, b, precision=lax.Precision.DEFAULT if allow_tf32 else lax.Precision.HIGHEST)
