"""Pages for sequences: who holds which page, and where each token goes.

The allocator decides and `KVCache` executes: it returns numpy arrays and page copies, and never sees a device. All
verbs are transactional: a call that raises has changed nothing. One owner: calls from two threads need a lock.
"""

import dataclasses
from collections.abc import Hashable, Sequence
from typing import NamedTuple, SupportsIndex

import numpy as np
import numpy.typing as npt

from jaxpaged.checks import as_count
from jaxpaged.config import NULL_PAGE, cdiv
from jaxpaged.paging.pool import OutOfPagesError, PagePool
from jaxpaged.paging.reports import FREE, NULL, SHARED, USED, PoolSnapshot
from jaxpaged.paging.tables import Rows, SequenceTable, ragged_arange

TokenIds = list[int] | tuple[int, ...] | range | npt.NDArray[np.integer]


class PageCopy(NamedTuple):
    """Copy page `src` to page `dst`, in all layers, before anything is written to either."""

    src: int
    dst: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PageStats:
    """A snapshot of the pool. Counts are of pages that can be allocated: the null page is in none of them.

    Attributes:
        num_usable_pages: Used and free ones.
        num_used_pages: Pages that some sequence holds, each counted once.
        num_shared_pages: Of those, pages that several sequences hold.
        num_unshared_pages: What the same sequences would hold without sharing.
        num_sequences: Live sequences.
        num_tokens: The sum of their lengths.
        page_size: Tokens a page.
    """

    num_usable_pages: int
    num_used_pages: int
    num_shared_pages: int
    num_unshared_pages: int
    num_sequences: int
    num_tokens: int
    page_size: int

    @property
    def num_free_pages(self) -> int:
        """Pages that nobody holds."""
        return self.num_usable_pages - self.num_used_pages

    @property
    def num_saved_pages(self) -> int:
        """Pages that sharing saves."""
        return self.num_unshared_pages - self.num_used_pages

    @property
    def saved_fraction(self) -> float:
        """Pages that sharing saves, as a fraction of what unshared sequences would hold; 0 when there are none."""
        return self.num_saved_pages / max(1, self.num_unshared_pages)

    @property
    def utilisation(self) -> float:
        """Used pages as a fraction of the usable ones."""
        return self.num_used_pages / self.num_usable_pages

    @property
    def occupancy(self) -> float:
        """Tokens as a fraction of the slots of the pages their sequences hold; the rest is the ends of last pages."""
        return self.num_tokens / max(1, self.num_unshared_pages * self.page_size)


