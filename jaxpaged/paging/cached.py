"""The verbs of the prefix cache: what can be hit, why, for how long, and who is told."""

import math
import numbers
from collections.abc import Hashable, Iterable, Sequence

import numpy as np
import numpy.typing as npt

from jaxpaged.config import cdiv
from jaxpaged.paging.cache import PrefixCache
from jaxpaged.paging.continuations import NO_TOKEN
from jaxpaged.paging.digests import (
    DIGEST_BYTES,
    Digests,
    Key,
    TokenIds,
    as_bytes,
    as_digests,
    as_tokens,
    check_keys,
    hash_pages,
    root_digest,
)
from jaxpaged.paging.lru import PageIds
from jaxpaged.paging.pool import OutOfPagesError
from jaxpaged.paging.reports import CachedPages, Eviction, PageCopy, PageEvent, PageExplanation, Restore
from jaxpaged.paging.state import PageState, verb
from jaxpaged.paging.tables import Rows, SequenceTable


class CacheVerbs(PageState):
    """`commit`, `match`, `explain`, `pin`, `reset`, and what must be moved or told. Nothing is cached without them."""

    __slots__ = ()

    @verb
    def commit(self, seq_id: Hashable, token_ids: TokenIds) -> None:
        """Tells that the K and V of these tokens are written, or that the step which writes them is dispatched.

        From then on others hit the full pages among them. Costs O(new pages): what was committed before is not read.
        Where another sequence committed the same content first, its page takes the place of this one's, which is free:
        make page tables after the commit, not before. Gives back the pages that no window sees any more.

        Args:
            seq_id: A sequence.
            token_ids: All of its tokens that are final, from the first one on; never draft tokens.

        Raises:
            ValueError, TypeError: No such sequence, or more tokens than it has, or a page was committed with others.
        """
        row = self._row(seq_id)
        num_tokens = self._checked_length(row, seq_id, token_ids)
        first, end = self._table.num_indexed.item(row), num_tokens // self._page_size
        if self._cache is not None and end > first:
            self._enter_pages(self._cache, row, seq_id, token_ids, first, end)
            self._table.num_indexed[row] = end
        self._pass_windows(row, num_tokens)

    @verb
    def match(self, token_ids: TokenIds, *, keys: Iterable[Key] = ()) -> int:
        """How many tokens of a prompt an `add` now would find; changes nothing."""
        tokens = as_tokens(token_ids)
        if self._cache is None or not len(tokens):
            return 0
        keys = check_keys(keys)
        hits = self._cache.find(tokens, keys, (len(tokens) - 1) // self._page_size)
        return hits.num_pages * self._page_size + self._partial_hit(tokens, keys, hits.num_pages, hits.chain)[1]

    @verb
    def explain(self, token_ids: TokenIds, *, keys: Iterable[Key] = ()) -> list[PageExplanation]:
        """Page by page, why an `add` of this prompt now would hit it or miss it; changes nothing."""
        tokens, keys = as_tokens(token_ids), check_keys(keys)
        num_pages = cdiv(len(tokens), self._page_size)
        cache = self._cache
        if cache is None:
            reason = "prefix caching is off: PageAllocator(prefix_caching=True) turns it on"
            return [PageExplanation(i, False, 0, 0, reason) for i in range(num_pages)]
        hits = cache.find(tokens, keys, max(0, len(tokens) - 1) // self._page_size)
        source, in_part = self._partial_hit(tokens, keys, hits.num_pages, hits.chain)
        chain = self._hash(tokens, keys)
        found = [cache.index.find(cache.tagged(chain, group)) for group in range(len(self._groups))]
        explained = []
        for i in range(num_pages):
            # A group whose window has passed the page needs none for the hit.
            holders = [int(ids[i]) for ids in (hits.page_ids if i < hits.num_pages else found) if i < len(ids)]
            page_id = next((holder for holder in holders if holder), 0)
            owners = self._pool.ref_count(page_id) if page_id else 0
            if i == hits.num_pages and in_part:
                page_id, owners = source, self._pool.ref_count(source)
                reason = f"hit in part: its first {in_part} tokens are copied from page {source}"
            elif i >= hits.num_pages:
                reason = self._why_missed(cache, tokens, keys, i, chain, found)
            elif not page_id:
                reason = "hit: no token to compute sees it"
            else:
                reason = f"hit: {owners} owners" if owners else "hit: cached, nobody owns it now"
            explained.append(PageExplanation(i, i < hits.num_pages, page_id, owners, reason))
        return explained

    @verb
    def pin(self, token_ids: TokenIds, *, keys: Iterable[Key] = (), expires_at: float | None = None) -> int:
        """Keeps the pages that this prefix hits now from eviction, until `unpin`, or an `expire` at `expires_at`.

        Pinned pages count as used. Pinning the same prefix again takes the place of the pin before.

        Returns:
            How many tokens are pinned: a multiple of the page size.

        Raises:
            OutOfPagesError: The pages are free, and all free pages are promised to sequences.
            TypeError, ValueError: `expires_at` is neither None nor a time.
        """
        tokens, keys = as_tokens(token_ids), check_keys(keys)
        if expires_at is not None:
            expires_at = _as_time(expires_at, "`expires_at`")
        cache = self._cache
        if cache is None or len(tokens) < self._page_size:
            return 0
        hits = cache.find(tokens, keys, len(tokens) // self._page_size)
        idle = self._pool.num_idle(hits.here)
        if idle > self.num_free_pages:
            raise OutOfPagesError(idle, self.num_free_pages, f"pin of {len(tokens)} tokens")
        cache.pin(self._name_of(tokens, keys), hits.here, expires_at)
        return hits.num_pages * self._page_size

    @verb
    def unpin(self, token_ids: TokenIds, *, keys: Iterable[Key] = ()) -> None:
        """Ends the pin of a prefix, given as it was to `pin`.

        Raises:
            ValueError: It is not pinned (it may have expired).
        """
        tokens, keys = as_tokens(token_ids), check_keys(keys)
        if self._cache is None or not self._cache.unpin(self._name_of(tokens, keys)):
            raise ValueError(f"`token_ids` must be a prefix that is pinned; got {len(tokens)} tokens that are not.")

    @verb
    def expire(self, now: float) -> None:
        """Ends the pins whose time is up: the same clock as their `expires_at`, whichever that is."""
        if self._cache is not None:
            self._cache.expire(_as_time(now, "`now`"))

    @verb
    def reset(self) -> None:
        """Forgets all content and all pins: nothing hits until it is committed anew. Sequences keep their pages."""
        if self._cache is not None:
            self._cache.clear()
            self._table.num_indexed[:] = 0

    @verb
    def invalidate(self, seq_id: Hashable, num_valid_tokens: int) -> list[Hashable]:
        """Forgets the content of a sequence's pages after its first tokens, and of all that continues them.

        For pages whose import failed: they count as missed, nobody hits them from now on. Costs a pass over the pool.

        A sequence can be computed anew from there only where its windows still have the pages that the first token to
        compute sees. One that lacks some of them gets new pages in the place of all that its windows have passed, and
        has to be computed anew from token 0; pages that are still right are then written again with what they hold.

        Returns:
            The sequences that hold one of those pages, this one included: they have to be computed anew from there, or
            from token 0 where no entry of `page_ids` is `NULL_PAGE` now.

        Raises:
            ValueError, TypeError: No such sequence, or the count is none within its length.
            OutOfPagesError: Too few pages are free for the new ones. The contents can still be hit: `forget_pages`.
        """
        row = self._row(seq_id)
        num_valid = self._within(row, seq_id, num_valid_tokens, "`num_valid_tokens`")
        page_ids = [table.pages(row)[num_valid // self._page_size :].astype(np.intp) for table in self._tables]
        wrong, leaving = self._wrong_pages(np.concatenate(page_ids))
        rows = self._table.all_rows()
        valid = self._num_right_pages(rows, wrong) * self._page_size  # by row; past the end where all are right
        if num_valid < self._table.num_tokens.item(row):
            valid[row] = min(valid.item(row), num_valid)
        lacking = [i for i in rows.tolist() if self._lacks_pages(i, valid.item(i))]
        needed = sum(table.num_dead.item(i) for table in self._tables for i in lacking)
        if needed > self.num_free_pages:
            raise OutOfPagesError(needed, self.num_free_pages, f"invalidate of sequence {seq_id!r}")
        self._forget(wrong, leaving)
        np.minimum(self._table.num_indexed, valid // self._page_size, out=self._table.num_indexed)
        for i in lacking:
            self._restore_dead(i)
        holding = (valid[rows] < self._table.num_tokens[rows]).tolist()
        return [name for name, holds in zip(self._table.seq_ids(), holding, strict=True) if holds]

    @verb
    def forget_pages(self, page_ids: npt.NDArray[np.integer]) -> None:
        """Forgets the content of these pages, and of all that continues them, whoever holds them.

        For pages whose import failed where `invalidate` finds no room: free their sequences, and add them again later.
        Costs a pass over the pool.

        Raises:
            ValueError: An id that is none of the pool's pages.
        """
        page_ids = np.asarray(page_ids, np.intp)
        if len(page_ids) and not 0 < page_ids.min() <= page_ids.max() < self._pool.num_pages:
            raise ValueError(
                f"`page_ids` must be in 1 .. {self._pool.num_pages - 1}; got {page_ids.min()} .. {page_ids.max()}."
            )
        wrong, leaving = self._wrong_pages(page_ids)
        self._forget(wrong, leaving)
        right = self._num_right_pages(self._table.all_rows(), wrong)
        np.minimum(self._table.num_indexed, right, out=self._table.num_indexed)

    @verb
    def take_copies(self) -> list[PageCopy]:
        """The copies for partial hits; take them right after `add`, and run them in order with those of `append`."""
        copies, self._copies = self._copies, []
        return copies

    @verb
    def take_evictions(self) -> list[Eviction]:
        """Contents given up since the last call, with `offload=True`: to be exported before anything else is moved."""
        if self._cache is None or self._cache.evictions is None:
            return []
        evictions, self._cache.evictions = self._cache.evictions, []
        return evictions

    @verb
    def take_restores(self) -> list[Restore]:
        """Pages that `add(..., host=...)` found there, since the last call: to be imported before the step."""
        restores, self._restores = self._restores, []
        return restores

    @verb
    def take_events(self) -> list[PageEvent]:
        """What became and what ceased to be cached since the last call, with `record_events=True`."""
        if self._cache is None or self._cache.events is None:
            return []
        events, self._cache.events = self._cache.events, []
        return events

    @verb
    def cached_pages(self) -> CachedPages:
        """All contents that can be hit, parents before children. Costs a few passes over the pool."""
        cache = self._cache
        if cache is None:
            empty = np.zeros((0, 16), np.uint8)
            return CachedPages(digests=empty, parents=empty, page_ids=np.zeros(0, np.int32))
        page_ids = cache.in_order()
        return CachedPages(
            digests=np.frombuffer(as_bytes(cache.index.digests[page_ids]), np.uint8).reshape(-1, 16),
            parents=np.frombuffer(as_bytes(cache.index.parents[page_ids]), np.uint8).reshape(-1, 16),
            page_ids=page_ids.astype(np.int32),
            tokens=cache.continuations.tokens[page_ids] if cache.continuations is not None else None,
        )

    @verb
    def adopt(self, pages: CachedPages) -> npt.NDArray[np.int32]:
        """Takes free pages for another's cached contents, as many as are plain, and makes them findable.

        They count as used longer ago than anything here. Import their K and V before anybody can hit them.

        Returns:
            [n] the page for each content; 0 for one that is here already, whose parent is not, or that has no room.

        Raises:
            ValueError, TypeError: There is no prefix cache, or the arrays are not those of `cached_pages` of an
                allocator with this page size.
        """
        cache = self._cache
        if cache is None:
            raise ValueError("`adopt` needs a prefix cache: PageAllocator(prefix_caching=True).")
        _check_cached_pages(pages, self._page_size)
        digests, parents = (as_digests([x.tobytes()]) for x in (pages.digests, pages.parents))
        room = min(self._pool.num_plain_pages, self.num_free_pages)
        chosen = cache.adoptable(digests, parents)[:room]
        adopted = np.zeros(len(digests), np.int32)
        adopted[chosen] = cache.adopt(digests[chosen], parents[chosen])
        if cache.continuations is not None and pages.tokens is not None:
            cache.continuations.enter(adopted[chosen].astype(np.intp), parents[chosen], pages.tokens[chosen])
        return adopted

    def _enter_pages(
        self, cache: PrefixCache, row: int, seq_id: Hashable, token_ids: TokenIds, first: int, end: int
    ) -> None:
        """Makes the full pages [first, end) of a row findable, in all groups."""
        keys = self._keys.get(row, ())
        before = self._chain_before(cache, row, first)
        hashed_from = first if before is not None else 0  # a window has passed the page before: hash from the start
        tokens = as_tokens(token_ids[hashed_from * self._page_size : end * self._page_size], _LABEL.format(seq_id))
        parent = cache.root if before is None else before
        chain = hash_pages(tokens, self._page_size, parent=parent, keys=keys, first_page=hashed_from)
        parents = np.concatenate([as_digests([parent]), chain[:-1]])
        chain, parents = chain[first - hashed_from :], parents[first - hashed_from :]
        tokens = tokens[(first - hashed_from) * self._page_size :].reshape(-1, self._page_size)
        self._check_not_another(cache, row, seq_id, first, chain)
        for group, table in enumerate(self._tables):
            self._enter_group(cache, group, table, row, first, chain, parents)
        if cache.continuations is not None:
            keyed = [key.position // self._page_size - first for key in keys]
            tokens = np.where(np.isin(np.arange(end - first), keyed)[:, None], NO_TOKEN, tokens)
            cache.continuations.enter(self._table.pages(row)[first:end].astype(np.intp), parents, tokens)

    def _chain_before(self, cache: PrefixCache, row: int, first: int) -> bytes | None:
        """The digest of the page before page `first`; None if no group has that page any more."""
        if first == 0:
            return cache.root
        for group, table in enumerate(self._tables):
            if page_id := table.pages(row).item(first - 1):
                return as_bytes(cache.tagged(cache.index.digests[[page_id]], group))
        return None

    def _check_not_another(self, cache: PrefixCache, row: int, seq_id: Hashable, first: int, chain: Digests) -> None:
        """Raises where a fork committed one of these pages with other tokens."""
        for group, table in enumerate(self._tables):
            page_ids = table.pages(row)[first : first + len(chain)].astype(np.intp)
            differs = (cache.index.digests[page_ids] != cache.tagged(chain, group)).any(axis=1)
            differs &= self._pool.kept(page_ids)
            if differs.any():
                index = first + int(np.argmax(differs))
                raise ValueError(
                    f"`token_ids` of sequence {seq_id!r} must be those that its page {index} was committed with by "
                    "another sequence that shares it; got others."
                )

    def _enter_group(
        self,
        cache: PrefixCache,
        group: int,
        table: SequenceTable,
        row: int,
        first: int,
        chain: Digests,
        parents: Digests,
    ) -> None:
        """Enters a row's pages where their content is new, and settles on one page where it is not."""
        entries = table.pages(row)[first : first + len(chain)]
        mine = entries.astype(np.intp)
        twins = cache.index.find(cache.tagged(chain, group))
        new = (mine != 0) & (twins == 0)
        cache.enter(group, mine[new], chain[new], parents[new])
        double = (mine != 0) & (twins != 0) & (twins != mine)
        if not double.any():
            return
        idle = double & (self._pool.ref_counts(twins) == 0)
        if idle.any():  # so that a commit never costs a page
            cache.replace(twins[idle], mine[idle])
        used = double & ~idle
        shared = used & (self._pool.ref_counts(mine) > 1)
        for page_id, twin in zip(mine[shared].tolist(), twins[shared].tolist(), strict=True):
            self._replace_for_all(table, page_id, twin)
        private = used & ~shared
        self._pool.share(twins[private])
        self._pool.drop(mine[private])
        entries[private] = twins[private]

    def _replace_for_all(self, table: SequenceTable, page_id: int, twin: int) -> None:
        """Gives all forks that share a page another of the same content: what they share stays shared."""
        owners = self._pool.ref_count(page_id)
        table.replace_everywhere(page_id, twin)
        self._pool.share(np.array([twin]), owners)
        self._pool.drop(np.array([page_id]), owners)

    def _partial_hit(
        self, tokens: npt.NDArray[np.int32], keys: Sequence[Key], num_pages: int, chain: Digests
    ) -> tuple[int, int]:
        """The page that goes on like a prompt does after its hits, and for how many tokens; (0, 0) if none does.

        A page with keys of its own is never shared in part: a key changes the tokens after it.
        """
        cache, start = self._cache, num_pages * self._page_size
        if cache is None or cache.continuations is None:
            return 0, 0
        if any(start <= key.position < start + self._page_size for key in keys):
            return 0, 0
        parent = chain[num_pages - 1 : num_pages] if num_pages else as_digests([cache.root])
        return cache.closest(parent, tokens[start:-1])

    def _why_missed(
        self,
        cache: PrefixCache,
        tokens: npt.NDArray[np.int32],
        keys: Sequence[Key],
        i: int,
        chain: Digests,
        found: list[PageIds],
    ) -> str:
        """The reason that page i is no hit: the first page that its successor would see and that a group lacks."""
        size = self._page_size
        if i >= len(chain):
            return f"not full: {len(tokens) - i * size} of {size} tokens"
        lacking = [
            (start + int(np.argmin(seen)), group)
            for group, ids in enumerate(found)
            for start in [self._groups[group].num_dead_pages((i + 1) * size, size)]
            if not (seen := ids[start : i + 1] > 0).all()
        ]
        if not lacking:
            return "holds the last token, which is always computed anew"
        first_miss, its_group = min(lacking)
        own = [group for group, ids in enumerate(found) if ids[i] == 0 and any(group == g for _, g in lacking)]
        group = own[0] if own else its_group
        where = f" in group {self._groups[group].name!r}" if len(self._groups) > 1 else ""
        if not own:
            return f"cached, but page {first_miss} before it is not{where}"
        if cache.was_evicted(cache.tagged(chain[i : i + 1], group)):
            return "evicted" + where
        if keys and cache.index.find(cache.tagged(self._hash(tokens, ())[i : i + 1], group)).any():
            return f"cached without `keys`, or under others{where}"
        if first_miss < i:
            return f"not cached{where}, nor is page {first_miss} before it"
        return f"never seen{where}, or evicted long ago"

    def _name_of(self, tokens: npt.NDArray[np.int32], keys: Sequence[Key]) -> bytes:
        """The digest of a prefix's last full page; the root's where it has none."""
        chain = self._hash(tokens, keys)
        return as_bytes(chain[-1]) if len(chain) else root_digest(self._page_size)

    def _hash(self, tokens: npt.NDArray[np.int32], keys: Sequence[Key]) -> Digests:
        """The digests of a prompt's full pages."""
        return hash_pages(tokens, self._page_size, parent=root_digest(self._page_size), keys=keys)

    def _wrong_pages(self, page_ids: PageIds) -> tuple[npt.NDArray[np.bool_], PageIds]:
        """[num_pages] which pages are wrong when these are; and those of them that can be hit."""
        wrong = np.zeros(self._pool.num_pages, np.bool_)
        wrong[page_ids] = True
        wrong[0] = False
        leaving = np.zeros(0, np.intp) if self._cache is None else self._cache.descendants(np.flatnonzero(wrong))
        wrong[leaving] = True
        return wrong, leaving

    def _forget(self, wrong: npt.NDArray[np.bool_], leaving: PageIds) -> None:
        if self._cache is not None:
            self._cache.unpin_pages(wrong)
            self._cache.leave(leaving)

    def _num_right_pages(self, rows: Rows, wrong: npt.NDArray[np.bool_]) -> npt.NDArray[np.intp]:
        """By row the pages before the first wrong one of any group; more than any sequence has where none is wrong."""
        right = np.full(len(self._table.starts), 2**31, np.intp)
        for table in self._tables:
            places, indices, page_ids = table.entries(rows)
            hit = wrong[page_ids]
            np.minimum.at(right, rows[places[hit]], indices[hit])
        return right

    def _lacks_pages(self, row: int, num_valid: int) -> bool:
        """Whether a window has passed pages that token `num_valid` sees."""
        return any(
            table.num_dead.item(row) > group.num_dead_pages(num_valid, self._page_size)
            for group, table in zip(self._groups, self._tables, strict=True)
        )

    def _restore_dead(self, row: int) -> None:
        """Gives a row new pages, with nothing in them, in the place of those that its windows have passed."""
        self._table.num_indexed[row] = 0
        for table in self._tables:
            num_dead = table.num_dead.item(row)
            table.pages(row)[:num_dead] = self._take_array(num_dead)
            table.num_dead[row] = 0

    def _checked_length(self, row: int, seq_id: Hashable, token_ids: TokenIds) -> int:
        if not isinstance(token_ids, np.ndarray | list | tuple | range):
            raise TypeError(f"{_LABEL.format(seq_id)} must be its tokens; got {type(token_ids).__name__}.")
        length = self._table.num_tokens.item(row)
        if len(token_ids) > length:
            raise ValueError(f"{_LABEL.format(seq_id)} must be at most its {length} tokens; got {len(token_ids)}.")
        return len(token_ids)


_LABEL = "`token_ids` of sequence {!r}"


def _as_time(value: float, label: str) -> float:
    """A time as a float: all pins are compared with it."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{label} must be a number of the caller's clock; got {value!r} ({type(value).__name__}).")
    if math.isnan(value):
        raise ValueError(f"{label} must be a number of the caller's clock; got nan, which no time reaches.")
    return float(value)


def _check_cached_pages(pages: CachedPages, page_size: int) -> None:
    """Raises by name for what `cached_pages` of an allocator with this page size cannot have given."""
    if not isinstance(pages, CachedPages):
        raise TypeError(f"`pages` must be CachedPages, as `cached_pages` gives them; got {type(pages).__name__}.")
    count = len(pages.digests)
    expected: dict[str, tuple[type[np.integer], int]]
    expected = {"digests": (np.uint8, DIGEST_BYTES), "parents": (np.uint8, DIGEST_BYTES)}
    if pages.tokens is not None:
        expected["tokens"] = (np.int32, page_size)
    for name, (dtype, width) in expected.items():
        array = getattr(pages, name)
        if array.shape != (count, width) or array.dtype != dtype:
            raise ValueError(
                f"`{name}` of `pages` must be {dtype.__name__} [{count}, {width}], for pages of {page_size} tokens; "
                f"got {array.dtype} {list(array.shape)}."
            )
