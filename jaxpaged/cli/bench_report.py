"""What `jaxpaged bench` measured: as a table, as JSON, as a picture. matplotlib is imported by `write_plot` only."""

import argparse
import dataclasses
import importlib.metadata
import json
from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np
from rich.table import Table

from jaxpaged import __version__
from jaxpaged.cli.console import Console
from jaxpaged.cli.errors import UsageError
from jaxpaged.cli.setup import size
from jaxpaged.cli.workload import Arrival

_COLUMNS = ("mean", "p50", "p90", "p99", "max")
_NAMES = {
    "time_to_first_token": "time to first token",
    "inter_token": "between two tokens",
    "end_to_end": "end to end",
}


class StepSample(NamedTuple):
    """The engine after a step. `num_waiting` counts also requests that were due while the step ran."""

    time_s: float
    num_running: int
    num_waiting: int
    num_pages: int
    num_new_tokens: int


@dataclasses.dataclass(slots=True, kw_only=True)
class RequestTimes:
    """One request, with times in seconds from the start of the run.

    Attributes:
        arrival_s: When it was due.
        added_s: When the loop gave it to the engine.
        token_s: When each of its tokens came.
    """

    arrival_s: float
    num_prompt_tokens: int
    prefix: int | None
    priority: int
    added_s: float = 0.0
    token_s: list[float] = dataclasses.field(default_factory=list)
    failed: bool = False

    @classmethod
    def of(cls, arrival: Arrival) -> "RequestTimes":
        """Return a request that has not come yet."""
        return cls(
            arrival_s=arrival.time_s,
            num_prompt_tokens=len(arrival.prompt_token_ids),
            prefix=arrival.prefix,
            priority=arrival.priority,
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """A run.

    Attributes:
        errors: Why requests failed, those that did. Their latencies are not counted.
        hit_rate: Prompt tokens found in the prefix cache, as a fraction of those looked up, also by requests that
            start over after a preemption.
        num_compilations: Programs that XLA compiled after the warm-up.
    """

    requests: list[RequestTimes]
    steps: list[StepSample]
    errors: list[Exception]
    hit_rate: float
    num_preemptions: int
    peak_num_pages: int
    num_pages: int
    nbytes_per_page: int
    num_programs: int = 0
    warmup_s: float = 0.0
    num_compilations: int = 0

    @property
    def seconds(self) -> float:
        """From the first arrival to the end of the last step."""
        return self.steps[-1].time_s

    def latencies(self, priority: int | None = None) -> dict[str, list[float]]:
        """Return seconds from arrival to first token and to the last, a request each, and between tokens, a pair each.

        Args:
            priority: Count only requests of this priority; None counts all.
        """
        done = [r for r in self.requests if not r.failed and priority in (None, r.priority)]
        return {
            "time_to_first_token": [r.token_s[0] - r.arrival_s for r in done],
            "inter_token": [gap for r in done for gap in np.diff(r.token_s).tolist()],
            "end_to_end": [r.token_s[-1] - r.arrival_s for r in done],
        }

    def throughput(self) -> dict[str, float]:
        """Return requests, new tokens, and all tokens a second, of the requests that did not fail."""
        done = [r for r in self.requests if not r.failed]
        num_new = sum(len(r.token_s) for r in done)
        return {
            "requests_per_s": len(done) / self.seconds,
            "new_tokens_per_s": num_new / self.seconds,
            "all_tokens_per_s": (num_new + sum(r.num_prompt_tokens for r in done)) / self.seconds,
        }


def summary(values: Sequence[float]) -> dict[str, float | None]:
    """Return mean, percentiles (linear between neighbours) and maximum; None each where there is nothing."""
    if not values:
        return dict.fromkeys(_COLUMNS)
    p50, p90, p99 = np.percentile(values, [50, 90, 99]).tolist()
    return {"mean": float(np.mean(values)), "p50": p50, "p90": p90, "p99": p99, "max": max(values)}


def print_report(measured: Measurement, *, rate: float | None) -> None:
    """Print the table to stdout."""
    console = Console()
    requests, pace = measured.requests, "all at once" if rate is None else f"{rate:g} a second"
    num_prompt, num_new = sum(r.num_prompt_tokens for r in requests), sum(len(r.token_s) for r in requests)
    title = f"{len(requests)} requests, {pace}: {num_prompt:,} prompt tokens, {num_new:,} new, {measured.seconds:.1f} s"
    table = Table(title=title, title_justify="left", title_style="bold")
    table.add_column("latency")
    for column in _COLUMNS:
        table.add_column(column, justify="right")
    priorities = sorted({r.priority for r in requests})
    for name, label in _NAMES.items():
        latencies = {label: measured.latencies()[name]}
        if len(priorities) > 1 and name != "inter_token":
            latencies |= {f"  priority {p}": measured.latencies(p)[name] for p in priorities}
        for row, values in latencies.items():
            table.add_row(row, *map(_duration, summary(values).values()))
    console.print(table)
    rates = measured.throughput()
    peak, num_pages = measured.peak_num_pages, measured.num_pages
    facts = {
        "throughput": f"{rates['requests_per_s']:.2f} requests/s, {rates['new_tokens_per_s']:.1f} new tokens/s, "
        f"{rates['all_tokens_per_s']:.1f} with prompts",
        "prefix hit rate": f"{measured.hit_rate:.1%} of prompt tokens",
        "preemptions": f"{measured.num_preemptions}",
        "peak pages": f"{peak:,} of {num_pages:,} ({size(peak * measured.nbytes_per_page)})",
        "compilations": f"{measured.num_programs} programs warmed up in {measured.warmup_s:.1f} s, "
        f"{measured.num_compilations} compilations after that",
    }
    if measured.errors:
        facts["failed"] = f"{len(measured.errors)} of {len(requests)} requests, not counted above"
    for name, text in facts.items():
        console.print(f"{name:<16} {text}", soft_wrap=True)
    console.print(
        "Latencies count from when a request was due. Tokens of one step come together.", style="dim", soft_wrap=True
    )


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1000:.1f} ms"