class PageAllocator:
    """Hands pages to sequences, shares them between forks, and says in which slot each token lies.

    A sequence of n tokens holds `ceil(n / page_size)` pages; token t lies in slot
    `page_ids[t // page_size] * page_size + t % page_size`. Sequence ids are any hashable values. Verbs cost
    O(pages touched), whatever the size of the pool.

    Args:
        num_pages: Pages of the pool, the null page included: the same number as `KVCache`'s.
        page_size: Tokens a page.
    """

    __slots__ = ("_page_size", "_pool", "_table")

    def __init__(self, num_pages: SupportsIndex, page_size: SupportsIndex = 16):
        self._page_size = as_count(page_size, "`page_size`", minimum=1)
        num_pages = as_count(num_pages, "`num_pages`, the null page included,", minimum=2)
        if num_pages * self._page_size >= 2**31:
            raise ValueError(
                f"`num_pages` x `page_size` must be < 2**31, for slots are int32; got {num_pages} x {self._page_size}."
            )
        self._pool = PagePool(num_pages)
        self._table = SequenceTable()

    @property
    def num_pages(self) -> int:
        """Pages of the pool, the null page included."""
        return self._pool.num_pages

    @property
    def page_size(self) -> int:
        """Tokens a page."""
        return self._page_size

    @property
    def num_free_pages(self) -> int:
        """Pages that can be handed out now."""
        return self._pool.num_free_pages

    def __contains__(self, seq_id: Hashable) -> bool:
        return seq_id in self._table

    def can_allocate(self, num_tokens: SupportsIndex) -> bool:
        """Whether `add` of a sequence with so many tokens would find its pages now."""
        return cdiv(as_count(num_tokens, "`num_tokens`"), self._page_size) <= self._pool.num_free_pages

    def num_pages_needed(self, seq_id: Hashable, num_tokens: SupportsIndex = 1) -> int:
        """How many free pages `append(seq_id, num_tokens)` would take, the copy of a shared last page included."""
        row = self._table.row(seq_id)
        num_tokens = as_count(num_tokens, "`num_tokens` for sequence {!r}", seq_id)
        return self._append_cost(row, num_tokens)[0]

    def add(self, seq_id: Hashable, token_ids: TokenIds | SupportsIndex) -> int:
        """Gives a new sequence the pages for its tokens.

        Args:
            seq_id: A name that no live sequence has.
            token_ids: The tokens, or how many they are.

        Returns:
            How many of the tokens are in the cache already: none.

        Raises:
            OutOfPagesError: Too few pages are free.
            ValueError, TypeError: The id is taken, or the tokens are not one list, or their number is not a count.
        """
        if seq_id in self._table:
            raise _taken("seq_id", seq_id)
        num_tokens = _num_tokens(token_ids, seq_id)
        needed = cdiv(num_tokens, self._page_size)
        self._require(needed, "add", seq_id, num_tokens)
        self._table.add(seq_id, self._pool.allocate(needed), num_tokens)
        return 0

    def append(self, seq_id: Hashable, num_tokens: SupportsIndex = 1) -> list[PageCopy]:
        """Makes room for `num_tokens` more tokens at a sequence's end.

        When the first of them falls into a page that another sequence also holds, this sequence gets a page of its own
        in its place. The copies returned are to be run, in order, before anything is written, forked or freed.

        Raises:
            OutOfPagesError: Too few pages are free: fewer than `num_pages_needed(seq_id, num_tokens)`.
            ValueError, TypeError: No such sequence, or `num_tokens` is not a count.
        """
        table = self._table
        row = table.row(seq_id)
        num_tokens = as_count(num_tokens, "`num_tokens` for sequence {!r}", seq_id)
        needed, copies_last = self._append_cost(row, num_tokens)
        copies = []
        if needed:
            self._require(needed, "append", seq_id, num_tokens)
            page_ids = self._pool.allocate(needed)
            if copies_last:
                copies.append(PageCopy(src=table.last_page(row), dst=page_ids.item(0)))
                self._pool.release([copies[0].src])
                table.replace_last(row, copies[0].dst)
                page_ids = page_ids[1:]
            table.extend(row, page_ids)
        table.num_tokens[row] += num_tokens
        return copies

    def fork(self, parent_id: Hashable, child_id: Hashable) -> None:
        """Makes a new sequence with the same tokens, sharing all pages. Either may be freed first.

        Raises:
            ValueError: There is no such parent, or the child's id is taken.
        """
        row = self._table.row(parent_id)
        if child_id in self._table:
            raise _taken("child_id", child_id)
        page_ids = self._table.pages(row).copy()
        self._pool.retain(page_ids)
        self._table.add(child_id, page_ids, self._table.num_tokens.item(row))

    def truncate(self, seq_id: Hashable, num_tokens: SupportsIndex) -> None:
        """Keeps the first `num_tokens` tokens of a sequence and gives back the pages past them.

        Raises:
            ValueError, TypeError: No such sequence, or `num_tokens` is not a count within its length.
        """
        table = self._table
        row = table.row(seq_id)
        num_tokens = as_count(num_tokens, "`num_tokens` for sequence {!r}", seq_id)
        length = table.num_tokens.item(row)
        if num_tokens > length:
            raise ValueError(f"`num_tokens` must be <= {length}, the length of sequence {seq_id!r}; got {num_tokens}.")
        num_kept = cdiv(num_tokens, self._page_size)
        self._pool.release(table.pages(row)[num_kept:])
        table.num_pages[row] = num_kept
        table.num_tokens[row] = num_tokens

    def free(self, seq_id: Hashable) -> None:
        """Forgets a sequence. Pages that no other sequence holds are free.

        Raises:
            ValueError: No such sequence (it may have been freed already).
        """
        self._pool.release(self._table.pages(self._table.row(seq_id)))
        self._table.remove(seq_id)

    def seq_len(self, seq_id: Hashable) -> int:
        """Tokens of a sequence."""
        return self._table.num_tokens.item(self._table.row(seq_id))

    def page_ids(self, seq_id: Hashable) -> npt.NDArray[np.int32]:
        """[num_pages] the pages of a sequence, in order; a fresh array."""
        return self._table.pages(self._table.row(seq_id)).copy()

    def page_table(self, seq_ids: Sequence[Hashable], max_pages: SupportsIndex | None = None) -> npt.NDArray[np.int32]:
        """[len(seq_ids), max_pages] page ids, each row padded with `NULL_PAGE`; a fresh array.

        Args:
            seq_ids: The sequences, in the order of the rows.
            max_pages: Width of the table; None takes that of the longest sequence, and at least 1.

        Raises:
            ValueError, TypeError: No such sequence, or one has more pages than the table is wide.
        """
        rows = self._table.rows(seq_ids)
        counts = self._table.num_pages[rows]
        if max_pages is None:
            width = max(1, int(counts.max(initial=0)))
        else:
            width = as_count(max_pages, "`max_pages`", minimum=1)
            if counts.max(initial=0) > width:
                i = int(np.argmax(counts > width))
                raise ValueError(
                    f"`max_pages` must be >= {counts[i]}, the pages of sequence {seq_ids[i]!r} "
                    f"({self._table.num_tokens[rows[i]]} tokens); got {width}."
                )
        return self._table.window(rows, width, NULL_PAGE)

    def slot_mapping(
        self, seq_ids: Sequence[Hashable], num_new_tokens: Sequence[int] | npt.NDArray[np.integer]
    ) -> npt.NDArray[np.int32]:
        """[sum(num_new_tokens)] slots of each sequence's last `num_new_tokens[i]` tokens; a fresh array.

        Call it after `add` or `append` made room for them. Slots are packed: all of the first sequence's, then all of
        the second's.

        Raises:
            ValueError, TypeError: No such sequence, one given twice, or a count that is negative or beyond its length.
        """
        rows = self._table.rows(seq_ids)
        counts = self._checked_counts(seq_ids, rows, num_new_tokens)
        positions = ragged_arange(self._table.num_tokens[rows] - counts, counts)
        page_index = positions // self._page_size
        page_ids = self._table.page_ids[np.repeat(self._table.starts[rows], counts) + page_index]
        return page_ids * np.int32(self._page_size) + (positions - page_index * self._page_size).astype(np.int32)

    def stats(self) -> PageStats:
        """Counts of pages, sequences and tokens. Costs a pass over the pool."""
        num_usable = self._pool.num_pages - 1
        return PageStats(
            num_usable_pages=num_usable,
            num_used_pages=num_usable - self._pool.num_free_pages,
            num_shared_pages=self._pool.num_shared_pages(),
            num_unshared_pages=int(self._table.num_pages.sum()),
            num_sequences=len(self._table),
            num_tokens=int(self._table.num_tokens.sum()),
            page_size=self._page_size,
        )

    def snapshot(self) -> PoolSnapshot:
        """The whole pool in arrays. Costs a pass over it and its sequences."""
        num_pages, seq_ids = self.num_pages, tuple(self._table._row_of_seq)
        owner, fill = np.full(num_pages, -1, np.int32), np.zeros(num_pages, np.int32)
        ref_count = np.array([self._pool.ref_count(i) for i in range(num_pages)], np.int32)
        for i in reversed(range(len(seq_ids))):
            ids = self.page_ids(seq_ids[i])
            owner[ids] = i
            left = self.seq_len(seq_ids[i]) - self._page_size * np.arange(len(ids))
            fill[ids] = np.maximum(fill[ids], np.minimum(self._page_size, left))
        state = np.select([ref_count > 1, ref_count == 1], [SHARED, USED], FREE).astype(np.uint8)
        state[0] = NULL
        return PoolSnapshot(
            owner=owner, ref_count=ref_count, state=state, fill=fill, seq_ids=seq_ids, page_size=self._page_size
        )

    def _append_cost(self, row: int, num_tokens: int) -> tuple[int, bool]:
        """Pages that an append takes, and whether one of them takes the place of a shared last page."""
        length = self._table.num_tokens.item(row)
        copies_last = (
            num_tokens > 0 and length % self._page_size > 0 and self._pool.ref_count(self._table.last_page(row)) > 1
        )
        added = cdiv(length + num_tokens, self._page_size) - cdiv(length, self._page_size)
        return added + copies_last, copies_last

    def _require(self, needed: int, verb: str, seq_id: Hashable, num_tokens: int) -> None:
        free = self._pool.num_free_pages
        if needed > free:
            raise OutOfPagesError(needed, free, f"{verb} of {num_tokens} tokens to sequence {seq_id!r}")

    def _checked_counts(
        self, seq_ids: Sequence[Hashable], rows: Rows, num_new_tokens: Sequence[int] | npt.NDArray[np.integer]
    ) -> npt.NDArray[np.intp]:
        counts = np.asarray(num_new_tokens)
        if counts.shape != rows.shape:
            raise ValueError(
                f"`num_new_tokens` must have one entry for each of the {len(rows)} sequences; got shape {counts.shape}."
            )
        if len(rows) and not np.issubdtype(counts.dtype, np.integer):
            raise TypeError(f"`num_new_tokens` must be integers; got {counts.dtype}.")
        lengths = self._table.num_tokens[rows]
        wrong = (counts < 0) | (counts > lengths)
        if np.count_nonzero(wrong):
            i = int(np.argmax(wrong))
            raise ValueError(
                f"`num_new_tokens` must be in 0 .. {lengths[i]}, the length of sequence {seq_ids[i]!r}; "
                f"got {counts[i]}."
            )
        if len(set(rows.tolist())) < len(rows):
            first = np.unique(rows, return_index=True)[1]
            repeated = np.setdiff1d(np.arange(len(rows)), first)[0]
            raise ValueError(f"`seq_ids` of a slot mapping must be distinct; got {seq_ids[repeated]!r} twice.")
        return counts.astype(np.intp)


def _num_tokens(token_ids: TokenIds | SupportsIndex, seq_id: Hashable) -> int:
    """The length of a list of tokens, or the count itself."""
    if isinstance(token_ids, np.ndarray) and token_ids.ndim:
        if token_ids.ndim > 1:
            raise ValueError(f"`token_ids` of sequence {seq_id!r} must have one axis; got shape {token_ids.shape}.")
        return len(token_ids)
    if isinstance(token_ids, list | tuple | range):
        return len(token_ids)
    return as_count(token_ids, "`token_ids` of sequence {!r}, where it is their number,", seq_id)


def _taken(name: str, seq_id: Hashable) -> ValueError:
    return ValueError(f"`{name}` must be new; got {seq_id!r}, which is a live sequence. Free it first.")
