import importlib.metadata
import os
import pathlib
import sys

import hypothesis

# Before JAX is imported: where CUDA plugins are installed without a GPU, JAX would look for one.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# The fusion emitters of JAX 0.10 are half of its compile time on a CPU; later JAX lines know no such flag.
if importlib.metadata.version("jaxlib").startswith("0.10."):
    os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_cpu_use_fusion_emitters=false"

# Time depends on who else uses the machine; CI repeats the same examples.
hypothesis.settings.register_profile("local", deadline=None)
hypothesis.settings.register_profile("ci", deadline=None, derandomize=True)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "local")


def pytest_addoption(parser):
    parser.addoption("--soak", action="store_true", help="run the page manager's state machine for a million steps")


def pytest_runtest_setup(item):
    """Each program of a short test runs a few times, and most of the suite would be LLVM.

    Tests marked `slow` or `aot` compile as users do: between them they run every part of the package.
    """
    if jax := sys.modules.get("jax"):
        jax.config.update("jax_disable_most_optimizations", not any(map(item.get_closest_marker, ("slow", "aot"))))


def pytest_runtest_teardown():
    """XLA on a CPU maps what it compiles into memory; it crashes where a process has the 65,530 maps of Linux."""
    maps = pathlib.Path("/proc/self/maps")
    if (jax := sys.modules.get("jax")) and maps.exists() and maps.read_bytes().count(b"\n") > 30_000:
        jax.clear_caches()
