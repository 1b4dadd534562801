"""How close does attention come to the memory's speed? `python -m benchmarks.gpu_attention [--short] [--out DIR]`

Needs an NVIDIA GPU, and of Python packages jax, flax, numpy and matplotlib (and jaxtyping, or `benchmarks/bare` on the
path, which stands in for it). `--smoke` runs the same lines on a CPU at toy sizes; its numbers mean nothing.

What to expect: a decode step reads every K and V once and computes little, so the floor of a call is its bytes over the
bandwidth that a plain copy reaches on the same device, measured in the same run. Every time stands beside its share of
that. A prefill computes much more than it reads: there the TFLOP/s say more.

First, small cases of every dtype and option run on the device against the float64 oracle; where one fails, nothing is
timed and the exit code is 1. Rivals must agree with each other on each workload too. A rival that cannot run one is
listed with its reason. Times are medians of 30 runs, after 5 that do not count, rivals in turn.
"""

import argparse
import dataclasses
import json
import math
import pathlib
import statistics
import time
from collections.abc import Callable

import jax
import numpy as np

from benchmarks import gpu_cases, gpu_rivals, gpu_sweep, harness, workloads
from benchmarks.gpu_rivals import REFUSALS, Inputs, Program
from benchmarks.workloads import Append, Workload

OURS, THEIRS = "jaxpaged", "JAX's own"
AGREE = 0.06  # of the largest output, of bfloat16 rivals; one-byte values differ by their rounding


def rivals_of(w: Workload, inputs: Inputs, num_calls: int, smoke: bool) -> dict[str, Callable[[], Program]]:
    """Who is asked; the gather through XLA is slow, and gets fewer calls."""
    backend = "interpret" if smoke else "triton"
    return {
        OURS: lambda: gpu_rivals.jaxpaged(inputs, num_calls, backend=backend),
        "jaxpaged, int8": lambda: gpu_rivals.jaxpaged(inputs, num_calls, backend=backend, dtype="int8"),
        THEIRS: lambda: gpu_rivals.jax_own(inputs, num_calls, interpret=smoke),
        "cuDNN, contiguous": lambda: gpu_rivals.cudnn(inputs, num_calls),
        "jaxpaged, XLA gather": lambda: gpu_rivals.jaxpaged(inputs, min(2, num_calls), backend="xla"),
    }


def start(name: str, build: Callable[[], Program]) -> tuple[Program | None, np.ndarray | None, str]:
    """Builds, compiles and runs a rival once: itself, its first output, and why not."""
    try:
        program = build()
        first, _ = program.fn(program.q, *program.arguments[0])
        return program, np.asarray(first, np.float32), ""
    except REFUSALS as error:
        lines = str(error).strip().splitlines() or [""]
        return None, None, f"{type(error).__name__}: {lines[0][:160]}"


def measure(w: Workload, settings: argparse.Namespace, copy_speed: float) -> list[dict]:
    """A row for each rival of a workload."""
    inputs = Inputs.draw(w, cold_bytes=2**14 if settings.smoke else gpu_rivals.COLD_BYTES)
    rows, ready, expected = [], {}, None
    for name, build in rivals_of(w, inputs, settings.calls, settings.smoke).items():
        row = {"workload": w.name, "rival": name, "bytes": w.num_bytes(1 if "int8" in name else 2)}
        program, first, reason = start(name, build)
        if program is not None and first is not None:
            if expected is None:
                expected = first
            error = np.abs(first.reshape(expected.shape) - expected).max() / np.abs(expected).max()
            row["difference"] = float(error)
            if not error <= AGREE:
                reason = f"WRONG: differs from {OURS} by {error:.2g} of the largest output"
            else:
                ready[name] = program
        rows.append(row | ({"refused": reason} if reason else {}))
    times = time_programs(ready, settings)
    for row in rows:
        if seconds := times.get(row["rival"]):
            row |= {"us": seconds * 1e6, "gb_per_s": row["bytes"] / seconds / 1e9}
            row |= {"share": row["bytes"] / seconds / copy_speed, "tflops": w.num_flops() / seconds / 1e12}
    return rows


