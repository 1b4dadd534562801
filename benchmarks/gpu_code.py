"""What would run on a GPU? `python -m benchmarks.gpu_code [--gpu h200] [--call decode]`

Compiles attention calls for GPUs that are not there, beside JAX's own paged attention, and a greedy decode step of a
Llama of 8 billion parameters, and reads the machine code. It says how much there is to do and how much of it can be
under way at once. It cannot say how long that takes: nothing is executed, no GPU is needed, and no time is given.

What to look for. A decode step is bound by reading K and V once. To keep a memory busy that answers after some 800 ns,
an SM of an H200 must have about 30 kB on order at any moment (4.8 TB/s x 800 ns / 132), and the work between two orders
must fit into the time that the bytes take: at 36 GB/s an SM, a token of one head (512 bytes in bfloat16) comes every
14 ns, 25 cycles, in which four schedulers start a hundred warp-instructions at most.

Needs the groups `aot` and `sass`. Takes some minutes on two cores.
"""

import argparse
import collections
import json
import os
from collections.abc import Iterator

os.environ["JAX_PLATFORMS"] = "cpu"  # before JAX is imported: a plugin without a GPU would look for one

import jax
import rich.console
import rich.table

from benchmarks import harness, programs
from benchmarks.programs import ATTENTION, LLAMA_8B
from jaxpaged.inspect.aot import GPUS, CompiledProgram
from jaxpaged.inspect.sass import WIDE_COPY
from jaxpaged.ops.attention.tilings import TILINGS, Tiling

# What a compiler says of what it cannot do.
_REFUSALS = (NotImplementedError, ValueError, TypeError, AssertionError, jax.errors.JaxRuntimeError)
_MIX = ("LDG", "LDS", "LDSM", "STS", "SHFL", "MUFU", "FMUL", "FADD", "FFMA", "IMAD", "ISETP", "BAR")


def measure(gpu: str, name: str, by: str, max_pages: int = programs.MAX_PAGES) -> dict:
    """One row: the call `name` compiled for `gpu`, by `"jaxpaged"` or `"jax"`."""
    call = ATTENTION[name]
    row = {"gpu": gpu, "call": name, "by": by, "max_pages": max_pages}
    if by == "jax" and (reason := programs.why_not_jax(call)):
        return row | {"refused": reason}
    try:
        if by == "jax":
            program = programs.compile_jax_attention(call, gpu, max_pages)
        else:
            program = programs.compile_attention(call, gpu)
    except _REFUSALS as error:
        return row | {"refused": f"{type(error).__name__}: {str(error).splitlines()[0]}"}
    code = programs.read_attention(program, call, gpu)
    loop = code.code.hot_loop
    kernels = [x.kernel for x in program.launches if x.kernel]
    return row | {
        "launches": [x.name for x in program.launches],
        "code_unknown": [x.name for x in program.launches if not x.kernel],
        "registers": code.launch.kernel.registers if code.launch.kernel else None,
        "spill_bytes": max(k.spill_bytes for k in kernels),
        "threads": code.launch.threads,
        "shared_bytes": code.launch.shared_bytes,
        "blocks_per_sm": code.blocks_per_sm,
        "tokens_per_turn": code.tokens_per_turn,
        "instructions_per_turn": len(loop.names),
        "instructions_per_token": code.instructions_per_token,
        "mix": loop.mix(),
        "wide_copies": loop.count(WIDE_COPY),
        "matrix": code.matrix,
        "tiles_in_flight": code.tiles_in_flight,
        "bytes_in_flight_per_sm": code.bytes_in_flight,
        "temp_bytes": program.temp_bytes,
        "copies": len(program.copies(1)),
    }


