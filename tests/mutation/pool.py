"""Functions in forked children, so many at a time; a child may end in any way at all."""

import contextlib
import dataclasses
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Hashable, Iterable, Iterator
from multiprocessing.connection import Connection, wait
from pathlib import Path

_FORK = multiprocessing.get_context("fork")


@dataclasses.dataclass(frozen=True)
class Ended:
    """How a child ended.

    Attributes:
        value: What its function returned; None if it did not.
        signal: The signal that ended it; None if it ended by itself.
        output: What it printed.
        seconds: Wall time from its fork to its end.
    """

    value: object
    signal: int | None
    output: Path
    seconds: float


def run_children(
    tasks: Iterable[tuple[Hashable, Callable[[], object]]], jobs: int, directory: Path
) -> Iterator[tuple[Hashable, Ended]]:
    """Runs each task in a child of its own, `jobs` of them at a time, and yields (key, how it ended) as they end.

    Children that are left when the caller stops, with all that they started, are killed.
    """
    tasks = iter(tasks)
    running: dict[Connection, tuple[Hashable, multiprocessing.process.BaseProcess, Path, float]] = {}
    count = 0
    try:
        while True:
            while len(running) < jobs and (task := next(tasks, None)) is not None:
                output = directory / f"output-{count}.txt"
                count += 1
                receiver, sender = _FORK.Pipe(duplex=False)
                process = _FORK.Process(target=_run, args=(task[1], sender, output))
                process.start()
                sender.close()
                running[receiver] = (task[0], process, output, time.monotonic())
            if not running:
                return
            for receiver in wait(list(running)):
                key, process, output, start = running[receiver]
                try:
                    value = receiver.recv()
                except EOFError:  # it was ended before it had an answer
                    value = None
                _end(process)
                del running[receiver]
                code = process.exitcode
                yield key, Ended(value, -code if code < 0 else None, output, time.monotonic() - start)
    finally:
        for _, process, _, _ in running.values():
            _end(process, at_once=True)


def _run(function: Callable[[], object], sender: Connection, output: Path) -> None:
    """The child: a session of its own, nothing to read, and an end that waits for no thread."""
    os.setsid()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    with output.open("wb") as file, open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sender.send(function())
    os._exit(0)


def _end(process: multiprocessing.process.BaseProcess, *, at_once: bool = False) -> None:
    """Waits for a child that has answered or died, and kills what it left behind."""
    if not at_once:
        process.join()
    with contextlib.suppress(ProcessLookupError):  # nothing was left
        os.killpg(process.pid, signal.SIGKILL)
    process.join()
