"""The survivors that are accepted: `survivors.toml`, which says of each why no test notices it."""

import dataclasses
import enum
import fnmatch
import tomllib
from pathlib import Path

from tests.mutation.mutants import Mutant


class Kind(enum.StrEnum):
    """Why a mutant may survive, and whether that counts against the kill rate."""

    EQUIVALENT = "equivalent"  # nothing changes that the package promises: no test could notice. Not counted.
    UNSEEN = "unseen"  # a behaviour that no test sees so far. Counted.


@dataclasses.dataclass(frozen=True)
class Accepted:
    """An entry: mutants of one file whose nodes match a pattern, and the reason.

    Attributes:
        node: A node as the report prints it; `*` stands for anything, as in `TILES::*`.
    """

    kind: Kind
    file: str
    node: str
    reason: str

    def covers(self, mutant: Mutant) -> bool:
        """Tells whether a mutant is one of these."""
        return mutant.file == self.file and fnmatch.fnmatchcase(mutant.node, self.node.replace("[", "[[]"))


def read_accepted(path: Path) -> list[Accepted]:
    """Reads the entries.

    Raises:
        ValueError: A table of the file is none of the kinds.
        TypeError: An entry has other fields than `file`, `node` and `reason`.
    """
    tables = tomllib.loads(path.read_text())
    return [Accepted(Kind(kind), **entry) for kind, entries in tables.items() for entry in entries]
