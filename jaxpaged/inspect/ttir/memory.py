"""The operands of a kernel as memory that checks each access.

A pointer is an int64 that holds the number of an operand and an offset in bytes, so that each access is checked against
the operand from which its pointer was made, however far the arithmetic on it went. For each element the last program
that wrote it and the last two that read it are known, which finds races between programs in whatever order they run.
"""

import math
from collections.abc import Iterator, Sequence

import numpy as np

from jaxpaged.inspect.ttir.decode import Op
from jaxpaged.inspect.ttir.report import Event, KernelFault, Report, Traffic

_SHIFT = 41  # pointer = (number << 41) + 2**40 + offset
_BIAS = 1 << (_SHIFT - 1)


def poison_array(shape, dtype: np.dtype, poison: bool | float) -> np.ndarray:
    """Return undefined values: NaN or bytes of 0x5A for True, zero for False, else the number `poison`."""
    if poison is True and dtype.kind in "iu":
        return np.full(shape, int.from_bytes(b"\x5a" * dtype.itemsize, "little"), dtype)
    return np.full(shape, np.nan if poison is True else poison, np.float32).astype(dtype)


def bits(values: np.ndarray) -> np.ndarray:
    """View values as unsigned integers of their size."""
    return values.view(f"u{values.dtype.itemsize}")


class _Touches:
    """By element, the last program that touched it, by which operation and at which time."""

    def __init__(self, size: int):
        self.program, self.op, self.time = np.full((3, size), -1, np.int32)

    def at(self, units: np.ndarray) -> tuple[np.ndarray, ...]:
        return self.program[units], self.op[units], self.time[units]

    def set(self, units: np.ndarray, program, op, time) -> None:
        self.program[units], self.op[units], self.time[units] = program, op, time


