"""`jaxpaged bench`: serves a mix of requests and measures what those who sent them would see.

A latency counts from the time at which a request was due, whether or not the loop was then busy with a step, so that a
slow step is charged to every request that it kept waiting. Tokens have the time at which their step was read: those of
the same step come together.
"""

import argparse
import dataclasses
import importlib.util
import sys
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import jax

from jaxpaged.cli.bench_report import Measurement, RequestTimes, StepSample, print_report, write_json, write_plot
from jaxpaged.cli.errors import UsageError, check_at_least, check_writable
from jaxpaged.cli.setup import check_model_flags, check_profile, errors_by_flag, load, make, profiled
from jaxpaged.cli.workload import Arrival, Mix
from jaxpaged.config import cdiv
from jaxpaged.engine import EngineCore, SamplingParams, SchedulerConfig
from jaxpaged.engine.beam import BeamsFound
from jaxpaged.engine.log import Add, WarmUp
from jaxpaged.progress import progress_bar

if TYPE_CHECKING:
    from jaxpaged.models.llama import Llama

_COMPILED = "/jax/core/compile/backend_compile_duration"


def run(args: argparse.Namespace) -> None:
    """Warm up, serve and report. Exit code 1 where requests failed."""
    mix = Mix.from_flags(args)
    check_model_flags(args)
    check_at_least(args, 1, "max_num_seqs", "max_step_tokens")
    check_profile(args)
    if args.plot is not None and importlib.util.find_spec("matplotlib") is None:
        raise UsageError("`--plot` needs matplotlib: install jaxpaged[plot].")
    for name in ("json", "plot"):
        if (path := getattr(args, name)) is not None:
            check_writable(f"--{name}", path)
    drawing = {name: getattr(args, name) for name in ("temperature", "top_p", "top_k")}
    with errors_by_flag(args):
        SamplingParams(**drawing).check()
        model, _ = load(args)
        arrivals = mix.arrivals(model.vocab_size, model.max_position)
        engine = _make_engine(args, model, arrivals)
        params = [SamplingParams(**drawing, max_new_tokens=a.num_new_tokens, seed=a.seed) for a in arrivals]
        begin = time.perf_counter()
        warm_up = WarmUp(params=tuple(params[:1] if args.temperature else ()), greedy=not args.temperature)
        with progress_bar("Compiling", "programs") as advance:
            num_programs = engine.warm_up(warm_up, advance)
        warmup_s = time.perf_counter() - begin
        with _Compilations() as compilations, progress_bar("Serving", "tokens") as advance, profiled(args):
            measured = serve(engine, arrivals, params, progress=advance)
    measured = dataclasses.replace(
        measured, num_programs=num_programs, warmup_s=warmup_s, num_compilations=compilations.count
    )
    if args.json is not None:
        write_json(measured, args)
    if args.plot is not None:
        write_plot(measured, args)
    print_report(measured, rate=args.rate)
    if measured.errors:
        print(f"{len(measured.errors)} requests failed, the first by: {measured.errors[0]}", file=sys.stderr)
        sys.exit(1)


def _make_engine(args: argparse.Namespace, model: "Llama", arrivals: Sequence[Arrival]) -> EngineCore:
    """Return an engine with room for the longest requests that can run together, or with `--num-pages`."""
    longest = sorted(a.num_tokens for a in arrivals)
    if args.num_pages is not None and args.num_pages - 1 < cdiv(longest[-1] - 1, args.page_size):
        raise UsageError(
            f"`--num-pages` must be at least {1 + cdiv(longest[-1] - 1, args.page_size)}, the null page included: the "
            f"longest request has {longest[-1]} tokens, in pages of {args.page_size}; got {args.num_pages}."
        )
    # No step can have more tokens than all prompts and one a request: nothing is compiled for larger ones.
    all_tokens = sum(len(a.prompt_token_ids) for a in arrivals) + len(arrivals)
    limits = SchedulerConfig(
        max_num_seqs=min(args.max_num_seqs, len(arrivals)),
        max_step_tokens=min(args.max_step_tokens, all_tokens),
        max_model_len=longest[-1],
    )
    num_pages = 1 + sum(cdiv(n, args.page_size) for n in longest[-limits.max_num_seqs :])
    return make(EngineCore, args, model, limits, num_pages=num_pages, prefix_caching=not args.no_prefix_caching)


def serve(
    engine: EngineCore,
    arrivals: Sequence[Arrival],
    params: Sequence[SamplingParams],
    *,
    progress: Callable[[int, int], None] = lambda done, total: None,
    clock: Callable[[], float] = time.perf_counter,
    sleep: Callable[[float], None] = time.sleep,
) -> Measurement:
    """Run requests to their ends, each added when it is due or, where a step runs then, right after that.

    Args:
        engine: With nothing to do. It is stepped here, so that each token has the time of its step.
        arrivals: In order of time.
        params: One for each.
        progress: Called with the tokens done and all of them.
        clock, sleep: In seconds.
    """
    times = [RequestTimes.of(arrival) for arrival in arrivals]
    steps: list[StepSample] = []
    errors: list[Exception] = []
    before, start = engine.stats(), clock()
    num_added = num_done = num_arrived = 0
    total = sum(a.num_new_tokens for a in arrivals)
    while num_added < len(arrivals) or engine.has_work:
        now = clock() - start
        while num_added < len(arrivals) and arrivals[num_added].time_s <= now:
            arrival = arrivals[num_added]
            prompt = tuple(arrival.prompt_token_ids)
            engine.apply(
                Add(
                    request_ids=(num_added,),
                    prompt_token_ids=prompt,
                    params=params[num_added],
                    priority=arrival.priority,
                )
            )
            times[num_added].added_s = clock() - start
            num_added += 1
        if not engine.has_work:
            sleep(max(arrivals[num_added].time_s - (clock() - start), 0.0))
            continue
        new = engine.step()
        now = clock() - start
        for token in new:
            assert not isinstance(token, BeamsFound)
            engine.outputs.finished.pop(token.request_id, None)
            if token.token_id is not None:
                times[token.request_id].token_s.append(now)
                num_done += 1
            if token.error is not None:
                times[token.request_id].failed = True
                errors.append(token.error)
        while num_arrived < len(arrivals) and arrivals[num_arrived].time_s <= now:
            num_arrived += 1
        num_used = engine.pages.num_pages - 1 - engine.pages.num_free_pages
        num_waiting = engine.scheduler.num_waiting + num_arrived - num_added  # and those that are due
        steps.append(StepSample(now, len(engine.scheduler.running), num_waiting, num_used, len(new)))
        progress(num_done, total)
    after = engine.stats()
    num_hits, num_missed = (
        getattr(after, name) - getattr(before, name) for name in ("num_hit_tokens", "num_missed_tokens")
    )
    return Measurement(
        requests=times,
        steps=steps,
        errors=errors,
        hit_rate=num_hits / max(1, num_hits + num_missed),
        num_preemptions=after.num_preemptions - before.num_preemptions,
        peak_num_pages=after.peak_num_pages,
        num_pages=after.num_pages,
        nbytes_per_page=after.nbytes_per_page,
    )


class _Compilations:
    """Counts what XLA compiles while it is entered."""

    def __init__(self):
        self.count = 0

    def __enter__(self) -> "_Compilations":
        jax.monitoring.register_event_duration_secs_listener(self._listen)
        return self

    def __exit__(self, *_: object) -> None:
        jax.monitoring.unregister_event_duration_listener(self._listen)

    def _listen(self, event: str, duration_secs: float, **_: object) -> None:
        self.count += event == _COMPILED
