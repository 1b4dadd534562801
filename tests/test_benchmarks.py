"""The benchmarks' own lines, at toy sizes; those for GPUs on a CPU, by what a bare machine has."""

import json
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest

from benchmarks import engine_host, gpu_attention, gpu_cases, workloads
from benchmarks.gpu_rivals import Inputs

pytestmark = pytest.mark.slow

ROOT = pathlib.Path(__file__).parents[1]
# Without what a machine with a GPU may lack, and with what then stands in for it.
BARE = """
import runpy, sys
sys.modules |= dict.fromkeys(("rich", "flax", "hypothesis", "beartype"))
sys.path.insert(0, "benchmarks/bare")
sys.argv = sys.argv[1:]
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""


def run_bare(*arguments):
    # Each program runs a few times only: most of the test would be LLVM.
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_backend_optimization_level=0"}
    command = [sys.executable, "-W", "ignore", "-c", BARE, "benchmarks.gpu_attention", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


def test_gpu_attention_smoke_on_a_bare_machine_writes_table_picture_and_line(tmp_path):
    pytest.importorskip("matplotlib", reason="needs matplotlib")
    process = run_bare("--smoke", "--out", tmp_path)
    assert process.returncode == 0, process.stderr
    lines = process.stdout.splitlines()
    assert lines[0] == "Correctness on cpu: PASS, 2 cases by ('xla',)"
    last = json.loads(lines[-1])
    assert (last["device"], last["wrong"]) == ("smoke", [])
    assert list(last["shares"]) == ["decode", "speculative", "append"]
    rows = json.loads((tmp_path / "gpu_attention.json").read_text())["rows"]
    refused = {(r["workload"], r["rival"]): r["refused"] for r in rows if "refused" in r}
    assert refused["speculative", "JAX's own"] == "NotImplementedError: it takes one query token a sequence"
    assert "cuDNN" in refused["decode", "cuDNN, contiguous"]
    assert all(r["share"] > 0 for r in rows if "refused" not in r)
    assert (tmp_path / "gpu_attention.png").read_bytes()[:4] == b"\x89PNG"


def test_gpu_attention_without_a_gpu_says_so():
    process = run_bare("--short")
    assert process.returncode == 2
    assert process.stdout.startswith("no NVIDIA GPU: JAX sees cpu.")


def test_gpu_attention_measure_names_a_rival_that_is_wrong(monkeypatch):
    other = Inputs.draw(workloads.SMOKE[0], cold_bytes=0, seed=1)
    build = gpu_attention.rivals_of

    def with_other_inputs(w, inputs, num_calls, smoke):
        rivals = build(w, inputs, num_calls, smoke)
        wrong = build(w, other, num_calls, smoke)["jaxpaged, XLA gather"]
        return {"jaxpaged": rivals["jaxpaged, XLA gather"], "wrong": wrong}

    monkeypatch.setattr(gpu_attention, "rivals_of", with_other_inputs)
    settings = gpu_attention.parse(["--smoke"])
    ours, wrong = gpu_attention.measure(workloads.SMOKE[0], settings, copy_speed=1e9)
    assert ours["us"] > 0
    assert wrong["refused"].startswith("WRONG: differs from jaxpaged by ")


def test_failures_names_a_case_that_does_not_hold(monkeypatch):
    def wrong(name, case, backend):
        expected, lse = gpu_cases.oracle(case)
        return expected.astype(np.float32) * 1.001, lse

    monkeypatch.setattr(gpu_cases, "attend", wrong)
    found = gpu_cases.failures(["float32, not TF32"], ("xla",))
    assert list(found) == ["float32, not TF32 by xla"]


@pytest.mark.parametrize(
    ("name", "num_bytes", "num_flops"),
    [
        ("decode B8 S32768", 2 * 8 * 32768 * 8 * 128 * 2 + 2 * 8 * 32 * 128 * 2, 4 * 8 * 32768 * 32 * 128),
        ("decode B8 S8192 window 128", 2 * 8 * 128 * 8 * 128 * 2 + 2 * 8 * 32 * 128 * 2, 4 * 8 * 128 * 32 * 128),
        (
            "prefill B1 q1024 S2048",
            2 * 2048 * 8 * 128 * 2 + 2 * 1024 * 32 * 128 * 2,
            4 * (1024 * 1024 + 1024 * 1025 // 2) * 32 * 128,
        ),
    ],
)
def test_workload_counts_bytes_and_products(name, num_bytes, num_flops):
    workload = next(w for w in workloads.DECODE + workloads.OTHERS if w.name == name)
    assert (workload.num_bytes(2), workload.num_flops()) == (num_bytes, num_flops)


def test_workloads_have_names_of_their_own():
    names = [w.name for w in [*workloads.DECODE, *workloads.OTHERS, *workloads.APPEND]]
    assert len(names) == len(set(names)) == 58
    assert len(workloads.SHORT) == 9


def test_page_memory_smoke_writes_figures_and_picture(tmp_path):
    pytest.importorskip("matplotlib", reason="needs matplotlib")
    command = [sys.executable, "-m", "benchmarks.page_memory", "--smoke", "--out", str(tmp_path)]
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr
    results = json.loads((tmp_path / "page_memory.json").read_text())
    assert set(results["figures"]) == set(results["bars"])
    assert (tmp_path / "page_memory.png").read_bytes()[:4] == b"\x89PNG"


def test_engine_host_writes_each_round_and_prints_the_least_disturbed(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["engine_host", "--steps", "10", "--rounds", "2", "--out", str(tmp_path)])
    engine_host.main()
    cases = json.loads((tmp_path / "engine_host.json").read_text())["cases"]
    assert [(c["num_seqs"], c["prefix_caching"]) for c in cases[-2:]] == [(256, False), (256, True)]
    assert all(c["mean_s"]["step"] == min(c["steps_s"]) and len(c["steps_s"]) == 2 for c in cases)
    parts = cases[-1]["mean_s"]
    assert sum(t for name, t in parts.items() if name != "step") == pytest.approx(parts["step"])
    assert capsys.readouterr().out.count("(reach 300 us: ") == 2