class Allocation:
    """The buffer of one operand. A *unit* is one of its elements.

    Args:
        array: Its contents, which are copied.
        initialised: By element; None where all are.
        writable: Whether it is an output, or an input that an output shares.
    """

    def __init__(self, number: int, name: str, array: np.ndarray, initialised: np.ndarray | None, writable: bool):
        self.base = np.int64((number << _SHIFT) + _BIAS)
        self.name, self.shape, self.dtype = name, array.shape, array.dtype
        self.data = np.array(array, order="C").reshape(-1).view(np.uint8)
        self.initialised, self.writable = initialised, writable
        self.unit = array.dtype.itemsize  # in bytes
        self.writes, self.reads, self.earlier_reads = (_Touches(array.size) for _ in range(3))
        self.lanes = np.zeros(array.size, np.int32)
        self.traffic = Traffic()

    def view(self, dtype: np.dtype) -> np.ndarray:
        """View the whole buffer as another type."""
        return self.data[: self.data.size // dtype.itemsize * dtype.itemsize].view(dtype)

    def units(self, index: np.ndarray, itemsize: int) -> np.ndarray:
        """Find the units that an access touches whose elements have `itemsize` bytes."""
        if itemsize <= self.unit:
            return index * itemsize // self.unit
        ratio = itemsize // self.unit
        return (index[:, None] * ratio + np.arange(ratio)).reshape(-1)

    def last_lane(self, index: np.ndarray) -> np.ndarray:
        """Find for each lane the last lane with the same element."""
        self.lanes[index] = np.arange(index.size, dtype=np.int32)
        return self.lanes[index]

    def element(self, unit: int) -> tuple[int, ...]:
        """Return the index of a unit; the leading number is out of bounds where the unit is."""
        index = []
        for size in self.shape[:0:-1]:
            unit, rest = divmod(unit, size)
            index.append(rest)
        return (unit, *index[::-1])

    def __str__(self) -> str:
        return f"{self.name} {self.dtype}{list(self.shape)}"


class Memory:
    """All accesses of a kernel.

    Attributes:
        program: The number of the program that runs.
        barrier_time: When it last passed a barrier.
    """

    def __init__(self, report: Report, allocations: Sequence[Allocation], ops: Sequence[Op], poison: bool | float):
        self.report, self.ops, self.poison = report, ops, poison
        self.allocations = {int(a.base) >> _SHIFT: a for a in allocations}
        self.program, self.time, self.barrier_time = 0, 0, 0

    def begin_program(self, program: int) -> None:
        """Say that what follows is done by this program."""
        self.program, self.barrier_time = program, self.time

    def barrier(self) -> None:
        """Order what the threads of the program did before it and what they do after it."""
        self.barrier_time = self.time

    def load(self, op: Op, address, mask=None, other=None):
        """Execute `tt.load`: poison, or `other`, in the lanes that the mask leaves off."""
        dtype = op.source.dtype
        lanes, addresses = _active_lanes(address, mask)
        result = poison_array(np.size(address), dtype, self.poison)
        if other is not None:
            result[:] = np.broadcast_to(other, np.shape(address)).reshape(-1)
        self.time += 1
        for a, where, index in self._resolve(op, addresses, dtype.itemsize, "read"):
            units = a.units(index, dtype.itemsize)
            a.traffic.loaded += index.size * dtype.itemsize
            if a.initialised is not None and not (ready := a.initialised[units]).all():
                self.note("uninitialised-read", op, a, units[~ready])
            self._race(op, a, units, a.writes.at(units), "read after write")
            writers, ops, times = a.writes.at(units)
            own = np.flatnonzero((writers == self.program) & (times > self.barrier_time))
            if own.size:
                self.note(
                    "read-after-own-write", op, a, units[own], "no barrier since", (int(ops[own[0]]), self.program)
                )
            fresh = units[a.reads.program[units] != self.program]
            a.earlier_reads.set(fresh, *a.reads.at(fresh))
            a.reads.set(units, self.program, op.number, self.time)
            result[lanes[where]] = a.view(dtype)[index]
        return result.reshape(np.shape(address))[()]

    def store(self, op: Op, address, value, mask=None) -> None:
        """Execute `tt.store`."""
        dtype = op.source.dtype
        lanes, addresses = _active_lanes(address, mask)
        values = np.broadcast_to(value, np.shape(address)).reshape(-1)[lanes].astype(dtype)
        self.time += 1
        for a, where, index in self._resolve(op, addresses, dtype.itemsize, "write"):
            units, chosen = a.units(index, dtype.itemsize), values[where]
            a.traffic.stored += index.size * dtype.itemsize
            if not a.writable:
                self.note("write-to-input", op, a, units)
            self._race(op, a, units, a.writes.at(units), "write after write")
            readers, earlier = a.reads.at(units), a.earlier_reads.at(units)
            others = tuple(np.where(readers[0] == self.program, e, r) for r, e in zip(readers, earlier, strict=True))
            self._race(op, a, units, others, "write after read")
            if dtype.itemsize == a.unit:
                differs = bits(chosen) != bits(chosen[a.last_lane(index)])
                if differs.any():
                    self.note("store-lane-conflict", op, a, index[differs], "lanes of one store differ")
            a.writes.set(units, self.program, op.number, self.time)
            if a.initialised is not None:
                a.initialised[units] = True
            a.view(dtype)[index] = chosen

    def note(
        self,
        kind: str,
        op: Op | None = None,
        a: Allocation | None = None,
        units: Sequence[int] | np.ndarray = (),
        detail: str = "",
        culprit: tuple[int, int] | None = None,
    ) -> Event:
        """Count an event, and return it.

        Args:
            units: The elements of `a` in question.
            culprit: Number of the operation and of the program with which this one collided.
        """
        key = (kind, op and op.number, a and a.name, culprit and culprit[0])
        if key not in self.report.events:
            if culprit:
                detail += f" {self.ops[culprit[0]]}, program {self.report.program_id(culprit[1])}"
            self.report.events[key] = Event(
                kind=kind,
                kernel=self.report.kernel,
                op=str(op or ""),
                program=self.report.program_id(self.program),
                operand=str(a or ""),
                index=a.element(int(units[0])) if a else (),
                detail=detail,
            )
        self.report.events[key].count += max(1, len(units))
        return self.report.events[key]

    def finish(self, outputs: Sequence[Allocation]) -> None:
        """Note the elements of outputs that no program wrote, and report the traffic."""
        for a in outputs:
            if a.initialised is not None and not a.initialised.all():
                self.note("unwritten", None, a, np.flatnonzero(~a.initialised))
        self.report.traffic = {a.name: a.traffic for a in self.allocations.values()}

    def _resolve(
        self, op: Op, addresses: np.ndarray, itemsize: int, action: str
    ) -> Iterator[tuple[Allocation, np.ndarray, np.ndarray]]:
        """Yield each operand that is addressed, which active lanes address it, and their elements.

        Raises:
            KernelFault: A lane is out of bounds or misaligned. It ends the run, as it would on a GPU.
        """
        numbers = addresses >> _SHIFT
        for number in np.unique(numbers):
            lanes = np.flatnonzero(numbers == number)
            a = self.allocations.get(int(number))
            if a is None:
                raise KernelFault(self.note("out-of-bounds", op, detail=f"{action} through a pointer to no operand"))
            offsets = addresses[lanes] - a.base
            outside = offsets[(offsets < 0) | (offsets + itemsize > a.data.size)]
            if outside.size:
                flat = outside // itemsize
                detail = f"{action} of flat elements {flat.min()} to {flat.max()} of {a.data.size // itemsize}"
                detail += f" by {flat.size} of {offsets.size} active lanes"
                raise KernelFault(self.note("out-of-bounds", op, a, a.units(flat, itemsize), detail))
            if (offsets % itemsize).any():
                raise KernelFault(self.note("misaligned", op, a, offsets // a.unit, f"{action} of {itemsize} bytes"))
            yield a, lanes, offsets // itemsize

    def _race(self, op: Op, a: Allocation, units: np.ndarray, touches: tuple[np.ndarray, ...], detail: str) -> None:
        """Note the units that another program touched: nothing orders the programs of a grid."""
        programs, ops, _ = touches
        lanes = np.flatnonzero((programs >= 0) & (programs != self.program))
        if lanes.size:
            self.note("race", op, a, units[lanes], detail, (int(ops[lanes[0]]), int(programs[lanes[0]])))


def _active_lanes(address, mask) -> tuple[np.ndarray, np.ndarray]:
    """Return numbers and addresses of the lanes that the mask leaves on."""
    flat = np.reshape(address, -1)
    if mask is None:
        return np.arange(math.prod(np.shape(address))), flat
    lanes = np.flatnonzero(np.broadcast_to(mask, np.shape(address)))
    return lanes, flat[lanes]
