"""Compiles a function for an NVIDIA GPU that is not there, and reads what would run on it.

    program = compile_for(step, *args, gpu="h200", donate_argnums=(1,))
    program.launches        # each kernel with its grid, registers, spills and shared memory, in launch order
    program.copies(2**20)   # what moves a MiB or more from one buffer to another

Shapes are enough: arguments are pytrees of arrays or `jax.ShapeDtypeStruct`. XLA's whole GPU pipeline runs, ptxas
included. Nothing is executed, so no time is known, and XLA cannot tune its matrix products: a GPU may get other tiles.
Needs the `aot` dependency group; `lower_for` and `hlo_copies` need nothing.
"""

import dataclasses
import importlib.util
import pathlib
import re
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Callable

import jax
from jax.experimental import topologies
from jax.sharding import AbstractDevice, AbstractMesh, NamedSharding, PartitionSpec, use_abstract_mesh


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gpu:
    """What the compiler asks of a GPU: sizes in bytes, bandwidth in bytes a second."""

    name: str
    compute_capability: tuple[int, int]
    num_sms: int
    threads_per_sm: int
    shared_per_sm: int
    l2: int
    memory: int
    bandwidth: int


GPUS = {
    "a100": Gpu(
        name="NVIDIA A100-SXM4-80GB",
        compute_capability=(8, 0),
        num_sms=108,
        threads_per_sm=2048,
        shared_per_sm=164 * 2**10,
        l2=40 * 2**20,
        memory=80 * 10**9,
        bandwidth=2039 * 10**9,
    ),
    "l4": Gpu(
        name="NVIDIA L4",
        compute_capability=(8, 9),
        num_sms=58,
        threads_per_sm=1536,
        shared_per_sm=100 * 2**10,
        l2=48 * 2**20,
        memory=24 * 10**9,
        bandwidth=300 * 10**9,
    ),
    "h200": Gpu(
        name="NVIDIA H200",
        compute_capability=(9, 0),
        num_sms=132,
        threads_per_sm=2048,
        shared_per_sm=228 * 2**10,
        l2=50 * 2**20,
        memory=141 * 10**9,
        bandwidth=4800 * 10**9,
    ),
    "b200": Gpu(
        name="NVIDIA B200",
        compute_capability=(10, 0),
        num_sms=148,
        threads_per_sm=2048,
        shared_per_sm=228 * 2**10,
        l2=126 * 2**20,
        memory=180 * 10**9,
        bandwidth=8000 * 10**9,
    ),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kernel:
    """Machine code of one kernel.

    Attributes:
        registers: A thread.
        spill_bytes: Local memory a thread, where values go that found no register.
    """

    name: str
    registers: int
    spill_bytes: int
    cubin: bytes = dataclasses.field(repr=False)

    def sass(self) -> str:
        """Return its instructions.

        Raises FileNotFoundError without `nvdisasm` (CUDA toolkit, or the `triton` package).
        """
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(self.cubin)
            file.flush()
            return subprocess.run([_nvdisasm(), "-c", file.name], capture_output=True, text=True, check=True).stdout


@dataclasses.dataclass(frozen=True, kw_only=True)
class Launch:
    """One kernel launch.

    Attributes:
        kernel: None for the few that XLA's library holds compiled, such as its sort.
        shared_bytes: A block.
        graph: Whether it is part of a CUDA graph.
    """

    name: str
    kernel: Kernel | None
    grid: tuple[int, ...]
    threads: int
    shared_bytes: int
    graph: bool

    def blocks_per_sm(self, gpu: Gpu) -> int:
        """Return how many blocks run on an SM at once: the least that registers, shared memory and threads allow.

        Raises:
            ValueError: The kernel's registers are not known.
        """
        if self.kernel is None:
            raise ValueError(f"`kernel` of {self.name} must be known; got None.")
        warps = -(-self.threads // 32)
        # A quarter of an SM has a quarter of its 65536 registers, and gives them to a warp 256 at a time.
        warps_by_registers = 4 * (16384 // (-(-self.kernel.registers * 32 // 256) * 256))
        by_shared = gpu.shared_per_sm // (self.shared_bytes + 1024)  # the driver takes a KiB a block
        return min(warps_by_registers // warps, by_shared, gpu.threads_per_sm // (32 * warps), 32)

    def __str__(self) -> str:
        code = f"{k.registers} registers, {k.spill_bytes} B spilled" if (k := self.kernel) else "code unknown"
        grid = "x".join(map(str, self.grid))
        return f"{self.name}: grid {grid}, {self.threads} threads, {code}, {self.shared_bytes} B shared"


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompiledProgram:
    """A compiled function.

    Attributes:
        launches: In order; a loop body once.
        command_buffers: CUDA graphs.
        thunks: XLA's launch sequence, as text.
        hlo: Optimised HLO, as text.
        temp_bytes: Scratch memory of a call.
        alias_bytes: Outputs that reuse a donated argument.
    """

    launches: tuple[Launch, ...]
    command_buffers: int
    thunks: str
    hlo: str
    temp_bytes: int
    alias_bytes: int

    def copies(self, at_least: int) -> list[str]:
        """`hlo_copies` of the program."""
        return hlo_copies(self.hlo, at_least)

    def __str__(self) -> str:
        return "\n".join(
            [
                *map(str, self.launches),
                f"{len(self.launches)} launches, {sum(x.graph for x in self.launches)} of them in "
                f"{self.command_buffers} command buffers; temp {self.temp_bytes} B, aliased {self.alias_bytes} B",
            ]
        )


def lower_for(fn: Callable, *args, gpu: str = "h200") -> jax.stages.Lowered:
    """Lower `jax.jit(fn)` for one GPU of a kind in `GPUS`. It needs no CUDA plugin, and compiles nothing.

    Raises:
        ValueError: An unknown `gpu`, or one that this JAX does not know.
    """
    target = _named(gpu)
    device = AbstractDevice(device_kind=target.name, platform="gpu", num_cores=None)
    return _lower(jax.jit(fn), args, AbstractMesh((1,), ("gpu",), abstract_device=device), target)


def compile_for(fn: Callable, *args, gpu: str = "h200", **jit_kwargs) -> CompiledProgram:
    """Compile `jax.jit(fn, **jit_kwargs)` for one GPU of a kind in `GPUS`.

    Args:
        args: Pytrees of arrays or `jax.ShapeDtypeStruct`; no value is read.

    Raises:
        ValueError: An unknown `gpu`, or one that this JAX does not know.
        ModuleNotFoundError: The CUDA plugin is not installed.
    """
    target = _named(gpu)
    mesh = topologies.make_mesh(_topology(target), (1,), ("gpu",))
    sharding = NamedSharding(mesh, PartitionSpec())
    specs = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), args)
    lowered = _lower(jax.jit(fn, **jit_kwargs), specs, mesh.abstract_mesh, target)
    with tempfile.TemporaryDirectory() as folder:
        # The kernel cache file holds each kernel's cubin as it is; the dump, what is launched in which order.
        cache = pathlib.Path(folder, "kernels")
        compiled = lowered.compile(compiler_options={"xla_dump_to": folder, "xla_gpu_kernel_cache_file": str(cache)})
        kernels = {kernel.name: kernel for kernel in _kernels(cache.read_bytes() if cache.exists() else b"")}
        dumps = sorted(pathlib.Path(folder).glob("*thunk_sequence*.txt"), key=lambda p: "after" in p.name)
        thunks = dumps[-1].read_text() if dumps else ""
    memory = compiled.memory_analysis()
    return CompiledProgram(
        launches=tuple(_launches(thunks, kernels)),
        command_buffers=thunks.count("kCommandBuffer"),
        thunks=thunks,
        hlo=compiled.as_text() or "",
        temp_bytes=memory.temp_size_in_bytes if memory else 0,
        alias_bytes=memory.alias_size_in_bytes if memory else 0,
    )


def _named(gpu: str) -> Gpu:
    if gpu not in GPUS:
        raise ValueError(f"`gpu` must be one of {', '.join(GPUS)}; got {gpu!r}.")
    return GPUS[gpu]


def _lower(jitted, args: tuple, mesh: AbstractMesh, target: Gpu) -> jax.stages.Lowered:
    try:
        with use_abstract_mesh(mesh):
            return jitted.trace(*args).lower(lowering_platforms=("cuda",))
    except RuntimeError as error:
        if "No supported GPU devices found" not in str(error):
            raise
        raise ValueError(
            f"`name` of a GPU must be a device kind that JAX {jax.__version__} knows; got {target.name!r}. Give its "
            "entry in GPUS the name of a GPU with the same compute capability, such as 'NVIDIA L4' for an L40S."
        ) from error


_MOVES = (
    "copy",
    "copy-start",
    "convert",
    "slice",
    "dynamic-slice",
    "concatenate",
    "pad",
    "transpose",
    "select",
    "bitcast-convert",
)
_INSTRUCTION = re.compile(r"\s*(ROOT )?%?([\w.-]+) = (\((?:[^()]|\([^()]*\))*\)|\S+) ([\w-]+)\((.*)")


def hlo_copies(hlo: str, at_least: int) -> list[str]:
    """Return HLO instructions that write `at_least` bytes or more which hold nothing but a copy of other bytes.

    A copy, slice, concatenation, padding, transposition, selection or conversion counts, alone or as what a fusion ends
    in; an update in place does not. `hlo` is optimised HLO for any platform: `jitted.lower(...).compile().as_text()`.
    """
    computations: dict[str, dict[str, re.Match]] = {}
    fused: set[str] = set()
    body: dict[str, re.Match] = {}
    for line in hlo.splitlines():
        if header := re.match(r"(?:ENTRY )?%?([\w.-]+) \(.*\{$", line):
            body = computations[header[1]] = {}
        elif m := _INSTRUCTION.match(line):
            body[m[2]] = m
            if m[4] == "fusion":
                fused.add(_called(m))

    def moves(body: dict[str, re.Match], m: re.Match) -> bool:
        if m[4] == "fusion":
            callee = computations[_called(m)]
            return any(moves(callee, root) for root in callee.values() if root[1])
        if m[1] and m[4] in ("tuple", "bitcast"):
            return any(moves(body, body[x]) for x in re.findall(r"%([\w.-]+)", m[5]) if x in body)
        return m[4] in _MOVES

    return [
        m.string.strip()
        for name, body in computations.items()
        if name not in fused
        for m in body.values()
        if _largest_array(m[3]) >= at_least and m[4] not in ("tuple", "bitcast") and moves(body, m)
    ]


def _called(fusion: re.Match) -> str:
    called = re.search(r"calls=%?([\w.-]+)", fusion[5])
    if called is None:
        raise ValueError(f"`hlo` must name the computation of each fusion; got {fusion.string.strip()}")
    return called[1]


def _largest_array(shape: str) -> int:
    """Return bytes of the largest array in an HLO shape."""
    largest = 0
    for kind, dims in re.findall(r"(pred|[a-z]+\d+\w*)\[([\d,]*)\]", shape):
        bits = 8 if kind == "pred" else int(re.findall(r"\d+", kind)[0])
        for dim in filter(None, dims.split(",")):
            bits *= int(dim)
        largest = max(largest, bits // 8)
    return largest


def _topology(gpu: Gpu):
    major, minor = gpu.compute_capability
    target = f"""
        gpu_device_info {{
          cuda_compute_capability {{ major: {major} minor: {minor} }}
          core_count: {gpu.num_sms} fpus_per_core: 128 threads_per_warp: 32 clock_rate_ghz: 1.98
          threads_per_block_limit: 1024 threads_per_core_limit: {gpu.threads_per_sm}
          block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
          registers_per_core_limit: 65536 registers_per_block_limit: 65536
          shared_memory_per_core: {gpu.shared_per_sm} shared_memory_per_block: 49152
          shared_memory_per_block_optin: {gpu.shared_per_sm - 1024}
          l2_cache_size: {gpu.l2} memory_bandwidth: {gpu.bandwidth} device_memory_size: {gpu.memory}
        }}
        platform_name: "CUDA"
        runtime_version {{ major: 13 }}
        dnn_version_info {{ major: 9 minor: 12 }}
        device_description_str: "{gpu.name}" """
    try:
        return topologies.get_topology_desc(platform="cuda", topology_name="", target_config=target, topology="1x1x1")
    except NotImplementedError as error:
        raise ModuleNotFoundError(
            "compile_for needs the CUDA plugin jax_plugins.xla_cuda13: install the packages jax-cuda13-plugin and "
            f"jax-cuda13-pjrt of version {jax.__version__} (dependency group `aot`)."
        ) from error


def _kernels(blob: bytes):
    """Return the kernel of each cubin in `blob`: a 64-bit ELF, with what ptxas used in the attributes of its
    `.nv.info`.
    """
    magic = b"\x7fELF\x02\x01\x01"
    start = blob.find(magic)
    while start >= 0:
        elf = blob[start:]
        segments, table, segment, num_segments, entry, count, names = struct.unpack_from("<32xQQ6xHHHHH", elf)
        elf = elf[: max(segments + segment * num_segments, table + entry * count)]
        sections = {}
        for i in range(count):
            name_at, _, _, _, offset, size = struct.unpack_from("<IIQQQQ", elf, table + i * entry)
            name_at += struct.unpack_from("<24xQ", elf, table + names * entry)[0]
            sections[elf[name_at : elf.index(b"\0", name_at)].decode()] = elf[offset : offset + size]

        def largest(attribute: int, info: bytes = sections.get(".nv.info", b"")) -> int:
            values = re.findall(b"\x04%c\x08\x00....(....)" % attribute, info, re.DOTALL)  # format, id, size, symbol
            return max((int.from_bytes(x, "little") for x in values), default=0)

        for name in sections:
            if name.startswith(".text."):
                frame, registers = largest(0x11), largest(0x2F)
                yield Kernel(name=name[len(".text.") :], registers=registers, spill_bytes=frame, cubin=elf)
        start = blob.find(magic, start + 1)


def _launches(thunks: str, kernels: dict[str, Kernel]):
    graph_indent = None
    for line in thunks.splitlines():
        indent = len(line) - len(line.lstrip())
        if graph_indent is not None and indent <= graph_indent:
            graph_indent = None
        if "kCommandBuffer" in line:
            graph_indent = indent
        if m := re.search(r"\] (\S+) grid: \[([\d, ]+)\] threads: \[(\d+).*shared_memory: (\d+)", line):
            yield Launch(
                name=m[1],
                kernel=kernels.get(m[1]),
                grid=tuple(map(int, m[2].split(","))),
                threads=int(m[3]),
                shared_bytes=int(m[4]),
                graph=graph_indent is not None,
            )


def _nvdisasm() -> str:
    spec = importlib.util.find_spec("triton")
    bundled = [
        pathlib.Path(p, "backends/nvidia/bin/nvdisasm") for p in (spec and spec.submodule_search_locations) or ()
    ]
    found = next((str(p) for p in bundled if p.exists()), None) or shutil.which("nvdisasm")
    if found is None:
        raise FileNotFoundError("nvdisasm not found: install the CUDA toolkit or the Python package `triton`.")
    return found
