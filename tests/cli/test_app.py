"""The command line as a whole, and `jaxpaged info`."""

import json
import re
import subprocess
import sys

import jax
import numpy as np
import pytest

from tests.cli.command import run
from tests.cli.test_generate import KEYS


@pytest.mark.parametrize("arguments", [(), ("sing",), ("--loud", "info")])
def test_main_without_a_known_command_is_refused_in_one_line(capfd, arguments):
    code, out, err = run(capfd, *arguments)
    assert (code, out) == (2, "")
    assert re.fullmatch(r"jaxpaged: error: [^\n]+\n", err)


def test_info_lists_device_versions_and_why_a_backend_cannot_run(capfd):
    code, out, err = run(capfd, "info")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0] == f"device    {jax.devices()[0].device_kind} (cpu), {jax.device_count()} in all"
    assert f"jax {jax.__version__}," in lines[1]
    assert f"numpy {np.__version__}," in lines[1]
    backends = {line.split()[1]: line.split(maxsplit=2)[2] for line in lines[2:-1]}
    assert list(backends) == ["auto", "reference", "xla", "triton", "interpret"]
    assert backends.pop("triton").startswith("cannot run here: it needs an NVIDIA GPU, and JAX sees only a cpu;")
    assert set(backends.values()) == {"runs here"}
    assert lines[-1] == "target    h200: the kind of GPU whose size attention is cut for"


def test_info_without_the_device_that_was_asked_for_is_refused(capfd, monkeypatch):
    def no_backend():
        raise RuntimeError("Unable to initialize backend 'cuda'")

    monkeypatch.setattr(jax, "default_backend", no_backend)
    code, out, err = run(capfd, "info")
    assert (code, out) == (2, "")
    assert err.startswith("jaxpaged: error: JAX finds no device (JAX_PLATFORMS=")
    assert err.endswith("Unable to initialize backend 'cuda'\n")


@pytest.mark.slow
def test_python_m_jaxpaged_prints_json_and_nothing_else(model_path):
    """In a process of its own: no warning of Python or JAX gets between."""
    done = subprocess.run(
        [sys.executable, "-m", "jaxpaged", "generate", "the hen", "--model", model_path, "--format", "json",
         "--max-new-tokens", "2"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0
    assert list(json.loads(done.stdout)) == KEYS
    assert re.fullmatch(r"2 tokens in [^\n]+\n", done.stderr)
