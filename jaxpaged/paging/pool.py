"""The pool: which pages are free, which of them hold cached content, and how many references each of the others has.

It knows no sequences and no tokens. All is numpy arrays and every call is vectorised over its pages, so that it costs a
few microseconds plus a few nanoseconds a page, however many pages the pool has. To take uncached pages and to put them
back are each one copy of a run of memory, through memory views: numpy alone would take longer to begin.
"""

from typing import Any, SupportsIndex

import numpy as np
import numpy.typing as npt

from jaxpaged.checks import as_count
from jaxpaged.paging.lru import LruQueue, PageIds
from jaxpaged.paging.owner import Owner, verb


class OutOfPagesError(RuntimeError):
    """The pool has too few free pages. The call that raised it changed nothing.

    Attributes:
        needed: Pages that the call would have taken from the free ones, cached pages that it hit included.
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

    A page is *referenced* or *free*. A page is *indexed* while its content can be found by its tokens
    (`mark_indexed`). A free page that is indexed is *cached*: it waits in a queue, from which `evict` takes the least
    recently used ones and makes them uncached. The other free pages, the *uncached* ones, are on a stack, last in,
    first out: `allocate(n)` straight after a `release` of n pages returns those pages, in the same order.

    `allocate`, `retain` and `release` check their pages, and raise RuntimeError while another thread is inside one of
    them. The other calls are for the parts of a `PageAllocator`, which know their pages and have a guard of their own.

    Args:
        num_pages: Pages of the pool, the null page included.
        caching: Whether pages can be indexed; it costs 13 bytes a page.

    Attributes:
        num_uncached_pages: Free pages without cached content, which is what `allocate` can take. Changed here only.
        caching: Whether pages can be indexed.
    """

    __slots__ = (
        "_counts",
        "_free",
        "_free_view",
        "_indexed",
        "_known_from",
        "_lru",
        "_num_usable",
        "_owner",
        "_place",
        "caching",
        "num_uncached_pages",
    )

    def __init__(self, num_pages: SupportsIndex, *, caching: bool = False):
        num_pages = as_count(num_pages, "`num_pages`, the null page included,", minimum=2)
        # The uncached pages are the last `num_uncached_pages` entries of _free, the next to be taken first: a stack
        # that grows towards index 0, so that a run of pages enters and leaves it in order.
        self._free = np.arange(1, num_pages, dtype=np.int32)
        self._free_view = memoryview(self._free)
        self.num_uncached_pages = self._num_usable = num_pages - 1
        # References of each page, and 0 for a cached one. An uncached page has 1 in advance: to take it and to give it
        # back, its count is not touched. The null page and a sentinel at the end have 0.
        self._counts = np.ones(num_pages + 1, np.int32)
        self._counts[[0, num_pages]] = 0
        # Where on the stack a page lies, true for stack entries from _known_from on: looked at by checks only.
        self._place = np.zeros(num_pages + 1, np.int32)
        self._known_from = len(self._free)
        self.caching = caching
        self._owner = Owner()
        self._lru = LruQueue(num_pages if caching else 0)
        self._indexed = np.zeros(num_pages if caching else 0, np.bool_)

    def __getstate__(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__ if name != "_free_view"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        for name, value in state.items():
            setattr(self, name, value)
        self._free_view = memoryview(self._free)

    @property
    def num_pages(self) -> int:
        """Pages of the pool, the null page included."""
        return self._num_usable + 1

    @property
    def num_cached_pages(self) -> int:
        """Free pages whose content can be found."""
        return self._lru.size

    @property
    def num_free_pages(self) -> int:
        """Pages that nobody references, cached and uncached ones, the null page not counted."""
        return self.num_uncached_pages + self._lru.size

    @verb
    def allocate(self, count: SupportsIndex) -> PageIds:
        """Take `count` uncached pages, with one reference each.

        Raises:
            OutOfPagesError: Fewer are uncached; none was taken.
        """
        count = as_count(count, "`count`")
        if count > self.num_uncached_pages:
            raise OutOfPagesError(count, self.num_uncached_pages, "Allocation")
        return np.array(self.take(count), np.intp)

    @verb
    def retain(self, page_ids: npt.ArrayLike) -> None:
        """Add a reference to each of these pages.

        Raises:
            ValueError: A page is not allocated, or given twice; no count was changed.
        """
        self.share(self._checked(page_ids, "retain"))

    @verb
    def release(self, page_ids: npt.ArrayLike) -> None:
        """Drop a reference to each of these pages; a page that has none left is free.

        Of indexed pages, the last given is the first to be evicted.

        Raises:
            ValueError: A page is not allocated (a double free), or given twice; no count was changed.
        """
        self.drop(self._checked(page_ids, "release"))

    def take(self, count: int) -> memoryview:
        """Take `count` uncached pages, with one reference each. The ids are int32, valid until the next call."""
        top = self._num_usable - self.num_uncached_pages
        self.num_uncached_pages -= count
        return self._free_view[top : top + count]

    def put(self, page_ids: memoryview) -> None:
        """Undo `take`: free pages that are not indexed and that only the caller references."""
        top = self._num_usable - self.num_uncached_pages
        if self._known_from < top:
            self._known_from = top
        count = len(page_ids)
        self._free_view[top - count : top] = page_ids
        self.num_uncached_pages += count

    def share(self, page_ids: PageIds, references: int = 1) -> None:
        """Add references to pages that are referenced or cached, each given once."""
        counts = self._counts[page_ids]
        self._counts[page_ids] = counts + np.int32(references)
        if self.caching:
            self._lru.discard(page_ids[counts == 0])

    def drop(self, page_ids: PageIds, references: int | npt.NDArray[np.integer] = 1) -> None:
        """Drop references to pages, each given once, none of which has fewer; see `release`."""
        counts = self._counts[page_ids] - np.asarray(references, np.int32)
        self._counts[page_ids] = counts
        self._free_up(page_ids[counts == 0])

    def mark_indexed(self, page_ids: PageIds) -> None:
        """Mark referenced pages as indexed: once nobody references them they are cached."""
        self._indexed[page_ids] = True

    def unmark_indexed(self, page_ids: PageIds) -> None:
        """Take the mark off indexed pages; those that were cached become uncached."""
        self._indexed[page_ids] = False
        cached = page_ids[self._counts[page_ids] == 0]
        self._lru.discard(cached)
        self._free_up(cached)

    def evict(self, count: int) -> PageIds:
        """Make the `count` least recently used cached pages uncached; there must be as many."""
        page_ids = self._lru.pop(count)
        self._indexed[page_ids] = False
        self._free_up(page_ids)
        return page_ids

    def take_cached(self, count: int) -> PageIds:
        """Turn uncached pages into cached ones, to be evicted before all others, the last one first."""
        page_ids = np.array(self.take(count), np.intp)
        self._counts[page_ids] = 0
        self._indexed[page_ids] = True
        self._lru.push_front(page_ids[::-1])
        return page_ids

    def ref_count(self, page_id: int) -> int:
        """Count the references of a page."""
        return 0 if self._are_uncached(np.array([page_id])).item() else self._counts.item(page_id)

    def ref_counts(self, page_ids: npt.NDArray[np.integer]) -> npt.NDArray[np.int32]:
        """[len(page_ids)] Count the references of each of these pages, which are referenced or cached."""
        return self._counts[page_ids]

    def all_ref_counts(self) -> npt.NDArray[np.int32]:
        """[num_pages] Count the references of each page; a fresh array. Costs a pass over the pool."""
        counts = self._counts[:-1].copy()
        counts[self.uncached_pages()] = 0
        return counts

    def is_writable(self, page_id: int) -> bool:
        """Whether whoever references a page may write to it: nobody else references it, and it is not indexed."""
        return self._counts.item(page_id) == 1 and not (self.caching and self._indexed.item(page_id))

    def are_writable(self, page_ids: PageIds) -> npt.NDArray[np.bool_]:
        """[len(page_ids)] `is_writable` of each of these referenced pages."""
        return (self._counts[page_ids] == 1) & ~self.are_indexed(page_ids)

    def are_indexed(self, page_ids: npt.NDArray[np.integer]) -> npt.NDArray[np.bool_]:
        """[len(page_ids)] Whether each page is indexed."""
        return self._indexed[page_ids] if self.caching else np.zeros(len(page_ids), np.bool_)

    def uncached_pages(self) -> PageIds:
        """List the uncached free pages, the next to be taken first. Costs a pass over them."""
        return self._free[self._num_usable - self.num_uncached_pages :].astype(np.intp)

    def cached_pages(self) -> PageIds:
        """List the cached pages, the next to be evicted first. Costs a pass over their queue."""
        return self._lru.page_ids()

    def indexed_pages(self) -> PageIds:
        """List all indexed pages, referenced or cached. Costs a pass over the pool."""
        return np.flatnonzero(self._indexed)

    def num_unreferenced(self, page_ids: PageIds) -> int:
        """Count those of these referenced or cached pages that nobody references."""
        return len(page_ids) - int(np.count_nonzero(self._counts[page_ids]))

    def num_shared_pages(self) -> int:
        """Count the pages with more than one reference. Costs a pass over the pool."""
        return int(np.count_nonzero(self._counts > 1))

    def _free_up(self, page_ids: PageIds) -> None:
        """Queue pages that lost their last reference, or put them on the stack."""
        if self.caching:
            indexed = self._indexed[page_ids]
            self._lru.push(page_ids[indexed][::-1])
            page_ids = page_ids[~indexed]
        self._counts[page_ids] = 1
        self.put(memoryview(page_ids.astype(np.int32)))

    def _are_uncached(self, page_ids: PageIds) -> npt.NDArray[np.bool_]:
        """[len(page_ids)] Whether each page is on the stack. Notes the places of those put there since it was asked."""
        top = self._num_usable - self.num_uncached_pages
        if top < self._known_from:
            self._place[self._free[top : self._known_from]] = np.arange(top, self._known_from, dtype=np.int32)
            self._known_from = top
        places = self._place.take(page_ids, mode="clip")
        return (places >= top) & (self._free.take(places, mode="clip") == page_ids)

    def _checked(self, page_ids: npt.ArrayLike, verb: str) -> PageIds:
        """Return the ids as an index array, once it is sure that all are referenced and none is repeated."""
        ids = np.asarray(page_ids)
        if ids.ndim != 1:
            raise ValueError(f"`page_ids` of {verb} must have one axis; got shape {ids.shape}.")
        if ids.dtype != np.intp:  # numpy would convert any other type at each use
            if len(ids) and ids.dtype.kind not in "iu":
                raise TypeError(f"`page_ids` of {verb} must be integers; got {ids.dtype}.")
            ids = ids.astype(np.intp)
        # Clipped, a negative id reads the null page's count and one past the pool the sentinel's: both are 0.
        counts = self._counts.take(ids, mode="clip")
        free = (counts == 0) | self._are_uncached(ids)
        if np.count_nonzero(free):
            raise self._refusal(verb, ids[free][0], "which nobody references")
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
            f"`page_ids` of {verb} must be referenced pages among {pool}, each given once; got {page_id}, {why}."
        )
