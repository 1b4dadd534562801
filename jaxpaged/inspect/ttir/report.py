"""What a kernel did when it ran: its faults, and how many bytes it moved."""

import dataclasses

import numpy as np

PROBLEMS = (
    "out-of-bounds",  # this and the next end the run
    "misaligned",
    "uninitialised-read",
    "unwritten",  # an element of an output
    "write-to-input",  # which shares its memory with no output
    "race",  # two programs touched an element, and one of them wrote it
    "store-lane-conflict",  # lanes of one store wrote different values to one element
)
"""Events that are wrong in every kernel."""
HAZARDS = (
    "division-by-zero",
    "read-after-own-write",  # by a program that passed no barrier since: another of its threads may have written
)
"""Events that may be harmless."""


@dataclasses.dataclass(kw_only=True, slots=True)
class Event:
    """Something that a kernel did: where first, and to how many elements in all.

    Attributes:
        kind: One of `PROBLEMS` or `HAZARDS`.
        program: Its place in the grid (x, y, z).
        operand: Name, dtype and shape; empty where none is meant.
        index: The first element of the operand; beyond its bounds where that is the fault.
    """

    kind: str
    kernel: str
    op: str
    program: tuple[int, ...]
    operand: str
    index: tuple[int, ...]
    detail: str
    count: int = 0

    def __str__(self) -> str:
        where = f"{self.op}, program {self.program}, " if self.op else ""
        what = f"operand {self.operand}, element {list(self.index)}, " if self.operand else ""
        detail = f": {self.detail}" if self.detail else ""
        return f"{self.kind}: kernel {self.kernel}, {where}{what}{self.count} element(s){detail}"


class KernelFault(Exception):
    """An access that no memory can serve, so that the run ends: out of bounds, or misaligned.

    Attributes:
        event: What happened.
    """

    def __init__(self, event: Event):
        super().__init__(str(event))
        self.event = event


@dataclasses.dataclass(slots=True)
class Traffic:
    """Bytes of one operand that the lanes of all programs moved, repeats included."""

    loaded: int = 0
    stored: int = 0


@dataclasses.dataclass(slots=True)
class Report:
    """What one call did.

    Attributes:
        events: By kind, operation, operand and what it collided with.
        traffic: By the operand's name. An output that shares an input's memory has the input's name.
    """

    kernel: str
    grid: tuple[int, int, int]
    events: dict[tuple, Event] = dataclasses.field(default_factory=dict)
    traffic: dict[str, Traffic] = dataclasses.field(default_factory=dict)

    def program_id(self, program: int) -> tuple[int, ...]:
        """Return the place (x, y, z) in the grid of a program by its number: x counts fastest."""
        return tuple(int(i) for i in np.unravel_index(program, self.grid[::-1])[::-1])

    def of_kind(self, *kinds: str) -> list[Event]:
        """Return the events of some kinds, in the order in which they happened first."""
        return [event for event in self.events.values() if event.kind in kinds]

    @property
    def problems(self) -> list[str]:
        """What is wrong with the kernel, as text; empty for a clean one."""
        return [str(event) for event in self.of_kind(*PROBLEMS)]

    @property
    def hazards(self) -> list[str]:
        """What may be wrong with it, as text."""
        return [str(event) for event in self.of_kind(*HAZARDS)]

    def __str__(self) -> str:
        traffic = [f"{name}: loaded {t.loaded} B, stored {t.stored} B" for name, t in self.traffic.items()]
        problems = [f"PROBLEM {text}" for text in self.problems]
        hazards = [f"hazard {text}" for text in self.hazards]
        return "\n  ".join([f"{self.kernel}, grid {self.grid}", *traffic, *problems, *hazards])
