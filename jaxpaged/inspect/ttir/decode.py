"""Turns a Triton module into plain Python objects that run fast. It knows syntax, not what any operation means."""

import dataclasses
import functools
import re
from collections.abc import Collection
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.extend.mlir import ir


class UnsupportedOp(NotImplementedError):
    """The kernel needs an operation or a type that no kernel here has needed so far."""


_FLOATS = {
    "f16": np.float16,
    "bf16": jnp.bfloat16,
    "f32": np.float32,
    "f8E4M3FN": jnp.float8_e4m3fn,
    "f8E5M2": jnp.float8_e5m2,
}


@dataclasses.dataclass(frozen=True, slots=True)
class IRType:
    """A type of the IR, and how numpy holds its values.

    Attributes:
        kind: "int", "float", "ptr" (its values are int64, `memory`), or "none" where an operation has no value.
        width: In bits.
        dtype: Of its values, bool for i1; of a pointer, what it points to.
        shape: () for a scalar.
    """

    kind: str
    width: int
    dtype: np.dtype
    shape: tuple[int, ...] = ()


_NONE = IRType("none", 0, np.dtype(np.void))


@functools.cache
def parse_type(text: str) -> IRType:
    """Parse a type of Triton IR or StableHLO as it is printed.

    Raises:
        UnsupportedOp: A type that no kernel here uses.
    """
    if match := re.fullmatch(r"tensor<((?:\d+x)*)([^,]+)(?:,.*)?>", text):
        shape = tuple(int(size) for size in match[1].split("x")[:-1])
        return dataclasses.replace(parse_type(match[2]), shape=shape)
    if match := re.fullmatch(r"!tt\.ptr<([^,>]+)(?:, *\d+)?>", text):
        return dataclasses.replace(parse_type(match[1]), kind="ptr", width=64)
    if text in _FLOATS:
        dtype = np.dtype(_FLOATS[text])
        return IRType("float", dtype.itemsize * 8, dtype)
    if text == "i1":
        return IRType("int", 1, np.dtype(bool))
    if match := re.fullmatch(r"(u?)i(8|16|32|64)", text):  # StableHLO has ui32, Triton's integers have no sign
        width = int(match[2])
        return IRType("int", width, np.dtype(f"{match[1] or 'i'}{width // 8}"))
    raise UnsupportedOp(f"type {text}")


@dataclasses.dataclass(eq=False, slots=True)
class Op:
    """One operation.

    Attributes:
        operands: Slots in the module's table of values, as are `results`.
        source: Type of the first operand.
        target: Type of the first result.
        location: File and line of the Python code that it came from, where known.
        number: Its place in `Module.ops`.
    """

    name: str
    operands: list[int]
    results: list[int]
    source: IRType
    target: IRType
    attributes: dict[str, Any]
    location: str
    number: int
    regions: "list[Region]" = dataclasses.field(default_factory=list)

    def __str__(self) -> str:
        return f"{self.name} at {self.location}" if self.location else self.name


@dataclasses.dataclass(slots=True)
class Region:
    """One block, since Pallas emits structured control flow only, or none (an `else` that is absent)."""

    arguments: list[int]
    ops: list[Op]


@dataclasses.dataclass(frozen=True, slots=True)
class Module:
    """The kernel of a Triton module.

    Attributes:
        body: Its arguments are the pointers to operands, then results.
        ops: All operations, those in loops and branches too.
        num_values: Slots in its table of values.
    """

    body: Region
    ops: list[Op]
    num_values: int


_TERMINATORS = ("scf.yield", "tt.return", "tt.reduce.return")
_EFFECTS = ("tt.store", "tt.return", "gpu.barrier")


def decode_module(module: ir.Module, known: Collection[str]) -> Module:
    """Decode the one function of a module, without the operations whose results nothing uses.

    Triton deletes those too: Pallas emits a load with each store, which must count neither as a read nor as traffic.

    Args:
        known: Names of operations that can be executed.

    Raises:
        UnsupportedOp: An operation that is not known, several functions, or branches between blocks.
    """
    functions = [op.operation for op in module.body.operations]
    if len(functions) != 1 or functions[0].name != "tt.func":
        raise UnsupportedOp(f"a module of {[f.name for f in functions]}, where one tt.func is expected")
    decoder = _Decoder(known)
    body = decoder.region(functions[0].regions[0], None)
    decoder.remove_dead_ops(body)
    return Module(body, decoder.ops, len(decoder.slots))


class _Decoder:
    def __init__(self, known: Collection[str]):
        self.known = known
        self.ops: list[Op] = []
        self.slots: dict[Any, int] = {}
        self.parents: list[Op | None] = []  # by the number of an operation
        self.producers: dict[int, Op] = {}  # by slot

    def region(self, raw, parent: Op | None) -> Region:
        if len(raw.blocks) > 1:
            raise UnsupportedOp("branches between blocks (cf.br)")
        region = Region([], [])
        for block in raw.blocks:
            region.arguments = self._slots_of(block.arguments)
            region.ops = [self._op(op.operation, parent) for op in block.operations]
        return region

    def _slots_of(self, values) -> list[int]:
        return [self.slots.setdefault(value, len(self.slots)) for value in values]

    def _op(self, raw, parent: Op | None) -> Op:
        location = re.search(r'([^"/]+\.py)":(\d+)', str(raw.location))
        op = Op(
            name=raw.name,
            operands=self._slots_of(raw.operands),
            results=self._slots_of(raw.results),
            source=_first_type(raw.operands),
            target=_first_type(raw.results),
            attributes=_attributes(raw),
            location=f"{location[1]}:{location[2]}" if location else "",
            number=len(self.ops),
        )
        if op.name not in self.known and op.name not in _TERMINATORS:
            raise UnsupportedOp(str(op))
        if op.name == "arith.constant":
            value = np.asarray(op.attributes["value"]).astype(op.target.dtype)
            op.attributes["value"] = np.broadcast_to(value, op.target.shape)[()]
        self.ops.append(op)
        self.parents.append(parent)
        self.producers.update(dict.fromkeys(op.results, op))
        op.regions = [self.region(region, op) for region in raw.regions]
        return op

    def remove_dead_ops(self, body: Region) -> None:
        pending: list[Op | None] = [op for op in self.ops if op.name in _EFFECTS or op.attributes.get("isVolatile")]
        live = set()
        while pending:
            op = pending.pop()
            if op is not None and op.number not in live:
                live.add(op.number)
                pending += [self.parents[op.number], *(self.producers.get(slot) for slot in op.operands)]
                pending += [region.ops[-1] for region in op.regions if region.ops]
        for region in [body, *(region for op in self.ops for region in op.regions)]:
            region.ops = [op for op in region.ops if op.number in live]


def _first_type(values) -> IRType:
    return parse_type(str(values[0].type)) if len(values) else _NONE


def _attributes(raw) -> dict[str, Any]:
    names = [a if isinstance(a, str) else a.name for a in raw.attributes]  # older JAX: the attributes themselves
    return {name: _value(raw.attributes[name]) for name in names}


def _value(attribute):
    if isinstance(attribute, ir.BoolAttr | ir.IntegerAttr | ir.FloatAttr):
        return attribute.value
    if isinstance(attribute, ir.StringAttr):
        return attribute.value_bytes.decode(errors="replace")
    if isinstance(attribute, ir.DenseI32ArrayAttr | ir.DenseI64ArrayAttr):
        return tuple(attribute)
    if isinstance(attribute, ir.DenseElementsAttr):
        return _value(attribute.get_splat_value()) if attribute.is_splat else np.array(attribute)
    return str(attribute)