def measure_append(w: Append, settings: argparse.Namespace, copy_speed: float) -> list[dict]:
    """A row for each way to write; the time is that of all layers."""
    rows, ready, expected = [], {}, None
    for name, by in ((OURS, "jaxpaged"), ("indexed store", "store")):
        row = {"workload": w.name, "rival": name, "bytes": w.num_bytes()}
        try:
            program = gpu_rivals.append(w, 1, by=by)
            _, cache = program.fn(program.q, *program.arguments[0])  # what it was given is gone: donated
            last = np.asarray(cache.k_pages[-1], np.float32)
            if expected is None:
                expected = last
            if np.array_equal(last, expected):
                ready[name] = dataclasses.replace(program, q=cache)
            else:
                row["refused"] = f"WRONG: stores other values than {OURS}"
        except REFUSALS as error:
            row["refused"] = f"{type(error).__name__}: {str(error).splitlines()[0]}"
        rows.append(row)
    times = time_programs(ready, settings)
    for row in rows:
        if seconds := times.get(row["rival"]):
            row |= {"us": seconds * 1e6, "gb_per_s": row["bytes"] / seconds / 1e9}
            row |= {"share": row["bytes"] / seconds / copy_speed, "tflops": 0.0}
    return rows


def time_programs(ready: dict[str, Program], settings: argparse.Namespace) -> dict[str, float]:
    """Seconds a call."""
    runs = {name: gpu_rivals.runner(program, settings.dispatches) for name, program in ready.items()}
    timings = harness.compare(runs, warmups=settings.warmups, runs=settings.runs)
    return {name: t.wall_s / (ready[name].num_calls * settings.dispatches) for name, t in timings.items()}


def verdicts(rows: list[dict]) -> list[tuple[str, str, bool]]:
    """What is aimed at on an H200, what was found, and whether that reaches it; only what was measured."""
    found = []
    by = {(r["workload"], r["rival"]): r for r in rows if "us" in r}
    for name in ("decode B8 S16384", "decode B8 S32768", "decode B32 S4096", "decode B128 S1024"):
        if row := by.get((name, OURS)):
            found.append((f"{name}: at least 85 % of the copy", f"{row['share']:.1%}", row["share"] >= 0.85))
            if int8 := by.get((name, "jaxpaged, int8")):
                ratio = row["us"] / int8["us"]
                found.append((f"{name}: int8 at least 1.3x", f"{ratio:.2f}x", ratio >= 1.3))
    for name, limit in (("decode B1 S1024", 15), ("decode B1 S32768", 50)):
        if row := by.get((name, OURS)):
            found.append((f"{name}: at most {limit} us", f"{row['us']:.1f} us", row["us"] <= limit))
    ratios = {name: r["us"] / by[name, OURS]["us"] for (name, rival), r in by.items() if rival == THEIRS}
    if ratios:
        slowest, mean = min(ratios, key=ratios.__getitem__), math.exp(statistics.mean(map(math.log, ratios.values())))
        found.append(("never slower than JAX's own", f"{ratios[slowest]:.2f}x ({slowest})", ratios[slowest] >= 1))
        found.append(("1.5x JAX's own in the geometric mean", f"{mean:.2f}x of {len(ratios)}", mean >= 1.5))
    return found


def show(rows: list[dict]) -> None:
    """A line a rival, as text: nothing but Python is needed to read it."""
    for name in dict.fromkeys(r["workload"] for r in rows):
        print(f"\n{name}")
        for row in (r for r in rows if r["workload"] == name):
            if "us" not in row:
                print(f"    {row['rival']:24} {row['refused']}")
                continue
            print(
                f"    {row['rival']:24} {row['us']:10.1f} us {row['gb_per_s']:8.0f} GB/s {row['share']:7.1%} of a copy,"
                f" {row['tflops']:.1f} TFLOP/s"
            )


