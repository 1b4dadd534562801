"""The prefix cache: it finds contents by their tokens, enters them, and gives them up. It knows no sequences.

Three owners of facts meet here: the pool (who has owners, who was used last), the index (which page holds what) and the
groups (which pages a hit needs). In a group without a window a page never stays in the index longer than the page
before it, for whoever holds a page holds those before it, and gives them back in one go, the last first.
"""

from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from jaxpaged.paging.continuations import NO_TOKEN, Continuations
from jaxpaged.paging.digests import Digests, Key, as_bytes, as_digests, group_tag, hash_pages, root_digest
from jaxpaged.paging.groups import PageGroup, longest_hit
from jaxpaged.paging.lru import PageIds
from jaxpaged.paging.pool import PagePool
from jaxpaged.paging.prefix import PrefixIndex
from jaxpaged.paging.reports import Eviction, HostPages, PageEvent

ON_HOST = -1
"""Stands for the id of a page that is not here, but where it can be restored from."""

_FIRST_LOOK = 64
"""Pages hashed before the first look at the index; then four times as many, so that a miss costs little."""


class Hits(NamedTuple):
    """A prompt's pages that need not be computed.

    Attributes:
        num_pages: How many leading pages.
        page_ids: Of each group [num_pages] page ids; 0 for one that the next token does not see, or `ON_HOST`.
        chain: [>= num_pages, 2] the digests of the prompt's pages, before any group's tag.
    """

    num_pages: int
    page_ids: list[PageIds]
    chain: Digests

    @property
    def here(self) -> PageIds:
        """The pages that are on the device, those of all groups."""
        page_ids = np.concatenate(self.page_ids)
        return page_ids[page_ids > 0]


