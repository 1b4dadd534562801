"""How long does the host take for a decode step? `python -m benchmarks.engine_host`

Scheduler and page manager alone: `schedule`, the page table and the slots of the step, `dispatched`, `update`. No
model, no JAX. On a GPU a decode step of a model with 8 billion parameters takes 5 ms or more; what the host does
beside it must hide behind that, once for all running sequences.

What to expect: every sequence costs a few dictionary and list operations, about a microsecond, and numpy's fixed cost
is some 60 us a step. Pages are taken for many sequences at once, every few steps: the mean shows it, the median of many
steps does not. Numbers are of one core.
"""

import argparse
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
    """Median seconds of each part of a decode step, and the mean of whole steps."""
    scheduler = make_scheduler(num_seqs, prompt, num_steps + 64, prefix_caching=prefix_caching)
    max_pages = -(-scheduler.config.max_model_len // PAGE_SIZE)
    samples = [step(scheduler, max_pages) for _ in range(num_steps)][num_steps // 5 :]
    medians = {name: statistics.median(s[name] for s in samples) for name in samples[0]}
    return medians | {"mean step": statistics.mean(s["step"] for s in samples)}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.engine_host", description="Host time of a step.")
    parser.add_argument("--steps", type=int, default=400, help="decode steps of each case (default 400)")
    num_steps = parser.parse_args().steps
    for num_seqs in (1, 16, 64, 256):
        for prefix_caching in (False, True):
            parts = measure(num_seqs, 512, num_steps, prefix_caching=prefix_caching)
            total = parts.pop("step")
            verdict = ""
            if num_seqs == 256:
                verdict = f" (reach {harness.in_units(REACH_S)}: {'yes' if total <= REACH_S else 'NO'})"
            cached = "prefix cache" if prefix_caching else "no cache"
            print(f"{num_seqs:4d} sequences, {cached}: {harness.in_units(total)}{verdict}", end="; ")
            print(", ".join(f"{name} {harness.in_units(t)}" for name, t in parts.items()))


if __name__ == "__main__":
    main()