def draw_picture(rows: list[dict], path: pathlib.Path, device: str) -> None:
    """Share of the ceiling against the bytes of a call."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 5.5), layout="constrained")
    measured = [r for r in rows if "us" in r and not r["workload"].startswith("append")]
    for rival in dict.fromkeys(r["rival"] for r in measured):
        points = [(r["bytes"] / 1e6, r["share"]) for r in measured if r["rival"] == rival]
        axes.plot(*zip(*points, strict=True), "o", label=rival, alpha=0.7)
    axes.axhline(1, color="black", linewidth=1)
    axes.set(xscale="log", ylim=(0, None), xlabel="MB that a call must move", ylabel="share of a copy's bandwidth")
    axes.set_title(f"Paged attention on {device}")
    axes.legend()
    figure.savefig(path, dpi=120)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--short", action="store_true", help="what has a reach, and one workload of each other kind")
    parser.add_argument("--smoke", action="store_true", help="toy sizes on any device, to try the script itself")
    parser.add_argument(
        "--sweep", action="store_true", help="tiles and partitions of a few decode shapes, nothing else"
    )
    parser.add_argument("--out", type=pathlib.Path, help="folder of the JSON and PNG; default: results/<device>")
    parser.add_argument("--calls", type=int, default=16, help="calls a program")
    parser.add_argument("--dispatches", type=int, default=4, help="programs on their way before anybody waits")
    parser.add_argument("--warmups", type=int, default=5)
    parser.add_argument("--runs", type=int, default=30)
    parser.add_argument("--budget", type=float, default=math.inf, help="seconds after which no workload is begun")
    settings = parser.parse_args(arguments)
    if settings.smoke:
        settings.calls, settings.dispatches, settings.warmups, settings.runs = 2, 1, 1, 2
    return settings


def main() -> int:
    settings = parse()
    began, device = time.monotonic(), jax.devices()[0]
    if device.platform != "gpu" and not settings.smoke:
        print(f"no NVIDIA GPU: JAX sees {device.device_kind}. `--smoke` runs anywhere.")
        return 2

    backends = ("xla",) if settings.smoke else ("triton", "xla")
    names = gpu_cases.SAMPLE[:2] if settings.smoke else gpu_cases.sample_for(device)
    failed = gpu_cases.failures(names, backends)
    for name, reason in failed.items():
        print(f"FAILED {name}: {reason}")
    print(f"Correctness on {device.device_kind}: {'FAIL' if failed else 'PASS'}, {len(names)} cases by {backends}")
    if failed:
        return 1
    if settings.sweep:
        print(json.dumps(gpu_sweep.sweep(settings)))
        return 0

    num_bytes = 2**16 if settings.smoke else 2**30
    program = gpu_rivals.copy(num_bytes, settings.calls)
    copy_speed = 2 * num_bytes / time_programs({"copy": program}, settings)["copy"]
    del program
    print(f"A copy: {copy_speed / 1e9:.0f} GB/s, read and written")
    attention, appends = workloads.DECODE + workloads.OTHERS, workloads.APPEND
    if settings.short:
        attention, appends = workloads.SHORT, workloads.SHORT_APPEND
    if settings.smoke:
        attention, appends = workloads.SMOKE, workloads.SMOKE_APPEND
    rows, left_out = [], []
    for w in [*attention, *appends]:
        if time.monotonic() - began > settings.budget:
            left_out.append(w.name)
            continue
        new = (measure if isinstance(w, Workload) else measure_append)(w, settings, copy_speed)
        show(new)
        rows += new
    return finish(rows, left_out, copy_speed, settings, device)


def finish(rows: list[dict], left_out: list[str], copy_speed: float, settings: argparse.Namespace, device) -> int:
    """Prints what was reached, writes the files; 1 if a rival's result was wrong."""
    found = [] if settings.smoke else verdicts(rows)
    print()
    for aim, what, good in found:
        print(f"{'yes' if good else 'NO ':3}  {aim}: {what}")
    if left_out:
        print(f"NOT RUN, out of time: {', '.join(left_out)}")
    wrong = [f"{r['workload']}: {r['rival']}" for r in rows if r.get("refused", "").startswith("WRONG")]
    ours = [f"{r['workload']}: {r['rival']}" for r in rows if "refused" in r and r["rival"].startswith(OURS)]
    print(f"Results: {'FAIL ' + '; '.join(wrong + ours) if wrong or ours else 'PASS'}")
    kind = "smoke" if settings.smoke else device.device_kind
    folder = settings.out or harness.RESULTS / harness.slug(kind)
    folder.mkdir(parents=True, exist_ok=True)
    result = {
        "benchmark": "gpu_attention",
        "machine": harness.describe_machine(kind),
        "copy_gb_per_s": copy_speed / 1e9,
        "reach": [{"aim": aim, "found": what, "reached": good} for aim, what, good in found],
        "not_run": left_out,
        "rows": rows,
    }
    (folder / "gpu_attention.json").write_text(json.dumps(result, indent=1) + "\n")
    draw_picture(rows, folder / "gpu_attention.png", kind)
    shares = {r["workload"]: round(r["share"], 3) for r in rows if r["rival"] == OURS and "share" in r}
    line = {"device": kind, "copy_gb_per_s": round(copy_speed / 1e9), "shares": shares, "wrong": wrong + ours}
    print(json.dumps(line | {"reached": sum(good for *_, good in found), "of": len(found), "not_run": left_out}))
    return 1 if wrong or ours else 0


if __name__ == "__main__":
    raise SystemExit(main())
