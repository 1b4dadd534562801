"""What the engine tells about itself: a frozen record, and the same as text for Prometheus."""

import collections
import dataclasses
import statistics
from collections import deque
from typing import Any

from jaxpaged.engine.pipeline import Pipeline
from jaxpaged.engine.runner import Program


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """Counts since the engine was made, and what it holds now.

    Attributes:
        peak_num_pages: Most pages in use at the same time.
        nbytes_per_page: K and V of all layers.
        num_preemptions: Times that a request gave its pages back: swapped out, or to start over.
        num_swap_outs: Of those, swapped out.
        num_restored_pages: Prefix pages that came back from the swap space.
        num_forks: Samples that began on the pages of another sample of their prompt.
        num_free_pages: Those whose content can still be hit are among them.
        num_hit_tokens, num_missed_tokens: Prompt tokens that were found in the prefix cache, and that were not.
        num_drafts, num_accepted_drafts: Tokens guessed by speculation, and those that stood.
        tokens_per_s: Of the last steps.
        step_s, host_s: Medians of the last steps, in seconds: a whole `step`, and what of it was not waiting for the
            device.
        programs: How many steps each compiled program has run.
        max_programs: How many there can be with greedy requests; each further kind of sampling adds as many.
    """

    num_steps: int
    peak_num_pages: int
    nbytes_per_page: int
    num_preemptions: int
    num_running: int = 0
    num_waiting: int = 0
    num_finished: int = 0
    num_failed: int = 0
    num_swap_outs: int = 0
    num_restored_pages: int = 0
    num_forks: int = 0
    num_pages: int = 0
    num_free_pages: int = 0
    num_hit_tokens: int = 0
    num_missed_tokens: int = 0
    num_drafts: int = 0
    num_accepted_drafts: int = 0
    num_tokens: int = 0
    tokens_per_s: float = 0.0
    step_s: float = 0.0
    host_s: float = 0.0
    programs: dict[Program, int] = dataclasses.field(default_factory=dict)
    max_programs: int = 0

    @property
    def hit_rate(self) -> float:
        """Prompt tokens found in the prefix cache, as a fraction of all; 0 when there were none."""
        return self.num_hit_tokens / max(1, self.num_hit_tokens + self.num_missed_tokens)

    def prometheus_text(self) -> str:
        """The numbers in the text format of Prometheus, under `jaxpaged_...`."""
        lines = []
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, int | float):
                kind = "counter" if field.name in _COUNTERS else "gauge"
                name = f"jaxpaged_{field.name}" + "_total" * (kind == "counter")
                lines += [
                    f"# TYPE {name} {kind}",
                    f"{name} {value if isinstance(value, int) else format(value, '.9g')}",
                ]
        steps: collections.Counter[str] = collections.Counter()  # ways to sample are no labels: programs share a line
        for program, count in self.programs.items():
            kind = "decode" if program.num_tokens is None else "mixed"
            steps[f'kind="{kind}",rows="{program.num_rows}",tokens="{program.num_tokens or program.num_rows}"'] += count
        lines += ["# TYPE jaxpaged_program_steps_total counter"]
        lines += [f"jaxpaged_program_steps_total{{{labels}}} {count}" for labels, count in steps.items()]
        return "\n".join(lines) + "\n"


_COUNTERS = {
    "num_steps",
    "num_preemptions",
    "num_finished",
    "num_failed",
    "num_swap_outs",
    "num_restored_pages",
    "num_forks",
    "num_hit_tokens",
    "num_missed_tokens",
    "num_drafts",
    "num_accepted_drafts",
    "num_tokens",
}


class StepTimes:
    """Durations of the last steps."""

    def __init__(self, window: int = 256):
        self._steps: deque[tuple[float, float, int]] = deque(maxlen=window)

    def add(self, step_s: float, wait_s: float, num_tokens: int) -> None:
        """Counts a step."""
        self._steps.append((step_s, wait_s, num_tokens))

    def summary(self) -> dict[str, Any]:
        """Fields of `EngineStats`."""
        if not self._steps:
            return {}
        steps, waits, tokens = zip(*self._steps, strict=True)
        return {
            "tokens_per_s": sum(tokens) / max(sum(steps), 1e-9),
            "step_s": statistics.median(steps),
            "host_s": statistics.median(s - w for s, w in zip(steps, waits, strict=True)),
        }


def collect_stats(pipeline: Pipeline, times: StepTimes, **counts: int) -> EngineStats:
    """The stats of an engine, `counts` among them. Costs a pass over the pool."""
    scheduler, runner, pages = pipeline.scheduler, pipeline.runner, pipeline.scheduler.pages
    of_pages = pages.stats()
    return EngineStats(
        num_steps=pipeline.num_steps,
        peak_num_pages=scheduler.peak_num_pages,
        nbytes_per_page=runner.cache.nbytes_per_page,
        num_preemptions=scheduler.num_preemptions,
        num_running=len(scheduler.running),
        num_waiting=scheduler.num_waiting,
        num_swap_outs=scheduler.holdings.num_swap_outs,
        num_restored_pages=scheduler.holdings.num_restored_pages,
        num_forks=scheduler.holdings.num_forks,
        num_pages=of_pages.num_usable_pages,
        num_free_pages=pages.num_free_pages,
        num_hit_tokens=of_pages.num_hit_tokens,
        num_missed_tokens=of_pages.num_missed_tokens,
        num_drafts=scheduler.num_drafts,
        num_accepted_drafts=scheduler.num_accepted_drafts,
        programs=dict(runner.programs),
        max_programs=len(runner.all_programs()),
        **counts,
        **times.summary(),
    )
