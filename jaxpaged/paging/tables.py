"""Which pages each live sequence holds, in order: one flat array for all of them. It knows no owners and no free pages.

A step asks for thousands of sequences at once (page table, slot mapping), so a sequence is a row number, its facts are
entries of a few arrays, and its page ids are one run of a flat array: whatever concerns many sequences is a gather.
"""

from collections.abc import Hashable, Iterable

import numpy as np
import numpy.typing as npt

_MIN_ROWS = 1024

Rows = npt.NDArray[np.intp]


def ragged_arange(starts: npt.NDArray[np.intp], counts: npt.NDArray[np.intp]) -> npt.NDArray[np.intp]:
    """`starts[i], starts[i] + 1, ...`, `counts[i]` of them, one after the other for every i."""
    ends = np.cumsum(counts)
    return np.repeat(starts - ends + counts, counts) + np.arange(ends[-1] if len(ends) else 0)


class SequenceTable:
    """The rows. Every verb costs O(pages of that row), amortised, or O(pages returned).

    Attributes:
        page_ids: int32, the flat array. Row r's pages are `page_ids[starts[r] : starts[r] + num_pages[r]]`.
        starts: [num_rows] where each row's run begins.
        num_pages: [num_rows] pages in use; 0 for a row that no sequence has.
        num_tokens: [num_rows] tokens; 0 for a row that no sequence has. Kept for the caller, not read here.
    """

    __slots__ = ("_end", "_free_rows", "_room", "_row_of_seq", "num_pages", "num_tokens", "page_ids", "starts")

    def __init__(self):
        self.page_ids = np.zeros(2 * _MIN_ROWS, np.int32)
        self.starts = np.zeros(_MIN_ROWS, np.intp)
        self.num_pages = np.zeros(_MIN_ROWS, np.intp)
        self.num_tokens = np.zeros(_MIN_ROWS, np.intp)
        self._room = np.zeros(_MIN_ROWS, np.intp)  # length of the row's run, used or not
        self._end = 0  # page_ids[_end:] belongs to no row
        self._free_rows = list(range(_MIN_ROWS - 1, -1, -1))
        self._row_of_seq: dict[Hashable, int] = {}

    def __contains__(self, seq_id: Hashable) -> bool:
        return seq_id in self._row_of_seq

    def __len__(self) -> int:
        """Live sequences."""
        return len(self._row_of_seq)

    def row(self, seq_id: Hashable) -> int:
        """The sequence's row. Raises ValueError when there is none."""
        try:
            return self._row_of_seq[seq_id]
        except KeyError:
            raise _unknown(seq_id) from None

    def rows(self, seq_ids: Iterable[Hashable]) -> Rows:
        """The rows of several sequences, in their order."""
        try:
            return np.array([self._row_of_seq[seq_id] for seq_id in seq_ids], np.intp)
        except KeyError as error:
            raise _unknown(error.args[0]) from None

    def pages(self, row: int) -> npt.NDArray[np.int32]:
        """A row's page ids: a view, valid until the next call."""
        start = self.starts.item(row)
        return self.page_ids[start : start + self.num_pages.item(row)]

    def last_page(self, row: int) -> int:
        """Page id of a row that has at least one."""
        return self.page_ids.item(self.starts.item(row) + self.num_pages.item(row) - 1)

    def add(self, seq_id: Hashable, page_ids: npt.NDArray[np.integer], num_tokens: int) -> None:
        """Gives a new sequence a row that holds these pages."""
        count = len(page_ids)
        start = self._claim(count)
        self.page_ids[start : start + count] = page_ids
        if not self._free_rows:
            self._double_rows()
        row = self._free_rows.pop()
        self._row_of_seq[seq_id] = row
        self.starts[row] = start
        self.num_pages[row] = self._room[row] = count
        self.num_tokens[row] = num_tokens

    def extend(self, row: int, page_ids: npt.NDArray[np.integer]) -> None:
        """Adds pages at a row's end. A run too short for them moves to the flat array's end, with twice the room."""
        used = self.num_pages.item(row)
        total = used + len(page_ids)
        if total > self._room.item(row):
            room = max(total, 2 * used)
            start = self._claim(room)
            self.page_ids[start : start + used] = self.pages(row)
            self.starts[row] = start
            self._room[row] = room
        end = self.starts.item(row) + total
        self.page_ids[end - len(page_ids) : end] = page_ids
        self.num_pages[row] = total

    def replace_last(self, row: int, page_id: int) -> None:
        """Puts another page in the place of a row's last one."""
        self.page_ids[self.starts.item(row) + self.num_pages.item(row) - 1] = page_id

    def remove(self, seq_id: Hashable) -> None:
        """Forgets a sequence; its row and its run are free for others."""
        row = self._row_of_seq.pop(seq_id)
        self.num_pages[row] = self.num_tokens[row] = self._room[row] = 0
        self._free_rows.append(row)

    def window(self, rows: Rows, width: int, padding: int) -> npt.NDArray[np.int32]:
        """[len(rows), width] page ids of rows that have at most `width` pages each; a fresh array."""
        # Each row is one copy of `width` entries, of which the padding then covers those that belong to others: 4 times
        # faster than a gather of single entries. The last run needs as many entries behind it.
        if self._end + width > len(self.page_ids):
            self._collect(width)
        flat = self.page_ids
        shape = (len(flat) - width + 1, width)
        windows = np.ndarray(shape, flat.dtype, buffer=flat, strides=(flat.itemsize, flat.itemsize))
        table = windows[self.starts[rows]]
        columns = np.arange(width, dtype=np.int32)
        np.copyto(table, padding, where=columns >= self.num_pages[rows, None].astype(np.int32))
        return table

    def _claim(self, count: int) -> int:
        """Where a new run of `count` entries begins. Moves the other runs when the flat array is full."""
        if self._end + count > len(self.page_ids):
            self._collect(count)
        start = self._end
        self._end += count
        return start

    def _collect(self, count: int) -> None:
        """Moves the live runs to a new array that is half empty once `count` more entries are in it.

        So a copying collector works: each move of n entries and r rows is paid for by at least n + r entries added.
        Runs keep their spare room, or all would have to move again to grow.
        """
        rooms = np.minimum(self._room, 2 * self.num_pages)
        ends = np.cumsum(rooms)
        starts = ends - rooms
        self._end = int(ends[-1])
        page_ids = np.zeros(2 * (self._end + count + len(rooms)), np.int32)
        page_ids[ragged_arange(starts, self.num_pages)] = self.page_ids[ragged_arange(self.starts, self.num_pages)]
        self.page_ids, self.starts, self._room = page_ids, starts, rooms

    def _double_rows(self) -> None:
        size = len(self.starts)
        self._free_rows.extend(range(2 * size - 1, size - 1, -1))
        self.starts, self.num_pages, self.num_tokens, self._room = (
            np.concatenate([column, np.zeros(size, np.intp)])
            for column in (self.starts, self.num_pages, self.num_tokens, self._room)
        )


def _unknown(seq_id: Hashable) -> ValueError:
    return ValueError(f"`seq_id` must be a sequence that is here (add or fork makes one); got {seq_id!r}.")
