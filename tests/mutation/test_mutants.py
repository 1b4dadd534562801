import ast
from pathlib import Path

import pytest

from tests.mutation.accepted import Accepted, Kind
from tests.mutation.mutants import Mutant, draw, find_mutants, mutated_tree
from tests.mutation.mutators import MUTATORS


def mutants_of(tmp_path: Path, source: str) -> dict[str, str]:
    """The change of each mutant, by its node."""
    (tmp_path / "m.py").write_text(source)
    return {mutant.node: mutant.diff for mutant in find_mutants(tmp_path, "m.py")}


@pytest.mark.parametrize(
    ("mutator", "source", "changed"),
    [
        ("comparison_negated", "a < b", ["a >= b"]),
        ("comparison_negated", "a is None", ["a is not None"]),
        ("comparison_shifted", "a < b <= c", ["a <= b <= c", "a < b < c"]),
        ("operator_changed", "a + b", ["a - b"]),
        ("operator_changed", "a //= b", ["a *= b"]),
        ("operand_dropped", "f(a * b)", ["f(a)"]),
        ("number_changed", "f(3)", ["f(4)", "f(2)"]),
        ("number_changed", "f(0.5)", ["f(1.0)"]),
        ("boolean_flipped", "f(True)", ["f(False)"]),
        ("compared_text_changed", "a == 'x'", ["a == 'not x'"]),
        ("compared_text_changed", "a in 'xy'", ["a in ''"]),
        ("logic_changed", "a and b", ["a or b", "b", "a"]),
        ("negation_dropped", "f(not a)", ["f(a)"]),
        ("condition_fixed", "a if c else b", ["a if True else b", "a if False else b"]),
        ("condition_fixed", "while c: f()", ["while False:\n    f()"]),
        ("condition_fixed", "[a for a in b if a]", ["[a for a in b]"]),
        ("name_swapped", "min(jnp.zeros(cos))", ["max(jnp.zeros(cos))", "min(jnp.ones(cos))"]),
        ("branches_swapped", "jnp.where(c, a, b)", ["jnp.where(c, b, a)"]),
        ("arguments_swapped", "f(a, b, b)", ["f(b, a, b)"]),
        ("arguments_swapped", "min(a, b)", []),
        ("keyword_dropped", "f(a, axis=1, dtype=d)", ["f(a, dtype=d)", "f(a, axis=1)"]),
        ("bound_dropped", "a[b:c]", ["a[:c]", "a[b:]"]),
        ("statement_removed", "self.a = b", ["pass"]),
        ("statement_removed", "raise a", ["pass"]),
        ("loop_left", "for a in b: break", ["for a in b:\n    continue"]),
        ("return_changed", "def f(): return a", ["def f():\n    return None"]),
        ("return_changed", "def f(): return a < b", ["def f():\n    return not a < b"]),
        ("handler_dropped", "try: f()\nexcept KeyError: g()", ["try:\n    f()\nexcept KeyError:\n    raise"]),
    ],
)
def test_mutator_makes_these_changes_and_no_other(tmp_path, mutator, source, changed):
    (tmp_path / "m.py").write_text(source)
    mutants = [mutant for mutant in find_mutants(tmp_path, "m.py") if f"::{mutator}#" in mutant.node]
    assert [ast.unparse(mutated_tree(tmp_path, mutant)) for mutant in mutants] == changed


def test_every_mutator_is_shown_above():
    (marks,) = [m for m in test_mutator_makes_these_changes_and_no_other.pytestmark if m.name == "parametrize"]
    assert {row[0] for row in marks.args[1]} == set(MUTATORS)


@pytest.mark.parametrize(
    "source",
    [
        '"""Says 3 < 4."""',
        "import a",
        "if TYPE_CHECKING:\n    a = 3",
        "__all__ = ['a', *f(3)]",
        "class A:\n    __slots__ = f('a', 3)",
        "class A:\n    def __repr__(self):\n        return f(3)",
        "def f(a: Literal[3]) -> Literal[4]: ...",
        "def _refusal(a) -> ValueError:\n    return ValueError(a + 1)",
        "a = f'{b + 1}'",
        "@dataclass(frozen=True)\nclass A: ...",
        "Either = A | B",
        "a = zip(b, strict=True)",
    ],
)
def test_what_is_for_readers_or_tells_of_faults_elsewhere_is_left_alone(tmp_path, source):
    assert mutants_of(tmp_path, source) == {}


def test_raise_is_removed_and_its_text_left_alone(tmp_path):
    assert mutants_of(tmp_path, "raise ValueError(a + 1)") == {
        "<module>::statement_removed#1": "-raise ValueError(a + 1)\n+pass"
    }


def test_names_are_qualified_and_stay_when_other_code_is_edited(tmp_path):
    method = "class A:\n    def m(self, a):\n        return a + 1\n"
    constant = "LIMIT = 3\n"
    before = mutants_of(tmp_path, constant + method)
    after = mutants_of(tmp_path, "def other(a):\n    return a + 1\n" + method + "# a remark\n" + constant)
    assert {"LIMIT::number_changed#1", "A.m::operator_changed#1", "A.m::return_changed#1"} <= set(before)
    assert {node: after[node] for node in before} == before
    assert all(node.startswith("other::") for node in set(after) - set(before))


def test_mutated_tree_of_no_mutant_is_refused(tmp_path):
    (tmp_path / "m.py").write_text("a = 3")
    with pytest.raises(LookupError, match="m.py has no mutant f::number_changed#1"):
        mutated_tree(tmp_path, Mutant("m.py", "f::number_changed#1", 1, ""))


def test_draw_takes_two_of_each_module_at_least_and_depends_on_names_alone():
    many = [Mutant("many.py", f"f::number_changed#{i}", i, "") for i in range(200)]
    few = [Mutant(f"few{i}.py", f"f::number_changed#{j}", j, "") for i in range(10) for j in range(3)]
    drawn = draw([*many, *few], 60, seed=0)
    assert len(drawn) == len(set(drawn)) == 60
    assert all(sum(mutant.file == f"few{i}.py" for mutant in drawn) >= 2 for i in range(10))
    moved = [Mutant(mutant.file, mutant.node, mutant.line + 7, mutant.diff) for mutant in reversed([*many, *few])]
    assert [mutant.name for mutant in draw(moved, 60, seed=0)] == [mutant.name for mutant in drawn]
    assert draw([*many, *few], 60, seed=1) != drawn


def test_accepted_pattern_covers_what_it_matches_in_its_file_alone():
    entry = Accepted(Kind.EQUIVALENT, "m.py", "TILES[0]::*", "only the speed depends on it")
    assert entry.covers(Mutant("m.py", "TILES[0]::number_changed#1", 1, ""))
    assert not entry.covers(Mutant("m.py", "TILES0::number_changed#1", 1, ""))
    assert not entry.covers(Mutant("n.py", "TILES[0]::number_changed#1", 1, ""))
