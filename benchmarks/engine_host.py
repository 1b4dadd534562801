"""How long does the host take for a decode step? `python -m benchmarks.engine_host`

Scheduler and page manager alone: `schedule`, the page table and the slots of the step, `dispatched`, `update`. No
model, no JAX. On a GPU a decode step of a model with 8 billion parameters takes 5 ms or more; what the host does
beside it must hide behind that, once for all running sequences.

What to expect: every sequence costs a few dictionary and list operations, about a microsecond, and numpy's fixed cost
is some 60 us a step. Pages are taken for many sequences at once, every few steps, so that the mean of steps is what
counts, not their median. Numbers are of one core. A neighbour on the machine can make all of it 1.7 times as long for
seconds: all cases are measured in turn, several times, and the least disturbed round counts; the JSON has each.
"""

import argparse
import json
import pathlib
import statistics
import time

import numpy as np

from benchmarks import harness

PAGE_SIZE, REACH_S = 16, 300e-6


def make_scheduler(num_seqs: int, prompt: int, num_new: int, *, prefix_caching: bool):
    """A scheduler whose requests have all read their prompts, of different lengths, and decode."""
    from jaxpaged.engine.request import Request, SamplingParams
    from jaxpaged.engine.scheduler import Scheduler, SchedulerConfig
    from jaxpaged.paging import PageAllocator

    max_len = 3 * prompt // 2 + num_new + 1
    pages = PageAllocator(num_seqs * -(-max_len // PAGE_SIZE) + 1, PAGE_SIZE, prefix_caching=prefix_caching)
    config = SchedulerConfig(max_num_seqs=num_seqs, max_step_tokens=8192, max_model_len=max_len)
    scheduler = Scheduler(config, pages)
    params = SamplingParams(max_new_tokens=num_new, stop_token_ids=(2,))
    for i in range(num_seqs):
        tokens = tuple(range(i, i + prompt // 2 + i * prompt // num_seqs))  # half as long to half longer
        scheduler.add(Request(request_id=i, prompt_token_ids=tokens, params=params, max_tokens=len(tokens) + num_new))
    while scheduler.num_waiting or any(r.is_prompting for r in scheduler.running):
        step(scheduler, -(-max_len // PAGE_SIZE))
    return scheduler


def step(scheduler, max_pages: int) -> dict[str, float]:
    """One step; seconds of each part."""
    begin = time.perf_counter()
    plan = scheduler.schedule(0.0)
    scheduled = time.perf_counter()
    ids = [r.request_id for r in plan.requests]
    table = scheduler.pages.page_table(ids, max_pages)
    position = np.array([r.num_computed_tokens for r in plan.requests])
    _ = table[np.arange(len(ids)), position // PAGE_SIZE] * PAGE_SIZE + position % PAGE_SIZE
    tabled = time.perf_counter()
    scheduler.dispatched(plan)
    dispatched = time.perf_counter()
    scheduler.update(plan, [7] * len(ids))
    end = time.perf_counter()
    return {
        "schedule": scheduled - begin,
        "page table and slots": tabled - scheduled,
        "dispatched": dispatched - tabled,
        "update": end - dispatched,
        "step": end - begin,
    }


def measure(num_seqs: int, prompt: int, num_steps: int, *, prefix_caching: bool) -> dict[str, float]:
    """Mean seconds of each part of a decode step, and of the whole."""
    scheduler = make_scheduler(num_seqs, prompt, num_steps + 64, prefix_caching=prefix_caching)
    max_pages = -(-scheduler.config.max_model_len // PAGE_SIZE)
    samples = [step(scheduler, max_pages) for _ in range(num_steps)][num_steps // 5 :]
    return {name: statistics.mean(s[name] for s in samples) for name in samples[0]}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.engine_host", description="Host time of a step.")
    parser.add_argument("--steps", type=int, default=400, help="decode steps of each case and round (default 400)")
    parser.add_argument("--rounds", type=int, default=5, help="times that each case is measured (default 5)")
    parser.add_argument("--out", type=pathlib.Path, help="folder for engine_host.json")
    arguments = parser.parse_args()
    cases = [(num_seqs, caching) for num_seqs in (1, 16, 64, 256) for caching in (False, True)]
    rounds: dict[tuple[int, bool], list[dict[str, float]]] = {case: [] for case in cases}
    for _ in range(arguments.rounds):
        for num_seqs, caching in cases:
            rounds[num_seqs, caching].append(measure(num_seqs, 512, arguments.steps, prefix_caching=caching))
    rows = []
    for (num_seqs, caching), measured in rounds.items():
        best = min(measured, key=lambda parts: parts["step"])
        steps = sorted(parts["step"] for parts in measured)
        reach = REACH_S if num_seqs == 256 else None
        rows.append(
            {"num_seqs": num_seqs, "prefix_caching": caching, "mean_s": best, "steps_s": steps, "reach_s": reach}
        )
        verdict = "" if reach is None else f" (reach {harness.in_units(reach)}: {'yes' if steps[0] <= reach else 'NO'})"
        others = ", ".join(f"{name} {harness.in_units(t)}" for name, t in best.items() if name != "step")
        print(
            f"{num_seqs:4d} sequences, {'prefix cache' if caching else 'no cache'}: {harness.in_units(steps[0])}"
            f"{verdict}, slowest round {harness.in_units(steps[-1])}; {others}"
        )
    machine = harness.describe_machine()
    out = arguments.out or harness.RESULTS / harness.slug(machine["device"])
    out.mkdir(parents=True, exist_ok=True)
    results = {"benchmark": "engine_host", "machine": machine, "cases": rows}
    (out / "engine_host.json").write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
