"""One run: the tests on the source as it is, each mutant in a child, the killers once more on the source as it is."""

import ast
import collections
import dataclasses
import enum
import functools
import gc
import importlib
import math
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.mutation.accepted import Accepted
from tests.mutation.child import Record, judge, measure
from tests.mutation.mutants import Mutant, mutated_tree
from tests.mutation.pool import Ended, run_children
from tests.mutation.project import Project


class BaselineError(Exception):
    """A test fails on the source as it is, so that its failure on a mutant would prove nothing."""


class Verdict(enum.StrEnum):
    """What the tests said about a mutant. All but the last two are kills."""

    KILLED = "killed"
    TIMED_OUT = "timed out"
    CRASHED = "crashed"
    SURVIVED = "survived"
    UNREACHED = "unreached"

    @property
    def is_kill(self) -> bool:
        return self in (Verdict.KILLED, Verdict.TIMED_OUT, Verdict.CRASHED)


@dataclasses.dataclass(frozen=True)
class Result:
    """The verdict on a mutant.

    Attributes:
        killer: Node id of the test that failed; empty where none did.
        message: Its error, in one line.
        num_tests: How many tests were to be run.
        seconds: Wall time, from the fork to the end of the child.
    """

    mutant: Mutant
    verdict: Verdict
    killer: str = ""
    message: str = ""
    num_tests: int = 0
    seconds: float = 0.0


@dataclasses.dataclass
class Run:
    """A project's tests, measured, with which mutants can be judged.

    Args:
        jobs: Children at a time.
        budget: Seconds of tests, as measured, that an accepted survivor must survive. Those that would go beyond are
            left out. Other mutants get all tests that reach them: no verdict hangs on how fast the machine is.
        directory: Scratch space, with JAX's compilation cache.
        accepted: The survivors that are accepted.
    """

    project: Project
    jobs: int
    budget: float
    directory: Path
    accepted: list[Accepted] = dataclasses.field(default_factory=list)
    records: dict[str, Record] = dataclasses.field(default_factory=dict)

    def test_files(self, modules: list[str]) -> list[str]:
        """Lists all that may kill mutants of these modules."""
        return list(dict.fromkeys(test for module in modules for test in self.project.killers(module)))

    def measure(self, modules: list[str]) -> Iterator[str]:
        """Runs the tests on the source as it is; yields each test file when it is done.

        Raises:
            BaselineError: A test failed.
        """
        tasks = [(file, functools.partial(self._measure, modules, file)) for file in self.test_files(modules)]
        for file, ended in run_children(tasks, self.jobs, self.directory):
            record = ended.value
            if not isinstance(record, Record) or record.failure is not None:
                raise BaselineError(f"{file} fails without any mutant: {_why(ended)}")
            self.records[file] = record
            self._share_compiled(file)
            yield file

    def judge(self, mutants: list[Mutant]) -> Iterator[Result]:
        """Runs the tests that reach each mutant, and yields the verdicts as they come.

        Raises:
            BaselineError: A test that killed mutants fails on the source as it is, now that programs are compiled.
        """
        killers: dict[str, dict[str, float]] = collections.defaultdict(dict)
        chosen = {mutant: self.tests_for(mutant) for mutant in mutants}
        tasks = [(m, functools.partial(self._judge, m, tests)) for m, tests in chosen.items() if tests]
        yield from (Result(mutant, Verdict.UNREACHED) for mutant, tests in chosen.items() if not tests)
        for mutant, ended in run_children(tasks, self.jobs, self.directory):
            result = _verdict(mutant, ended, len(chosen[mutant]))
            if result.killer in chosen[mutant]:
                package = self.project.package_of(mutant.file)
                killers[package][result.killer] = chosen[mutant][result.killer]
            yield result
        self._check_once_more(killers)

    def tests_for(self, mutant: Mutant) -> dict[str, float]:
        """Chooses the tests to run, in their order, each with its seconds on the source as it is.

        A test counts if it runs the mutated statement. If the statement runs while modules are imported, or in a
        fixture that tests share, all tests that run anything of the module count. Where the module imports JAX, a test
        that did not trace it may have used what another test of its file had compiled: they count too, but last.
        """
        is_traced = _imports_jax(self.project.root / mutant.file)
        ranked: list[tuple[bool, bool, float, str]] = []
        for file in self.project.killers(mutant.file):
            record, is_far = self.records[file], not self.project.mirrors(file, mutant.file)
            is_shared = mutant.line in record.shared.get(mutant.file, ())
            hit = {
                test
                for test, measured in record.tests.items()
                if mutant.file in measured.hits and (is_shared or mutant.line in measured.hits[mutant.file])
            }
            for test, measured in record.tests.items():
                if test in hit or (hit and is_traced):
                    ranked.append((test not in hit, is_far, measured.seconds, test))
        budget = self.budget if any(entry.covers(mutant) for entry in self.accepted) else math.inf
        chosen, total = {}, 0.0
        for _, _, seconds, test in sorted(ranked):
            if not chosen or total + seconds <= budget:
                chosen[test] = seconds
                total += seconds
        return chosen

    def _measure(self, modules: list[str], file: str) -> Record:
        own = self._compiled_by(file)
        own.mkdir(parents=True)
        for path in self._compiled.glob("*"):
            (own / path.name).hardlink_to(path)
        _use_compiled(own, may_add=True)
        return measure(self.project.root, modules, file, self.project.grace)

    def _judge(self, mutant: Mutant, tests: dict[str, float]) -> tuple[str, str] | None:
        _use_compiled(self._compiled, may_add=False)
        tree = mutated_tree(self.project.root, mutant)
        return judge(self.project.root, {mutant.file: tree}, tests, self.project.grace)

    def _check_once_more(self, killers: dict[str, dict[str, float]]) -> None:
        """What fails now has killed nothing: it fails where programs come from the cache, or now and then."""

        def all_pass(tests: dict[str, float]) -> tuple[str, str] | None:
            _use_compiled(self._compiled, may_add=False)
            return judge(self.project.root, {}, tests, self.project.grace)

        tasks = [(package, functools.partial(all_pass, tests)) for package, tests in killers.items()]
        for package, ended in run_children(tasks, self.jobs, self.directory):
            if ended.signal is not None or ended.value is not None:
                raise BaselineError(f"Tests that killed mutants of {package} fail without one: {_why(ended)}")

    @property
    def _compiled(self) -> Path:
        """JAX's compilation cache of the whole run."""
        return self.directory / "compiled"

    def _compiled_by(self, test_file: str) -> Path:
        """The cache of a test file that is measured, with links to what is there. None may read what another adds."""
        return self.directory / "compiled by" / test_file

    def _share_compiled(self, test_file: str) -> None:
        self._compiled.mkdir(exist_ok=True)
        for path in self._compiled_by(test_file).glob("*"):
            path.replace(self._compiled / path.name)


