"""What runs in a forked child: pytest in its own process, over modules whose syntax tree is changed at import.

The parent has imported what others wrote and nothing of the project, so that each child imports the project anew.
"""

import ast
import dataclasses
import importlib.abc
import importlib.machinery
import importlib.util
import os
import resource
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import hypothesis
import pytest

# Only what the project says about its tests and not how it runs them: no workers, nothing kept between runs.
PYTEST = ["-q", "-o", "addopts=", "--strict-markers", "--import-mode=importlib", "-p", "no:cacheprovider"]
PYTEST += ["-p", "no:faulthandler", "--tb=short"]
NOT_RUN = "not slow and not aot and not gpu"
# How many times its own CPU time a test may take on a mutant, which may have to be compiled.
FACTOR = 5.0
UNKNOWN = 60.0  # CPU seconds of a test that has not been measured
# Bytes that a child may ask for: a mutant that asks for all there is gets a MemoryError, and others live on.
MEMORY = 8 << 30
# Wall seconds a CPU second, on a machine that has other work: only a child that waits for ever comes near.
WALL = 6.0


Hits = dict[str, set[int]]  # first lines of the statements that ran, by file


@dataclasses.dataclass
class Measured:
    """One test on the source as it is.

    Attributes:
        seconds: CPU time, fixtures and child processes included.
        hits: What it ran.
    """

    seconds: float = 0.0
    hits: Hits = dataclasses.field(default_factory=dict)


@dataclasses.dataclass
class Record:
    """The tests of one file on the source as it is.

    Attributes:
        tests: By node id, in the order in which they ran.
        shared: What ran while modules were imported, and in fixtures that several tests share.
        failure: What went wrong, if something did.
    """

    tests: dict[str, Measured] = dataclasses.field(default_factory=dict)
    shared: Hits = dataclasses.field(default_factory=dict)
    failure: str | None = None


def measure(root: Path, files: list[str], test_file: str, grace: float) -> Record:
    """Runs a test file over instrumented sources: how long each test takes, and which statements it runs."""
    record = Record()
    recorder = _Recorder(record, grace)

    def instrumented(file: str) -> tuple[ast.Module, dict[str, object]]:
        tree = Instrument().visit(ast.parse((root / file).read_text()))
        return ast.fix_missing_locations(tree), {
            "__hit__": lambda line: recorder.hits.setdefault(file, set()).add(line)
        }

    _import_through(root, dict.fromkeys(files, instrumented))
    code = _run_pytest(root, [test_file], recorder, grace)
    if code not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
        record.failure = record.failure or f"pytest ended with {code}"
    return record


def judge(root: Path, trees: dict[str, ast.Module], tests: dict[str, float], grace: float) -> tuple[str, str] | None:
    """Runs tests over changed modules until one fails.

    Args:
        trees: The changed modules, by file.
        tests: Node ids in the order in which to run them, and the CPU seconds of each on the source as it is.
        grace: CPU seconds that may pass beside the tests' own.

    Returns:
        The test that failed and its error; None where all pass.
    """
    _import_through(root, {file: lambda _, tree=tree: (tree, {}) for file, tree in trees.items()})
    chosen = _Chosen(tests, grace)
    code = _run_pytest(root, ["-x", *dict.fromkeys(test.split("::")[0] for test in tests)], chosen, grace)
    if code == pytest.ExitCode.OK:
        return None
    return chosen.failure or ("pytest", f"ended with {code}")


class Instrument(ast.NodeTransformer):
    """Puts `__hit__(line)` before each statement."""

    def generic_visit(self, node: ast.AST) -> ast.AST:
        super().generic_visit(node)
        for field in ("body", "orelse", "finalbody"):
            block = getattr(node, field, None)
            if isinstance(block, list):
                setattr(node, field, [new for statement in block for new in self._with_hit(statement)])
        return node

    @staticmethod
    def _with_hit(statement: ast.stmt) -> Iterator[ast.stmt]:
        is_text = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
        if not is_text and not (isinstance(statement, ast.ImportFrom) and statement.module == "__future__"):
            call = ast.Call(ast.Name("__hit__", ast.Load()), [ast.Constant(statement.lineno)], [])
            yield ast.copy_location(ast.Expr(call), statement)
        yield statement


