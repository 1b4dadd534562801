"""Pages for sequences: who holds which page, and where each token goes.

The allocator decides and `KVCache` executes: it returns numpy arrays and page copies, and never sees a device. All
verbs are transactional: a call that raises has changed nothing. One owner: a call that begins while another thread is
inside one raises.
"""

from collections.abc import Hashable, Iterable, Sequence
from typing import Any, SupportsIndex

import numpy as np
import numpy.typing as npt

from jaxpaged.checks import as_count
from jaxpaged.config import cdiv
from jaxpaged.paging import reports
from jaxpaged.paging.batches import BatchVerbs
from jaxpaged.paging.cache import ON_HOST, Hits, PrefixCache
from jaxpaged.paging.cached import CacheVerbs
from jaxpaged.paging.commits import CommitVerbs
from jaxpaged.paging.contents import ContentVerbs
from jaxpaged.paging.digests import TOKEN_LISTS, Key, TokenIds, as_bytes, as_digests, as_tokens, check_keys
from jaxpaged.paging.failures import FailureVerbs
from jaxpaged.paging.groups import PageGroup, check_groups
from jaxpaged.paging.lru import PageIds
from jaxpaged.paging.owner import second_thread, verb
from jaxpaged.paging.pool import PagePool
from jaxpaged.paging.reports import HostPages, PageCopy, PageStats, PoolSnapshot, Restore, SharingStats
from jaxpaged.paging.state import SwappedSequence, taken
from jaxpaged.paging.tables import SequenceTable, unhashable


