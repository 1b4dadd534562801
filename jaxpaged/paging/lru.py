"""The order in which cached pages are evicted: a queue of page ids that a page can leave from any place.

A linked list would take a Python step a page. Here the queue is a run of an array: a page that leaves its middle stays
written there and is skipped later, for `_place` no longer points at that entry.
"""

import numpy as np
import numpy.typing as npt

PageIds = npt.NDArray[np.intp]


class LruQueue:
    """Pages from the least to the most recently used. Every call costs O(pages moved), amortised; 12 bytes a page.

    Attributes:
        size: Pages that are queued. Changed here only.
    """

    __slots__ = ("_head", "_order", "_place", "_tail", "size")

    def __init__(self, num_pages: int):
        # Twice the pages: compaction leaves half of it free, so that it is paid for by as many pushes.
        self._order = np.zeros(2 * num_pages, np.int32)
        self._place = np.full(num_pages, -1, np.int32)  # where in _order a page stands; -1 for one that is not queued
        self._head = self._tail = self.size = 0

    def push(self, page_ids: PageIds) -> None:
        """Put pages that are not queued at the end, the first of them to be popped first."""
        if self._tail + len(page_ids) > len(self._order):
            self._compact()
        end = self._tail + len(page_ids)
        self._order[self._tail : end] = page_ids
        self._place[page_ids] = np.arange(self._tail, end)
        self._tail = end
        self.size += len(page_ids)

    def push_front(self, page_ids: PageIds) -> None:
        """Put pages that are not queued before all others, the first of them to be popped first."""
        if len(page_ids) > self._head:
            self._compact(start=len(page_ids))
        self._head -= len(page_ids)
        end = self._head + len(page_ids)
        self._order[self._head : end] = page_ids
        self._place[page_ids] = np.arange(self._head, end)
        self.size += len(page_ids)

    def discard(self, page_ids: PageIds) -> None:
        """Take queued pages out, wherever they stand."""
        self._place[page_ids] = -1
        self.size -= len(page_ids)

    def pop(self, count: int) -> PageIds:
        """Take the `count` least recently used pages; as many must be queued."""
        parts, missing = [np.zeros(0, np.intp)], count
        while missing:
            stop = min(self._head + max(64, 2 * missing), self._tail)
            found = np.flatnonzero(self._queued(self._head, stop))[:missing]
            parts.append(self._order[self._head + found].astype(np.intp))
            missing -= len(found)
            self._head = stop if missing else self._head + int(found[-1]) + 1
        page_ids = np.concatenate(parts)
        self.discard(page_ids)
        return page_ids

    def page_ids(self) -> PageIds:
        """Return all queued pages, the next to be popped first. Costs a pass over the queue."""
        return self._order[self._head : self._tail][self._queued(self._head, self._tail)].astype(np.intp)

    def _queued(self, start: int, stop: int) -> npt.NDArray[np.bool_]:
        """Return which entries of a stretch are the current place of their page."""
        return self._place[self._order[start:stop]] == np.arange(start, stop, dtype=np.int32)

    def _compact(self, start: int = 0) -> None:
        """Write the queue anew, without the entries that are skipped, from `start` on."""
        page_ids = self.page_ids()
        self._head, self._tail = start, start + len(page_ids)
        self._order[start : self._tail] = page_ids
        self._place[page_ids] = np.arange(start, self._tail)
