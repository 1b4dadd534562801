"""Reads the machine code of an NVIDIA GPU, as `nvdisasm` prints it: what the loop of a kernel is made of.

    code = read_sass(program.launches[0].kernel.sass())
    code.hot_loop.count("HMMA"), len(code.hot_loop.names)

Counts are static: an instruction is one of a warp, and a loop counts whole, with the branches inside it.
"""

import collections
import dataclasses
import re

WIDE_COPY = "LDGSTS.E.BYPASS.128"
"""A copy from global to shared memory that the program goes on without, 16 bytes a thread."""
MATRIX = ("HMMA", "HGMMA", "UTCHMMA")
"""Tensor-core products of 16-bit values: of all GPUs up to compute capability 9.0, since 9.0, and since 10.0."""
_MULTIPLY = (*MATRIX, "FFMA", "FFMA2")

_INSTRUCTION = re.compile(r"\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)(.*)")
_LABEL = re.compile(r"(\.L\w+):")
_TARGET = re.compile(r"`\((\.L\w+)\)")


@dataclasses.dataclass(frozen=True, slots=True)
class Code:
    """Instructions as they lie in memory, by name with modifiers: `HMMA.16816.F32.BF16`.

    Attributes:
        loops: First instruction and one past the last, which jumps back to the first.
    """

    names: tuple[str, ...]
    loops: tuple[tuple[int, int], ...] = ()

    def count(self, *names: str) -> int:
        """Return how many instructions have one of the names, whatever modifiers follow."""
        return sum(name == n or name.startswith(f"{n}.") for name in self.names for n in names)

    def mix(self) -> dict[str, int]:
        """Return instructions by name without modifiers, the most frequent first."""
        return dict(collections.Counter(name.split(".")[0] for name in self.names).most_common())

    def slice(self, begin: int, end: int) -> "Code":
        """Return some of the instructions, with the loops among them."""
        inside = tuple((first - begin, last - begin) for first, last in self.loops if begin <= first and last <= end)
        return Code(self.names[begin:end], inside)

    @property
    def hot_loop(self) -> "Code":
        """The innermost loop that multiplies, one that copies tiles too if there is such a loop; empty without any."""
        begin, end = self._hot_bounds()
        return self.slice(begin, end)

    @property
    def prologue(self) -> "Code":
        """What runs before the hot loop, since the loop around it or another that copies tiles or the kernel began."""
        begin, end = self._hot_bounds()
        around = [first for first, last in self.loops if first <= begin and end < last]
        others = [last for first, last in self.loops if last <= begin and self.slice(first, last).count(WIDE_COPY)]
        return self.slice(max([0, *around, *others]), begin)

    def _hot_bounds(self) -> tuple[int, int]:
        def rank(loop: tuple[int, int]) -> tuple[bool, int]:
            return self.slice(*loop).count(WIDE_COPY) > 0, loop[0] - loop[1]

        return max((x for x in self.loops if self.slice(*x).count(*_MULTIPLY)), key=rank, default=(0, 0))


def read_sass(sass: str) -> Code:
    """Parse what `nvdisasm -c` prints of one kernel (`jaxpaged.inspect.aot.Kernel.sass`)."""
    names: list[str] = []
    labels: dict[str, int] = {}
    loops: dict[int, int] = {}
    last_exit = 0  # where the code goes on after it
    for line in sass.splitlines():
        if label := _LABEL.match(line):
            labels[label[1]] = len(names)
        elif instruction := _INSTRUCTION.match(line):
            names.append(instruction[1])
            target = _TARGET.search(instruction[2])
            if instruction[1] == "EXIT" and "@" not in line:
                last_exit = len(names)
            # What lies behind the end and jumps back into the kernel is a wait that was moved out of the way.
            if instruction[1].split(".")[0] == "BRA" and target and labels.get(target[1], -1) >= last_exit:
                loops[labels[target[1]]] = len(names)
    # The code ends in a jump to itself, never reached.
    return Code(tuple(names), tuple((first, last) for first, last in loops.items() if last - first > 1))
