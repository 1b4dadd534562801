"""A sample of mutants over all modules: a test notices each, or `survivors.toml` says why none does."""

import json
import os
import subprocess
import sys

import pytest

from tests.mutation.project import JAXPAGED

SAMPLE = 200


@pytest.mark.slow
@pytest.mark.mutants
def test_sample_of_mutants_over_all_modules_is_killed_or_accounted_for(tmp_path):
    # A child a core; among other workers of pytest, this worker's cores alone.
    jobs = max(1, (os.cpu_count() or 1) // int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")))
    report = tmp_path / "report.json"
    options = ["--count", str(SAMPLE), "--seed", "0", "--jobs", str(jobs), "--json", str(report)]
    # A process of its own: JAX's threads must not be there where children are forked.
    command = [sys.executable, "-m", "tests.mutation", *options]
    done = subprocess.run(command, cwd=JAXPAGED.root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    packages = json.loads(report.read_text())["packages"]
    assert sum(counts["judged"] for counts in packages.values()) == SAMPLE
    assert {package: counts["rate"] for package, counts in packages.items() if counts["rate"] < 0.9} == {}
    assert set(packages) == set(JAXPAGED.packages)
