"""Executes one Triton call: every program of its grid, one after the other."""

import math
from collections.abc import Mapping, Sequence

import numpy as np

from jaxpaged.inspect.ttir.call import TritonCall
from jaxpaged.inspect.ttir.decode import Region
from jaxpaged.inspect.ttir.memory import Allocation, Memory, bits, poison_array
from jaxpaged.inspect.ttir.ops import HANDLERS
from jaxpaged.inspect.ttir.report import Report


class Machine:
    """Runs the operations of one kernel.

    Attributes:
        program_id: Of the program that runs (x, y, z).
    """

    def __init__(self, call: TritonCall, memory: Memory):
        self.module, self.grid, self.memory = call.module, call.grid, memory
        self.program_id: tuple[int, ...] = (0, 0, 0)
        self._values: list = [None] * call.module.num_values

    def run_program(self, program: int, arguments: Sequence[np.int64]) -> None:
        """Run one program of the grid, by its number."""
        self.memory.begin_program(program)
        self.program_id = self.memory.report.program_id(program)
        self.run_region(self.module.body, arguments)

    def run_region(self, region: Region, arguments: Sequence) -> list:
        """Run a region, and return what it yields."""
        values = self._values
        for slot, value in zip(region.arguments, arguments, strict=True):
            values[slot] = value
        *body, end = region.ops
        for op in body:
            result = HANDLERS[op.name](op, self, *[values[slot] for slot in op.operands])
            results = result if type(result) is tuple else (result,)
            for slot, value in zip(op.results, results, strict=False):  # a store has no result, and gives None
                values[slot] = value
        return [values[slot] for slot in end.operands]


class RunResult(tuple):
    """The output arrays of a call.

    Attributes:
        report: What the kernel did.
    """

    report: Report


def run(
    call: TritonCall,
    *inputs,
    poison: bool | float = True,
    grid_order: str | int = "sequential",
    uninitialised: Mapping[int, np.ndarray] | None = None,
) -> RunResult:
    """Execute a call, and return its outputs, with a report.

    Args:
        inputs: Arrays in the order, shapes and dtypes of `call.operands`; they are copied.
        poison: What undefined elements hold (outputs before they are written, lanes that a mask without `other` leaves
            off): True for NaN and bytes of 0x5A, False for zero, or a number.
        grid_order: "sequential", "reverse", or the seed of a shuffle.
        uninitialised: By input, True for the elements that nobody may read; broadcast to its shape.

    Raises:
        KernelFault: An access is out of bounds or misaligned.
        ValueError: Other inputs than the call takes, or marks for one that it does not take.
    """
    marks = uninitialised or {}
    if unknown := [i for i in marks if i not in range(len(call.operands))]:
        raise ValueError(f"`uninitialised` must name inputs 0 to {len(call.operands) - 1}; got {unknown}.")
    report = Report(call.name, call.grid)
    allocations: list[Allocation] = []

    def allocate(name: str, array: np.ndarray, initialised: np.ndarray | None, writable: bool) -> Allocation:
        allocations.append(Allocation(len(allocations) + 1, name, array, initialised, writable))
        return allocations[-1]

    for i, array in enumerate(_checked(call, inputs)):
        initialised = ~np.broadcast_to(marks[i], array.shape).reshape(-1) if i in marks else None
        allocate(call.names[i], array, initialised, i in call.aliases)
    outputs = {result: allocations[operand] for operand, result in call.aliases.items()}
    for i, (shape, dtype) in enumerate(call.results):
        if i not in outputs:
            unwritten = np.zeros(math.prod(shape), bool)
            outputs[i] = allocate(call.names[len(inputs) + i], poison_array(shape, dtype, poison), unwritten, True)

    memory = Memory(report, allocations, call.module.ops, poison)
    machine = Machine(call, memory)
    pointers = [a.base for a in allocations[: len(inputs)]] + [outputs[i].base for i in range(len(call.results))]
    with np.errstate(all="ignore"):
        for program in _program_order(grid_order, math.prod(call.grid)):
            machine.run_program(int(program), pointers)
    memory.finish(allocations[len(inputs) :])
    result = RunResult(outputs[i].view(dtype).reshape(shape) for i, (shape, dtype) in enumerate(call.results))
    result.report = report
    return result


def cross_check(call: TritonCall, *inputs) -> list[str]:
    """Say which outputs depend on the order of programs or on undefined elements.

    It finds what no access shows: NaN vanishes in a maximum, another poison does not. It takes five runs.
    """
    variants: dict[str, dict] = {
        "grid order reversed": {"poison": False, "grid_order": "reverse"},
        "grid order shuffled": {"poison": False, "grid_order": 1},
        "undefined elements NaN": {"poison": True},
        "undefined elements 100": {"poison": 100.0},
    }
    reference, changes = run(call, *inputs, poison=False), []
    for label, variant in variants.items():
        for i, (x, y) in enumerate(zip(reference, run(call, *inputs, **variant), strict=True)):
            if differing := np.count_nonzero(bits(x) != bits(y)):
                changes.append(f"{label}: {differing} element(s) of output {i} change")
    return changes


def _checked(call: TritonCall, inputs: Sequence) -> list[np.ndarray]:
    if len(inputs) != len(call.operands):
        raise ValueError(f"`inputs` of {call.name} must be {len(call.operands)} arrays; got {len(inputs)}.")
    arrays = [np.asarray(x) for x in inputs]
    for i, (array, (shape, dtype)) in enumerate(zip(arrays, call.operands, strict=True)):
        if array.shape != shape or array.dtype != dtype:
            got = f"{array.dtype}{list(array.shape)}"
            raise ValueError(f"input {i} of {call.name} must be {dtype}{list(shape)}; got {got}.")
    return arrays


def _program_order(grid_order: str | int, count: int) -> Sequence[int] | np.ndarray:
    if isinstance(grid_order, int):
        return np.random.default_rng(grid_order).permutation(count)
    return {"sequential": range(count), "reverse": range(count)[::-1]}[grid_order]
