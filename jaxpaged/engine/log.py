"""The log of an engine: all that reaches its core from outside, in order, and what each step made of it.

The core is a function of the entries, so a log can be run again: `replay`. A file is JSON, a line each: first how the
engine was made, then entries and steps as they came.
"""

import dataclasses
import json
import os
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol

from jaxpaged.engine.beam_scores import BeamParams
from jaxpaged.engine.outside import Outcome
from jaxpaged.engine.sampling.params import SamplingParams

VERSION = 1


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Add:
    """Queue a prompt, once for each of its samples. All arguments have been checked."""

    request_ids: tuple[int, ...]
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    priority: int = 0
    deadline: float | None = None
    cache_salt: str | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AddBeams:
    """Queue a beam search. Its beams get ids of their own from `request_id` on."""

    request_id: int
    prompt_token_ids: tuple[int, ...]
    params: BeamParams


@dataclasses.dataclass(frozen=True, slots=True)
class Abort:
    """End a request or a beam search, wherever it is; one that has ended, or never was, is left alone."""

    request_id: int


@dataclasses.dataclass(frozen=True, slots=True)
class Reset:
    """End all requests and forget all cached prefixes."""


@dataclasses.dataclass(frozen=True, slots=True)
class Now:
    """The time, by the clock of the deadlines, in seconds."""

    time: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WarmUp:
    """Compile programs: see `Engine.warmup`."""

    params: tuple[SamplingParams, ...] = ()
    greedy: bool = True


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LoadPrefixes:
    """Load prefixes that were saved: see `jaxpaged.paging.load_prefix_cache`."""

    path: str
    model: str


Entry = Add | AddBeams | Abort | Reset | Now | WarmUp | LoadPrefixes
_ENTRIES = {kind.__name__: kind for kind in (Add, AddBeams, Abort, Reset, Now, WarmUp, LoadPrefixes)}


class StepRecord(NamedTuple):
    """What a step did.

    Attributes:
        plan: Digest of the plan that it started; None where it started none.
        token_ids: What the step before sampled, row by row; None where none was read.
        errors: What went wrong, in words.
        outcomes: What the swap space answered: see `jaxpaged.engine.outside`.
    """

    plan: str | None = None
    token_ids: list[int] | None = None
    errors: tuple[str, ...] = ()
    outcomes: dict[int, Outcome] = {}  # noqa: RUF012 never changed


class Recorder:
    """Writes a log.

    Args:
        path: Of the file; one that is there is replaced.
        header: How the engine was made.
    """

    def __init__(self, path: str | os.PathLike[str], header: dict[str, Any]):
        self._file = open(path, "w", encoding="utf-8")  # noqa: SIM115 closed by `close`
        self._write({"jaxpaged_log": VERSION, **header})

    def entry(self, entry: Entry) -> None:
        """Write an entry, before the core takes it."""
        fields = {field.name: getattr(entry, field.name) for field in dataclasses.fields(entry)}
        self._write({"entry": type(entry).__name__, **fields})

    def step(self, record: StepRecord) -> None:
        """Write what a step did, after it."""
        self._write({"step": record._asdict()})

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _write(self, line: dict[str, Any]) -> None:
        self._file.write(json.dumps(line, default=_plain) + "\n")
        self._file.flush()


def read_log(path: str | os.PathLike[str]) -> tuple[dict[str, Any], Iterator[Entry | StepRecord]]:
    """Return the header of a log, and its entries and steps.

    Raises:
        ValueError: The file is no log, or of another version; or, while it is read, a line is none.
    """
    with open(path, encoding="utf-8") as file:
        lines = file.read().splitlines()
    header = _parsed(lines[0], 1) if lines else {}
    if header.get("jaxpaged_log") != VERSION:
        raise ValueError(f"`path` must be a log of version {VERSION}, as `Engine.record` writes it; got {path!s}.")
    return header, (_item(_parsed(line, number), number) for number, line in enumerate(lines[1:], 2))


class _Core(Protocol):
    recorder: Callable[[StepRecord], None] | None

    def apply(self, entry: Entry) -> None: ...
    def step(self) -> Any: ...
    def expect(self, outcomes: dict[int, Outcome]) -> None: ...


class Difference(NamedTuple):
    """The first step of a replay that is not as it was recorded: its number from 0, what was, and what is."""

    step: int
    recorded: StepRecord
    replayed: StepRecord


def replay(core: _Core, items: Iterator[Entry | StepRecord]) -> tuple[int, Difference | None]:
    """Run a log again.

    Args:
        core: A new one, made as the recorded one was.
        items: Of `read_log`.

    Returns:
        How many steps were equal, and the first that is not, if there is one; the rest is not run.
    """
    steps: list[StepRecord] = []
    core.recorder = steps.append
    for item in items:
        if not isinstance(item, StepRecord):
            core.apply(item)
            continue
        core.expect(item.outcomes)
        core.step()
        if steps[-1] != item:
            return len(steps) - 1, Difference(len(steps) - 1, item, steps[-1])
    return len(steps), None


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    return value.item()  # a number of numpy


def _parsed(line: str, number: int) -> dict[str, Any]:
    try:
        return json.loads(line)
    except ValueError as error:
        raise ValueError(f"line {number} of the log must be JSON; got {line[:40]!r}. Was it cut off?") from error


def _item(line: dict[str, Any], number: int) -> Entry | StepRecord:
    if "step" in line:
        step = line["step"]
        outcomes = {int(call): outcome for call, outcome in step["outcomes"].items()}
        return StepRecord(step["plan"], step["token_ids"], tuple(step["errors"]), outcomes)
    kind = _ENTRIES.get(line.pop("entry", ""))
    if kind is None:
        raise ValueError(f"line {number} of the log must be a step or an entry ({', '.join(_ENTRIES)}); got another.")
    if kind is WarmUp:
        line["params"] = tuple(SamplingParams(**params) for params in line["params"])
    elif "params" in line:
        params: dict[str, Any] = line["params"]
        line["params"] = SamplingParams(**params) if kind is Add else _beam_params(params)
    fields: dict[str, Any] = {name: tuple(x) if isinstance(x, list) else x for name, x in line.items()}
    return kind(**fields)


def _beam_params(fields: dict[str, Any]) -> BeamParams:
    fields["stop_token_ids"] = tuple(fields["stop_token_ids"])
    return BeamParams(**fields)