def preload(project: Project) -> None:
    """Imports once, before any child, what tests and sources need of others."""
    for name in project.preload:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # a child's collector would copy the pages of all that was imported


def _use_compiled(directory: Path, *, may_add: bool) -> None:
    """Makes JAX compile fast, and spares this process what was compiled before."""
    if "jax" in sys.modules:
        config = sys.modules["jax"].config
        config.update("jax_disable_most_optimizations", True)  # most of a test of ours would be LLVM
        config.update("jax_compilation_cache_dir", str(directory))
        config.update("jax_persistent_cache_min_entry_size_bytes", -1)
        config.update("jax_persistent_cache_min_compile_time_secs", 0.0 if may_add else math.inf)


@functools.cache
def _imports_jax(path: Path) -> bool:
    return any(
        name.split(".")[0] in ("jax", "flax")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in [getattr(node, "module", None) or "", *(alias.name for alias in node.names)]
    )


def _verdict(mutant: Mutant, ended: Ended, num_tests: int) -> Result:
    seconds = round(ended.seconds, 2)
    if ended.signal in (signal.SIGPROF, signal.SIGALRM):
        return Result(mutant, Verdict.TIMED_OUT, num_tests=num_tests, seconds=seconds)
    if ended.signal is not None:
        name = signal.Signals(ended.signal).name
        return Result(mutant, Verdict.CRASHED, message=name, num_tests=num_tests, seconds=seconds)
    if ended.value is None:
        return Result(mutant, Verdict.SURVIVED, num_tests=num_tests, seconds=seconds)
    killer, message = ended.value
    return Result(mutant, Verdict.KILLED, killer, message, num_tests, seconds)


def _why(ended: Ended) -> str:
    """Why a child on the source as it is did not do what it should."""
    if ended.signal is not None:
        what = f"it was ended by {signal.Signals(ended.signal).name}"
    else:
        what = ended.value.failure if isinstance(ended.value, Record) else ended.value
    return f"{what}\n{ended.output.read_text(errors='replace')[-2000:]}"
