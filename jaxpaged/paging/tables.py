"""Page tables: which pages each row holds, in order, in one flat array. It knows no references and no free pages.

A step asks for thousands of sequences at once, so a sequence is a row number, its facts are entries of a few columns,
and its page ids are one run of a flat array: whatever concerns many sequences is a gather. What concerns one sequence
goes through memory views, a whole row at once: numpy takes a microsecond a number.
"""

import struct
from typing import Any

import numpy as np
import numpy.typing as npt

from jaxpaged.config import NULL_PAGE
from jaxpaged.paging.groups import PageGroup
from jaxpaged.paging.lru import PageIds

_COLUMNS = ("starts", "num_pages", "num_passed", "may_share", "_room")
_ROW = struct.Struct(f"{len(_COLUMNS)}n")
_ROW_NBYTES = _ROW.size

Rows = npt.NDArray[np.intp]


def ragged_arange(starts: npt.NDArray[np.intp], counts: npt.NDArray[np.intp]) -> npt.NDArray[np.intp]:
    """Return `starts[i], starts[i] + 1, ...`, `counts[i]` of them, one after the other for every i."""
    ends = np.cumsum(counts)
    return np.repeat(starts - ends + counts, counts) + np.arange(ends[-1] if len(ends) else 0)


class PageTable:
    """The pages of every live sequence in one group. Calls cost O(pages of the rows given), amortised.

    Args:
        group: The group whose pages these are.
        page_size: Tokens a page.
        row_of_seq: The rows that are live: the dictionary that `Sequences` keeps; read here only.
        num_rows: Rows that there is room for at first.

    Attributes:
        group: The group whose pages these are.
        page_ids: int32, the flat array. Row r's pages are `page_ids[starts[r] : starts[r] + num_pages[r]]`.
        starts: [num_rows] where each row's run begins.
        num_pages: [num_rows] entries of each run, those that the window has passed included. Like all columns it means
            nothing in a row that no sequence has.
        num_passed: [num_rows] leading pages that the group's window has passed; their entries are `NULL_PAGE`.
        may_share: [num_rows] 0 where no page of the row has another reference; not 0 where one may have.
    """

    __slots__ = (*_COLUMNS, "_end", "_facts", "_page_size", "_row_of_seq", "_view", "group", "page_ids")

    page_ids: npt.NDArray[np.int32]
    starts: npt.NDArray[np.intp]
    num_pages: npt.NDArray[np.intp]
    num_passed: npt.NDArray[np.intp]
    may_share: npt.NDArray[np.intp]
    _room: npt.NDArray[np.intp]  # length of the row's run, used or not

    def __init__(self, group: PageGroup, page_size: int, row_of_seq: dict[Any, int], num_rows: int):
        self.group = group
        self._page_size = page_size
        self._row_of_seq = row_of_seq
        self._use_pages(np.zeros(2 * num_rows, np.int32))
        self._use_facts(np.zeros((num_rows, len(_COLUMNS)), np.intp))
        self._end = 0  # page_ids[_end:] belongs to no row

    def __getstate__(self) -> dict[str, Any]:
        plain = {name: getattr(self, name) for name in ("group", "_page_size", "_row_of_seq", "_end", "page_ids")}
        return plain | {"_facts": np.array(self._facts)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        for name in ("group", "_page_size", "_row_of_seq", "_end"):
            setattr(self, name, state[name])
        self._use_pages(state["page_ids"])
        self._use_facts(state["_facts"])

    def pages(self, row: int) -> npt.NDArray[np.int32]:
        """Return a row's page ids: a view, valid until the next call."""
        start = self.starts.item(row)
        return self.page_ids[start : start + self.num_pages.item(row)]

    def held_pages(self, row: int, first: int = 0) -> PageIds:
        """Return the pages that a row references, from page `first` on; a fresh array."""
        return self.pages(row)[max(first, self.num_passed.item(row)) :].astype(np.intp)

    def last_page(self, row: int) -> int:
        """Return the last page id of a row that has at least one."""
        return self.page_ids.item(self.starts.item(row) + self.num_pages.item(row) - 1)

    def add(self, row: int, page_ids: memoryview) -> None:
        """Give a new row these pages."""
        count = len(page_ids)
        start = self._end
        if start + count > len(self._view):
            start = self._claim(count)
        self._end = end = start + count
        self._view[start:end] = page_ids
        _ROW.pack_into(self._facts, row * _ROW_NBYTES, start, count, 0, 0, count)

    def extend(self, row: int, page_ids: npt.NDArray[np.integer]) -> None:
        """Add pages at a row's end. A run too short for them moves to the flat array's end, with twice the room."""
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
        """Extend distinct rows: `page_ids` are the first row's `counts[0]`, then the second's, and so on."""
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
        """Put another page in the place of a row's last one."""
        self.page_ids[self.starts.item(row) + self.num_pages.item(row) - 1] = page_id

    def last_pages(self, rows: Rows) -> PageIds:
        """[len(rows)] Return the last page of each row; that of a row without any means nothing."""
        return self.page_ids[self.starts[rows] + self.num_pages[rows] - 1].astype(np.intp)

    def replace_lasts(self, rows: Rows, page_ids: npt.NDArray[np.integer]) -> None:
        """Do `replace_last` for many rows."""
        self.page_ids[self.starts[rows] + self.num_pages[rows] - 1] = page_ids

    def replace_everywhere(self, page_id: int, other: int) -> None:
        """Put another page in the place of one, in all rows. Costs a pass over the flat array."""
        self.page_ids[self.page_ids == page_id] = other  # also in entries that no row reads

    def entries(self, rows: Rows) -> tuple[Rows, npt.NDArray[np.intp], PageIds]:
        """List each page of each of these rows: the place of its row among them, its index there, its page id."""
        counts = self.num_pages[rows]
        indices = ragged_arange(np.zeros_like(counts), counts)
        places = np.repeat(np.arange(len(rows)), counts)
        return places, indices, self.page_ids[self.starts[rows][places] + indices].astype(np.intp)

    def remove(self, row: int) -> tuple[memoryview, int]:
        """Take a row's pages from it.

        Returns:
            The pages that it references, valid until the next call, and whether others may reference them too.
        """
        start, count, num_passed, may_share, _ = _ROW.unpack_from(self._facts, row * _ROW_NBYTES)
        return self._view[start + num_passed : start + count], may_share

    def newly_passed(self, row: int, num_computed: int) -> npt.NDArray[np.int32]:
        """Return a row's pages that its window has passed, once so many tokens are computed, and that it still holds.

        The array is a view of the table.
        """
        num_passed = self.group.num_passed_pages(num_computed, self._page_size)
        return self.pages(row)[self.num_passed.item(row) : num_passed]

    def let_pass(self, row: int, page_ids: npt.NDArray[np.int32]) -> None:
        """Note that the window has passed these pages, as `newly_passed` gave them."""
        self.num_passed[row] += len(page_ids)
        page_ids[:] = NULL_PAGE

    def restore_passed(self, row: int, page_ids: PageIds) -> None:
        """Put these pages in the place of those that the window has passed."""
        self.pages(row)[: len(page_ids)] = page_ids
        self.num_passed[row] = 0

    def newly_passed_many(
        self, rows: Rows, num_computed: npt.NDArray[np.intp]
    ) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]:
        """Return what `newly_passed` does for many rows: pages passed in all, by row, and where the new ones lie."""
        before = self.num_passed[rows]
        now = np.maximum(before, self.group.passed_pages(num_computed, self._page_size))
        return now, ragged_arange(self.starts[rows] + before, now - before)

    def lacks_pages(self, row: int, num_computed: int) -> bool:
        """Whether the window has passed pages that token `num_computed` sees."""
        return self.num_passed.item(row) > self.group.num_passed_pages(num_computed, self._page_size)

    def window(self, rows: Rows, width: int) -> npt.NDArray[np.int32]:
        """[len(rows), width] Return the first page ids of rows. Behind those of a short row stand ones of others."""
        # Each row is one copy of `width` entries: 4 times faster than a gather of single ones. The last run needs as
        # many entries behind it.
        if self._end + width > len(self.page_ids):
            self._collect(width)
        flat = self.page_ids
        shape = (len(flat) - width + 1, width)
        windows = np.ndarray(shape, flat.dtype, buffer=flat, strides=(flat.itemsize, flat.itemsize))
        return windows[self.starts[rows]]

    def _move(self, rows: Rows, rooms: npt.NDArray[np.intp]) -> None:
        """Move runs to the flat array's end, where they get so much room."""
        start = self._claim(int(rooms.sum()))
        starts = start + np.cumsum(rooms) - rooms
        counts = self.num_pages[rows]
        self.page_ids[ragged_arange(starts, counts)] = self.page_ids[ragged_arange(self.starts[rows], counts)]
        self.starts[rows] = starts
        self._room[rows] = rooms

    def _claim(self, count: int) -> int:
        """Return where a new run of `count` entries begins. Moves the other runs when the flat array is full."""
        if self._end + count > len(self.page_ids):
            self._collect(count)
        start = self._end
        self._end += count
        return start

    def _collect(self, count: int) -> None:
        """Move the live runs to a new array that is half empty once `count` more entries are in it.

        So a copying collector works: each move of n entries and r rows is paid for by at least n + r entries added.
        Runs keep their spare room, or all would have to move again to grow.
        """
        rows = np.fromiter(self._row_of_seq.values(), np.intp, len(self._row_of_seq))
        rooms = np.minimum(self._room[rows], 2 * self.num_pages[rows])
        ends = np.cumsum(rooms)
        starts = ends - rooms
        self._end = int(ends[-1]) if len(ends) else 0
        page_ids = np.zeros(2 * (self._end + count + len(self.starts)), np.int32)
        counts = self.num_pages[rows]
        page_ids[ragged_arange(starts, counts)] = self.page_ids[ragged_arange(self.starts[rows], counts)]
        self._use_pages(page_ids)
        self.starts[rows], self._room[rows] = starts, rooms

    def double_rows(self) -> None:
        """Make room for twice as many rows."""
        size = len(self.starts)
        facts = np.zeros((2 * size, len(_COLUMNS)), np.intp)
        facts[:size] = np.asarray(self._facts)
        self._use_facts(facts)

    def _use_pages(self, page_ids: npt.NDArray[np.int32]) -> None:
        self.page_ids, self._view = page_ids, memoryview(page_ids)

    def _use_facts(self, facts: npt.NDArray[np.intp]) -> None:
        """Make the columns views of an array [num_rows, columns]."""
        self._facts = memoryview(facts)
        for column, name in enumerate(_COLUMNS):
            setattr(self, name, facts[:, column])
