"""The pool: which pages are free, which keep a content worth finding again, and how many owners each of the others has.

It knows no sequences and no tokens. All is numpy arrays and every call is vectorised over its pages, so that it costs a
few microseconds plus a few nanoseconds a page, however many pages the pool has. To take plain pages and to put them
back are each one copy of a run of memory, through memory views: numpy alone would take longer to begin.
"""

from typing import SupportsIndex

import numpy as np
import numpy.typing as npt

from jaxpaged.checks import as_count
from jaxpaged.paging.lru import LruQueue, PageIds
from jaxpaged.paging.owner import verb


class OutOfPagesError(RuntimeError):
    """The pool has too few free pages. The call that raised it changed nothing.

    Attributes:
        needed: Free pages that the call had to take, hits that nobody owns among them.
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
    """Free pages, and a reference count for each page. Page 0 (`config.NULL_PAGE`) is never handed out.

    A page is *in use* while it has owners. Without any it is free, in one of two ways: *plain*, on a stack (last in,
    first out: `allocate(n)` straight after a `release` of n pages returns those pages, in the same order); or *cached*
    where its content was marked by `keep`: in a queue, from which `evict` makes the least recently used ones plain.

    `allocate`, `retain` and `release` check their pages, and raise RuntimeError while another thread is inside one of
    them. The other calls are for an owner of the pool that knows its pages and has a guard of its own
    (`PageAllocator`), and take them as it says.

    Args:
        num_pages: Pages of the pool, the null page included.
        keeps_content: Whether pages can be marked to keep their content; it costs 13 bytes a page.
    """

    __slots__ = (
        "_busy",
        "_counts",
        "_free",
        "_free_view",
        "_kept",
        "_known_from",
        "_lru",
        "_place",
        "_top",
        "keeps_content",
    )

    def __init__(self, num_pages: SupportsIndex, *, keeps_content: bool = False):
        num_pages = as_count(num_pages, "`num_pages`, the null page included,", minimum=2)
        # Plain pages are _free[_top:], the next to be taken first: a stack that grows towards index 0, so that a run of
        # pages enters and leaves it in order. Others have an owner or are in `_lru`, the null page apart.
        self._free = np.arange(1, num_pages, dtype=np.int32)
        self._free_view = memoryview(self._free)
        self._top = 0
        # Owners of each page in use, and 0 for a cached one. A plain page has 1 in advance: to take it and to give it
        # back, its count is not touched. The null page and a sentinel at the end have 0.
        self._counts = np.ones(num_pages + 1, np.int32)
        self._counts[[0, num_pages]] = 0
        # Where on the stack a page lies, true for stack entries from _known_from on: looked at by checks only.
        self._place = np.zeros(num_pages + 1, np.int32)
        self._known_from = len(self._free)
        self.keeps_content = keeps_content
        self._busy = False
        self._lru = LruQueue(num_pages if keeps_content else 0)
        self._kept = np.zeros(num_pages if keeps_content else 0, np.bool_)

    @property
    def num_pages(self) -> int:
        """Pages of the pool, the null page included."""
        return len(self._free) + 1

    @property
    def num_plain_pages(self) -> int:
        """Free pages without content: what `allocate` can take."""
        return len(self._free) - self._top

    @property
    def num_cached_pages(self) -> int:
        """Free pages that keep their content."""
        return len(self._lru)

    @property
    def num_free_pages(self) -> int:
        """Pages that nobody owns, plain and cached ones, the null page not counted."""
        return self.num_plain_pages + len(self._lru)

    @verb
    def allocate(self, count: SupportsIndex) -> PageIds:
        """Takes `count` plain pages, with one owner each.

        Raises:
            OutOfPagesError: Fewer are plain; none was taken.
        """
        count = as_count(count, "`count`")
        if count > self.num_plain_pages:
            raise OutOfPagesError(count, self.num_plain_pages, "Allocation")
        return np.array(self.take(count), np.intp)

    @verb
    def retain(self, page_ids: npt.ArrayLike) -> None:
        """Adds an owner to each of these pages.

        Raises:
            ValueError: A page is not allocated, or given twice; no count was changed.
        """
        self.share(self._checked(page_ids, "retain"))

    @verb
    def release(self, page_ids: npt.ArrayLike) -> None:
        """Removes an owner from each of these pages; a page that has none left is free.

        Of pages that keep their content, the last given is the first to be evicted.

        Raises:
            ValueError: A page is not allocated (a double free), or given twice; no count was changed.
        """
        self.drop(self._checked(page_ids, "release"))

    def take(self, count: int) -> memoryview:
        """So many plain pages, with one owner each. The ids are int32, valid until the next call."""
        top = self._top
        self._top = end = top + count
        return self._free_view[top:end]

    def put(self, page_ids: memoryview) -> None:
        """Makes pages plain whose content is not kept, and whose one owner is the caller: `take` undone."""
        top = self._top
        if self._known_from < top:
            self._known_from = top
        self._top = start = top - len(page_ids)
        self._free_view[start:top] = page_ids

    def share(self, page_ids: PageIds, owners: int = 1) -> None:
        """Adds owners to pages that are in use or cached, each given once."""
        counts = self._counts[page_ids]
        self._counts[page_ids] = counts + np.int32(owners)
        if self.keeps_content:
            self._lru.discard(page_ids[counts == 0])

    def drop(self, page_ids: PageIds, owners: int | npt.NDArray[np.integer] = 1) -> None:
        """Removes owners from pages in use, each given once, none of which has fewer; see `release`."""
        counts = self._counts[page_ids] - np.asarray(owners, np.int32)
        self._counts[page_ids] = counts
        self._free_up(page_ids[counts == 0])

    def keep(self, page_ids: PageIds) -> None:
        """Marks pages in use: once nobody owns them they are cached."""
        self._kept[page_ids] = True

    def forget(self, page_ids: PageIds) -> None:
        """Takes the mark off; those that nobody owns become plain."""
        self._kept[page_ids] = False
        idle = page_ids[self._counts[page_ids] == 0]
        self._lru.discard(idle)
        self._free_up(idle)

    def evict(self, count: int) -> PageIds:
        """Makes the `count` least recently used cached pages plain; there must be as many."""
        page_ids = self._lru.pop(count)
        self._kept[page_ids] = False
        self._free_up(page_ids)
        return page_ids

    def take_cached(self, count: int) -> PageIds:
        """Makes plain pages cached ones that nobody owns, to be evicted before all others, the last one first."""
        page_ids = np.array(self.take(count), np.intp)
        self._counts[page_ids] = 0
        self._kept[page_ids] = True
        self._lru.push_front(page_ids[::-1])
        return page_ids

    def ref_count(self, page_id: int) -> int:
        """How many owners a page has."""
        return 0 if self._are_plain(np.array([page_id])).item() else self._counts.item(page_id)

    def ref_counts(self, page_ids: npt.NDArray[np.integer]) -> npt.NDArray[np.int32]:
        """[len(page_ids)] how many owners each of these pages has, which are in use or cached."""
        return self._counts[page_ids]

    def all_ref_counts(self) -> npt.NDArray[np.int32]:
        """[num_pages] how many owners each page has; a fresh array. Costs a pass over the pool."""
        counts = self._counts[:-1].copy()
        counts[self._free[self._top :]] = 0
        return counts

    def is_private(self, page_id: int) -> bool:
        """Whether the one owner of a page in use may write to it: nobody else has it, and nobody can find it."""
        return self._counts.item(page_id) == 1 and not (self.keeps_content and self._kept.item(page_id))

    def kept(self, page_ids: npt.NDArray[np.integer]) -> npt.NDArray[np.bool_]:
        """[len(page_ids)] whether each page is marked to keep its content."""
        return self._kept[page_ids] if self.keeps_content else np.zeros(len(page_ids), np.bool_)

    def plain_pages(self) -> PageIds:
        """The plain pages, the next to be taken first. Costs a pass over them."""
        return self._free[self._top :].astype(np.intp)

    def cached_pages(self) -> PageIds:
        """The cached pages, the next to be evicted first. Costs a pass over their queue."""
        return self._lru.page_ids()

    def kept_pages(self) -> PageIds:
        """All pages marked to keep their content, in use or cached. Costs a pass over the pool."""
        return np.flatnonzero(self._kept)

    def num_idle(self, page_ids: PageIds) -> int:
        """How many of these pages, in use or cached, nobody owns."""
        return len(page_ids) - int(np.count_nonzero(self._counts[page_ids]))

    def num_shared_pages(self) -> int:
        """Pages with more than one owner. Costs a pass over the pool."""
        return int(np.count_nonzero(self._counts > 1))

    def _free_up(self, page_ids: PageIds) -> None:
        """Queues pages that lost their last owner, or puts them on the stack."""
        if self.keeps_content:
            kept = self._kept[page_ids]
            self._lru.push(page_ids[kept][::-1])
            page_ids = page_ids[~kept]
        self._counts[page_ids] = 1
        top = self._top
        self._known_from = max(self._known_from, top)
        self._top = top - len(page_ids)
        self._free[self._top : top] = page_ids

    def _are_plain(self, page_ids: PageIds) -> npt.NDArray[np.bool_]:
        """[len(page_ids)] whether each page is on the stack. Notes the places of those put there since it was asked."""
        top = self._top
        if top < self._known_from:
            self._place[self._free[top : self._known_from]] = np.arange(top, self._known_from, dtype=np.int32)
            self._known_from = top
        places = self._place.take(page_ids, mode="clip")
        return (places >= top) & (self._free.take(places, mode="clip") == page_ids)

    def _checked(self, page_ids: npt.ArrayLike, verb: str) -> PageIds:
        """The ids as an index array, once it is sure that all are in use and none is repeated."""
        ids = np.asarray(page_ids)
        if ids.ndim != 1:
            raise ValueError(f"`page_ids` of {verb} must have one axis; got shape {ids.shape}.")
        if ids.dtype != np.intp:  # numpy would convert any other type at each use
            if len(ids) and ids.dtype.kind not in "iu":
                raise TypeError(f"`page_ids` of {verb} must be integers; got {ids.dtype}.")
            ids = ids.astype(np.intp)
        # Clipped, a negative id reads the null page's count and one past the pool the sentinel's: both are 0.
        counts = self._counts.take(ids, mode="clip")
        free = (counts == 0) | self._are_plain(ids)
        if np.count_nonzero(free):
            raise self._refusal(verb, ids[free][0], "which nobody owns")
        # Repeats in linear time: each position is written through its id and read back, and a repeated id can hand back
        # only one of its positions. The counts themselves are the scratch, whole again before anybody looks. (Small
        # arrays compare several times faster as bytes.)
        positions = np.arange(len(ids), dtype=np.int32)
        self._counts[ids] = positions
        read_back = self._counts[ids]
        self._counts[ids] = counts
        if read_back.tobytes() != positions.tobytes():
            raise self._refusal(verb, ids[read_back != positions][0], "which is given twice")
        return ids

    def _refusal(self, verb: str, page_id: int, why: str) -> ValueError:
        pool = f"the {self.num_pages - 1} pages of this pool"
        return ValueError(
            f"`page_ids` of {verb} must be owned pages among {pool}, each given once; got {page_id}, {why}."
        )