class PageAllocator(BatchVerbs, CommitVerbs, CacheVerbs, FailureVerbs, ContentVerbs):
    """Hands pages to sequences, shares them between forks and prefixes, and says in which slot each token lies.

    A sequence of n tokens holds `ceil(n / page_size)` pages of each group; token t lies in slot
    `page_ids[t // page_size] * page_size + t % page_size`. Sequence ids are any hashable values. Verbs cost
    O(pages touched), whatever the size of the pool.

    Args:
        num_pages: Pages of the pool, the null page included: the same number as `KVCache`'s.
        page_size: Tokens a page.
        prefix_caching: Full pages that were committed keep their content until they are needed for another, and an
            `add` of tokens that begin alike shares them.
        partial_hits: A prompt that parts from a cached page inside it gets a copy of that page (see `take_copies`).
            Keeps the tokens: 4 bytes a token and 32 a page more.
        groups: Layers with page tables of their own; None is one group that sees all tokens.
        max_pages_per_seq: The width of the page tables that sequences have to fit in, or None.
        offload: List evicted contents in `take_evictions`, so that they can be kept elsewhere.
        record_events: List what became and ceased to be cached in `take_events`.

    Raises:
        ValueError, TypeError: An argument out of range, or one that needs `prefix_caching` without it.
    """

    __slots__ = ()

    def __init__(
        self,
        num_pages: SupportsIndex,
        page_size: SupportsIndex = 16,
        *,
        prefix_caching: bool = False,
        partial_hits: bool = False,
        groups: Sequence[PageGroup] | None = None,
        max_pages_per_seq: SupportsIndex | None = None,
        offload: bool = False,
        record_events: bool = False,
    ):
        self._page_size = as_count(page_size, "`page_size`", minimum=1)
        num_pages = as_count(num_pages, "`num_pages`, the null page included,", minimum=2)
        if num_pages * self._page_size >= 2**31:
            raise ValueError(
                f"`num_pages` x `page_size` must be < 2**31, for slots are int32; got {num_pages} x {self._page_size}."
            )
        options = {"partial_hits": partial_hits, "offload": offload, "record_events": record_events}
        for name, on in {"prefix_caching": prefix_caching, **options}.items():
            if not isinstance(on, bool | np.bool_):
                raise TypeError(f"`{name}` must be True or False; got {on!r} ({type(on).__name__}).")
        if not prefix_caching and (without := [name for name, on in options.items() if on]):
            raise ValueError(f"`{without[0]}` needs prefix_caching=True.")
        self._groups = check_groups(groups)
        if partial_hits and (len(self._groups) > 1 or any(g.sliding_window is not None for g in self._groups)):
            raise ValueError("`partial_hits` must be False where a group has a window or there are several groups.")
        if max_pages_per_seq is not None:
            max_pages_per_seq = as_count(max_pages_per_seq, "`max_pages_per_seq`", minimum=1)
        self._max_pages = max_pages_per_seq
        self._pool = PagePool(num_pages, keeps_content=prefix_caching)
        self._cache = PrefixCache(self._pool, self._page_size, self._groups, **options) if prefix_caching else None
        self._tables = tuple(SequenceTable() for _ in self._groups)
        self._table = self._tables[0]
        pairs = zip(self._groups, self._tables, strict=True)
        self._windowed = tuple((group, table) for group, table in pairs if group.sliding_window is not None)
        self._keys = {}
        self._swapped = {}
        self._copies, self._restores = [], []
        self._num_reserved = 0
        self._covers_copy = set()
        self._is_simple = not prefix_caching and self._groups == check_groups(None) and max_pages_per_seq is None
        self._busy = False

    @property
    def num_pages(self) -> int:
        """Pages of the pool, the null page included."""
        return self._pool.num_pages

    @property
    def page_size(self) -> int:
        """Tokens a page."""
        return self._page_size

    @property
    def prefix_caching(self) -> bool:
        """Whether contents can be hit."""
        return self._cache is not None

    @property
    def groups(self) -> tuple[PageGroup, ...]:
        """The groups, in order."""
        return self._groups

    @property
    def options(self) -> dict[str, Any]:
        """The arguments that make an empty allocator which decides alike."""
        return {
            "num_pages": self.num_pages,
            "page_size": self.page_size,
            "prefix_caching": self._cache is not None,
            "partial_hits": self._cache is not None and self._cache.continuations is not None,
            "groups": self._groups,
            "max_pages_per_seq": self._max_pages,
        }

    @verb
    def can_allocate(
        self, num_tokens: TokenIds | SupportsIndex, *, keys: Iterable[Key] = (), host: HostPages | None = None
    ) -> bool:
        """Whether `add` of a sequence with so many tokens, or with these, would find its pages now."""
        count = _num_tokens(num_tokens, "`num_tokens`")
        if self._max_pages is not None and count > self._max_pages * self._page_size:
            return False
        needed, idle = self._add_cost(count, self._find(num_tokens, count, check_keys(keys), host))
        return needed + idle <= self.num_free_pages

    def add(
        self,
        seq_id: Hashable,
        token_ids: TokenIds | SupportsIndex,
        *,
        keys: Iterable[Key] = (),
        host: HostPages | None = None,
    ) -> int:
        """Gives a new sequence the pages for its tokens: those of others, as far as it begins alike, and new ones.

        Args:
            seq_id: A name that no live or swapped sequence has.
            token_ids: The tokens, or how many they are: a number hits nothing.
            keys: What besides the tokens shapes their KV. They stay with the sequence.
            host: Where evicted pages may be found that are missing here; see `take_restores`.

        Returns:
            How many of the tokens are in the cache already: fewer than all, for the last one's logits are wanted.

        Raises:
            OutOfPagesError: Too few pages are free.
            ValueError, TypeError: The id is taken, or the tokens are not one list, or their number is not a count, or
                beyond `max_pages_per_seq`.
        """
        if self._busy:  # `verb` in place, for it would take as long as all the rest
            raise second_thread("add")
        self._busy = True
        try:
            if self._is_simple and type(token_ids) is int and token_ids >= 0:
                table, pool, needed = self._table, self._pool, -(-token_ids // self._page_size)
                try:
                    is_new = seq_id not in table.row_of_seq and seq_id not in self._swapped
                except TypeError:
                    raise unhashable("seq_id", seq_id) from None
                if is_new and needed <= pool.num_plain_pages - self._num_reserved:
                    table.add(seq_id, pool.take(needed), token_ids)
                    return 0
            return self._add(seq_id, token_ids, check_keys(keys), host)
        finally:
            self._busy = False

    @verb
    def swap_out(self, seq_id: Hashable) -> npt.NDArray[np.int32]:
        """Takes a sequence's pages from it. It keeps its name and its length, and can only be swapped in or freed.

        Returns:
            The pages to export before anything else is written: of each group in turn those that it held.

        Raises:
            ValueError: No such sequence, or it is swapped out already.
        """
        row = self._row(seq_id)
        num_dead = tuple(table.num_dead.item(row) for table in self._tables)
        held = [table.pages(row)[dead:] for table, dead in zip(self._tables, num_dead, strict=True)]
        page_ids = np.concatenate(held)
        swapped = SwappedSequence(
            num_tokens=self._table.num_tokens.item(row), num_dead=num_dead, keys=self._keys.get(row, ())
        )
        self._drop(seq_id)
        self._swapped[seq_id] = swapped
        return page_ids

    @verb
    def swap_in(self, seq_id: Hashable) -> npt.NDArray[np.int32]:
        """Gives a swapped sequence as many new pages as it held.

        Returns:
            The pages to import, in the order in which `swap_out` gave them. They are nobody else's: commit all tokens
            anew to share them.

        Raises:
            OutOfPagesError: Too few pages are free.
            ValueError: It is not swapped out.
        """
        if seq_id not in self or seq_id not in self._swapped:
            self._table.row(seq_id)
            raise ValueError(f"`seq_id` must be a sequence that is swapped out; got {seq_id!r}, which is not.")
        swapped = self._swapped[seq_id]
        num_pages = cdiv(swapped.num_tokens, self._page_size)
        counts = [num_pages - dead for dead in swapped.num_dead]
        self._require(sum(counts), self.num_free_pages, "swap_in", seq_id, swapped.num_tokens)
        new = self._take_array(sum(counts))
        for table, dead, page_ids in zip(
            self._tables, swapped.num_dead, np.split(new, np.cumsum(counts)[:-1]), strict=True
        ):
            table.add(seq_id, np.concatenate([np.zeros(dead, np.intp), page_ids]), swapped.num_tokens)
            table.num_dead[table.row(seq_id)] = dead
        if swapped.keys:
            self._keys[self._table.row(seq_id)] = swapped.keys
        del self._swapped[seq_id]
        return new.astype(np.int32)

    @verb
    def stats(self) -> PageStats:
        """Counts of pages, sequences and tokens. Costs a pass over the pool."""
        num_usable, cache = self._pool.num_pages - 1, self._cache
        rows = self._table.all_rows()
        held = [(table.num_pages - table.num_dead)[rows] for table in self._tables]
        num_tokens = int(self._table.num_tokens[rows].sum())
        num_dead = sum(int(table.num_dead[rows].sum()) for table in self._tables)
        return PageStats(
            num_usable_pages=num_usable,
            num_used_pages=num_usable - self._pool.num_free_pages,
            num_shared_pages=self._pool.num_shared_pages(),
            num_unshared_pages=sum(int(counts.sum()) for counts in held),
            num_sequences=len(self._table),
            num_tokens=num_tokens,
            page_size=self._page_size,
            num_cached_pages=self._pool.num_cached_pages,
            num_reserved_pages=self._num_reserved,
            num_swapped_sequences=len(self._swapped),
            num_hit_tokens=cache.num_hit_tokens if cache else 0,
            num_missed_tokens=cache.num_missed_tokens if cache else 0,
            num_evictions=cache.num_evictions if cache else 0,
            num_pinned_pages=cache.num_pinned_pages() if cache else 0,
            num_stored_tokens=len(self._tables) * num_tokens - num_dead * self._page_size,
        )

    @verb
    def sharing(self, seq_ids: Sequence[Hashable]) -> SharingStats:
        """What some sequences hold together, and would without sharing: for the beams of a search, for example.

        Raises:
            ValueError, TypeError: No such sequence, or one is given twice.
        """
        rows = self._rows(seq_ids)
        self._check_distinct(seq_ids, rows, "sharing")
        held = [page_ids[page_ids > 0] for _, _, page_ids in (table.entries(rows) for table in self._tables)]
        every = np.concatenate(held)
        return SharingStats(num_unshared_pages=len(every), num_held_pages=len(np.unique(every)))

    @verb
    def snapshot(self) -> PoolSnapshot:
        """Who holds what, page by page, in arrays of their own: for pictures. Costs a pass over the pool."""
        num_pages = self._pool.num_pages
        rows = self._table.all_rows()
        owner, fill = np.full(num_pages, -1, np.int32), np.zeros(num_pages, np.int32)
        every = np.arange(num_pages)
        ref_count, kept = np.zeros(num_pages, np.int32), self._pool.kept(every)
        fill[kept] = self._page_size
        for table in self._tables:
            places, indices, page_ids = table.entries(rows)
            owner[page_ids[::-1]] = places[::-1]  # so that the first one stays
            ref_count += np.bincount(page_ids, minlength=num_pages).astype(np.int32)
            tokens = self._table.num_tokens[rows][places] - indices * self._page_size
            np.maximum.at(fill, page_ids, np.minimum(tokens, self._page_size).astype(np.int32))
        state = np.select(
            [ref_count > 1, ref_count == 1, self._pool.all_ref_counts() > 0, kept],
            [reports.SHARED, reports.USED, reports.PINNED, reports.CACHED],
            reports.FREE,
        ).astype(np.uint8)
        owner[0], ref_count[0], fill[0], state[0] = -1, 0, 0, reports.NULL
        return PoolSnapshot(
            owner=owner,
            ref_count=ref_count,
            state=state,
            fill=fill,
            seq_ids=self._table.seq_ids(),
            page_size=self._page_size,
        )

    def _add(
        self, seq_id: Hashable, token_ids: TokenIds | SupportsIndex, keys: tuple[Key, ...], host: HostPages | None
    ) -> int:
        """`add` in full: with all refusals, hits, groups and limits."""
        if seq_id in self:
            raise taken("seq_id", seq_id, self)
        num_tokens = _num_tokens(token_ids, "`token_ids` of sequence {!r}, where it is their number,", seq_id)
        self._check_limit(num_tokens, seq_id)
        hits = self._find(token_ids, num_tokens, keys, host)
        needed, idle = self._add_cost(num_tokens, hits)
        self._require(needed + idle, self.num_free_pages, "add", seq_id, num_tokens)
        if self._cache is None or not isinstance(token_ids, TOKEN_LISTS):
            self._place(seq_id, num_tokens, hits, needed)
            num_hit = 0
        else:
            # Found before pages are taken: the page to copy from may be one of them, and keeps its content until then.
            page_id, in_part = self._cache.partial_hit(as_tokens(token_ids), keys, hits)
            self._place(seq_id, num_tokens, hits, needed)
            if in_part:
                self._copies.append(PageCopy(page_id, self._table.pages(self._table.row(seq_id)).item(hits.num_pages)))
            num_hit = hits.num_pages * self._page_size + in_part
            self._cache.num_hit_tokens += num_hit
            self._cache.num_missed_tokens += num_tokens - num_hit
        if keys:
            self._keys[self._table.row(seq_id)] = keys
        return num_hit

    def _find(
        self, token_ids: TokenIds | SupportsIndex, num_tokens: int, keys: tuple[Key, ...], host: HostPages | None
    ) -> Hits:
        """What a new sequence with these tokens would share."""
        if self._cache is None or num_tokens == 0 or not isinstance(token_ids, TOKEN_LISTS):
            return Hits(0, [np.zeros(0, np.intp) for _ in self._groups], np.zeros((0, 2), np.uint64))
        return self._cache.find(as_tokens(token_ids), keys, (num_tokens - 1) // self._page_size, host)

    def _add_cost(self, num_tokens: int, hits: Hits) -> tuple[int, int]:
        """Pages that a new sequence takes, and free pages among those that it shares."""
        needed = cdiv(num_tokens, self._page_size) * len(self._groups)
        needed -= sum(int(np.count_nonzero(page_ids != ON_HOST)) for page_ids in hits.page_ids)
        return needed, self._pool.num_idle(hits.here)

    def _place(self, seq_id: Hashable, num_tokens: int, hits: Hits, needed: int) -> None:
        """Gives a new sequence its hits, and new pages for the rest and for what comes back from the host."""
        if hits.num_pages:
            self._pool.share(hits.here)
        new = self._take_array(needed)
        num_new = cdiv(num_tokens, self._page_size) - hits.num_pages
        for group, (table, page_ids) in enumerate(zip(self._tables, hits.page_ids, strict=True)):
            on_host = page_ids == ON_HOST
            restored, own, new = np.split(new, [np.count_nonzero(on_host), np.count_nonzero(on_host) + num_new])
            page_ids[on_host] = restored
            table.add(seq_id, np.concatenate([page_ids, own]), num_tokens)
            table.num_dead[table.row(seq_id)] = self._groups[group].num_dead_pages(
                hits.num_pages * self._page_size, self._page_size
            )
            if len(restored):
                self._restore(group, restored, np.flatnonzero(on_host), hits)
        self._table.num_indexed[self._table.row(seq_id)] = hits.num_pages

    def _restore(self, group: int, page_ids: PageIds, indices: npt.NDArray[np.intp], hits: Hits) -> None:
        """Lists pages to be imported, and makes them findable at once: their owner imports them before the step."""
        assert self._cache is not None
        before = np.concatenate([as_digests([self._cache.root]), hits.chain])
        self._cache.enter(group, page_ids, hits.chain[indices], before[indices])
        digests = map(as_bytes, self._cache.index.digests[page_ids])
        self._restores += map(Restore, digests, page_ids.tolist())


def _num_tokens(token_ids: TokenIds | SupportsIndex, label: str, *names: object) -> int:
    """The length of a list of tokens, or the count itself."""
    if isinstance(token_ids, np.ndarray) and token_ids.ndim:
        if token_ids.ndim > 1:
            what = label.format(*names).split(",")[0]
            raise ValueError(f"{what} must have one axis; got shape {token_ids.shape}.")
        return len(token_ids)
    if isinstance(token_ids, list | tuple | range):
        if token_ids and isinstance(token_ids[0], TOKEN_LISTS):
            raise ValueError(f"{label.format(*names).split(',')[0]} must be one list of integers; got a list of lists.")
        return len(token_ids)
    return as_count(token_ids, label, *names)
