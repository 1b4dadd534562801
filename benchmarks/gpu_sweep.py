"""Which tile and partition is fastest? `python -m benchmarks.gpu_attention --sweep`, to choose the tile table from."""

import argparse
import itertools

from benchmarks import gpu_rivals, harness
from benchmarks.workloads import DECODE, SMOKE
from jaxpaged.config import AttentionConfig

SHAPES = ("decode B1 S8192", "decode B8 S4096", "decode B128 S1024")
TILES = [
    {"block_k": k, "num_warps": w, "num_stages": s}
    for k, w, s in itertools.product((32, 64, 128), (2, 4, 8), (3, 5, 7))
    if 16 <= k // w <= 32
]
PROGRAMS = (24, 33, 48, 49, 66, 82, 99)


def sweep(settings: argparse.Namespace) -> dict[str, list[dict]]:
    """Microseconds of each configuration, fastest first, for bfloat16 and int8; prints the best of each shape.

    Tiles are tried with the default number of programs, then numbers of programs with the best tile.
    """
    tiles, programs = (TILES[:2], PROGRAMS[:1]) if settings.smoke else (TILES, PROGRAMS)
    results = {}
    for w in SMOKE[:1] if settings.smoke else [w for w in DECODE if w.name in SHAPES]:
        inputs = gpu_rivals.Inputs.draw(w, cold_bytes=2**14 if settings.smoke else gpu_rivals.COLD_BYTES)
        for dtype in ("bfloat16", "int8"):
            rows = _time(inputs, dtype, tiles, settings)
            tried = [row for row in rows if "us" in row]
            if tried:
                best = {name: tried[0][name] for name in tiles[0]}
                rows += _time(inputs, dtype, [best | {"num_programs": p} for p in programs], settings)
            rows.sort(key=lambda row: row.get("us", float("inf")))
            results[f"{w.name}, {dtype}"] = rows
            print(f"{w.name}, {dtype}:", *map(str, rows[:3]), sep="\n    ")
            for row in rows:
                if "refused" in row:
                    print(f"    refused: {row}")
    return results


def _time(inputs: gpu_rivals.Inputs, dtype: str, configs: list[dict], settings: argparse.Namespace) -> list[dict]:
    """Fastest first, refused ones last. Timed in turn, as rivals are."""
    backend, num_calls = "interpret" if settings.smoke else "triton", min(8, settings.calls)
    rows, runs = [dict(config) for config in configs], {}
    for i, config in enumerate(configs):
        try:
            program = gpu_rivals.jaxpaged(
                inputs, num_calls, backend=backend, dtype=dtype, config=AttentionConfig(**config)
            )
            program.fn(program.q, *program.arguments[0])
            runs[str(i)] = gpu_rivals.runner(program, settings.dispatches)
        except gpu_rivals.REFUSALS as error:
            rows[i]["refused"] = f"{type(error).__name__}: {str(error).splitlines()[0][:120]}"
    for i, timing in harness.compare(runs, warmups=settings.warmups, runs=settings.runs).items():
        rows[int(i)]["us"] = round(timing.wall_s / (num_calls * settings.dispatches) * 1e6, 2)
    return sorted(rows, key=lambda row: row.get("us", float("inf")))
