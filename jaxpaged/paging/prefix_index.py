"""The prefix index: which contents are indexed, in which pages, and what a prompt hits. It knows no sequences.

Three parts meet here: the pool (which pages are referenced, which were used last), the digest table (which page holds
which content) and the groups (which pages a hit needs). In a group without a window a page never stays indexed longer
than the page before it, for whoever holds a page holds those before it, and gives them back in one go, the last first.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from jaxpaged.paging.digest_table import DigestTable
from jaxpaged.paging.digests import Digests, Key, as_bytes, as_digests, group_tag, hash_pages, root_digest
from jaxpaged.paging.groups import PageGroup, longest_hit
from jaxpaged.paging.lru import PageIds
from jaxpaged.paging.partial_hits import NO_TOKEN, PartialHits
from jaxpaged.paging.pool import PagePool
from jaxpaged.paging.records import Eviction, HostPages, PageEvent, Restore

ON_HOST = -1
"""Stands for the id of a page that is not on the device, but can be restored from the host."""

_FIRST_LOOK = 64
"""Pages hashed before the first look at the table; then four times as many, so that a miss costs little."""
_NUM_REMEMBERED = 4096
"""Evicted contents that `was_evicted` remembers."""


class Hits(NamedTuple):
    """The pages of a prompt that need not be computed.

    Attributes:
        num_pages: How many leading pages.
        page_ids: An array [num_pages] of page ids a group; 0 for one that the next token does not see, or `ON_HOST`.
        chain: [>= num_pages, 2] the digests of the prompt's pages, before any group's tag.
    """

    num_pages: int
    page_ids: list[PageIds]
    chain: Digests

    @property
    def on_device(self) -> PageIds:
        """The pages that are on the device, those of all groups."""
        page_ids = np.concatenate(self.page_ids)
        return page_ids[page_ids > 0]


class PrefixIndex:
    """What can be hit. Its calls check nothing: `PageAllocator` and `PrefixCache` did.

    Over a pool that does not cache it is empty and stays empty.

    Attributes:
        pool, page_size, groups: As given.
        table: The indexed pages by digest.
        root: The digest that stands before every first page.
        tags: What is exclusive-ored into a digest, by group.
        partial_hits: The tokens of pages, for hits that end inside one; None where those are off.
        events: What became indexed and ceased to be since they were taken; None where nobody records them.
        evictions: Contents that were evicted since they were taken; None without offloading.
        restores: Pages to be imported from the host since they were taken.
        num_evictions: Pages evicted since the index was made.
    """

    def __init__(
        self,
        pool: PagePool,
        page_size: int,
        groups: tuple[PageGroup, ...],
        *,
        partial_hits: bool,
        offload: bool,
        record_events: bool,
    ):
        self.pool = pool
        self.page_size = page_size
        self.groups = groups
        self.table = DigestTable(pool.num_pages if pool.caching else 1)
        self.root = root_digest(page_size)
        # A lone group needs no tag: its digests are those that any router computes from the tokens.
        self.tags = [group_tag(g.name, g.sliding_window) if len(groups) > 1 else np.uint64(0) for g in groups]
        self.roots = {as_bytes(self.tagged(as_digests([self.root]), group)) for group in range(len(groups))}
        self.partial_hits = PartialHits(pool.num_pages, page_size) if partial_hits else None
        self.events: list[PageEvent] | None = [] if record_events else None
        self.evictions: list[Eviction] | None = [] if offload else None
        self.restores: list[Restore] = []
        self.num_evictions = 0
        self._evicted = np.zeros((_NUM_REMEMBERED if pool.caching else 0, 2), np.uint64)  # a ring of digests

    def tagged(self, chain: Digests, group: int) -> Digests:
        """Return digests as they are in the table for a group; applied twice, as they were."""
        return chain ^ np.array([self.tags[group], 0], np.uint64)

    def find(
        self, tokens: npt.NDArray[np.int32], keys: Sequence[Key], max_pages: int, host: HostPages | None = None
    ) -> Hits:
        """Return the longest prefix of at most `max_pages` pages for which every group has what the next token sees."""
        if not self.pool.caching:
            max_pages = 0
        chain = np.zeros((0, 2), np.uint64)
        found = [np.zeros(0, np.intp) for _ in self.groups]
        size, missed, parent = _FIRST_LOOK, False, self.root
        while not missed and len(chain) < max_pages:
            start, stop = len(chain), min(len(chain) + size, max_pages)
            part = tokens[start * self.page_size : stop * self.page_size]
            hashed = hash_pages(part, self.page_size, parent=parent, keys=keys, first_page=start)
            page_ids = [self._find_in_group(group, hashed, host) for group in range(len(self.groups))]
            end = self._end_of_full_hits(page_ids)
            found = [np.concatenate([before, ids[:end]]) for before, ids in zip(found, page_ids, strict=True)]
            chain = np.concatenate([chain, hashed])
            missed, parent = end < len(hashed), as_bytes(hashed[-1])
            size *= 4
        return self._agreed(found, chain)

    def find_partial(self, tokens: npt.NDArray[np.int32], keys: Sequence[Key], hits: Hits) -> tuple[int, int]:
        """Return the page that goes on like a prompt does after its hits, and for how many tokens; (0, 0) if none does.

        A page with keys of its own is never hit in part: a key changes the tokens after it.
        """
        start = hits.num_pages * self.page_size
        if self.partial_hits is None or any(start <= key.position < start + self.page_size for key in keys):
            return 0, 0
        parent = hits.chain[hits.num_pages - 1 : hits.num_pages] if hits.num_pages else as_digests([self.root])
        page_ids = self.partial_hits.recent(parent)
        page_ids = page_ids[self.pool.are_indexed(page_ids)]
        page_ids = page_ids[(self.table.parents[page_ids] == parent).all(axis=1)]
        return self.partial_hits.closest(page_ids, tokens[start:-1])

    def chain_of(self, tokens: npt.NDArray[np.int32], keys: Sequence[Key]) -> Digests:
        """[full pages, 2] Return the digests of all full pages of a prompt, before any group's tag."""
        return hash_pages(tokens, self.page_size, parent=self.root, keys=keys)

    def page_ids(self, chain: Digests, group: int) -> PageIds:
        """[len(chain)] Return the page that holds each content in a group; 0 where none does."""
        return self.table.find(self.tagged(chain, group))

    def insert(self, group: int, page_ids: PageIds, chain: Digests, parents: Digests) -> None:
        """Index referenced pages, whose contents are not indexed; the digests are those before the group's tag."""
        self.pool.mark_indexed(page_ids)
        self._list(page_ids, self.tagged(chain, group), self.tagged(parents, group))

    def insert_restored(self, group: int, page_ids: PageIds, indices: npt.NDArray[np.intp], hits: Hits) -> None:
        """Index new pages for the hits `indices` that are on the host, and list them as to be imported.

        They can be hit at once: whoever added them imports them before the step.
        """
        before = np.concatenate([as_digests([self.root]), hits.chain])
        self.insert(group, page_ids, hits.chain[indices], before[indices])
        self.restores += map(Restore, map(as_bytes, self.table.digests[page_ids]), page_ids.tolist())

    def remove(self, page_ids: PageIds) -> None:
        """Take pages out of the index; those that nobody references become uncached."""
        if len(page_ids):
            self._unlist(page_ids)
            self.pool.unmark_indexed(page_ids)

    def replace(self, old: PageIds, new: PageIds) -> None:
        """Let referenced pages stand for the contents of cached pages, which become uncached."""
        digests, parents = self.table.digests[old], self.table.parents[old]
        self.table.remove(old)
        self.pool.unmark_indexed(old)
        self.pool.mark_indexed(new)
        self.table.insert(new, digests, parents)

    def make_room(self, count: int) -> None:
        """Evict cached pages where fewer than `count` pages are uncached; so many must be free."""
        missing = count - self.pool.num_uncached_pages
        if missing > 0:
            self._evict(missing)

    def take(self, count: int) -> PageIds:
        """Take `count` free pages, with one reference each; where too few are uncached, evict the missing ones."""
        self.make_room(count)
        return np.array(self.pool.take(count), np.intp)

    def was_evicted(self, digest: Digests) -> bool:
        """Whether a content is among the last few thousand that were evicted."""
        return bool((self._evicted == digest).all(axis=1).any())

    def take_evictions(self) -> list[Eviction]:
        """Return what was evicted since the last call."""
        evictions = self.evictions or []
        if self.evictions is not None:
            self.evictions = []
        return evictions

    def take_events(self) -> list[PageEvent]:
        """Return what became indexed and ceased to be since the last call."""
        events = self.events or []
        if self.events is not None:
            self.events = []
        return events

    def take_restores(self) -> list[Restore]:
        """Return the pages to be imported since the last call, as far as they still hold that content."""
        restores, self.restores = self.restores, []
        return [restore for restore in restores if self._holds(*restore)]

    def adoptable(self, digests: Digests, parents: Digests) -> list[int]:
        """Return which contents could be indexed in this order: those not here, whose parents are here by then."""
        keeps_orphans = any(group.sliding_window is not None for group in self.groups)
        known, rooted = self.table.find(digests) != 0, self.table.find(parents) != 0
        inserted, chosen = set(self.roots), []
        for i, (digest, parent) in enumerate(zip(map(as_bytes, digests), map(as_bytes, parents), strict=True)):
            if not known[i] and digest not in inserted and (rooted[i] or parent in inserted or keeps_orphans):
                inserted.add(digest)
                chosen.append(i)
        return chosen

    def adopt(self, digests: Digests, parents: Digests) -> PageIds:
        """Index contents in uncached pages, as those used longest ago, the last of them longest."""
        page_ids = self.pool.take_cached(len(digests))
        self._list(page_ids, digests, parents)
        return page_ids

    def clear(self) -> None:
        """Take all pages out of the index; what was evicted before is not listed any more."""
        self.pool.unmark_indexed(self.pool.indexed_pages())
        self.table.clear()
        if self.evictions is not None:
            self.evictions.clear()
        if self.events is not None:
            self.events.append(PageEvent("cleared"))

    def parents(self) -> PageIds:
        """[num_pages] Return the page before each indexed page; 0 for a first one and where there is none."""
        indexed = self.pool.indexed_pages()
        parents = np.zeros(self.pool.num_pages, np.intp)
        parents[indexed] = self.table.find(self.table.parents[indexed])
        return parents

    def descendants(self, page_ids: PageIds) -> PageIds:
        """Return the indexed pages among these, and all that continue them. Costs a few passes over the pool."""
        reached = np.zeros(self.pool.num_pages, np.bool_)
        reached[page_ids] = True
        ancestors = self.parents()
        while ancestors.any():  # each pass doubles the distance
            reached |= reached[ancestors]
            ancestors = ancestors[ancestors]
        indexed = self.pool.indexed_pages()
        return indexed[reached[indexed]]

    def in_order(self) -> PageIds:
        """Return all indexed pages, parents before children. Costs a few passes over the pool."""
        ancestors = self.parents()
        depth = (ancestors != 0).astype(np.int32)
        while ancestors.any():
            depth += depth[ancestors]
            ancestors = ancestors[ancestors]
        indexed = self.pool.indexed_pages()
        return indexed[np.argsort(depth[indexed], kind="stable")]

    def _find_in_group(self, group: int, chain: Digests, host: HostPages | None) -> PageIds:
        digests = self.tagged(chain, group)
        page_ids = self.table.find(digests)
        if host is not None:
            for i in np.flatnonzero(page_ids == 0):
                if host.has(as_bytes(digests[i])):
                    page_ids[i] = ON_HOST
                elif self.groups[group].sliding_window is None:
                    break
        return page_ids

    def _end_of_full_hits(self, page_ids: list[PageIds]) -> int:
        """Return where the first page is missing from a group that needs all of them."""
        misses = np.zeros(len(page_ids[0]), np.bool_)
        for group, ids in zip(self.groups, page_ids, strict=True):
            if group.sliding_window is None:
                misses |= ids == 0
        return int(np.argmax(misses)) if misses.any() else len(misses)

    def _agreed(self, found: list[PageIds], chain: Digests) -> Hits:
        """Return the hits without the pages that are not needed."""
        num_pages = longest_hit(self.groups, found, self.page_size)
        page_ids = [ids[:num_pages] for ids in found]
        for group, ids in zip(self.groups, page_ids, strict=True):
            ids[: group.num_passed_pages(num_pages * self.page_size, self.page_size)] = 0
        return Hits(num_pages, page_ids, chain)

    def _evict(self, count: int) -> None:
        """Evict the `count` least recently used cached pages."""
        page_ids = self.pool.evict(count)
        digests = self.table.digests[page_ids]
        if self.evictions is not None:
            not_imported = frozenset(self.restores)  # there is nothing in them to export
            evicted = map(Eviction, map(as_bytes, digests), page_ids.tolist())
            self.evictions += [eviction for eviction in evicted if eviction not in not_imported]
        places = (self.num_evictions + np.arange(count))[-len(self._evicted) :] % len(self._evicted)
        self._evicted[places] = digests[-len(places) :]
        self.num_evictions += count
        self._unlist(page_ids)

    def _holds(self, digest: bytes, page_id: int) -> bool:
        """Whether this page can be hit for this content."""
        return bool(self.pool.are_indexed(np.array([page_id]))[0]) and as_bytes(self.table.digests[page_id]) == digest

    def _list(self, page_ids: PageIds, digests: Digests, parents: Digests) -> None:
        self.table.insert(page_ids, digests, parents)
        if self.partial_hits is not None:
            self.partial_hits.tokens[page_ids] = NO_TOKEN  # until they are known
        if self.events is not None:
            for page_id, digest, parent in zip(page_ids.tolist(), digests, map(as_bytes, parents), strict=True):
                before = None if parent in self.roots else parent
                self.events.append(PageEvent("stored", as_bytes(digest), before, page_id, self.page_size))

    def _unlist(self, page_ids: PageIds) -> None:
        if self.events is not None:
            for page_id, digest in zip(page_ids.tolist(), self.table.digests[page_ids], strict=True):
                self.events.append(PageEvent("removed", as_bytes(digest), None, page_id, self.page_size))
        self.table.remove(page_ids)
