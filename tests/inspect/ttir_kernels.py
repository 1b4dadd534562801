"""Small kernels for the tests of the interpreter: written in Pallas, or in Triton IR that Pallas never emits."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from jaxpaged.inspect import ttir
from jaxpaged.inspect.aot import lower_for
from jaxpaged.inspect.ttir.call import parse_module

ROWS = jnp.arange(64.0).reshape(8, 8)
NAMES = {"float32": "f32", "int32": "i32", "int8": "i8"}


def struct(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def pallas(kernel, out_shape, grid=(), interpret=False, **options):
    return pl.pallas_call(
        kernel,
        out_shape=out_shape,
        grid=grid,
        interpret=interpret,
        compiler_params=plgpu.CompilerParams(),
        **options,
    )


def lowered_call(kernel, out_shape, *inputs, **options) -> ttir.TritonCall:
    [call] = ttir.find_triton_calls(lower_for(pallas(kernel, out_shape, **options), *inputs))
    return call


def kinds(result: ttir.FunctionResult) -> list[str]:
    """Kinds of the events of a function's one kernel, in order."""
    [run] = result.runs
    return [event.kind for event in run.report.events.values()]


def call_from_text(body: str, operands, results, grid=(1, 1, 1)) -> ttir.TritonCall:
    """A kernel whose pointers are called %p0, %p1, ..., first those of operands; each is (shape, dtype)."""
    arrays = [(shape, np.dtype(dtype)) for shape, dtype in [*operands, *results]]
    pointers = [f"%p{i}: !tt.ptr<{NAMES[dtype.name]}>" for i, (_, dtype) in enumerate(arrays)]
    text, module = parse_module(f"module {{ tt.func public @text({', '.join(pointers)}) {{\n{body}\ntt.return\n}} }}")
    return ttir.TritonCall(
        name="text",
        ir=text,
        module=module,
        grid=grid,
        operands=arrays[: len(operands)],
        results=arrays[len(operands) :],
        aliases={},
        names=[f"p{i}" for i in range(len(arrays))],
    )


def evaluate_text(body: str, dtype, *inputs: np.ndarray) -> tuple[np.ndarray, list[str]]:
    """The vector %out of 8 elements that a body computes from vectors %in0, %in1, ..., and the kinds of events."""
    lines = ["%r = tt.make_range {end = 8 : i32, start = 0 : i32} : tensor<8xi32>"]
    arrays = [(x.shape, x.dtype) for x in inputs] + [((8,), np.dtype(dtype))]
    for i, (_, array_dtype) in enumerate(arrays):
        pointers = f"!tt.ptr<{NAMES[array_dtype.name]}>"
        lines += [
            f"%s{i} = tt.splat %p{i} : {pointers} -> tensor<8x{pointers}>",
            f"%a{i} = tt.addptr %s{i}, %r : tensor<8x{pointers}>, tensor<8xi32>",
        ]
        if i < len(inputs):
            lines.append(f"%in{i} = tt.load %a{i} : tensor<8x{pointers}>")
    store = f"tt.store %a{len(inputs)}, %out : tensor<8x!tt.ptr<{NAMES[np.dtype(dtype).name]}>>"
    result = ttir.run(call_from_text("\n".join([*lines, body, store]), arrays[:-1], arrays[-1:]), *inputs)
    return result[0], [event.kind for event in result.report.events.values()]
