"""A hash table from digests to the pages that hold their content, in numpy arrays. It knows no references.

A dict entry alone takes 120 bytes; here a page takes 40: its digest, its parent's, and its places in the chains. Pages
whose digests fall into one bucket form a chain, `heads[bucket] -> next[page] -> ... -> 0`; page 0 is never in it.
"""

import numpy as np
import numpy.typing as npt

from jaxpaged.paging.digests import Digests
from jaxpaged.paging.lru import PageIds


class DigestTable:
    """Finds pages by digest, many at once. Every call costs O(pages given), whatever the size of the table.

    Attributes:
        digests: [num_pages, 2] uint64, of the pages that are in the table.
        parents: [num_pages, 2] uint64, the digests of the pages before them.
    """

    __slots__ = ("_heads", "_next", "digests", "parents")

    def __init__(self, num_pages: int):
        self.digests = np.zeros((num_pages, 2), np.uint64)
        self.parents = np.zeros((num_pages, 2), np.uint64)
        self._heads = np.zeros(1 << num_pages.bit_length(), np.int32)
        self._next = np.zeros(num_pages, np.int32)

    def find(self, digests: Digests) -> PageIds:
        """[n] Return the page that holds each content; 0 where none does."""
        page_ids = self._heads[self._buckets(digests)].astype(np.intp)
        asking = np.arange(len(page_ids))
        while len(asking):
            candidates = page_ids[asking]
            differs = (self.digests[candidates] != digests[asking]).any(axis=1) & (candidates != 0)
            asking = asking[differs]
            page_ids[asking] = self._next[page_ids[asking]]
        return page_ids

    def insert(self, page_ids: PageIds, digests: Digests, parents: Digests) -> None:
        """Insert pages that are not in the table, with contents that are not, each given once."""
        self.digests[page_ids] = digests
        self.parents[page_ids] = parents
        self._link(page_ids)

    def remove(self, page_ids: PageIds) -> None:
        """Take pages out of the table."""
        buckets = np.unique(self._buckets(self.digests[page_ids]))
        members = self._members(buckets)
        self._heads[buckets] = 0
        leaving = np.sort(page_ids)
        places = np.minimum(np.searchsorted(leaving, members), len(leaving) - 1)
        self._link(members[leaving[places] != members])

    def clear(self) -> None:
        """Take all pages out. Costs a pass over the table."""
        self._heads[:] = 0

    def _buckets(self, digests: Digests) -> npt.NDArray[np.intp]:
        return (digests[:, 0] & np.uint64(len(self._heads) - 1)).astype(np.intp)

    def _link(self, page_ids: PageIds) -> None:
        """Put pages at the heads of their chains; those of one bucket one behind the other."""
        if not len(page_ids):
            return
        buckets = self._buckets(self.digests[page_ids])
        order = np.argsort(buckets, kind="stable")
        buckets, page_ids = buckets[order], page_ids[order]
        begins = np.concatenate([[True], buckets[1:] != buckets[:-1]])
        ends = np.concatenate([begins[1:], [True]])
        self._next[page_ids] = np.where(ends, self._heads[buckets], np.roll(page_ids, -1))
        self._heads[buckets[begins]] = page_ids[begins]

    def _members(self, buckets: npt.NDArray[np.intp]) -> PageIds:
        """Return all pages of these chains."""
        level = self._heads[buckets].astype(np.intp)
        levels = []
        while len(level := level[level != 0]):
            levels.append(level)
            level = self._next[level].astype(np.intp)
        return np.concatenate(levels) if levels else level
