"""Hits that end inside a page: which indexed pages continue a given page, and with which tokens."""

import numpy as np
import numpy.typing as npt

from jaxpaged.paging.digests import Digests
from jaxpaged.paging.lru import PageIds

_WAYS = 8
NO_TOKEN = np.int32(-(2**31))
"""Fills the pages that are never hit in part: those with keys, and those whose tokens are not known. No prompt has it,
for `as_tokens` refuses it."""


class PartialHits:
    """The tokens of each page, and the last few pages that were indexed after each page.

    Not all of them: a popular page has thousands of continuations, and both a lookup and an eviction must cost the same
    whatever their number. Costs 32 bytes a page and 4 a token; entries are checked when read, so nothing is removed.

    Attributes:
        tokens: [num_pages, page_size] int32.
    """

    __slots__ = ("_recent", "tokens")

    def __init__(self, num_pages: int, page_size: int):
        self.tokens = np.zeros((num_pages, page_size), np.int32)
        self._recent = np.zeros((1 << num_pages.bit_length(), _WAYS), np.int32)

    def insert(self, page_ids: PageIds, parents: Digests, tokens: npt.NDArray[np.int32]) -> None:
        """Note the tokens of pages, given the digests of the pages before them."""
        self.tokens[page_ids] = tokens
        buckets = self._buckets(parents)
        while len(page_ids):  # in rounds, for several pages may fall into one bucket
            first = np.unique(buckets, return_index=True)[1]
            self._recent[buckets[first], 1:] = self._recent[buckets[first], :-1]
            self._recent[buckets[first], 0] = page_ids[first]
            page_ids, buckets = np.delete(page_ids, first), np.delete(buckets, first)

    def recent(self, parent: Digests) -> PageIds:
        """Return pages that may continue `parent` [1, 2]: some may hold other contents by now."""
        page_ids = self._recent[self._buckets(parent)[0]].astype(np.intp)
        return page_ids[page_ids > 0]

    def closest(self, page_ids: PageIds, tokens: npt.NDArray[np.int32]) -> tuple[int, int]:
        """Return which of these pages begins with the most of `tokens`, and with how many; (0, 0) if none does."""
        if not len(page_ids) or not len(tokens):
            return 0, 0
        same = self.tokens[page_ids, : len(tokens)] == tokens[: self.tokens.shape[1]]
        lengths = np.logical_and.accumulate(same, axis=1).sum(axis=1)
        best = int(np.argmax(lengths))
        return (int(page_ids[best]), int(lengths[best])) if lengths[best] else (0, 0)

    def _buckets(self, parents: Digests) -> npt.NDArray[np.intp]:
        return (parents[:, 0] & np.uint64(len(self._recent) - 1)).astype(np.intp)
