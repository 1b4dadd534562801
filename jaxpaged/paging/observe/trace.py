"""Traces: what was asked of a `PageAllocator`, as lines of JSON, written from live use and replayed later.

    {"trace": 1, "num_pages": 64, "page_size": 16}
    {"verb": "add", "seq_id": "a", "token_ids": 40}
    {"verb": "append", "seq_id": "a", "num_tokens": 1}

The first line is the pool; each later one a verb with its arguments, by the names that they have in `PageAllocator`;
`prefix.pin` is the verb `pin` of its part `prefix`. A trace holds the tokens of prompts where a prefix cache compares
them. Sequence ids are numbers or strings. Only calls that succeeded are in a trace: a replay of a whole one fails
nowhere.
"""

import contextlib
import dataclasses
import functools
import inspect
import json
import operator
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from jaxpaged.paging.allocator import PageAllocator
from jaxpaged.paging.observe.trace_values import AskedHost, from_json, to_json
from jaxpaged.paging.pool import OutOfPagesError
from jaxpaged.paging.prefix_cache import PrefixCache

VERSION = 1
VERBS = {
    "add": ("seq_id", "token_ids"),
    "append": ("seq_id", "num_tokens"),
    "append_many": ("seq_ids", "num_tokens"),
    "commit": ("seq_id", "token_ids"),
    "advance": ("seq_id", "num_computed"),
    "fork": ("parent_id", "child_id"),
    "truncate": ("seq_id", "num_tokens"),
    "free": ("seq_id",),
    "reserve": ("seq_id", "num_tokens"),
    "swap_out": ("seq_id",),
    "swap_in": ("seq_id",),
    "invalidate": ("seq_id", "num_valid_tokens"),
    "prefix.pin": ("token_ids",),
    "prefix.unpin": ("token_ids",),
    "prefix.expire": ("now",),
    "prefix.reset": (),
    "prefix.forget": ("page_ids",),
    "prefix.adopt": ("pages",),
}
"""The verbs that change what an allocator decides, and their arguments."""

OPTIONAL = {
    "add": ("keys", "host", "chunk"),
    "append": ("num_computed",),
    "append_many": ("num_computed",),
    "prefix.pin": ("keys", "expires_at"),
    "prefix.unpin": ("keys",),
}
"""Further arguments, that a line may have."""

_POOL = ("num_pages", "page_size")
_OPTIONS = ("prefix_caching", "partial_hits", "max_pages_per_seq", "groups")


class TraceError(ValueError):
    """A trace cannot be read or replayed; the message names the line."""


class Step(NamedTuple):
    """One verb of a trace, with its arguments by name, and the number of its line."""

    line: int
    verb: str
    arguments: dict[str, Any]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """A pool and what was done to it.

    Attributes:
        name: What errors call it.
        pool: Arguments of `PageAllocator`.
        steps: The verbs, in order.
    """

    name: str
    pool: dict[str, Any]
    steps: list[Step]

    def replay(self, step: int | None = None) -> PageAllocator:
        """Return the allocator after the first `step` verbs; None is all of them.

        Raises:
            TraceError: A verb was refused, which its line did not expect.
            ValueError: There are fewer verbs.
        """
        count = len(self.steps) if step is None else step
        if not 0 <= count <= len(self.steps):
            raise ValueError(f"`step` must be from 0 to {len(self.steps)}, the verbs of {self.name}; got {step}.")
        with self._naming(1):
            pages = PageAllocator(**self._options())
        for line, verb, arguments in self.steps[:count]:
            with self._naming(line):
                operator.attrgetter(verb)(pages)(**{name: from_json(name, value) for name, value in arguments.items()})
        return pages

    def _options(self) -> dict[str, Any]:
        return self.pool | {"groups": from_json("groups", self.pool.get("groups"))}

    @contextlib.contextmanager
    def _naming(self, line: int) -> Iterator[None]:
        """Name the line where an argument is wrong or a verb is refused."""
        try:
            yield
        except (ValueError, TypeError, LookupError, AttributeError, OutOfPagesError) as error:
            raise TraceError(f"{self.name}, line {line}: {error}") from error
        except MemoryError as error:
            raise TraceError(f"{self.name}, line {line}: too large for the memory of this machine.") from error


def read_trace(path: str | os.PathLike) -> Trace:
    """Read a trace from a file.

    Raises:
        TraceError: The file is not a trace; the message names the line.
        OSError: The file cannot be read.
    """
    try:
        text = Path(path).read_text("utf-8")
    except UnicodeDecodeError as error:
        raise TraceError(f"{path} must be UTF-8 text; byte {error.start} is not.") from error
    return parse_trace(text.splitlines(), str(path))


def parse_trace(lines: Iterable[str], name: str = "trace") -> Trace:
    """Return the trace that these lines are; empty ones are skipped. Raises as `read_trace`."""
    records = [(i, _parse_line(line, f"{name}, line {i}")) for i, line in enumerate(lines, 1) if line.strip()]
    if not records:
        raise TraceError(f'{name} must begin with a line {{"trace": {VERSION}, "num_pages": ..., ...}}; it is empty.')
    first_line, head = records[0]
    if head.get("trace") != VERSION:
        raise TraceError(
            f'{name}, line {first_line} must be {{"trace": {VERSION}, "num_pages": ..., ...}}, as TraceRecorder '
            f"writes it; got {_shortened(head)}."
        )
    pool = {key: value for key, value in head.items() if key != "trace"}
    _check_names(pool, _POOL, _OPTIONS, f"{name}, line {first_line}")
    return Trace(name=name, pool=pool, steps=[_as_step(i, record, f"{name}, line {i}") for i, record in records[1:]])


