"""How long does the host take for a decode step? `python -m benchmarks.engine_host`

All that the host does between two steps but for text: `schedule` (who computes what, pages, the plan with its page
table), `pack` (the plan as one array for the device), `dispatched` and `update`. No model runs. On a GPU a decode step
of a model with 8 billion parameters takes 5 ms or more; what the host does beside it must hide behind that, once for
all running sequences.

What to expect: every sequence costs a few dictionary and list operations, about a microsecond, and numpy's fixed cost
is some 100 us a step. Pages are taken for many sequences at once, every few steps, so that the mean of steps is what
counts, not their median. Numbers are of one core. A neighbour on the machine can make all of it 1.7 times as long for
seconds: all cases are measured in turn, several times, and the least disturbed round counts; the JSON has each.

The text of the tokens is made while the device computes the next step. What it takes is a row of its own: a stop
string, in the built-in model's vocabulary, for each of 256 sequences.
"""

import argparse
import json
import pathlib
import statistics
import time

from benchmarks import harness

PAGE_SIZE, WINDOW = 16, 512
REACH_S, GROUPS_REACH, TEXT_REACH_S = 300e-6, 2.0, 2e-3


def make_scheduler(num_seqs: int, prompt: int, num_new: int, *, prefix_caching: bool, num_groups: int):
    """A scheduler whose requests have all computed their prompts, of different lengths, and decode; and a runner.

    Of several page groups, all but the first have a window.
    """
    from jaxpaged.cache.kv_cache import KVCache
    from jaxpaged.config import LayerSpec
    from jaxpaged.engine.config import SchedulerConfig
    from jaxpaged.engine.request import Request, RequestStatus
    from jaxpaged.engine.runner import Runner
    from jaxpaged.engine.sampling.params import SamplingParams
    from jaxpaged.engine.scheduler import Scheduler
    from jaxpaged.paging import PageAllocator, group_layers

    max_len = 3 * prompt // 2 + num_new + 1
    windows = [None] + [WINDOW] * (num_groups - 1)
    groups, places = group_layers([LayerSpec(num_kv_heads=1, head_dim=1, sliding_window=w) for w in windows])
    num_pages = num_groups * num_seqs * -(-max_len // PAGE_SIZE) + 1
    pages = PageAllocator(num_pages, PAGE_SIZE, prefix_caching=prefix_caching, groups=groups)
    config = SchedulerConfig(max_num_seqs=num_seqs, max_step_tokens=8192, max_model_len=max_len)
    cache = KVCache.create(
        num_layers=num_groups,
        num_pages=num_pages,
        page_size=PAGE_SIZE,
        num_kv_heads=1,
        head_dim=1,
        dtype="float32",
        layer_places=places,
    )
    scheduler = Scheduler(config, pages)
    runner = Runner(lambda cache, batch: None, cache, config, make_cache=lambda: cache, compile_whole=False)
    params = SamplingParams(max_new_tokens=num_new, stop_token_ids=(2,))
    for i in range(num_seqs):
        tokens = tuple(range(i, i + prompt // 2 + i * prompt // num_seqs))  # half as long to half longer
        scheduler.add(Request(request_id=i, prompt_token_ids=tokens, params=params, max_len=len(tokens) + num_new))
    while scheduler.num_waiting or any(r.status is RequestStatus.PREFILL for r in scheduler.running):
        step(scheduler, runner)
    return scheduler, runner


def step(scheduler, runner) -> dict[str, float]:
    """One step; seconds of each part."""
    begin = time.perf_counter()
    plan = scheduler.schedule(0.0)
    scheduled = time.perf_counter()
    runner.pack(plan)
    packed = time.perf_counter()
    scheduler.dispatched(plan)
    dispatched = time.perf_counter()
    scheduler.update(plan, [7] * plan.rows.num_sampling)
    end = time.perf_counter()
    return {
        "schedule": scheduled - begin,
        "pack": packed - scheduled,
        "dispatched": dispatched - packed,
        "update": end - dispatched,
        "step": end - begin,
    }


def measure(num_seqs: int, prompt: int, num_steps: int, **options) -> dict[str, float]:
    """Mean seconds of each part of a decode step, and of the whole."""
    scheduler, runner = make_scheduler(num_seqs, prompt, num_steps + 64, **options)
    samples = [step(scheduler, runner) for _ in range(num_steps)][num_steps // 5 :]
    return {name: statistics.mean(s[name] for s in samples) for name in samples[0]}


def measure_text(num_seqs: int, num_steps: int) -> float:
    """Mean seconds in which the tokens of a step become text, with a stop string that never comes."""
    from jaxpaged.engine.text import TextStream
    from jaxpaged.models.gguf import builtin_model_path, read_gguf
    from jaxpaged.models.tokenizer import Tokenizer

    tokenizer = Tokenizer(read_gguf(builtin_model_path()).tokenizer)
    token_ids = tokenizer.encode("The lighthouse stood at the end of a long spit of sand, and the sea covered it. ")
    streams = [TextStream(tokenizer, token_ids[:4], stop=["\n\nUser:"]) for _ in range(num_seqs)]
    begin = time.perf_counter()
    for i in range(num_steps):
        token_id = (token_ids[i % len(token_ids)],)
        for stream in streams:
            stream.push(token_id)
    return (time.perf_counter() - begin) / num_steps


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.engine_host", description="Host time of a step.")
    parser.add_argument("--steps", type=int, default=400, help="decode steps of each case and round (default 400)")
    parser.add_argument("--rounds", type=int, default=5, help="times that each case is measured (default 5)")
    parser.add_argument("--out", type=pathlib.Path, help="folder for engine_host.json")
    arguments = parser.parse_args()
    cases = [(num_seqs, caching, 1) for num_seqs in (1, 16, 64, 256) for caching in (False, True)]
    cases += [(256, caching, 6) for caching in (False, True)]
    rounds: dict[tuple[int, bool, int], list[dict[str, float]]] = {case: [] for case in cases}
    for _ in range(arguments.rounds):
        for num_seqs, caching, num_groups in cases:
            measured = measure(num_seqs, 512, arguments.steps, prefix_caching=caching, num_groups=num_groups)
            rounds[num_seqs, caching, num_groups].append(measured)
    rows = []
    for (num_seqs, caching, num_groups), measured in rounds.items():
        best = min(measured, key=lambda parts: parts["step"])
        steps = sorted(parts["step"] for parts in measured)
        reach = REACH_S if (num_seqs, num_groups) == (256, 1) else None
        if num_groups > 1:
            reach = GROUPS_REACH * min(parts["step"] for parts in rounds[num_seqs, caching, 1])
        row = {"num_seqs": num_seqs, "prefix_caching": caching, "num_groups": num_groups}
        rows.append(row | {"mean_s": best, "steps_s": steps, "reach_s": reach})
        verdict = "" if reach is None else f" (reach {harness.in_units(reach)}: {'yes' if steps[0] <= reach else 'NO'})"
        others = ", ".join(f"{name} {harness.in_units(t)}" for name, t in best.items() if name != "step")
        groups = "1 page group" if num_groups == 1 else f"{num_groups} page groups"
        print(
            f"{num_seqs:4d} sequences, {groups}, {'prefix cache' if caching else 'no cache'}: "
            f"{harness.in_units(steps[0])}{verdict}, slowest round {harness.in_units(steps[-1])}; {others}"
        )
    text_s = min(measure_text(256, arguments.steps // 4) for _ in range(arguments.rounds))
    verdict = "yes" if text_s <= TEXT_REACH_S else "NO"
    print(f" 256 sequences, text: {harness.in_units(text_s)} (reach {harness.in_units(TEXT_REACH_S)}: {verdict})")
    machine = harness.describe_machine()
    out = arguments.out or harness.RESULTS / harness.slug(machine["device"])
    out.mkdir(parents=True, exist_ok=True)
    results = {"benchmark": "engine_host", "machine": machine, "cases": rows, "text_s": text_s}
    (out / "engine_host.json").write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
