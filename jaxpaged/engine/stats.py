"""What the engine counts, and the same as text for Prometheus. Each number is named here, and nowhere else."""

import collections
import dataclasses
import statistics
from collections import deque
from typing import Any, NamedTuple


class Program(NamedTuple):
    """One compilation of a step.

    Attributes:
        num_rows: Sequences, or more than those where they have drafts.
        num_tokens: Tokens of a step with prompts; None where each row has one.
        sampling: What its sampling can do, a `SamplingFeatures`.
    """

    num_rows: int
    num_tokens: int | None
    sampling: Any


def _counter() -> Any:
    return dataclasses.field(default=0, metadata={"kind": "counter"})


@dataclasses.dataclass(slots=True, kw_only=True)
class Counters:
    """What the parts of an engine count, all in one object that is handed down to them.

    Attributes:
        num_steps: Steps started.
        num_tokens: Tokens generated.
        num_finished: Requests that ended, however they did.
        num_failed: Requests that ended by an error or their deadline.
        num_preemptions: Times that a request gave its pages back: swapped out, or to start over.
        num_swap_outs: Preemptions in which the pages were swapped out.
        num_restored_pages: Prefix pages that came back from the swap space.
        num_forks: Samples that began on the pages of another sample of their prompt.
        num_drafts: Tokens guessed by speculation.
        num_accepted_drafts: Drafts that were what the model samples.
        peak_num_pages: Most pages in use at the same time.
        programs: How many steps each compiled program has run.
    """

    num_steps: int = _counter()
    num_tokens: int = _counter()
    num_finished: int = _counter()
    num_failed: int = _counter()
    num_preemptions: int = _counter()
    num_swap_outs: int = _counter()
    num_restored_pages: int = _counter()
    num_forks: int = _counter()
    num_drafts: int = _counter()
    num_accepted_drafts: int = _counter()
    peak_num_pages: int = 0
    programs: dict[Program, int] = dataclasses.field(default_factory=dict)

    def snapshot(self) -> dict[str, Any]:
        """Return the counts by name, as they are now."""
        counts = {field.name: getattr(self, field.name) for field in dataclasses.fields(Counters)}
        return counts | {"programs": dict(self.programs)}


@dataclasses.dataclass(slots=True, kw_only=True)
class EngineStats(Counters):
    """Counts since the engine was made, and what it holds now.

    Attributes:
        num_running: Requests that hold pages.
        num_waiting: Requests that wait to run.
        num_pages: Pages of the pool, without the null page.
        num_free_pages: Pages that nobody holds; those whose content can still be hit are among them.
        nbytes_per_page: Bytes of K and V of all layers.
        num_hit_tokens: Prompt tokens that were found in the prefix cache.
        num_missed_tokens: Prompt tokens that were not found there.
        tokens_per_s: Rate of the last steps.
        step_s: Median of the last steps, in seconds.
        host_s: Median of what was not waiting for the device in the last steps, in seconds.
        max_programs: How many programs there can be with greedy requests; each further kind of sampling adds as many.
    """

    num_running: int = 0
    num_waiting: int = 0
    num_pages: int = 0
    num_free_pages: int = 0
    nbytes_per_page: int = 0
    num_hit_tokens: int = _counter()
    num_missed_tokens: int = _counter()
    tokens_per_s: float = 0.0
    step_s: float = 0.0
    host_s: float = 0.0
    max_programs: int = 0

    @property
    def hit_rate(self) -> float:
        """Prompt tokens found in the prefix cache, as a fraction of all; 0 when there were none."""
        return self.num_hit_tokens / max(1, self.num_hit_tokens + self.num_missed_tokens)

    def prometheus_text(self) -> str:
        """Return the numbers in the text format of Prometheus, under `jaxpaged_...`."""
        lines = []
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, int | float):
                kind = field.metadata.get("kind", "gauge")
                name = f"jaxpaged_{field.name}" + "_total" * (kind == "counter")
                text = str(value) if isinstance(value, int) else format(value, ".9g")
                lines += [f"# TYPE {name} {kind}", f"{name} {text}"]
        steps: collections.Counter[str] = collections.Counter()  # ways to sample are no labels: programs share a line
        for program, count in self.programs.items():
            kind = "decode" if program.num_tokens is None else "mixed"
            steps[f'kind="{kind}",rows="{program.num_rows}",tokens="{program.num_tokens or program.num_rows}"'] += count
        lines += ["# TYPE jaxpaged_program_steps_total counter"]
        lines += [f"jaxpaged_program_steps_total{{{labels}}} {count}" for labels, count in steps.items()]
        return "\n".join(lines) + "\n"


class StepTimes:
    """Durations of the last steps."""

    def __init__(self, window: int = 256):
        self._steps: deque[tuple[float, float, int]] = deque(maxlen=window)

    def add(self, step_s: float, wait_s: float, num_tokens: int) -> None:
        """Count a step."""
        self._steps.append((step_s, wait_s, num_tokens))

    def summary(self) -> dict[str, Any]:
        """Return fields of `EngineStats`."""
        if not self._steps:
            return {}
        steps, waits, tokens = zip(*self._steps, strict=True)
        return {
            "tokens_per_s": sum(tokens) / max(sum(steps), 1e-9),
            "step_s": statistics.median(steps),
            "host_s": statistics.median(s - w for s, w in zip(steps, waits, strict=True)),
        }
