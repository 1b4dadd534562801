"""Why each page of a prompt would be hit or missed, in words."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from jaxpaged.config import cdiv
from jaxpaged.paging.digests import Digests, Key
from jaxpaged.paging.lru import PageIds
from jaxpaged.paging.prefix_index import Hits, PrefixIndex
from jaxpaged.paging.records import PageExplanation


def explain_pages(index: PrefixIndex, tokens: npt.NDArray[np.int32], keys: Sequence[Key]) -> list[PageExplanation]:
    """Return an explanation for each page of a prompt; changes nothing."""
    size = index.page_size
    hits = index.find(tokens, keys, max(0, len(tokens) - 1) // size)
    source, in_part = index.find_partial(tokens, keys, hits)
    misses = _Misses(index, tokens, keys)
    explained = []
    for i in range(cdiv(len(tokens), size)):
        if i < hits.num_pages:
            explained.append(_hit(index, hits, i))
        elif i == hits.num_pages and in_part:
            reason = f"hit in part: its first {in_part} tokens are copied from page {source}"
            explained.append(PageExplanation(i, False, source, index.pool.ref_count(source), reason))
        else:
            page_id = next((int(ids[i]) for ids in misses.found if i < len(ids) and ids[i]), 0)
            num_references = index.pool.ref_count(page_id) if page_id else 0
            explained.append(PageExplanation(i, False, page_id, num_references, misses.reason(i)))
    return explained


def _hit(index: PrefixIndex, hits: Hits, i: int) -> PageExplanation:
    page_id = next((int(ids[i]) for ids in hits.page_ids if ids[i]), 0)
    if not page_id:  # the windows of all groups have passed it
        return PageExplanation(i, True, 0, 0, "hit: no token to compute sees it")
    count = index.pool.ref_count(page_id)
    reason = f"hit: {count} reference{'s' if count > 1 else ''}" if count else "hit: cached, nobody references it now"
    return PageExplanation(i, True, page_id, count, reason)


class _Misses:
    """The pages of a prompt that are not cached.

    Attributes:
        found: An array a group of the pages that hold the prompt's full pages, 0 for one that is not cached.
    """

    def __init__(self, index: PrefixIndex, tokens: npt.NDArray[np.int32], keys: Sequence[Key]):
        self._index, self._num_tokens = index, len(tokens)
        self._chain = index.chain_of(tokens, keys)
        self.found = self._find(self._chain)
        self._found_unkeyed = self._find(index.chain_of(tokens, ())) if keys else None
        self._next_misses = [_next_misses(ids) for ids in self.found]

    def reason(self, i: int) -> str:
        """Say why page i is no hit: what a token after it would see, and a group lacks."""
        index, size = self._index, self._index.page_size
        if i >= len(self._chain):
            return f"not full: {self._num_tokens - i * size} of {size} tokens"
        first_seen = [group.num_passed_pages((i + 1) * size, size) for group in index.groups]
        first_misses = [int(ids[start]) for ids, start in zip(self._next_misses, first_seen, strict=True)]
        lacking = [group for group, first_miss in enumerate(first_misses) if first_miss <= i]
        if not lacking:
            return "holds the last token, which is always computed anew"
        own = [group for group in lacking if not self.found[group][i]]  # those that lack page i itself
        group = own[0] if own else min(lacking, key=first_misses.__getitem__)
        before = min(first_misses)
        where = f" in group {index.groups[group].name!r}" if len(index.groups) > 1 else ""
        if not own:
            return f"cached, but page {before} before it is not{where}"
        if index.was_evicted(index.tagged(self._chain[i : i + 1], group)):
            return f"evicted{where}"
        if self._found_unkeyed is not None and self._found_unkeyed[group][i]:
            return f"cached without `keys`, or under others{where}"
        if before < i:
            return f"not cached{where}, nor is page {before} before it"
        return f"never seen{where}, or evicted long ago"

    def _find(self, chain: Digests) -> list[PageIds]:
        return [self._index.page_ids(chain, group) for group in range(len(self._index.groups))]


def _next_misses(page_ids: PageIds) -> npt.NDArray[np.intp]:
    """[len(page_ids) + 1] Return the first page from each one on that is missing; past the end where none is."""
    count = len(page_ids)
    missing = np.where(page_ids == 0, np.arange(count), count)
    return np.append(np.minimum.accumulate(missing[::-1])[::-1], count)
