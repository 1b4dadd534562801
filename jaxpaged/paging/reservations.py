"""Reservations: free pages that are kept for a sequence.

A sequence never has more of them than it could still use up to the length that it reserved. They become fewer as the
sequence grows, and also where others act: a fork that ends, or writes, may leave a last page to its sequence alone, and
then the copy of that page that was reserved for will never be made.
"""

import numpy as np
import numpy.typing as npt

from jaxpaged.paging.pool import PagePool
from jaxpaged.paging.sequences import Sequences
from jaxpaged.paging.tables import Rows


class Reservations:
    """The pages that are reserved, by row.

    Attributes:
        num_pages: How many pages are reserved in all.
        length: The length up to which pages are reserved, by row; a row is in it until its reservation ends, also when
            it has used up its pages.
    """

    __slots__ = ("_covers_copy", "_num_pages", "_pool", "_sequences", "length", "num_pages")

    def __init__(self, sequences: Sequences, pool: PagePool):
        self._sequences = sequences
        self._pool = pool
        self.num_pages = 0
        self.length: dict[int, int] = {}
        self._num_pages: dict[int, int] = {}  # reserved pages by row, where there are some
        self._covers_copy: set[int] = set()  # rows whose reservation includes the copy of a last page

    def of(self, row: int) -> int:
        """Return the pages that are reserved for a row."""
        return self._num_pages.get(row, 0)

    def among(self, rows: Rows) -> npt.NDArray[np.intp]:
        """[len(rows)] Return the pages that are reserved for each of these rows."""
        return np.array([self.of(row) for row in rows.tolist()], np.intp)

    def make(self, row: int, length: int, num_pages: int, covers_copy: bool) -> None:
        """Reserve pages for a row, which are free, up to a length of so many tokens; the last call counts."""
        self.length[row] = length
        self._keep(row, num_pages, covers_copy)

    def end(self, row: int) -> None:
        """End the reservation of a row."""
        self.length.pop(row, None)
        self._keep(row, 0, False)

    def add_copies(self, row: int, num_pages: int) -> None:
        """Reserve so many pages more for copies of last pages."""
        self._keep(row, self.of(row) + num_pages, True)

    def settle(self, row: int, free_before: int) -> None:
        """Bring a reservation up to date after the row took pages or gave some back.

        What it took comes off the reservation, and what it gave back is reserved again as far as it asked for.

        Args:
            row: The row.
            free_before: The free pages of the pool before that.
        """
        if length := self.length.get(row):
            num_tokens = self._sequences.num_tokens.item(row)
            cost = self._sequences.append_cost(row, max(0, length - num_tokens), num_tokens)
            left = max(0, self.of(row) + self._pool.num_free_pages - free_before)
            self._keep(row, min(cost.taken, left), any(cost.copies_last))

    def settle_many(self, rows: Rows, taken: npt.NDArray[np.intp]) -> None:
        """Take off the reservations of many rows what they took; what windows freed is reserved for nobody."""
        for row, count in zip(rows.tolist(), taken.tolist(), strict=True):
            if reserved := self.of(row):
                self._keep(row, max(0, reserved - count), row in self._covers_copy)

    def settle_copies(self) -> None:
        """Give back what was reserved for copies of pages to which their sequences may write by now."""
        if not self._covers_copy:
            return
        rows = np.fromiter(self._covers_copy, np.intp, len(self._covers_copy))
        changed = np.zeros(len(rows), np.bool_)
        for table in self._sequences.tables:
            changed |= self._pool.are_writable(table.last_pages(rows))
        for row in rows[changed].tolist():
            self.settle(row, self._pool.num_free_pages)

    def _keep(self, row: int, num_pages: int, covers_copy: bool) -> None:
        self.num_pages += num_pages - self.of(row)
        if num_pages:
            self._num_pages[row] = num_pages
        else:
            self._num_pages.pop(row, None)
        if num_pages and covers_copy:
            self._covers_copy.add(row)
        else:
            self._covers_copy.discard(row)
