"""What every benchmark shares: fair timing, a table for people, a JSON file for machines.

Rivals are timed in turn (A, B, A, B, ...), so that a busy neighbour slows all of them, and compared by their medians.
CPU seconds stand beside wall time: on shared cores they tell waiting from work.
"""

import dataclasses
import datetime
import importlib
import importlib.metadata
import importlib.util
import json
import os
import pathlib
import platform
import re
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from types import ModuleType

RESULTS = pathlib.Path(__file__).parent / "results"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Medians over the runs of one rival, in seconds. CPU seconds add up all threads of the process."""

    wall_s: float
    cpu_s: float
    fastest_wall_s: float
    num_runs: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """One comparison: the same work done by several rivals.

    Attributes:
        name: What is done, with its sizes.
        ours: The rival that is this package.
        theirs: The rival that `ratio` measures it against.
        reach: The ratio aimed at, or None where the figure only informs.
        timings: Of each rival, in the order they ran.
        num_tokens: Tokens that the work makes, where a rate says more than a time.
    """

    name: str
    ours: str
    theirs: str
    reach: float | None
    timings: Mapping[str, Timing]
    num_tokens: int | None = None

    @property
    def ratio(self) -> float:
        """How many times faster ours is than theirs, by wall time."""
        return self.timings[self.theirs].wall_s / self.timings[self.ours].wall_s

    @property
    def cpu_ratio(self) -> float:
        """The same by CPU seconds, which a busy machine disturbs less."""
        return self.timings[self.theirs].cpu_s / self.timings[self.ours].cpu_s

    @property
    def reached(self) -> bool:
        """Whether the ratio is what it aims at."""
        return self.reach is None or self.ratio >= self.reach


def compare(rivals: Mapping[str, Callable[[], object]], *, warmups: int = 5, runs: int = 30) -> dict[str, Timing]:
    """Times each rival `runs` times, all in turn. A rival returns only when its work is done."""
    for _ in range(warmups):
        for run in rivals.values():
            run()
    samples: dict[str, list[tuple[float, float]]] = {name: [] for name in rivals}
    for _ in range(runs):
        for name, run in rivals.items():
            wall, cpu = time.perf_counter(), time.process_time()
            run()
            samples[name].append((time.perf_counter() - wall, time.process_time() - cpu))
    timings = {}
    for name, pairs in samples.items():
        walls, cpus = zip(*pairs, strict=True)
        timings[name] = Timing(
            wall_s=statistics.median(walls), cpu_s=statistics.median(cpus), fastest_wall_s=min(walls), num_runs=runs
        )
    return timings


def report(benchmark: str, questions: list[Question], *, device: str | None = None) -> pathlib.Path:
    """Prints the table and writes results/<device>/<benchmark>.json, whose path it returns.

    Args:
        device: A name such as "NVIDIA H200"; None means this machine's CPU.
    """
    # Not at the top: a machine with a GPU may have nothing but what its benchmarks need.
    import rich.console
    import rich.table

    machine = describe_machine(device)
    console = rich.console.Console()
    if not console.is_terminal:
        console.width = 120
    console.print(f"[bold]{benchmark}[/] on {machine['device']}: {machine['versions']}")
    table = rich.table.Table("work", "by", "wall", "CPU", "ours is faster by")
    for question in questions:
        for i, (name, timing) in enumerate(question.timings.items()):
            speedup = timing.wall_s / question.timings[question.ours].wall_s
            verdict = "(ours)" if name == question.ours else f"{speedup:.2f}x"
            if name == question.theirs:
                verdict += f", CPU {question.cpu_ratio:.2f}x"
                if question.reach is not None:
                    verdict += f" (reach {question.reach:g}x: {'yes' if question.reached else 'NO'})"
            rate = f", {question.num_tokens / timing.wall_s:.3g} tokens/s" if question.num_tokens else ""
            table.add_row(
                question.name if i == 0 else "", name, in_units(timing.wall_s) + rate, in_units(timing.cpu_s), verdict
            )
        table.add_section()
    console.print(table)

    path = RESULTS / slug(machine["device"]) / f"{benchmark}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [
        dataclasses.asdict(q) | {"ratio": q.ratio, "cpu_ratio": q.cpu_ratio, "reached": q.reached} for q in questions
    ]
    path.write_text(json.dumps({"benchmark": benchmark, "machine": machine, "questions": rows}, indent=1) + "\n")
    console.print(f"Written to {path.relative_to(RESULTS.parent.parent)}")
    return path


def import_torch(benchmark: str, *others: str) -> ModuleType:
    """torch on this machine's cores, without gradients; exits with the command that installs it where it is missing."""
    # Spinning OpenMP workers collapse on shared cores; the runtime reads this when torch is loaded.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    missing = [name for name in ("torch", *others) if importlib.util.find_spec(name) is None]
    if missing:
        raise SystemExit(
            f"{benchmark} needs {', '.join(missing)} for its rivals: `uv sync --group bench` installs all."
        )
    torch = importlib.import_module("torch")
    torch.set_num_threads(os.cpu_count() or 1)
    torch.set_grad_enabled(False)
    return torch


def describe_machine(device: str | None = None) -> dict[str, str]:
    """Device, processor and versions, for the head of a result."""
    versions = [f"Python {platform.python_version()}"]
    for package in ("numpy", "jax", "torch", "transformers"):
        if package in sys.modules:
            versions.append(f"{package} {importlib.metadata.version(package)}")
    return {
        "device": device or f"cpu-{os.cpu_count()}core",
        "processor": _processor(),
        "versions": ", ".join(versions),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "command": f"python -m {sys.modules['__main__'].__spec__.name}" if sys.modules["__main__"].__spec__ else "",
    }


def slug(name: str) -> str:
    """A name as a folder: lower case, words joined by hyphens."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def in_units(seconds: float) -> str:
    """Three significant digits with a unit."""
    unit, factor = next(((u, f) for u, f in (("s", 1.0), ("ms", 1e3)) if seconds * f >= 1), ("us", 1e6))
    return f"{seconds * factor:.3g} {unit}" if seconds * factor < 1000 else f"{seconds * factor:.0f} {unit}"


def _processor() -> str:
    cpuinfo = pathlib.Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
