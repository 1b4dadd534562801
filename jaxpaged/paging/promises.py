"""Promises: free pages that `reserve` keeps for a sequence.

A promise is never more than the sequence could still use up to the length that it reserved. It shrinks as the sequence
grows, and also where others act: a fork that ends, or writes, may leave a last page to its sequence alone, and then the
copy of that page that was promised will never be made.
"""

from collections.abc import Hashable
from typing import SupportsIndex

import numpy as np
import numpy.typing as npt

from jaxpaged.checks import as_count
from jaxpaged.paging.owner import verb
from jaxpaged.paging.pool import OutOfPagesError
from jaxpaged.paging.state import PageState
from jaxpaged.paging.tables import Rows


class Promises(PageState):
    """`reserve`, and what keeps promises up to date. `_covers_copy` are the rows whose promise is also for a copy."""

    __slots__ = ()

    @verb
    def reserve(self, seq_id: Hashable, num_tokens: SupportsIndex) -> None:
        """Promises a sequence the free pages for `num_tokens` more tokens; to all others they are taken.

        Its appends use the promise up; what `truncate` gives back, up to the length reserved, is promised again. Ends
        with `free`, with `swap_out`, and with a reservation of 0. A group with a window is promised as many pages as
        one without.

        Raises:
            OutOfPagesError: Too few pages are free; an earlier promise stays.
            ValueError, TypeError: No such sequence, or `num_tokens` is not a count.
        """
        row = self._row(seq_id)
        num_tokens = as_count(num_tokens, "`num_tokens` for sequence {!r}", seq_id)
        length = self._table.num_tokens.item(row)
        self._check_limit(length + num_tokens, seq_id)
        added, _, copies = self._append_cost(row, num_tokens)
        needed = added * len(self._tables) + sum(copies)
        self._require(needed, self._free_for(row), "reserve", seq_id, num_tokens)
        self._table.limit[row] = length + num_tokens if num_tokens else 0
        self._promise(row, needed, any(copies))

    def _free_for(self, row: int) -> int:
        """Free pages that this sequence may take: those promised to it, and those promised to nobody."""
        return self.num_free_pages + self._table.num_reserved.item(row)

    def _settle(self, row: int, free_before: int) -> None:
        """Brings a promise up to date after the sequence took pages or gave some back.

        What it takes comes off the promise, and what it gives back is promised again as far as it reserved.
        """
        table = self._table
        if limit := table.limit.item(row):
            added, _, copies = self._append_cost(row, max(0, limit - table.num_tokens.item(row)))
            wanted = added * len(self._tables) + sum(copies)
            left = max(0, table.num_reserved.item(row) + self._pool.num_free_pages - free_before)
            self._promise(row, min(wanted, left), any(copies))

    def _settle_many(self, rows: Rows, needed: npt.NDArray[np.intp]) -> None:
        """Takes off the promises of many rows what they took; what windows gave back is promised to nobody."""
        promised = self._table.num_reserved[rows]
        left = np.maximum(0, promised - needed)
        self._num_reserved += int(left.sum() - promised.sum())
        self._table.num_reserved[rows] = left

    def _settle_copies(self) -> None:
        """Gives back what was promised for copies of pages that nobody else holds any more."""
        if self._covers_copy:
            rows = np.fromiter(self._covers_copy, np.intp, len(self._covers_copy))
            is_private = np.zeros(len(rows), np.bool_)
            for table in self._tables:
                page_ids = table.last_pages(rows)
                is_private |= (self._pool.ref_counts(page_ids) == 1) & ~self._pool.kept(page_ids)
            for row in rows[is_private].tolist():
                self._settle(row, self._pool.num_free_pages)

    def _promise(self, row: int, num_pages: int, covers_copy: bool = False) -> None:
        self._num_reserved += num_pages - self._table.num_reserved.item(row)
        self._table.num_reserved[row] = num_pages
        if num_pages and covers_copy:
            self._covers_copy.add(row)
        else:
            self._covers_copy.discard(row)

    def _promise_copies(self, row: int, seq_id: Hashable) -> None:
        """Lets a promise cover the copies of last pages that a fork is about to share."""
        more = sum(self._pool.is_private(table.last_page(row)) for table in self._tables)
        if more > self.num_free_pages:
            raise OutOfPagesError(more, self.num_free_pages, f"fork of sequence {seq_id!r}, which has a reservation,")
        self._promise(row, self._table.num_reserved.item(row) + more, covers_copy=True)
