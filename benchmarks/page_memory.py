"""What does the page manager cost, and does that depend on the size of the pool? `python -m benchmarks.page_memory`

A serving step asks the manager once for all its sequences, so what counts is a whole step: one token more for each of
10,000 sequences, their page table, their slots. What to expect: a page table of 10,000 x 64 ids is 2.5 MB, half a
millisecond of copying; a prompt of 100,000 tokens is 6,250 hashes of half a microsecond. Nothing here reads the whole
pool, so the lines of the plot should be flat. `--smoke` runs all of it once, small.
"""

import argparse
import functools
import json
import pathlib
import time
import tracemalloc

import numpy as np

from benchmarks import harness, sketches
from jaxpaged.paging import PageAllocator

PAGE_SIZE = 16
POOL_SIZES = (10_000, 100_000, 1_000_000, 4_000_000)
BARS = {
    "step of all sequences, ms": 5.0,
    "look-up of a long prompt, ms": 8.0,
    "memory of the manager, bytes a page": 100.0,
}


def make_pages(num_pages: int, num_seqs: int, num_tokens: int) -> PageAllocator:
    """A pool with live sequences of about so many tokens, no two of the same length."""
    pages = PageAllocator(num_pages + 1, PAGE_SIZE, prefix_caching=True)
    lengths = np.random.default_rng(0).integers(num_tokens // 2, num_tokens, num_seqs)
    for seq_id, length in enumerate(lengths.tolist()):
        pages.add(seq_id, length)
    return pages


def median_ms(call, runs: int) -> float:
    """Median wall time of a call, after two that are not counted."""
    times = []
    for _ in range(runs + 2):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return 1e3 * float(np.median(times[2:]))


def step(pages: PageAllocator, seq_ids: list[int], ones: np.ndarray) -> None:
    """What one decode step of all sequences asks for."""
    pages.append_many(seq_ids)
    pages.page_table(seq_ids)
    pages.slot_mapping(seq_ids, ones)


def time_step(num_pages: int, num_seqs: int, num_tokens: int, runs: int) -> float:
    """Milliseconds of a decode step."""
    pages = make_pages(num_pages, num_seqs, num_tokens)
    seq_ids = list(range(num_seqs))
    return median_ms(functools.partial(step, pages, seq_ids, np.ones(num_seqs, np.int64)), runs)


def time_lookup(num_pages: int, num_tokens: int, runs: int) -> float:
    """Milliseconds to find a prompt of so many tokens, all of whose full pages are cached."""
    pages = PageAllocator(num_pages + 1, PAGE_SIZE, prefix_caching=True)
    tokens = np.random.default_rng(1).integers(0, 128_000, num_tokens + 1).astype(np.int32)
    pages.add("prompt", tokens)
    pages.commit("prompt", tokens)
    found = pages.prefix.match(tokens)
    if found != num_tokens:
        raise SystemExit(f"expected a hit of {num_tokens} tokens; got {found}.")
    return median_ms(functools.partial(pages.prefix.match, tokens), runs)


def time_eviction(num_pages: int, runs: int) -> float:
    """Milliseconds to give 64 cached pages up for a new prompt, in a pool that is full of them."""
    pages = PageAllocator(num_pages + 1, PAGE_SIZE, prefix_caching=True)
    tokens = np.random.default_rng(2).integers(0, 128_000, num_pages * PAGE_SIZE).astype(np.int32)
    pages.add("old", tokens)
    pages.commit("old", tokens)
    pages.free("old")

    def evict() -> None:
        pages.add("new", 64 * PAGE_SIZE)
        pages.commit("new", np.random.default_rng(time.perf_counter_ns()).integers(0, 128_000, 64 * PAGE_SIZE))
        pages.free("new")

    return median_ms(evict, runs)


def bytes_a_page(num_pages: int) -> float:
    """Memory of a manager with prefix caching whose every page is in use and findable, all included."""
    tracemalloc.start()
    pages = PageAllocator(num_pages + 1, PAGE_SIZE, prefix_caching=True)
    per_seq = 100
    for seq_id in range(num_pages // per_seq):
        tokens = np.full(per_seq * PAGE_SIZE, seq_id, np.int32)
        pages.add(seq_id, tokens)
        pages.commit(seq_id, tokens)
    used, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    if pages.num_free_pages != num_pages % per_seq:
        raise SystemExit("the pool should be full.")
    return used / num_pages


def measure(smoke: bool) -> dict[str, object]:
    """All figures: the bars at their sizes, and the costs at each size of the pool."""
    sizes = (2_000, 4_000) if smoke else POOL_SIZES
    runs, num_seqs, prompt = (2, 20, 1_600) if smoke else (30, 10_000, 100_000)
    pool = 2_000 if smoke else 1_000_000
    figures = {
        "step of all sequences, ms": time_step(pool, num_seqs, 1024, runs),
        "look-up of a long prompt, ms": time_lookup(pool, prompt, runs),
        "memory of the manager, bytes a page": bytes_a_page(pool),
    }
    curves = {
        "decode step of 64 sequences, ms": [time_step(n, 16 if smoke else 64, 1024, runs) for n in sizes],
        "look-up of 8,000 tokens, ms": [time_lookup(n, 8_000, runs) for n in sizes],
        "64 pages evicted and replaced, ms": [time_eviction(n, runs) for n in sizes],
    }
    return {"figures": figures, "bars": BARS, "num_pages": list(sizes), "costs_by_num_pages": curves}


def plot(results: dict, path: pathlib.Path) -> None:
    """The costs against the size of the pool."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6.4, 4), layout="constrained")
    for name, costs in results["costs_by_num_pages"].items():
        axes.plot(results["num_pages"], costs, marker="o", label=name)
    axes.set(xscale="log", xlabel="pages of the pool", ylabel="milliseconds", ylim=(0, None))
    axes.set_title("Cost of a call does not depend on the size of the pool")
    axes.legend()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="small sizes, once: does it run?")
    parser.add_argument("--out", type=pathlib.Path, help="folder for page_memory.json and .png")
    arguments = parser.parse_args()
    machine = harness.describe_machine()
    out = arguments.out or harness.RESULTS / harness.slug(machine["device"])
    out.mkdir(parents=True, exist_ok=True)
    results = {"benchmark": "page_memory", "machine": machine, **measure(arguments.smoke)}
    for name, value in results["figures"].items():
        print(f"{name}: {value:.3g} (bar {BARS[name]:g}: {'yes' if value <= BARS[name] else 'NO'})")
    for name, costs in results["costs_by_num_pages"].items():
        print(f"{name}: " + ", ".join(f"{c:.3g} at {n:,}" for n, c in zip(results["num_pages"], costs, strict=True)))
    if not arguments.smoke:
        questions = [
            sketches.time_allocation(sketches.POOL, reach=10),
            sketches.time_allocation(64, reach=1.5),
            sketches.time_allocation(8, reach=1),
        ]
        for question in questions:
            print(f"{question.name}: {question.ratio:.2f}x the deque ({'yes' if question.reached else 'NO'})")
        results["allocation"] = [{"name": q.name, "ratio": q.ratio, "reach": q.reach} for q in questions]
    (out / "page_memory.json").write_text(json.dumps(results, indent=1) + "\n")
    plot(results, out / "page_memory.png")


if __name__ == "__main__":
    main()