def _import_through(root: Path, sources: dict[str, Callable[[str], tuple[ast.Module, dict[str, object]]]]) -> None:
    """Makes Python compile these files from the trees that the functions make, with some more names in each module."""

    class Loader(importlib.machinery.SourceFileLoader):
        def exec_module(self, module):
            file = str(Path(self.path).relative_to(root))
            tree, names = sources[file](file)
            vars(module).update(names)
            exec(compile(tree, self.path, "exec"), vars(module))

    class Finder(importlib.abc.MetaPathFinder):
        def find_spec(self, name, path, target=None):
            stem = root.joinpath(*name.split("."))
            for candidate in (stem.with_suffix(".py"), stem / "__init__.py"):
                if str(candidate.relative_to(root)) in sources:
                    loader = Loader(name, str(candidate))
                    return importlib.util.spec_from_file_location(name, candidate, loader=loader)
            return None

    sys.meta_path.insert(0, Finder())


def _run_pytest(root: Path, arguments: list[str], plugin: object, grace: float) -> int:
    _set_limit(grace)
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
    os.chdir(root)
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    config = ["-c", str(root / "pyproject.toml"), "--rootdir", str(root), "-m", NOT_RUN]
    return pytest.main([*PYTEST, *config, *arguments], plugins=[_FewExamples(), plugin])


def _set_limit(seconds: float) -> None:
    """Ends this process by a signal after so much CPU time (`SIGPROF`), or if it waits for ever (`SIGALRM`)."""
    for number, timer, limit in (
        (signal.SIGPROF, signal.ITIMER_PROF, seconds),
        (signal.SIGALRM, signal.ITIMER_REAL, WALL * seconds),
    ):
        signal.signal(number, signal.SIG_DFL)
        signal.setitimer(timer, limit)


class _FewExamples:
    """The same few examples in each child, and none to explain a failure."""

    @pytest.hookimpl(trylast=True)
    def pytest_configure(self):
        phases = [hypothesis.Phase.explicit, hypothesis.Phase.generate]
        hypothesis.settings.register_profile(
            "mutation", deadline=None, derandomize=True, database=None, max_examples=20, phases=phases
        )
        hypothesis.settings.load_profile("mutation")


class _Recorder:
    """Notes in a record what pytest runs."""

    def __init__(self, record: Record, grace: float):
        self.record = record
        self.grace = grace
        self.hits = record.shared

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item):
        _set_limit(self.grace + UNKNOWN)
        measured = self.record.tests[item.nodeid] = Measured()
        self.hits, start = measured.hits, sum(os.times()[:4])
        try:
            return (yield)
        finally:
            self.hits, measured.seconds = self.record.shared, sum(os.times()[:4]) - start

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef):
        before = self.hits
        if fixturedef.scope != "function":
            self.hits = self.record.shared
        try:
            return (yield)
        finally:
            self.hits = before

    def pytest_runtest_logreport(self, report):
        if report.failed:
            self.record.failure = f"{report.nodeid}: {_message(report)}"

    pytest_collectreport = pytest_runtest_logreport


class _Chosen:
    """Runs the chosen tests in their order, each under its limit of time, and keeps the first failure."""

    def __init__(self, tests: dict[str, float], grace: float):
        self.tests = tests
        self.grace = grace
        self.failure: tuple[str, str] | None = None

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items):
        place = {test: i for i, test in enumerate(self.tests)}
        # A mutant can give tests other names, by other parameters: then all of these files count.
        items[:] = sorted((i for i in items if i.nodeid in place), key=lambda i: place[i.nodeid]) or items

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item):
        _set_limit(self.grace + FACTOR * self.tests.get(item.nodeid, UNKNOWN))
        return (yield)

    def pytest_runtest_logreport(self, report):
        if report.failed and self.failure is None:
            self.failure = (report.nodeid, _message(report))

    pytest_collectreport = pytest_runtest_logreport


def _message(report) -> str:
    """The line that says what went wrong, or the last one of the report."""
    crash = getattr(report.longrepr, "reprcrash", None)
    text = crash.message if crash is not None else str(report.longrepr)
    lines = [line for line in text.splitlines() if line.strip()] or [""]
    return (lines[0] if crash is not None else lines[-1])[:200]
