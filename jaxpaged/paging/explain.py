"""Why each page of a prompt would be hit or missed, in words."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from jaxpaged.config import cdiv
from jaxpaged.paging.cache import Hits, PrefixCache
from jaxpaged.paging.digests import Digests, Key, hash_pages
from jaxpaged.paging.lru import PageIds
from jaxpaged.paging.reports import PageExplanation


def explain_pages(cache: PrefixCache, tokens: npt.NDArray[np.int32], keys: Sequence[Key]) -> list[PageExplanation]:
    """An explanation for each page of a prompt; changes nothing."""
    size = cache.page_size
    hits = cache.find(tokens, keys, max(0, len(tokens) - 1) // size)
    source, in_part = cache.partial_hit(tokens, keys, hits)
    misses = _Misses(cache, tokens, keys)
    explained = []
    for i in range(cdiv(len(tokens), size)):
        if i < hits.num_pages:
            explained.append(_hit(cache, hits, i))
        elif i == hits.num_pages and in_part:
            reason = f"hit in part: its first {in_part} tokens are copied from page {source}"
            explained.append(PageExplanation(i, False, source, cache.pool.ref_count(source), reason))
        else:
            page_id = next((int(ids[i]) for ids in misses.found if i < len(ids) and ids[i]), 0)
            num_owners = cache.pool.ref_count(page_id) if page_id else 0
            explained.append(PageExplanation(i, False, page_id, num_owners, misses.reason(i)))
    return explained


def _hit(cache: PrefixCache, hits: Hits, i: int) -> PageExplanation:
    page_id = next((int(ids[i]) for ids in hits.page_ids if ids[i]), 0)
    if not page_id:  # the windows of all groups have passed it
        return PageExplanation(i, True, 0, 0, "hit: no token to compute sees it")
    owners = cache.pool.ref_count(page_id)
    reason = "hit: cached, nobody owns it now" if not owners else f"hit: {owners} owner{'s' if owners > 1 else ''}"
    return PageExplanation(i, True, page_id, owners, reason)


class _Misses:
    """Which pages of a prompt the cache lacks.

    Attributes:
        found: Of each group the pages that hold the prompt's full pages, 0 for one that is not cached.
    """

    def __init__(self, cache: PrefixCache, tokens: npt.NDArray[np.int32], keys: Sequence[Key]):
        self._cache, self._num_tokens = cache, len(tokens)
        self._chain = hash_pages(tokens, cache.page_size, parent=cache.root, keys=keys)
        self.found = self._find(self._chain)
        self._found_unkeyed = self._find(hash_pages(tokens, cache.page_size, parent=cache.root)) if keys else None
        self._next_misses = [_next_misses(ids) for ids in self.found]

    def reason(self, i: int) -> str:
        """Why page i is no hit: what a token after it would see, and a group lacks."""
        cache, size = self._cache, self._cache.page_size
        if i >= len(self._chain):
            return f"not full: {self._num_tokens - i * size} of {size} tokens"
        first_seen = [group.num_dead_pages((i + 1) * size, size) for group in cache.groups]
        first_misses = [int(ids[start]) for ids, start in zip(self._next_misses, first_seen, strict=True)]
        lacking = [group for group, first_miss in enumerate(first_misses) if first_miss <= i]
        if not lacking:
            return "holds the last token, which is always computed anew"
        own = [group for group in lacking if not self.found[group][i]]  # those that lack page i itself
        group = own[0] if own else min(lacking, key=first_misses.__getitem__)
        before = min(first_misses)
        where = f" in group {cache.groups[group].name!r}" if len(cache.groups) > 1 else ""
        if not own:
            return f"cached, but page {before} before it is not{where}"
        if cache.was_evicted(cache.tagged(self._chain[i : i + 1], group)):
            return f"evicted{where}"
        if self._found_unkeyed is not None and self._found_unkeyed[group][i]:
            return f"cached without `keys`, or under others{where}"
        if before < i:
            return f"not cached{where}, nor is page {before} before it"
        return f"never seen{where}, or evicted long ago"

    def _find(self, chain: Digests) -> list[PageIds]:
        return [self._cache.index.find(self._cache.tagged(chain, group)) for group in range(len(self._cache.groups))]


def _next_misses(page_ids: PageIds) -> npt.NDArray[np.intp]:
    """[len(page_ids) + 1] the first page from each one on that is missing; past the end where none is."""
    count = len(page_ids)
    missing = np.where(page_ids == 0, np.arange(count), count)
    return np.append(np.minimum.accumulate(missing[::-1])[::-1], count)
