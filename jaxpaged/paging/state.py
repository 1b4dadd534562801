"""What all verbs of the page manager share: its parts, how it takes pages, and what it promised to whom."""

import dataclasses
import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Concatenate, ParamSpec, Protocol, SupportsIndex, TypeVar

import numpy as np
import numpy.typing as npt

from jaxpaged.checks import as_count
from jaxpaged.config import cdiv
from jaxpaged.paging.cache import PrefixCache
from jaxpaged.paging.digests import Key
from jaxpaged.paging.groups import PageGroup
from jaxpaged.paging.lru import PageIds
from jaxpaged.paging.pool import OutOfPagesError, PagePool
from jaxpaged.paging.reports import PageCopy, Restore
from jaxpaged.paging.tables import Rows, SequenceTable, unhashable

P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S", bound="Owned")


class Owned(Protocol):
    """What one thread owns: `_busy` while it is inside."""

    _busy: bool


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SwappedSequence:
    """What is remembered of a sequence that holds no pages."""

    num_tokens: int
    num_dead: tuple[int, ...]
    keys: tuple[Key, ...]


class PageState:
    """The parts, and the helpers that read and change them. No verbs.

    The first table holds the facts of each sequence; each further group has a table of its own, with the same rows.
    """

    __slots__ = (
        "_busy",
        "_cache",
        "_copies",
        "_groups",
        "_is_simple",
        "_keys",
        "_max_pages",
        "_num_reserved",
        "_page_size",
        "_pool",
        "_restores",
        "_swapped",
        "_table",
        "_tables",
    )

    _busy: bool
    _cache: PrefixCache | None
    _copies: list[PageCopy]
    _groups: tuple[PageGroup, ...]
    _is_simple: bool
    _keys: dict[int, tuple[Key, ...]]
    _max_pages: int | None
    _num_reserved: int
    _page_size: int
    _pool: PagePool
    _restores: list[Restore]
    _swapped: dict[Hashable, SwappedSequence]
    _table: SequenceTable
    _tables: tuple[SequenceTable, ...]

    def __contains__(self, seq_id: Hashable) -> bool:
        try:
            return seq_id in self._table.row_of_seq or seq_id in self._swapped
        except TypeError:
            raise unhashable("seq_id", seq_id) from None

    @property
    def num_free_pages(self) -> int:
        """Pages that can be handed out now: free, and promised to no sequence."""
        return self._pool.num_free_pages - self._num_reserved

    def _row(self, seq_id: Hashable) -> int:
        """The row of a sequence that holds pages."""
        if self._swapped and seq_id in self and seq_id in self._swapped:
            raise swapped_out(seq_id)
        return self._table.row(seq_id)

    def _rows(self, seq_ids: Sequence[Hashable]) -> Rows:
        """The rows of several sequences that hold pages."""
        if isinstance(seq_ids, str | bytes) or not isinstance(seq_ids, Sequence | np.ndarray):
            hint = "Make a list of it: its order is that of the rows."
            raise TypeError(f"`seq_ids` must be a list of sequence ids; got {type(seq_ids).__name__}. {hint}")
        if self._swapped:
            for seq_id in seq_ids:
                self._row(seq_id)
        return self._table.rows(seq_ids)

    def _check_distinct(self, seq_ids: Sequence[Hashable], rows: Rows, verb: str) -> None:
        """Raises where a sequence is given twice."""
        seen = np.zeros(len(self._table.starts), np.bool_)
        seen[rows] = True
        if np.count_nonzero(seen) < len(rows):
            first = np.unique(rows, return_index=True)[1]
            repeated = np.setdiff1d(np.arange(len(rows)), first)[0]
            raise ValueError(f"`seq_ids` of {verb} must be distinct; got {seq_ids[repeated]!r} twice.")

    def _within(self, row: int, seq_id: Hashable, count: SupportsIndex, name: str) -> int:
        """A count of tokens within a sequence's length."""
        count = as_count(count, name + " for sequence {!r}", seq_id)
        length = self._table.num_tokens.item(row)
        if count > length:
            raise ValueError(f"{name} must be <= {length}, the length of sequence {seq_id!r}; got {count}.")
        return count

    def _group(self, name: str | None) -> int:
        """The place of a group; None means the only one."""
        if name is None and len(self._groups) == 1:
            return 0
        for index, group in enumerate(self._groups):
            if group.name == name:
                return index
        raise ValueError(f"`group` must be one of {[group.name for group in self._groups]}; got {name!r}.")

    def _take(self, count: int) -> memoryview:
        """So many free pages, with one owner each; evicts where plain ones are not enough."""
        missing = count - self._pool.num_plain_pages
        if missing > 0 and self._cache is not None:
            self._cache.evict(missing)
        return self._pool.take(count)

    def _take_array(self, count: int) -> PageIds:
        """The same as an array of its own."""
        return np.array(self._take(count), np.intp)

    def _require(self, needed: int, free: int, verb: str, seq_id: Hashable, num_tokens: int) -> None:
        if needed > free:
            raise OutOfPagesError(needed, free, f"{verb} of {num_tokens} tokens to sequence {seq_id!r}")

    def _check_limit(self, num_tokens: int, seq_id: Hashable) -> None:
        """Raises where a sequence would outgrow its row of the page table."""
        if self._max_pages is not None and num_tokens > self._max_pages * self._page_size:
            raise ValueError(
                f"Sequence {seq_id!r} must have at most {self._max_pages * self._page_size} tokens, for "
                f"`max_pages_per_seq` is {self._max_pages} pages of {self._page_size}; got {num_tokens}."
            )

    def _free_for(self, row: int) -> int:
        """Free pages that this sequence may take: those promised to it, and those promised to nobody."""
        return self.num_free_pages + self._table.num_reserved.item(row)

    def _append_cost(self, row: int, num_tokens: int) -> tuple[int, int, list[bool]]:
        """What an append does to the pool: pages that each group adds, pages that windows free, who copies its last."""
        length = self._table.num_tokens.item(row)
        added = cdiv(length + num_tokens, self._page_size) - cdiv(length, self._page_size)
        writes_last = num_tokens > 0 and length % self._page_size > 0
        copies = [writes_last and not self._pool.is_private(table.last_page(row)) for table in self._tables]
        freed = 0
        for group, table in zip(self._groups, self._tables, strict=True):
            if group.sliding_window is not None:
                dead = self._passed_pages(group, table, row, length)
                freed += int(np.count_nonzero(self._pool.ref_counts(dead) == 1))
        return added, freed, copies

    def _passed_pages(
        self, group: PageGroup, table: SequenceTable, row: int, num_computed: int
    ) -> npt.NDArray[np.int32]:
        """A row's pages that the window has left behind and that it still holds: a view."""
        num_dead = group.num_dead_pages(num_computed, self._page_size)
        return table.pages(row)[table.num_dead.item(row) : num_dead]

    def _pass_windows(self, row: int, num_computed: int) -> None:
        """Gives back the pages that no token from `num_computed` on sees."""
        for group, table in zip(self._groups, self._tables, strict=True):
            if group.sliding_window is not None:
                dead = self._passed_pages(group, table, row, num_computed)
                if len(dead):
                    self._pool.drop(dead.astype(np.intp))
                    table.num_dead[row] += len(dead)
                    dead[:] = 0

    def _settle(self, row: int, free_before: int) -> None:
        """Brings a promise up to date after the sequence took pages or gave some back.

        What it takes comes off the promise, and what it gives back is promised again as far as it reserved.
        """
        table = self._table
        if limit := table.limit.item(row):
            added, _, copies = self._append_cost(row, max(0, limit - table.num_tokens.item(row)))
            wanted = added * len(self._tables) + sum(copies)
            promised = table.num_reserved.item(row)
            self._promise(row, min(wanted, max(0, promised + self._pool.num_free_pages - free_before)))

    def _promise(self, row: int, num_pages: int) -> None:
        self._num_reserved += num_pages - self._table.num_reserved.item(row)
        self._table.num_reserved[row] = num_pages


def verb(method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """Refuses a call that begins while another thread is inside one: one owner, who may hand over between calls."""

    @functools.wraps(method)
    def guarded(self: S, *args: P.args, **kwargs: P.kwargs) -> R:
        if self._busy:  # nothing lets another thread run between this line and the next
            raise second_thread(method.__name__)
        self._busy = True
        try:
            return method(self, *args, **kwargs)
        finally:
            self._busy = False

    return guarded


def second_thread(name: str) -> RuntimeError:
    """The refusal of a verb that began inside another one."""
    return RuntimeError(
        f"`{name}` was called while another thread was inside the page manager. It has one owner: let one thread make "
        "all calls, or put a lock around them."
    )


def swapped_out(seq_id: Hashable) -> ValueError:
    """The refusal of a verb that needs the sequence's pages."""
    return ValueError(f"Sequence {seq_id!r} is swapped out; swap it in first.")


def taken(name: str, seq_id: Hashable, state: PageState) -> ValueError:
    """The refusal of a name that a sequence has."""
    what = "a live sequence" if seq_id in state._table.row_of_seq else "a swapped sequence"
    return ValueError(f"`{name}` must be new; got {seq_id!r}, which is {what}. Free it first.")
