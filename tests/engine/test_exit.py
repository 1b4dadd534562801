"""A process with an engine ends as any other: its code, an empty stderr, and no wait, whatever the thread does then."""

import os
import subprocess
import sys

import pytest

BEGIN = """
import os, signal, sys, threading
signal.signal(signal.SIGINT, signal.default_int_handler)
import jax, jax.numpy as jnp
from tests.engine.tiny import CACHE, LIMITS, PROMPTS
from tests.engine.test_speculation import Bigrams
from jaxpaged.engine import Engine, SamplingParams
engine = Engine(Bigrams(jnp.ones((64, 64))), CACHE, LIMITS)
long = SamplingParams(max_new_tokens=50)
"""
WAYS = {
    "idle": ("engine.generate(PROMPTS[:1], SamplingParams(max_new_tokens=1))", 0, ""),
    "unused": ("", 0, ""),
    "stepping": ("handles = [engine.add_request(p, long) for p in PROMPTS * 5]; next(handles[0])", 0, ""),
    "compiling": ("handle = engine.add_request(PROMPTS[1], long)", 0, ""),
    "closed": ("handle = engine.add_request(PROMPTS[1], long); engine.close()", 0, ""),
    "raising": ("handles = [engine.add_request(p, long) for p in PROMPTS * 5]; next(handles[0]); 1 / 0", 1, "Zero"),
    "interrupted": (
        "threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT)).start()\n"
        "try:\n    while True: engine.generate(PROMPTS, long)\n"
        "except KeyboardInterrupt:\n    assert engine.stats().num_running == 0; sys.exit(130)",
        130,
        "",
    ),
}


def run(way: str) -> None:
    code, expected, error = WAYS[way]
    process = subprocess.run(
        [sys.executable, "-c", BEGIN + code],
        env=os.environ | {"PYTHONPATH": ".", "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    stderr = [line for line in process.stderr.splitlines() if "plugin" not in line]
    assert process.returncode == expected, (process.returncode, stderr)
    if error:
        assert error in process.stderr
    elif "cuDNN" not in process.stderr:  # the plugins of a machine without a GPU complain at import
        assert stderr == []


@pytest.mark.parametrize(
    "way", ["interrupted", *(pytest.param(x, marks=pytest.mark.slow) for x in ("compiling", "raising"))]
)
def test_process_ends_well(way):
    run(way)


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_process_ends_well_each_time(way):
    for _ in range(7):
        run(way)
