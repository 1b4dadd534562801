import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
MODULE = """
import os
import signal

def clamp(x, low, high):
    if x < low:
        return low
    return min(x, high)

def count_down(n):
    while n > 0:
        n -= 1
    return n

def stand_firm(n):
    if n != 0:
        os.kill(os.getpid(), signal.SIGSEGV)

def never_called():
    return 3
"""
TEST = """
from toy.lib.numbers import clamp, count_down, stand_firm

def test_clamp():
    assert [clamp(x, 0, 3) for x in (-1, 1, 5)] == [0, 1, 3]

def test_count_down():
    assert count_down(2) == 0

def test_stand_firm():
    stand_firm(0)
"""
COMMAND = """
import sys
from pathlib import Path
from tests.mutation.__main__ import main
from tests.mutation.project import Project

project = Project(root=Path(sys.argv[1]), source="toy", tests="checks", packages=("lib",), grace=2.0)
sys.exit(main(sys.argv[2:], project))
"""


@pytest.fixture
def toy(tmp_path):
    """A project of one module, with tests that see some of what it does."""
    options = 'pythonpath = ["."]\nmarkers = ["slow", "aot", "gpu"]\n'
    (tmp_path / "pyproject.toml").write_text("[tool.pytest.ini_options]\n" + options)
    for file, text in (("toy/lib/numbers.py", MODULE), ("checks/lib/test_numbers.py", TEST)):
        (tmp_path / file).parent.mkdir(parents=True)
        (tmp_path / file).write_text(text)
    (tmp_path / "survivors.toml").write_text("")
    return tmp_path


def mutate(toy: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    options = ["--accepted", str(toy / "survivors.toml"), "--json", str(toy / "report.json"), *arguments]
    command = [sys.executable, "-c", COMMAND, str(toy), *options]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def test_command_judges_each_mutant_and_ends_with_1_where_one_survives(toy):
    done = mutate(toy)
    assert done.returncode == 1, done.stdout + done.stderr
    report = json.loads((toy / "report.json").read_text())
    verdicts = {result["mutant"]["node"]: result["verdict"] for result in report["results"]}
    assert verdicts["clamp::comparison_negated#1"] == "killed"
    assert verdicts["clamp::name_swapped#1"] == "killed"
    assert verdicts["clamp::comparison_shifted#1"] == "survived"  # it makes no difference
    assert verdicts["count_down::statement_removed#1"] == "timed out"  # it has no end
    assert verdicts["stand_firm::comparison_negated#1"] == "crashed"
    assert verdicts["never_called::number_changed#1"] == "unreached"
    counts = report["packages"]["lib"]
    assert counts["judged"] == counts["mutants"] == len(verdicts)
    kills = sum(verdict in ("killed", "timed out", "crashed") for verdict in verdicts.values())
    assert counts["rate"] == pytest.approx(kills / len(verdicts), abs=1e-4)
    assert counts["not listed"] == len(verdicts) - kills
    assert "clamp::comparison_shifted#1 (line 6; 1 tests pass)\n  -if x < low:\n  +if x <= low:\n" in done.stdout
    assert "never_called::number_changed#1 (line 20; no test runs it)" in done.stdout
    assert "clamp::name_swapped#1" not in done.stdout


def accept(toy: Path, *nodes: str, kind: str = "equivalent", file: str = "toy/lib/numbers.py") -> None:
    with (toy / "survivors.toml").open("a") as f:
        f.writelines(f'[[{kind}]]\nfile = "{file}"\nnode = "{node}"\nreason = "so"\n' for node in nodes)


def test_command_ends_with_0_where_survivors_are_accepted_and_names_stale_entries(toy):
    accept(toy, "clamp::comparison_shifted#1", "never_called::*")
    accept(toy, "clamp::name_swapped#1", "gone::number_changed#1")
    accept(toy, "f::number_changed#1", file="toy/lib/gone.py")
    done = mutate(toy, "--node", "clamp::*", "--node", "never_called::*", "--jobs", "1")
    report = json.loads((toy / "report.json").read_text())
    assert report["stale"] == [
        "toy/lib/numbers.py::clamp::name_swapped#1: it is killed now",
        "toy/lib/numbers.py::gone::number_changed#1: there is no such mutant",
        "toy/lib/gone.py::f::number_changed#1: there is no such mutant",
    ]
    assert all(line in done.stdout for line in ("it is killed now", "there is no such mutant"))
    assert (done.returncode, report["not listed"]) == (0, [])


def test_rate_leaves_out_equivalent_survivors_and_counts_unseen_ones(toy):
    options = ("--node", "clamp::comparison*", "--node", "never_called::number_changed#1")
    rates = []
    for kind in ("equivalent", "unseen"):
        (toy / "survivors.toml").write_text("")
        accept(toy, "clamp::comparison_shifted#1", "never_called::*", kind=kind)
        assert mutate(toy, *options).returncode == 0
        rates.append(json.loads((toy / "report.json").read_text())["packages"]["lib"]["rate"])
    assert rates == [1.0, pytest.approx(1 / 3, abs=1e-4)]


def test_command_judges_nothing_where_a_test_fails_without_a_mutant(toy):
    (toy / "checks/lib/test_numbers.py").write_text(TEST.replace("== 0", "== 7"))
    done = mutate(toy)
    assert done.returncode == 2
    assert "checks/lib/test_numbers.py fails without any mutant" in done.stdout
    assert "test_count_down" in done.stdout
    assert not (toy / "report.json").exists()


def test_command_judges_nothing_where_a_killer_fails_without_a_mutant_the_second_time(toy):
    once = "\n\ndef test_once():\n    from pathlib import Path\n    path = Path(__file__).with_suffix('.ran')\n"
    once += "    ran = path.exists()\n    path.touch()\n    assert clamp(1, 0, 3) == 1 and not ran\n"
    (toy / "checks/lib/test_numbers.py").write_text("from toy.lib.numbers import clamp\n" + once)
    done = mutate(toy)
    assert done.returncode == 2
    assert "Tests that killed mutants of lib fail without one" in done.stdout


def test_command_draws_from_the_modules_and_nodes_it_is_told(toy):
    (toy / "toy/lib/other.py").write_text("def clamp():\n    return 3 + 3\n")
    mutate(toy, "--module", "numbers.py", "--node", "clamp::*", "--count", "3")
    mutants = [result["mutant"] for result in json.loads((toy / "report.json").read_text())["results"]]
    assert len(mutants) == 3
    assert {mutant["file"] for mutant in mutants} == {"toy/lib/numbers.py"}
    assert all(mutant["node"].startswith("clamp::") for mutant in mutants)
