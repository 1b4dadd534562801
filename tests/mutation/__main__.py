"""The command: `python -m tests.mutation --help`."""

import argparse
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path

# Before libraries are imported: no GPU is looked for, and only one thread is there when children are forked.
os.environ.update(JAX_PLATFORMS="cpu", OPENBLAS_NUM_THREADS="1", OMP_NUM_THREADS="1")

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from tests.mutation.accepted import read_accepted
from tests.mutation.mutants import Mutant, draw, find_mutants
from tests.mutation.project import JAXPAGED, Project
from tests.mutation.report import Report
from tests.mutation.run import BaselineError, Result, Run, preload


def main(arguments: Sequence[str] | None = None, project: Project = JAXPAGED) -> int:
    """Judges mutants and prints what was found.

    Returns:
        0; 1 if a mutant survived that is not accepted; 2 if there is no mutant, or a test fails without any.
    """
    options = _parse(arguments, project)
    console = Console(highlight=False, soft_wrap=True, width=None if sys.stdout.isatty() else 120)
    start = time.monotonic()
    files = [file for package in options.package or project.packages for file in project.modules(package)]
    files = [file for file in files if not options.module or file.endswith(tuple(options.module))]
    everything = [mutant for file in files for mutant in find_mutants(project.root, file)]
    mutants = [m for m in everything if not options.node or any(fnmatchcase(m.node, n) for n in options.node)]
    if options.count is not None:
        mutants = draw(mutants, options.count, options.seed)
    if not mutants:
        console.print("There is nothing to mutate.")
        return 2
    accepted = read_accepted(options.accepted)
    preload(project)
    try:
        with tempfile.TemporaryDirectory(prefix="mutation-") as directory:
            run = Run(project, options.jobs, options.budget, Path(directory), accepted)
            results = _judge(run, mutants, console)
    except BaselineError as error:
        console.print(f"[red]{escape(str(error))}[/]")
        return 2
    seconds = round(time.monotonic() - start, 1)
    report = Report(project, everything, results, accepted, seconds)
    report.print(console)
    if options.json:
        options.json.write_text(json.dumps(report.as_json(), indent=1) + "\n")
    return 1 if report.not_accepted else 0


def _parse(arguments: Sequence[str] | None, project: Project) -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m tests.mutation", description="Is each wrong program noticed?")
    parser.add_argument("--package", action="append", choices=project.packages, help="only this one; may be repeated")
    parser.add_argument("--module", action="append", help="only files that end so, as pool.py; may be repeated")
    parser.add_argument("--node", action="append", help="only these, as the report names them; `*` is anything")
    parser.add_argument("--count", type=int, help="draw so many mutants; all are judged without it")
    parser.add_argument("--seed", type=int, default=0, help="which are drawn")
    parser.add_argument("--jobs", type=int, default=2, help="children at a time, a core each")
    parser.add_argument("--budget", type=float, default=8.0, help="CPU seconds of tests for one on the list")
    parser.add_argument("--json", type=Path, help="write all verdicts to this file")
    parser.add_argument("--accepted", type=Path, default=Path(__file__).with_name("survivors.toml"))
    return parser.parse_args(arguments)


def _judge(run: Run, mutants: list[Mutant], console: Console) -> list[Result]:
    """Measures the tests and judges the mutants, with a bar on a terminal."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    # Refreshed by hand: a thread that does it would be there when children are forked.
    with Progress(*columns, console=console, auto_refresh=False, disable=not console.is_terminal) as progress:
        modules = list(dict.fromkeys(mutant.file for mutant in mutants))
        bar = progress.add_task("tests on the source as it is", total=len(run.test_files(modules)))
        for _ in run.measure(modules):
            _advance(progress, bar)
        bar, results = progress.add_task("mutants", total=len(mutants)), []
        for result in run.judge(mutants):
            results.append(result)
            _advance(progress, bar)
    return results


def _advance(progress: Progress, bar: TaskID) -> None:
    progress.advance(bar)
    progress.refresh()


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # by way of what ends children and removes files
    sys.exit(main())
