"""The pool: which pages are free, and how many owners each of the others has. It knows no sequences and no tokens.

Both are numpy arrays and every call is vectorised over its pages, so that a call costs a few microseconds plus a few
nanoseconds a page, however many pages the pool has.
"""

from typing import SupportsIndex

import numpy as np
import numpy.typing as npt

from jaxpaged.checks import as_count

PageIds = npt.NDArray[np.intp]
"""Page ids inside `paging/`: indices, so of numpy's index type (any other is converted at each use, at 2 us a call)."""

_ONE = np.ones((), np.int32)
"""numpy adds an array of its own type at once, and looks up the type of a Python 1 first."""


class OutOfPagesError(RuntimeError):
    """The pool has too few free pages. The call that raised it changed nothing.

    Attributes:
        needed: Pages that the call had to take.
        free: Pages that were free.
        what: The call, in words.
    """

    def __init__(self, needed: int, free: int, what: str):
        super().__init__(needed, free, what)
        self.needed = needed
        self.free = free
        self.what = what

    def __str__(self) -> str:
        return (
            f"{self.what} needs {self.needed} pages; {self.free} are free. Free a sequence, or enlarge the pool "
            "(`num_pages`)."
        )


class PagePool:
    """A stack of free pages, and a reference count for each page. Page 0 (`config.NULL_PAGE`) is never handed out.

    The stack is last in, first out: `allocate(n)` straight after a `release` of n pages returns those pages, in the
    same order.

    Args:
        num_pages: Pages of the pool, the null page included.
    """

    __slots__ = ("_free", "_ref_counts", "_top")

    def __init__(self, num_pages: SupportsIndex):
        num_pages = as_count(num_pages, "`num_pages`, the null page included,", minimum=2)
        # Free pages are _free[_top:], the next to be taken first: a stack that grows towards index 0, so that a run of
        # pages enters and leaves it in order. A page is in it exactly when its count is 0, the null page apart.
        self._free = np.arange(1, num_pages, dtype=np.intp)
        self._top = 0
        self._ref_counts = np.zeros(num_pages + 1, np.int32)  # the last entry is a sentinel, always 0

    @property
    def num_pages(self) -> int:
        """Pages of the pool, the null page included."""
        return len(self._free) + 1

    @property
    def num_free_pages(self) -> int:
        """Pages that nobody owns, the null page not counted."""
        return len(self._free) - self._top

    def allocate(self, count: SupportsIndex) -> PageIds:
        """Takes `count` free pages, with one owner each.

        Raises:
            OutOfPagesError: Fewer are free; none was taken.
        """
        count = as_count(count, "`count`")
        if count > self.num_free_pages:
            raise OutOfPagesError(count, self.num_free_pages, "Allocation")
        page_ids = self._free[self._top : self._top + count].copy()
        self._top += count
        self._ref_counts[page_ids] = 1
        return page_ids

    def retain(self, page_ids: npt.ArrayLike) -> None:
        """Adds an owner to each of these pages.

        Raises:
            ValueError: A page is not allocated, or given twice; no count was changed.
        """
        ids, counts = self._live(page_ids, "retain")
        self._ref_counts[ids] = counts + _ONE

    def release(self, page_ids: npt.ArrayLike) -> None:
        """Removes an owner from each of these pages; a page that has none left is free.

        Raises:
            ValueError: A page is not allocated (a double free), or given twice; no count was changed.
        """
        ids, counts = self._live(page_ids, "release")
        counts -= _ONE
        self._ref_counts[ids] = counts
        freed = ids[counts == 0] if np.count_nonzero(counts) else ids
        self._top -= len(freed)
        self._free[self._top : self._top + len(freed)] = freed

    def ref_count(self, page_id: int) -> int:
        """How many owners a page has."""
        return self._ref_counts.item(page_id)

    def num_shared_pages(self) -> int:
        """Pages with more than one owner. Costs a pass over the pool."""
        return int(np.count_nonzero(self._ref_counts > 1))

    def _live(self, page_ids: npt.ArrayLike, verb: str) -> tuple[PageIds, npt.NDArray[np.int32]]:
        """The ids as an index array, and their counts, once it is sure that all are allocated and none is repeated."""
        ids = np.asarray(page_ids)
        if ids.dtype != np.intp:
            ids = ids.astype(np.intp, casting="same_kind") if ids.size else np.zeros(0, np.intp)
        # Clipped, a negative id reads the null page's count and one past the pool the sentinel's: both are 0.
        counts = self._ref_counts.take(ids, mode="clip")
        if np.count_nonzero(counts) < len(ids):
            raise self._refusal(verb, ids[counts == 0][0], "which nobody owns")
        # Repeats in linear time: each position is written through its id and read back, and a repeated id can hand back
        # only one of its positions. The counts themselves are the scratch, whole again before anybody looks. (Small
        # arrays compare several times faster as bytes.)
        positions = np.arange(len(ids), dtype=np.int32)
        self._ref_counts[ids] = positions
        read_back = self._ref_counts[ids]
        self._ref_counts[ids] = counts
        if read_back.tobytes() != positions.tobytes():
            raise self._refusal(verb, ids[read_back != positions][0], "which is given twice")
        return ids, counts

    def _refusal(self, verb: str, page_id: int, why: str) -> ValueError:
        pool = f"the {self.num_pages - 1} pages of this pool"
        return ValueError(
            f"`page_ids` of {verb} must be owned pages among {pool}, each given once; got {page_id}, {why}."
        )