def write_json(measured: Measurement, args: argparse.Namespace) -> None:
    """Write all of it into the file of `--json`: settings, summaries, each request and each step."""
    settings = {name: value for name, value in vars(args).items() if name not in ("module", "json", "plot")}
    device = jax.devices()[0]
    versions = {name: importlib.metadata.version(name) for name in ("jax", "jaxlib", "numpy")}
    record = {
        "settings": settings,
        "device": f"{device.device_kind} ({device.platform})",
        "versions": {"jaxpaged": __version__, **versions},
        "seconds": measured.seconds,
        "throughput": measured.throughput(),
        "latency_s": {name: summary(values) for name, values in measured.latencies().items()},
        "latency_s_by_priority": {
            priority: {name: summary(values) for name, values in measured.latencies(priority).items()}
            for priority in sorted({r.priority for r in measured.requests})
        },
        "prefix_hit_rate": measured.hit_rate,
        "num_preemptions": measured.num_preemptions,
        "peak_num_pages": measured.peak_num_pages,
        "num_pages": measured.num_pages,
        "nbytes_per_page": measured.nbytes_per_page,
        "num_programs": measured.num_programs,
        "warmup_s": measured.warmup_s,
        "num_compilations_after_warmup": measured.num_compilations,
        "errors": [str(error) for error in measured.errors],
        "requests": [dataclasses.asdict(request) for request in measured.requests],
        "steps": [step._asdict() for step in measured.steps],
    }
    try:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump(record, file, indent=1)
            file.write("\n")
    except OSError as error:
        raise UsageError(f"`--json {args.json}` cannot be written: {error.strerror}.") from error


def write_plot(measured: Measurement, args: argparse.Namespace) -> None:
    """Draw latencies as cumulative distributions, and requests and pages over time, into the file of `--plot`."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 6.4), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    (slow, fast), (requests, pages) = figure.subplots(2, 2)
    latencies = measured.latencies()
    for name in ("time_to_first_token", "end_to_end"):
        _plot_distribution(slow, latencies[name], _NAMES[name])
    slow.set(title="From arrival", xlabel="seconds", ylabel="share of requests")
    slow.legend(frameon=False)
    _plot_distribution(fast, [1000 * s for s in latencies["inter_token"]], _NAMES["inter_token"])
    fast.set(title="Between two tokens", xlabel="milliseconds", ylabel="share of gaps")
    times = [step.time_s for step in measured.steps]
    requests.step(times, [step.num_running for step in measured.steps], where="post", label="running")
    requests.step(times, [step.num_waiting for step in measured.steps], where="post", label="waiting")
    requests.set(title="Requests", xlabel="seconds", ylim=(0, None))
    requests.legend(frameon=False)
    pages.step(times, [step.num_pages for step in measured.steps], where="post", color="tab:green", label="in use")
    pages.axhline(measured.num_pages, color="gray", linewidth=0.8, linestyle="--", label="pool")
    pages.set(title="Pages", xlabel="seconds", ylim=(0, None))
    pages.legend(frameon=False)
    for axes in (slow, fast, requests, pages):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.3)
    rate = "all at once" if args.rate is None else f"{args.rate:g} a second"
    tokens = f"{measured.throughput()['new_tokens_per_s']:.1f} new tokens a second"
    figure.suptitle(f"{len(measured.requests)} requests, {rate}: {tokens}", fontsize=12)
    try:
        figure.savefig(args.plot, format="png")
    except OSError as error:
        raise UsageError(f"`--plot {args.plot}` cannot be written: {error.strerror}.") from error


def _plot_distribution(axes, values: list[float], label: str) -> None:
    """Draw the share of values up to each, with lines at the median and the 99th percentile."""
    if not values:
        return
    [line] = axes.step(np.sort(values), np.arange(1, len(values) + 1) / len(values), where="post", label=label)
    for percentile in np.percentile(values, [50, 99]):
        axes.axvline(percentile, color=line.get_color(), linewidth=0.7, linestyle=":")
    axes.set_ylim(0, 1.02)
