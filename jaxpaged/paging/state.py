"""What all verbs of the page manager share: its parts, how it finds rows and takes pages, and what an append costs."""

import dataclasses
from collections.abc import Hashable, Sequence
from typing import SupportsIndex

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
        "_covers_copy",
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
        "_windowed",
    )

    _busy: bool
    _cache: PrefixCache | None
    _copies: list[PageCopy]
    _covers_copy: set[int]
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
    _windowed: tuple[tuple[PageGroup, SequenceTable], ...]

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
        try:
            return self._table.rows(seq_ids)
        except ValueError:
            for seq_id in seq_ids:  # is it one that is swapped out?
                self._row(seq_id)
            raise

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
            self._cache.evict(missing, frozenset(self._restores))
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

    def _append_cost(self, row: int, num_tokens: int) -> tuple[int, int, list[bool]]:
        """What an append does to the pool: pages that each group adds, pages that windows free, who copies its last."""
        length = self._table.num_tokens.item(row)
        added = cdiv(length + num_tokens, self._page_size) - cdiv(length, self._page_size)
        writes_last = num_tokens > 0 and length % self._page_size > 0
        copies = [writes_last and not self._pool.is_private(table.last_page(row)) for table in self._tables]
        freed = 0
        for group, table in self._windowed:
            dead = self._passed_pages(group, table, row, length)
            if len(dead):
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
        for group, table in self._windowed:
            if group.num_dead_pages(num_computed, self._page_size) > table.num_dead.item(row):
                dead = self._passed_pages(group, table, row, num_computed)
                self._pool.drop(dead.astype(np.intp))
                table.num_dead[row] += len(dead)
                dead[:] = 0


def swapped_out(seq_id: Hashable) -> ValueError:
    """The refusal of a verb that needs the sequence's pages."""
    return ValueError(f"Sequence {seq_id!r} is swapped out; swap it in first.")


def taken(name: str, seq_id: Hashable, state: PageState) -> ValueError:
    """The refusal of a name that a sequence has."""
    what = "a live sequence" if seq_id in state._table.row_of_seq else "a swapped sequence"
    return ValueError(f"`{name}` must be new; got {seq_id!r}, which is {what}. Free it first.")
