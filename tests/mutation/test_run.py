import ast

import pytest

from tests.mutation.accepted import Accepted, Kind
from tests.mutation.child import Instrument, Measured, Record
from tests.mutation.mutants import Mutant
from tests.mutation.project import Project
from tests.mutation.run import Run

OWN, OTHER = "tests/lib/test_a.py", "tests/lib/test_b.py"


@pytest.fixture
def run(tmp_path):
    """Two test files: line 1 of a.py runs at import, line 2 in each test of its own file, line 3 in two tests."""
    for file in (OWN, OTHER, "source/lib/a.py"):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).touch()
    own = Record({"own::quick": Measured(1.0, {"source/lib/a.py": {2}})}, {"source/lib/a.py": {1}})
    own.tests["own::slow"] = Measured(4.0, {"source/lib/a.py": {2, 3}})
    other = Record({"other::one": Measured(2.0, {"source/lib/a.py": {3}})}, {"source/lib/a.py": {1}})
    other.tests["other::two"] = Measured(0.5, {"source/lib/b.py": {2, 3}})
    project = Project(root=tmp_path, source="source", packages=("lib",))
    return Run(project, jobs=1, budget=100.0, directory=tmp_path, records={OWN: own, OTHER: other})


def chosen(run: Run, line: int) -> list[str]:
    return list(run.tests_for(Mutant("source/lib/a.py", "f::number_changed#1", line, "")))


def test_tests_for_a_statement_are_those_that_run_it_the_modules_own_first_the_quick_first(run):
    assert chosen(run, 2) == ["own::quick", "own::slow"]
    assert chosen(run, 3) == ["own::slow", "other::one"]
    assert chosen(run, 4) == []


def test_tests_for_a_statement_run_at_import_are_all_that_use_the_module(run):
    assert chosen(run, 1) == ["own::quick", "own::slow", "other::one"]


def test_tests_for_a_module_with_jax_are_all_of_the_files_that_run_it_those_that_trace_it_first(run):
    (run.project.root / "source/lib/a.py").write_text("from jax import lax")
    assert chosen(run, 3) == ["own::slow", "other::one", "own::quick", "other::two"]


def test_tests_for_an_accepted_survivor_take_no_more_than_the_budget_and_one_at_least(run):
    run.budget = 3.0
    assert chosen(run, 1) == ["own::quick", "own::slow", "other::one"]
    run.accepted = [Accepted(Kind.EQUIVALENT, "source/lib/a.py", "f::*", "so")]
    assert chosen(run, 1) == ["own::quick", "other::one"]
    run.budget = 0.1
    assert chosen(run, 3) == ["own::slow"]


def test_instrument_notes_each_statement_and_leaves_what_must_come_first():
    source = '"""Text."""\nfrom __future__ import annotations\nif a:\n    b = 1\nelse:\n    c = 2\n'
    tree = ast.fix_missing_locations(Instrument().visit(ast.parse(source)))
    lines = []
    exec(compile(tree, "m.py", "exec"), {"__hit__": lines.append, "a": False})
    assert lines == [3, 6]
    assert ast.get_docstring(tree) == "Text."
