"""Which pages each live sequence holds, in order: one flat array for all of them. It knows no owners and no free pages.

A step asks for thousands of sequences at once (page table, slot mapping), so a sequence is a row number, its facts are
entries of a few columns, and its page ids are one run of a flat array: whatever concerns many sequences is a gather.
What concerns one sequence goes through memory views, a whole row at once: numpy takes a microsecond a number.
"""

import struct
from collections.abc import Hashable, Iterable

import numpy as np
import numpy.typing as npt

_MIN_ROWS = 1024
_COLUMNS = ("starts", "num_pages", "num_tokens", "num_indexed", "num_dead", "num_reserved", "limit", "shares", "_room")
_ROW = struct.Struct(f"{len(_COLUMNS)}n")

Rows = npt.NDArray[np.intp]


def ragged_arange(starts: npt.NDArray[np.intp], counts: npt.NDArray[np.intp]) -> npt.NDArray[np.intp]:
    """`starts[i], starts[i] + 1, ...`, `counts[i]` of them, one after the other for every i."""
    ends = np.cumsum(counts)
    return np.repeat(starts - ends + counts, counts) + np.arange(ends[-1] if len(ends) else 0)


class SequenceTable:
    """The rows. Every verb costs O(pages of that row), amortised, or O(pages returned).

    Attributes:
        row_of_seq: The row of each live sequence; changed here only.
        page_ids: int32, the flat array. Row r's pages are `page_ids[starts[r] : starts[r] + num_pages[r]]`.
        starts: [num_rows] where each row's run begins.
        num_pages: [num_rows] pages in use. Like all columns it means nothing in a row that no sequence has.
        num_tokens: [num_rows] tokens. Kept for the caller, not read here, like all that follow.
        num_indexed: [num_rows] leading pages that the prefix cache has seen.
        num_dead: [num_rows] leading pages that the group's window has passed.
        num_reserved: [num_rows] free pages promised to the sequence.
        limit: [num_rows] the length up to which they are promised.
        shares: [num_rows] 0 where no page has another owner; not 0 where one may have.
    """

    __slots__ = (*_COLUMNS, "_asked", "_end", "_facts", "_free_rows", "_view", "page_ids", "row_of_seq")

    page_ids: npt.NDArray[np.int32]
    starts: npt.NDArray[np.intp]
    num_pages: npt.NDArray[np.intp]
    num_tokens: npt.NDArray[np.intp]
    num_indexed: npt.NDArray[np.intp]
    num_dead: npt.NDArray[np.intp]
    num_reserved: npt.NDArray[np.intp]
    limit: npt.NDArray[np.intp]
    shares: npt.NDArray[np.intp]
    _room: npt.NDArray[np.intp]  # length of the row's run, used or not

    def __init__(self):
        self._use_pages(np.zeros(2 * _MIN_ROWS, np.int32))
        self._use_facts(np.zeros((_MIN_ROWS, len(_COLUMNS)), np.intp))
        self._end = 0  # page_ids[_end:] belongs to no row
        self._asked: tuple[list[Hashable], Rows] | None = None  # a step asks for the same sequences several times
        self._free_rows = list(range(_MIN_ROWS - 1, -1, -1))
        self.row_of_seq: dict[Hashable, int] = {}

    def __len__(self) -> int:
        """Live sequences."""
        return len(self.row_of_seq)

    def row(self, seq_id: Hashable) -> int:
        """The sequence's row. Raises ValueError when there is none."""
        try:
            return self.row_of_seq[seq_id]
        except KeyError:
            raise _unknown(seq_id) from None
        except TypeError:
            raise unhashable("seq_id", seq_id) from None

    def rows(self, seq_ids: Iterable[Hashable]) -> Rows:
        """The rows of several sequences, in their order; not to be written to."""
        seq_ids = list(seq_ids)
        if self._asked is None or self._asked[0] != seq_ids:
            try:
                rows = np.array([self.row_of_seq[seq_id] for seq_id in seq_ids], np.intp)
            except KeyError as error:
                raise _unknown(error.args[0]) from None
            except TypeError:
                for seq_id in seq_ids:
                    self.row(seq_id)
                raise
            self._asked = seq_ids, rows
        return self._asked[1]

    def all_rows(self) -> Rows:
        """The rows of all live sequences, in the order of their making."""
        return np.fromiter(self.row_of_seq.values(), np.intp, len(self.row_of_seq))

    def seq_ids(self) -> tuple[Hashable, ...]:
        """All live sequences, in the order of their making."""
        return tuple(self.row_of_seq)

    def pages(self, row: int) -> npt.NDArray[np.int32]:
        """A row's page ids: a view, valid until the next call."""
        start = self.starts.item(row)
        return self.page_ids[start : start + self.num_pages.item(row)]

    def last_page(self, row: int) -> int:
        """Page id of a row that has at least one."""
        return self.page_ids.item(self.starts.item(row) + self.num_pages.item(row) - 1)

    def add(self, seq_id: Hashable, page_ids: npt.NDArray[np.integer] | memoryview, num_tokens: int) -> None:
        """Gives a new sequence a row that holds these pages."""
        count = len(page_ids)
        start = self._end
        if start + count > len(self._view):
            start = self._claim(count)
        self._end = end = start + count
        if type(page_ids) is memoryview:
            self._view[start:end] = page_ids
        else:
            self.page_ids[start:end] = page_ids
        if not self._free_rows:
            self._double_rows()
        self.row_of_seq[seq_id] = row = self._free_rows.pop()
        _ROW.pack_into(self._facts, row * _ROW.size, start, count, num_tokens, 0, 0, 0, 0, 0, count)

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

    def extend_many(self, rows: Rows, page_ids: npt.NDArray[np.integer], counts: npt.NDArray[np.intp]) -> None:
        """`extend` of distinct rows: `page_ids` are the first row's `counts[0]`, then the second's, and so on."""
        totals = self.num_pages[rows] + counts
        moving = totals > self._room[rows]
        if moving.any():
            rooms = np.maximum(totals, 2 * self.num_pages[rows])
            if self._end + int(rooms.sum()) > len(self._view):
                self._collect(int(rooms.sum()))  # which takes spare room from rows that had enough
                moving = totals > self._room[rows]
            self._move(rows[moving], rooms[moving])
        self.page_ids[ragged_arange(self.starts[rows] + self.num_pages[rows], counts)] = page_ids
        self.num_pages[rows] = totals

    def replace_last(self, row: int, page_id: int) -> None:
        """Puts another page in the place of a row's last one."""
        self.page_ids[self.starts.item(row) + self.num_pages.item(row) - 1] = page_id

    def last_pages(self, rows: Rows) -> npt.NDArray[np.intp]:
        """[len(rows)] the last page of each row; that of a row without any means nothing."""
        return self.page_ids[self.starts[rows] + self.num_pages[rows] - 1].astype(np.intp)

    def replace_lasts(self, rows: Rows, page_ids: npt.NDArray[np.integer]) -> None:
        """`replace_last` of many rows."""
        self.page_ids[self.starts[rows] + self.num_pages[rows] - 1] = page_ids

    def replace_everywhere(self, page_id: int, other: int) -> None:
        """Puts another page in the place of one, in all rows. Costs a pass over the flat array."""
        self.page_ids[self.page_ids == page_id] = other  # also in entries that no row reads

    def entries(self, rows: Rows) -> tuple[Rows, npt.NDArray[np.intp], npt.NDArray[np.intp]]:
        """For each page of each of these rows: the place of its row among them, its index there, its page id."""
        counts = self.num_pages[rows]
        indices = ragged_arange(np.zeros_like(counts), counts)
        places = np.repeat(np.arange(len(rows)), counts)
        return places, indices, self.page_ids[self.starts[rows][places] + indices].astype(np.intp)

    def remove(self, seq_id: Hashable) -> tuple[memoryview, int]:
        """Forgets a sequence; its row and its run are free for others.

        Returns:
            The pages that its window has not passed, valid until the next call, and whether others may have them too.
        """
        try:
            row = self.row_of_seq.pop(seq_id)
        except KeyError:
            raise _unknown(seq_id) from None
        except TypeError:
            raise unhashable("seq_id", seq_id) from None
        start, count, _, _, num_dead, _, _, shares, _ = _ROW.unpack_from(self._facts, row * _ROW.size)
        self._free_rows.append(row)
        self._asked = None
        return self._view[start + num_dead : start + count], shares

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

    def _move(self, rows: Rows, rooms: npt.NDArray[np.intp]) -> None:
        """Moves runs to the flat array's end, where they get so much room."""
        start = self._claim(int(rooms.sum()))
        starts = start + np.cumsum(rooms) - rooms
        counts = self.num_pages[rows]
        self.page_ids[ragged_arange(starts, counts)] = self.page_ids[ragged_arange(self.starts[rows], counts)]
        self.starts[rows] = starts
        self._room[rows] = rooms

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
        rows = self.all_rows()
        rooms = np.minimum(self._room[rows], 2 * self.num_pages[rows])
        ends = np.cumsum(rooms)
        starts = ends - rooms
        self._end = int(ends[-1]) if len(ends) else 0
        page_ids = np.zeros(2 * (self._end + count + len(self.starts)), np.int32)
        counts = self.num_pages[rows]
        page_ids[ragged_arange(starts, counts)] = self.page_ids[ragged_arange(self.starts[rows], counts)]
        self._use_pages(page_ids)
        self.starts[rows], self._room[rows] = starts, rooms

    def _double_rows(self) -> None:
        size = len(self.starts)
        self._free_rows.extend(range(2 * size - 1, size - 1, -1))
        facts = np.zeros((2 * size, len(_COLUMNS)), np.intp)
        facts[:size] = np.asarray(self._facts)
        self._use_facts(facts)

    def _use_pages(self, page_ids: npt.NDArray[np.int32]) -> None:
        self.page_ids, self._view = page_ids, memoryview(page_ids)

    def _use_facts(self, facts: npt.NDArray[np.intp]) -> None:
        """Makes the columns views of an array [num_rows, columns]."""
        self._facts = memoryview(facts)
        for column, name in enumerate(_COLUMNS):
            setattr(self, name, facts[:, column])


def unhashable(name: str, seq_id: object) -> TypeError:
    """The refusal of a sequence id that cannot be one."""
    what = f"{seq_id!r} ({type(seq_id).__name__}), which is unhashable"
    return TypeError(f"`{name}` must be hashable, such as a number, a string or a tuple of those; got {what}.")


def _unknown(seq_id: Hashable) -> ValueError:
    return ValueError(f"`seq_id` must be a sequence that is here (add or fork makes one); got {seq_id!r}.")
