"""Finds the Triton calls of a JAX function that was lowered for a GPU (`aot.lower_for`)."""

import dataclasses
import re
from typing import cast

import jax
import numpy as np
from jax._src.pallas.triton import lowering as pallas_triton_lowering
from jax.extend.mlir import ir

from jaxpaged.inspect.ttir.decode import Module, decode_module, parse_type
from jaxpaged.inspect.ttir.ops import HANDLERS

_CALL = "__gpu$xla.gpu.triton"


@dataclasses.dataclass(kw_only=True)
class TritonCall:
    """One Triton call: its kernel, launch grid and operands.

    Attributes:
        ir: The module as text.
        operands: Shape and dtype of each; so are `results`.
        aliases: By operand, the result that shares its memory.
        names: Of the operands, then of the results.
    """

    name: str
    ir: str
    module: Module = dataclasses.field(repr=False)
    grid: tuple[int, int, int]
    operands: list[tuple[tuple[int, ...], np.dtype]]
    results: list[tuple[tuple[int, ...], np.dtype]]
    aliases: dict[int, int]
    names: list[str]


def parse_module(text: str | bytes) -> tuple[str, Module]:
    """Parse a Triton module; returns it as text and decoded.

    Raises:
        UnsupportedOp: It has an operation or a type that is not in `ops.HANDLERS`.
    """
    with pallas_triton_lowering._new_ir_context(), ir.Location.unknown():
        module = ir.Module.parse(text)
        return str(module), decode_module(module, HANDLERS)


def find_triton_calls(lowered: jax.stages.Lowered) -> list[TritonCall]:
    """Find every Triton call, in the order of the program's text."""
    calls: list[TritonCall] = []

    def visit(op) -> None:
        for region in op.regions:
            for block in region.blocks:
                for inner in block.operations:
                    visit(inner.operation)
        if op.name == "stablehlo.custom_call" and ir.StringAttr(op.attributes["call_target_name"]).value == _CALL:
            calls.append(_triton_call(op))

    visit(cast(ir.Module, lowered.compiler_ir("stablehlo")).operation)
    return calls


def _triton_call(op) -> TritonCall:
    config = ir.DictAttr(op.attributes["mhlo.backend_config"])
    x, y, z = (ir.IntegerAttr(config[f"grid_{axis}"]).value for axis in "xyz")
    aliases = re.findall(
        r"output_tuple_indices = \[(\d*)\],\s*operand_index = (\d+)", str(op.attributes["output_operand_aliases"])
    )
    text, module = parse_module(ir.StringAttr(config["ir"]).value_bytes)
    return TritonCall(
        name=ir.StringAttr(config["name"]).value,
        ir=text,
        module=module,
        grid=(x, y, z),
        operands=[_shape_and_dtype(value) for value in op.operands],
        results=[_shape_and_dtype(value) for value in op.results],
        aliases={int(operand): int(result or 0) for result, operand in aliases},
        names=[*(f"in{i}" for i in range(len(op.operands))), *(f"out{i}" for i in range(len(op.results)))],
    )


def _shape_and_dtype(value) -> tuple[tuple[int, ...], np.dtype]:
    t = parse_type(str(value.type))
    return t.shape, t.dtype