class TraceRecorder:
    """A `PageAllocator` that writes down what it is asked: the same verbs and parts, the same results.

        with open("trace.jsonl", "w") as file:
            pages = TraceRecorder(PageAllocator(num_pages=64), file)

    Args:
        pages: The allocator. It holds nothing yet, for a trace begins with an empty pool.
        file: Where the lines go. It stays open.

    Raises:
        ValueError: `pages` has sequences, pins or cached content.
        TypeError: In a verb: an argument cannot be written down; the verb was not called.
    """

    def __init__(self, pages: PageAllocator, file: TextIO):
        stats = pages.stats()
        num_sequences = stats.num_sequences + stats.num_swapped_sequences
        if num_sequences or stats.num_used_pages or stats.num_cached_pages:
            raise ValueError(
                f"`pages` must hold nothing yet, as a trace begins with an empty pool; got {num_sequences} sequences, "
                f"{stats.num_used_pages} used pages and {stats.num_cached_pages} cached ones."
            )
        self._pages = pages
        self.prefix = _RecordedPart(pages.prefix, "prefix.", file)
        self._verbs = _RecordedPart(pages, "", file)
        groups = [[group.name, group.sliding_window] for group in pages.groups]
        _write(file, {"trace": VERSION} | pages.options | {"groups": groups})

    def __contains__(self, seq_id: object) -> bool:
        return seq_id in self._pages

    def __getattr__(self, name: str) -> Any:
        return getattr(self._verbs, name)


class _RecordedPart:
    """An object whose verbs are written down when they succeed, under their names after `prefix`."""

    def __init__(self, part: PageAllocator | PrefixCache, prefix: str, file: TextIO):
        self._part, self._prefix, self._file = part, prefix, file

    def __getattr__(self, name: str) -> Any:
        value, verb = getattr(self._part, name), self._prefix + name
        if verb not in VERBS:
            return value

        @functools.wraps(value)
        def recorded(*args: Any, **kwargs: Any) -> Any:
            bound = inspect.signature(value).bind(*args, **kwargs)
            bound.apply_defaults()
            arguments = bound.arguments
            if arguments.get("keys") is not None:
                arguments["keys"] = tuple(arguments["keys"])  # they are read here and by the verb
            given = VERBS[verb] + tuple(key for key in OPTIONAL.get(verb, ()) if not _is_default(arguments[key]))
            if "host" in given:
                arguments["host"] = AskedHost(arguments["host"])
            record = {"verb": verb} | {key: to_json(key, arguments[key]) for key in given}
            result = value(*bound.args, **bound.kwargs)
            if "host" in given:  # what it has shows when it is asked
                record["host"] = to_json("host", arguments["host"])
            _write(self._file, record)
            return result

        return recorded


def _is_default(value: Any) -> bool:
    """Whether an optional argument was left out, or might have been."""
    return value is None or (isinstance(value, tuple) and not value)


def _write(file: TextIO, record: Mapping[str, Any]) -> None:
    file.write(json.dumps(record) + "\n")


def demo_trace() -> Trace:
    """Return a small workload: chats with one system prompt, that fork, grow and end in a pool of 96 pages."""
    steps: list[tuple[str, dict[str, Any]]] = []

    def do(verb: str, *arguments: Any) -> None:
        steps.append((verb, dict(zip(VERBS[verb], arguments, strict=True))))

    for i, num_tokens in enumerate((150, 75, 215, 90, 70)):
        prompt = [*range(64), *range(1000 * (i + 1), 1000 * (i + 1) + num_tokens - 64)]
        do("add", f"chat {i}", prompt)
        do("commit", f"chat {i}", prompt)
    for i in range(3):
        do("fork", "chat 2", f"beam {i}")
        do("append", f"beam {i}", 30 + 20 * i)
    do("prefix.pin", [*range(64)])
    do("append", "chat 3", 25)
    do("free", "chat 0")
    do("truncate", "chat 3", 100)
    do("add", "chat 5", 75)
    do("free", "beam 1")
    do("append_many", ["chat 1", "chat 4"], 6)
    return Trace(
        name="the demo",
        pool={"num_pages": 96, "page_size": 16, "prefix_caching": True},
        steps=[Step(i, *step) for i, step in enumerate(steps, 2)],
    )


def _parse_line(line: str, where: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise TraceError(f"{where} must be JSON: {error.msg} at column {error.colno}.") from error
    if not isinstance(record, dict):
        raise TraceError(f"{where} must be a JSON object; got {_shortened(record)}.")
    return record


def _as_step(line: int, record: dict[str, Any], where: str) -> Step:
    verb = record.pop("verb", None)
    if not isinstance(verb, str) or verb not in VERBS:
        raise TraceError(f"{where} must have a `verb` among {', '.join(VERBS)}; got {_shortened(verb)}.")
    _check_names(record, VERBS[verb], OPTIONAL.get(verb, ()), f"{where}: {verb}")
    return Step(line, verb, record)


def _check_names(got: Mapping[str, Any], required: Sequence[str], optional: Sequence[str], where: str) -> None:
    if not set(required) <= set(got) <= {*required, *optional}:
        may = f", and may have {', '.join(optional)}" if optional else ""
        raise TraceError(f"{where} must have {', '.join(required) or 'nothing'}{may}; got {', '.join(got) or 'none'}.")


def _shortened(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."