class PrefixCache:
    """What can be hit. The verbs check nothing: the allocator did."""

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
        self.index = PrefixIndex(pool.num_pages)
        self.groups = groups
        self.root = root_digest(page_size)
        # A lone group needs no tag: its digests are those that any router computes from the tokens.
        self.tags = [group_tag(g.name, g.sliding_window) if len(groups) > 1 else np.uint64(0) for g in groups]
        self.continuations = Continuations(pool.num_pages, page_size) if partial_hits else None
        self.events: list[PageEvent] | None = [] if record_events else None
        self.evictions: list[Eviction] | None = [] if offload else None
        self.num_evictions = 0
        self._pins: dict[bytes, tuple[npt.NDArray[np.int32], float | None]] = {}
        self._roots = {as_bytes(self.tagged(as_digests([self.root]), group)) for group in range(len(groups))}
        self.num_hit_tokens = self.num_missed_tokens = 0
        self.page_size = page_size
        self._given_up = np.zeros((4096, 2), np.uint64)  # a ring: the last contents that were evicted

    def tagged(self, chain: Digests, group: int) -> Digests:
        """Digests as they are in the index for a group; applied twice, as they were."""
        return chain ^ np.array([self.tags[group], 0], np.uint64)

    def find(
        self, tokens: npt.NDArray[np.int32], keys: Sequence[Key], max_pages: int, host: HostPages | None = None
    ) -> Hits:
        """The longest prefix of at most `max_pages` pages for which every group has what the next token sees."""
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

    def partial_hit(self, tokens: npt.NDArray[np.int32], keys: Sequence[Key], hits: Hits) -> tuple[int, int]:
        """The page that goes on like a prompt does after its hits, and for how many tokens; (0, 0) if none does.

        A page with keys of its own is never shared in part: a key changes the tokens after it.
        """
        start = hits.num_pages * self.page_size
        if self.continuations is None or any(start <= key.position < start + self.page_size for key in keys):
            return 0, 0
        parent = hits.chain[hits.num_pages - 1 : hits.num_pages] if hits.num_pages else as_digests([self.root])
        page_ids = self.continuations.recent(parent)
        page_ids = page_ids[self.pool.kept(page_ids)]
        page_ids = page_ids[(self.index.parents[page_ids] == parent).all(axis=1)]
        return self.continuations.closest(page_ids, tokens[start:-1])

    def enter(self, group: int, page_ids: PageIds, chain: Digests, parents: Digests) -> None:
        """Makes pages in use findable: contents that are not in the index, digests before the group's tag."""
        self.pool.keep(page_ids)
        self._list(page_ids, self.tagged(chain, group), self.tagged(parents, group))

    def leave(self, page_ids: PageIds) -> None:
        """Makes pages unfindable; those that nobody owns become plain."""
        if len(page_ids):
            self._unlist(page_ids)
            self.pool.forget(page_ids)

    def replace(self, old: PageIds, new: PageIds) -> None:
        """Lets pages in use stand for the contents of pages that nobody owns, which become plain."""
        digests, parents = self.index.digests[old], self.index.parents[old]
        self.index.remove(old)
        self.pool.forget(old)
        self.pool.keep(new)
        self.index.insert(new, digests, parents)

    def evict(self, count: int, not_here: Collection[tuple[bytes, int]] = ()) -> None:
        """Makes the `count` least recently used cached pages plain.

        Args:
            count: How many.
            not_here: Contents and pages that were to be imported and have not been: nothing to export.
        """
        page_ids = self.pool.evict(count)
        digests = self.index.digests[page_ids]
        if self.evictions is not None:
            given_up = map(Eviction, map(as_bytes, digests), page_ids.tolist())
            self.evictions += [eviction for eviction in given_up if eviction not in not_here]
        places = (self.num_evictions + np.arange(count))[-len(self._given_up) :] % len(self._given_up)
        self._given_up[places] = digests[-len(places) :]
        self.num_evictions += count
        self._unlist(page_ids)

    def holds(self, digest: bytes, page_id: int) -> bool:
        """Whether this page can be hit for this content."""
        return bool(self.pool.kept(np.array([page_id]))[0]) and as_bytes(self.index.digests[page_id]) == digest

    def was_evicted(self, digest: Digests) -> bool:
        """Whether a content is among the last few thousand that were given up."""
        return bool((self._given_up == digest).all(axis=1).any())

    def pin(self, name: bytes, page_ids: PageIds, expires_at: float | None) -> None:
        """Owns indexed pages under a name, until `unpin` or until the time is up; takes the place of a pin before."""
        self.pool.share(page_ids)
        self.unpin(name)
        self._pins[name] = page_ids.astype(np.int32), expires_at

    def unpin(self, name: bytes) -> bool:
        """Gives up what is owned under a name; whether there was a pin."""
        pin = self._pins.pop(name, None)
        if pin is not None:
            self.pool.drop(pin[0].astype(np.intp))
        return pin is not None

    def expire(self, now: float) -> None:
        """Ends the pins whose time is up."""
        self._unpin_where(lambda _, expires_at: expires_at is not None and expires_at <= now)

    def unpin_pages(self, marked: npt.NDArray[np.bool_]) -> None:
        """Ends the pins that own a marked page."""
        self._unpin_where(lambda page_ids, _: bool(marked[page_ids].any()))

    def pinned_pages(self) -> PageIds:
        """The pages of all pins, each as often as pins own it."""
        return np.concatenate([np.zeros(0, np.intp), *(page_ids for page_ids, _ in self._pins.values())]).astype(
            np.intp
        )

    def num_pinned_pages(self) -> int:
        """Pages that nothing but pins own. Costs O(pinned pages)."""
        page_ids, counts = np.unique(self.pinned_pages(), return_counts=True)
        return int(np.count_nonzero(self.pool.ref_counts(page_ids) == counts))

    def adoptable(self, digests: Digests, parents: Digests) -> list[int]:
        """Which contents could be entered in this order: those not here, whose parents are here by then."""
        keeps_orphans = any(group.sliding_window is not None for group in self.groups)
        known, rooted = self.index.find(digests) != 0, self.index.find(parents) != 0
        entered, chosen = set(self._roots), []
        for i, (digest, parent) in enumerate(zip(map(as_bytes, digests), map(as_bytes, parents), strict=True)):
            if not known[i] and digest not in entered and (rooted[i] or parent in entered or keeps_orphans):
                entered.add(digest)
                chosen.append(i)
        return chosen

    def adopt(self, digests: Digests, parents: Digests) -> PageIds:
        """Enters contents in plain pages that nobody owns, as those used longest ago, the last of them longest."""
        page_ids = self.pool.take_cached(len(digests))
        self._list(page_ids, digests, parents)
        return page_ids

    def clear(self) -> None:
        """Makes all pages unfindable and ends all pins; what was given up before is not listed any more."""
        self._unpin_where(lambda *_: True)
        self.pool.forget(self.pool.kept_pages())
        self.index.clear()
        if self.evictions is not None:
            self.evictions.clear()
        if self.events is not None:
            self.events.append(PageEvent("cleared"))

    def parents(self) -> PageIds:
        """[num_pages] the page before each indexed page; 0 for a first one and where there is none. A pass over all."""
        kept = self.pool.kept_pages()
        parents = np.zeros(self.pool.num_pages, np.intp)
        parents[kept] = self.index.find(self.index.parents[kept])
        return parents

    def descendants(self, page_ids: PageIds) -> PageIds:
        """The indexed pages among these, and all that continue them. Costs a few passes over the pool."""
        reached = np.zeros(self.pool.num_pages, np.bool_)
        reached[page_ids] = True
        ancestors = self.parents()
        while ancestors.any():  # each pass doubles the distance
            reached |= reached[ancestors]
            ancestors = ancestors[ancestors]
        kept = self.pool.kept_pages()
        return kept[reached[kept]]

    def in_order(self) -> PageIds:
        """All indexed pages, parents before children. Costs a few passes over the pool."""
        ancestors = self.parents()
        depth = (ancestors != 0).astype(np.int32)
        while ancestors.any():
            depth += depth[ancestors]
            ancestors = ancestors[ancestors]
        kept = self.pool.kept_pages()
        return kept[np.argsort(depth[kept], kind="stable")]

    def _find_in_group(self, group: int, chain: Digests, host: HostPages | None) -> PageIds:
        digests = self.tagged(chain, group)
        page_ids = self.index.find(digests)
        if host is not None:
            for i in np.flatnonzero(page_ids == 0):
                if host.has(as_bytes(digests[i])):
                    page_ids[i] = ON_HOST
                elif self.groups[group].sliding_window is None:
                    break
        return page_ids

    def _end_of_full_hits(self, page_ids: list[PageIds]) -> int:
        """Where the first page is missing from a group that needs all of them."""
        misses = np.zeros(len(page_ids[0]), np.bool_)
        for group, ids in zip(self.groups, page_ids, strict=True):
            if group.sliding_window is None:
                misses |= ids == 0
        return int(np.argmax(misses)) if misses.any() else len(misses)

    def _agreed(self, found: list[PageIds], chain: Digests) -> Hits:
        """The hits without the pages that are not needed."""
        num_pages = longest_hit(self.groups, found, self.page_size)
        page_ids = [ids[:num_pages] for ids in found]
        for group, ids in zip(self.groups, page_ids, strict=True):
            ids[: group.num_dead_pages(num_pages * self.page_size, self.page_size)] = 0
        return Hits(num_pages, page_ids, chain)

    def _list(self, page_ids: PageIds, digests: Digests, parents: Digests) -> None:
        self.index.insert(page_ids, digests, parents)
        if self.continuations is not None:
            self.continuations.tokens[page_ids] = NO_TOKEN  # until they are told
        if self.events is not None:
            for page_id, digest, parent in zip(page_ids.tolist(), digests, map(as_bytes, parents), strict=True):
                before = None if parent in self._roots else parent
                self.events.append(PageEvent("stored", as_bytes(digest), before, page_id, self.page_size))

    def _unlist(self, page_ids: PageIds) -> None:
        if self.events is not None:
            for page_id, digest in zip(page_ids.tolist(), self.index.digests[page_ids], strict=True):
                self.events.append(PageEvent("removed", as_bytes(digest), None, page_id, self.page_size))
        self.index.remove(page_ids)

    def _unpin_where(self, ends: Callable[[npt.NDArray[np.int32], float | None], bool]) -> None:
        for name, pin in list(self._pins.items()):
            if ends(*pin):
                self.unpin(name)
