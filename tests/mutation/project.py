"""What is mutated, and which tests must notice."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path


@dataclasses.dataclass(frozen=True)
class Project:
    """A source tree and the test tree that mirrors it.

    Attributes:
        root: Where both lie; pytest runs here.
        source: Folder of the package whose parts are mutated.
        packages: The parts, which are folders of it.
        tests: Folder whose folders mirror those of `source`.
        preload: Modules to import before any child is forked: all that tests and sources need of others, so that no
            child has to. None of this project may be among them.
        grace: CPU seconds that a child may take beside the tests themselves, before its mutant has timed out.
        more_killers: For a module, test files outside of its package's folder that must notice its mutants too.
    """

    root: Path
    source: str
    packages: tuple[str, ...]
    tests: str = "tests"
    preload: tuple[str, ...] = ()
    grace: float = 10.0
    more_killers: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)

    def modules(self, package: str) -> list[str]:
        """Lists the files of a package, as paths from the root."""
        return sorted(str(path.relative_to(self.root)) for path in (self.root / self.source / package).rglob("*.py"))

    def package_of(self, file: str) -> str:
        """Tells which package a module is of."""
        return Path(file).relative_to(self.source).parts[0]

    def mirrors(self, test: str, module: str) -> bool:
        """Tells whether a test file is a module's own: `test_<module>*.py` in the folder that mirrors the module's."""
        path, test_path = Path(module).relative_to(self.source), Path(test).relative_to(self.tests)
        own = f"test_{path.stem}"
        return test_path.parent == path.parent and (test_path.stem == own or test_path.stem.startswith(f"{own}_"))

    def killers(self, module: str) -> list[str]:
        """Lists the test files that must notice a mutant of a module: the tests of its package, and some more."""
        folder = self.root / self.tests / self.package_of(module)
        found = sorted(str(path.relative_to(self.root)) for path in folder.rglob("test_*.py"))
        return [*found, *self.more_killers.get(module, ())]


JAXPAGED = Project(
    root=Path(__file__).parents[2],
    source="jaxpaged",
    packages=("ops", "paging", "engine", "cache"),
    # What models use of attention is called by the layers of `nn`.
    more_killers={"jaxpaged/ops/attention/api.py": ("tests/nn/test_linen.py", "tests/nn/test_nnx.py")},
    preload=(
        "chex",
        "flax.linen",
        "flax.nnx",
        "hypothesis.stateful",
        "hypothesis.strategies",
        "jax.experimental.pallas",
        "jax.experimental.pallas.triton",
        "jaxtyping",
        "matplotlib",
        "numpy.random",
        "scipy.special",
    ),
)