def rows_of(gpus: list[str], calls: list[str]) -> Iterator[dict]:
    for gpu in gpus:
        for name in calls:
            yield measure(gpu, name, "jaxpaged")
            yield measure(gpu, name, "jax")
            if name == "decode":  # its tile follows the width of the table
                yield measure(gpu, name, "jax", programs.MAX_PAGES // 2)


def show(rows: list[dict], console: rich.console.Console) -> None:
    """A table a GPU."""
    for gpu in dict.fromkeys(row["gpu"] for row in rows):
        table = rich.table.Table(
            *("call", "by", "launches", "registers", "spilled B", "shared B", "blocks an SM", "tokens a turn"),
            *("warp-instr. a token", "16-byte copies a turn", "tensor core", "kB in flight an SM", "temp B", "copies"),
            title=f"{GPUS[gpu].name}: the attention kernel's loop",
        )
        refused = []
        for row in (r for r in rows if r["gpu"] == gpu):
            by = row["by"] if row["max_pages"] == programs.MAX_PAGES else f"{row['by']}, {row['max_pages']} pages"
            if "refused" in row:
                refused.append(f"{row['call']} by {by}: {row['refused']}")
                continue
            a_token = row["instructions_per_token"]
            table.add_row(
                *(row["call"], by, str(len(row["launches"])), str(row["registers"]), str(row["spill_bytes"])),
                *(str(row["shared_bytes"]), str(row["blocks_per_sm"]), str(row["tokens_per_turn"] or "unknown")),
                *(f"{a_token:.1f}" if a_token else "unknown", str(row["wide_copies"])),
                ", ".join(f"{n} {name}" for name, n in row["matrix"].items()) or "none",
                *(f"{row['bytes_in_flight_per_sm'] / 1000:.0f}", str(row["temp_bytes"]), str(row["copies"])),
            )
        console.print(table)
        console.print("Refused:", "; ".join(refused) or "none")
        for row in rows:
            if row["gpu"] == gpu and row["call"] == "decode" and "mix" in row:
                mix = ", ".join(f"{name} {row['mix'][name]}" for name in _MIX if name in row["mix"])
                by, turn, pages = row["by"], row["instructions_per_turn"], row["max_pages"]
                console.print(
                    f"decode by {by} ({pages} pages): {turn} a turn of {row['tokens_per_turn']} tokens: {mix}"
                )


def measure_step(gpu: str) -> dict:
    """The decode step of `LLAMA_8B`, compiled for `gpu`."""
    program = programs.compile_step(LLAMA_8B, gpu)
    a_layer = programs.launches_per_layer(program, LLAMA_8B.num_layers)
    weight_bytes = 2 * LLAMA_8B.hidden_size * LLAMA_8B.num_kv_heads * LLAMA_8B.head_dim  # of K's rows alone
    return {
        "gpu": gpu,
        "num_seqs": programs.NUM_SEQS,
        "command_buffers": program.command_buffers,
        "launches": len(program.launches),
        "outside_of_graphs": [x.name for x in program.launches if not x.graph],
        "launches_per_layer": a_layer,
        "once_a_step": _once(program, a_layer),
        "large_copies": program.copies(weight_bytes),
        "temp_bytes": program.temp_bytes,
        "alias_bytes": program.alias_bytes,
    }


def _once(program: CompiledProgram, a_layer: dict[str, int]) -> dict[str, int]:
    """Kernels that are not part of a layer, and how often they run."""
    rest = collections.Counter(programs.base_name(x) for x in program.launches)
    rest.subtract({name: n * LLAMA_8B.num_layers for name, n in a_layer.items()})
    return {name: n for name, n in rest.items() if n}


def show_tilings(console: rich.console.Console) -> None:
    """Registers a thread of the call that takes each row of the table of tiles, by GPU; spilled bytes behind a +."""
    table = rich.table.Table(*Tiling._fields, *GPUS)
    for tiling in TILINGS:
        call, found = programs.call_of(tiling), []
        for gpu in GPUS:
            kernel = programs.read_attention(programs.compile_attention(call, gpu), call, gpu).launch.kernel
            found.append(
                "unknown"
                if kernel is None
                else f"{kernel.registers}" + f"+{kernel.spill_bytes}" * bool(kernel.spill_bytes)
            )
        table.add_row(*map(str, tiling), *found)
    console.print(table)


def verdicts(rows: list[dict], step: dict | None) -> list[tuple[str, str, bool]]:
    """What is aimed at, what was found, and whether that reaches it."""
    ours = [r for r in rows if r["by"] == "jaxpaged" and "refused" not in r]
    found: list[tuple[str, str, bool]] = []

    def every(aim: str, good, show) -> None:
        bad = [f"{show(r)} ({r['gpu']}, {r['call']})" for r in ours if not good(r)]
        found.append((aim, "; ".join(bad) or f"all {len(ours)}", not bad))

    every(
        "as many launches as planned: 2, and 1 with max_splits=1; one more a step packs a tree mask",
        lambda r: len(r["launches"]) == ATTENTION[r["call"]].num_launches + ATTENTION[r["call"]].tree,
        lambda r: len(r["launches"]),
    )
    every("nothing spilled", lambda r: r["spill_bytes"] == 0, lambda r: f"{r['spill_bytes']} B")
    every("16-byte copies that nobody waits for", lambda r: r["wide_copies"] > 0, lambda r: "none")
    every(
        "tensor cores where values have 16 bits or 8",
        lambda r: bool(r["matrix"]) or "float32" in r["call"],
        lambda r: "none",
    )
    every("no pad, cast, transpose or copy around it", lambda r: r["copies"] == 0, lambda r: r["copies"])
    every(
        "at least 30 kB in flight an SM",
        lambda r: r["bytes_in_flight_per_sm"] >= 30000,
        lambda r: f"{r['bytes_in_flight_per_sm'] / 1000:.0f} kB",
    )
    for row in ours:
        if (row["gpu"], row["call"]) == ("h200", "decode"):
            a_token = row["instructions_per_token"]
            found.append(("plain decode on an H200: at most 24 warp-instructions a token", f"{a_token}", a_token <= 24))
    if step:
        once = f"{step['command_buffers']}, {len(step['outside_of_graphs'])} launches outside"
        alone = step["command_buffers"] == 1 and not step["outside_of_graphs"]
        found.append(("decode step: one command buffer", once, alone))
        copies = step["large_copies"]
        found.append(("decode step: no copy as large as a weight or the cache", f"{len(copies)}", not copies))
        mib = step["temp_bytes"] / 2**20
        found.append(("decode step: less than 64 MiB of temporaries", f"{mib:.1f} MiB", mib < 64))
        a_layer = sum(step["launches_per_layer"].values())
        found.append(("decode step: at most 8 launches a layer", f"{a_layer}", a_layer <= 8))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--gpu", choices=GPUS, action="append", help="one of them; again for more; default: all")
    parser.add_argument("--call", choices=ATTENTION, action="append", help="likewise")
    parser.add_argument("--tilings", action="store_true", help="the table of tiles with its registers, nothing else")
    parser.add_argument("--no-step", action="store_true", help="leave the decode step out")
    args = parser.parse_args()
    console = rich.console.Console()
    if not console.is_terminal:
        console.width = 180
    if args.tilings:
        show_tilings(console)
        return
    rows = list(rows_of(args.gpu or list(GPUS), args.call or list(ATTENTION)))
    show(rows, console)
    step = None if args.no_step else measure_step("h200")
    if step:
        layers, names = LLAMA_8B.num_layers, step["launches_per_layer"]
        console.print(
            f"Greedy decode step of {layers} layers, batch {step['num_seqs']}, on an H200: {step['launches']} launches "
            f"in {step['command_buffers']} CUDA graph; a layer {sum(names.values())}: "
            + ", ".join(f"{n} {name}" for name, n in names.items())
            + "; once a step: "
            + ", ".join(f"{n} {name}" for name, n in step["once_a_step"].items())
        )
    found = verdicts(rows, step)
    table = rich.table.Table("aimed at", "found", "reached")
    for aim, what, good in found:
        table.add_row(aim, what, "yes" if good else "NO")
    console.print(table)
    if args.gpu or args.call or args.no_step:
        console.print("A part only: no file written.")
        return
    path = harness.RESULTS / "compiled" / "gpu_code.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    machine = harness.describe_machine("compiled, not run")
    reach = [{"aim": aim, "found": what, "reached": good} for aim, what, good in found]
    path.write_text(json.dumps({"machine": machine, "reach": reach, "rows": rows, "step": step}, indent=1) + "\n")
    console.print(f"Written to {path.relative_to(harness.RESULTS.parent.parent)}")


if __name__ == "__main__":
    main()
