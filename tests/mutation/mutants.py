"""All mutants of a module, each with a name that stays when other code is edited."""

import ast
import dataclasses
import difflib
import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

from tests.mutation.mutators import FUNCTIONS, MUTATORS

# Values of these names, methods of these names: they say how something prints, or what a module shows.
NOT_MUTATED = {"__all__", "__slots__", "__repr__", "__str__"}


@dataclasses.dataclass(frozen=True)
class Mutant:
    """One change of one module.

    Attributes:
        file: The module, as a path from the root of the project.
        node: What is changed: qualified name of the function, class or module-level name, mutator, and how many
            mutants of that mutator stand before this one there. It holds no line number, so that an edit anywhere else
            leaves it as it is.
        line: First line of the innermost statement that is changed, in today's source.
        diff: The lines of the statement that change, before and after, as Python would format them.
    """

    file: str
    node: str
    line: int
    diff: str

    @property
    def name(self) -> str:
        return f"{self.file}::{self.node}"


@dataclasses.dataclass(frozen=True)
class _Place:
    """Where the walk is: qualified name, innermost statement, and how to put another node there."""

    owner: str
    statement: ast.stmt
    parent: ast.AST
    field: str
    index: int | None

    def put(self, node: ast.AST) -> None:
        if self.index is None:
            setattr(self.parent, self.field, node)
        else:
            getattr(self.parent, self.field)[self.index] = node


def find_mutants(root: Path, file: str) -> list[Mutant]:
    """Lists all mutants of a file, in the order of its text."""
    tree = ast.parse((root / file).read_text())
    found = []
    for node, place, original, replacement in _changes(tree):
        before = ast.unparse(place.statement)
        place.put(replacement)
        after = ast.unparse(replacement if original is place.statement else place.statement)
        place.put(original)
        diff = [*difflib.unified_diff(before.splitlines(), after.splitlines(), lineterm="", n=0)]
        changed = [line for line in diff[2:] if not line.startswith("@@")]
        found.append(Mutant(file, node, place.statement.lineno, "\n".join(changed)))
    return found


def mutated_tree(root: Path, mutant: Mutant) -> ast.Module:
    """Parses a mutant's file and applies the mutant.

    Raises:
        LookupError: The file has no such mutant.
    """
    tree = ast.parse((root / mutant.file).read_text())
    for node, place, _, replacement in _changes(tree):
        if node == mutant.node:
            place.put(replacement)
            return ast.fix_missing_locations(tree)
    raise LookupError(f"{mutant.file} has no mutant {mutant.node}.")


def draw(mutants: Iterable[Mutant], count: int, seed: int) -> list[Mutant]:
    """Draws `count` mutants: two of each module, so that none goes untested, and the rest from all alike.

    A mutant's place in the queue is a hash of its name and the seed, so that an edit of one function changes which of
    its own mutants are drawn and hardly which of the others.
    """

    def place(mutant: Mutant) -> bytes:
        return hashlib.sha256(f"{seed} {mutant.name}".encode()).digest()

    first, rest, seen = [], [], Counter()
    for mutant in sorted(mutants, key=place):
        (first if seen[mutant.file] < 2 else rest).append(mutant)
        seen[mutant.file] += 1
    return sorted([*first, *rest][:count], key=lambda mutant: mutant.name)


def _changes(tree: ast.Module) -> Iterator[tuple[str, _Place, ast.AST, ast.AST]]:
    """Yields (node of the mutant, place, what is there, what could be there) for each mutant of a module."""
    seen: Counter[str] = Counter()
    for node, place in _walk(tree):
        for name, mutator in MUTATORS.items():
            for replacement in mutator(node):
                key = f"{place.owner}::{name}"
                seen[key] += 1
                yield f"{key}#{seen[key]}", place, node, replacement


def _walk(tree: ast.Module) -> Iterator[tuple[ast.AST, _Place]]:
    """Yields each node that may be mutated, from the top of the file to its end."""

    def children(parent: ast.AST, owner: str, statement: ast.stmt | None) -> Iterator[tuple[ast.AST, _Place]]:
        for field, value in ast.iter_fields(parent):
            for index, child in enumerate(value) if isinstance(value, list) else [(None, value)]:
                if not isinstance(child, ast.AST) or _is_left_alone(parent, field, child):
                    continue
                within = child if isinstance(child, ast.stmt) else statement
                name = _name(child, owner, at_top=isinstance(parent, ast.Module | ast.ClassDef))
                yield child, _Place(name, within, parent, field, index)
                if not isinstance(child, ast.Raise):  # the rest of it is an error's text
                    yield from children(child, name, within)

    yield from children(tree, "", None)


def _name(node: ast.AST, owner: str, at_top: bool) -> str:
    """The qualified name of a definition, and of an assignment outside of functions; else that of what is around."""
    if isinstance(node, (*FUNCTIONS, ast.ClassDef)):
        return f"{owner}.{node.name}" if owner else node.name
    if at_top and isinstance(node, ast.Assign | ast.AnnAssign):
        target = node.targets[0] if isinstance(node, ast.Assign) else node.target
        return f"{owner}.{ast.unparse(target)}" if owner else ast.unparse(target)
    return owner or "<module>"


def _is_left_alone(parent: ast.AST, field: str, node: ast.AST) -> bool:
    """Whether what a node says is for readers and type checkers alone, and no test could or should see it."""
    if field in ("annotation", "returns", "type_params", "bases", "format_spec"):
        return True
    if isinstance(node, ast.JoinedStr | ast.Import | ast.ImportFrom):  # formatted text is for people
        return True
    if field == "decorator_list" and "dataclass" in ast.unparse(node):  # how an object is stored and printed
        return True
    if field == "keywords" and node.arg == "strict":  # of `zip`: it would tell of a fault elsewhere
        return True
    if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
        return True
    if isinstance(node, FUNCTIONS):
        makes_an_error = node.returns is not None and ast.unparse(node.returns).strip("'\"").endswith("Error")
        return node.name in NOT_MUTATED or makes_an_error
    if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id in NOT_MUTATED for t in node.targets):
        return True
    if isinstance(parent, ast.Module) and isinstance(node, ast.Assign) and isinstance(node.value, ast.BinOp):
        return isinstance(node.value.op, ast.BitOr)  # a union of types
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)  # a docstring
