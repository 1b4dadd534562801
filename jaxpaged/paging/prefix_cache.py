"""The prefix cache as its users see it: what can be hit, why, for how long, and what has to be moved for it.

It is the part `PageAllocator.prefix`. Without prefix caching it is there too, and nothing hits.
"""

import math
import numbers
from collections.abc import Hashable, Iterable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from jaxpaged.config import cdiv
from jaxpaged.paging.commits import Commits
from jaxpaged.paging.digests import DIGEST_BYTES, Key, TokenIds, as_bytes, as_digests, as_tokens, check_keys
from jaxpaged.paging.observe.explain import explain_pages
from jaxpaged.paging.owner import Owner, verb
from jaxpaged.paging.pins import Pins
from jaxpaged.paging.pool import OutOfPagesError
from jaxpaged.paging.prefix_index import ON_HOST, Hits, PrefixIndex
from jaxpaged.paging.records import CachedPages, Eviction, HostPages, PageCopy, PageEvent, PageExplanation, Restore
from jaxpaged.paging.reservations import Reservations
from jaxpaged.paging.sequences import Sequences


class Prompt(NamedTuple):
    """A prompt, and what it hits.

    Attributes:
        tokens: [num_tokens] int32.
        keys: What besides the tokens shapes their KV.
        hits: The pages that it hits.
        copy_from: The page that it hits in part, behind those; 0 where there is none.
        num_hit_tokens: Tokens that it hits in all.
    """

    tokens: npt.NDArray[np.int32]
    keys: tuple[Key, ...]
    hits: Hits
    copy_from: int
    num_hit_tokens: int


class PrefixCache:
    """Finds, pins, forgets and takes over the contents that an `add` can hit; get it as `PageAllocator.prefix`.

    Contents become cached by `PageAllocator.commit`. Keys are what besides the tokens shapes the KV of a prompt, such
    as an adapter or a tenant's salt: give those here that `PageAllocator.add` was given.

    Attributes:
        index: What is indexed.
        pins: What is pinned.
        commits: What is committed.
        copies: Copies for hits that end inside a page, which nobody has taken yet.
        num_hit_tokens: Tokens of prompts that were hit since the allocator was made.
        num_missed_tokens: Tokens of the same prompts that had to be computed.
    """

    def __init__(self, owner: Owner, sequences: Sequences, reservations: Reservations, index: PrefixIndex):
        self._owner = owner
        self._sequences = sequences
        self._reservations = reservations
        self.index = index
        self.pins = Pins(index.pool)
        self.commits = Commits(sequences, index, self.pins)
        self.copies: list[PageCopy] = []
        self.num_hit_tokens = self.num_missed_tokens = 0

    @verb
    def match(self, token_ids: TokenIds, *, keys: Iterable[Key] = ()) -> int:
        """Return how many tokens of a prompt an `add` would find now; changes nothing.

        Args:
            token_ids: The tokens of the prompt.
            keys: What besides the tokens shapes their KV.
        """
        tokens, keys = as_tokens(token_ids), check_keys(keys)
        return self.look_up(tokens, keys, None).num_hit_tokens if len(tokens) else 0

    @verb
    def find(self, token_ids: TokenIds, *, keys: Iterable[Key] = (), group: str | None = None) -> npt.NDArray[np.int32]:
        """[full pages of the tokens] Return the page that holds the content of each full page; changes nothing.

        Unlike `match` it does not stop at the first page that is missing, and it looks for the last page too.

        Args:
            token_ids: The tokens of a prompt, or of a sequence.
            keys: What besides the tokens shapes their KV.
            group: The group whose pages are wanted; None where there is one only.

        Returns:
            Page ids; `NULL_PAGE` for each content that is not cached.
        """
        tokens, keys = as_tokens(token_ids), check_keys(keys)
        names = [page_group.name for page_group in self.index.groups]
        if group is None and len(names) == 1:
            group = names[0]
        if group not in names:
            raise ValueError(f"`group` must be one of {names}; got {group!r}.")
        return self.index.page_ids(self.index.chain_of(tokens, keys), names.index(group)).astype(np.int32)

    @verb
    def explain(self, token_ids: TokenIds, *, keys: Iterable[Key] = ()) -> list[PageExplanation]:
        """Explain page by page why an `add` of this prompt now would hit or miss it; changes nothing."""
        tokens, keys = as_tokens(token_ids), check_keys(keys)
        if not self.index.pool.caching:
            reason = "prefix caching is off: PageAllocator(prefix_caching=True) turns it on"
            return [PageExplanation(i, False, 0, 0, reason) for i in range(cdiv(len(tokens), self.index.page_size))]
        return explain_pages(self.index, tokens, keys)

    @verb
    def pin(self, token_ids: TokenIds, *, keys: Iterable[Key] = (), expires_at: float | None = None) -> int:
        """Keep the pages that this prefix hits now from eviction, until `unpin`, or an `expire` at `expires_at`.

        Pinned pages count as used. Pinning the same prefix again takes the place of the pin before.

        Returns:
            How many tokens are pinned: a multiple of the page size.

        Raises:
            OutOfPagesError: The pages are free, and all free pages are reserved for sequences.
            TypeError, ValueError: `expires_at` is neither None nor a time.
        """
        tokens, keys = as_tokens(token_ids), check_keys(keys)
        if expires_at is not None:
            expires_at = _as_time(expires_at, "`expires_at`")
        index = self.index
        if not index.pool.caching or len(tokens) < index.page_size:
            return 0
        hits = index.find(tokens, keys, len(tokens) // index.page_size)
        needed = index.pool.num_unreferenced(hits.on_device)
        free = index.pool.num_free_pages - self._reservations.num_pages
        if needed > free:
            raise OutOfPagesError(needed, free, f"pin of {len(tokens)} tokens")
        self.pins.pin(self._name_of(tokens, keys), hits.on_device, expires_at)
        return hits.num_pages * index.page_size

    @verb
    def unpin(self, token_ids: TokenIds, *, keys: Iterable[Key] = ()) -> None:
        """End the pin of a prefix, given as it was to `pin`.

        Raises:
            ValueError: It is not pinned (it may have expired).
        """
        tokens, keys = as_tokens(token_ids), check_keys(keys)
        if not self.pins.unpin(self._name_of(tokens, keys)):
            raise ValueError(f"`token_ids` must be a prefix that is pinned; got {len(tokens)} tokens that are not.")

    @verb
    def expire(self, now: float) -> None:
        """End the pins whose time is up, by the same clock as their `expires_at`, whichever that is."""
        self.pins.expire(_as_time(now, "`now`"))

    @verb
    def reset(self) -> None:
        """Forget all contents and all pins: nothing hits until it is committed anew. Sequences keep their pages."""
        self.pins.clear()
        self.index.clear()
        self.commits.clear()
        self._reservations.settle_copies()

    @verb
    def forget(self, page_ids: npt.ArrayLike) -> None:
        """Forget the content of these pages, and of all that continues them, whoever holds them.

        For pages whose import failed where `PageAllocator.invalidate` finds no room: free their sequences, and add them
        again later. Costs a pass over the pool.

        Raises:
            ValueError, TypeError: An id that is none of the pool's pages.
        """
        given = np.asarray(page_ids)
        if given.ndim != 1:
            raise ValueError(f"`page_ids` must have one axis; got shape {given.shape}.")
        if len(given) and given.dtype.kind not in "iu":
            raise TypeError(f"`page_ids` must be integers below 2**63; got {given.dtype}.")
        num_pages = self.index.pool.num_pages
        if len(given) and not 0 < given.min() <= given.max() < num_pages:
            raise ValueError(f"`page_ids` must be in 1 .. {num_pages - 1}; got {given.min()} .. {given.max()}.")
        self.commits.forget(self.commits.lost_pages(given.astype(np.intp)))
        self._reservations.settle_copies()

    @verb
    def cached_pages(self) -> CachedPages:
        """Return all contents that can be hit, parents before children. Costs a few passes over the pool."""
        index = self.index
        page_ids = index.in_order()
        return CachedPages(
            digests=np.frombuffer(as_bytes(index.table.digests[page_ids]), np.uint8).reshape(-1, DIGEST_BYTES),
            parents=np.frombuffer(as_bytes(index.table.parents[page_ids]), np.uint8).reshape(-1, DIGEST_BYTES),
            page_ids=page_ids.astype(np.int32),
            tokens=index.partial_hits.tokens[page_ids] if index.partial_hits is not None else None,
        )

    @verb
    def adopt(self, pages: CachedPages) -> npt.NDArray[np.int32]:
        """Index contents of another allocator in uncached pages, as many as there are.

        They count as used longer ago than anything here. Import their K and V before anybody can hit them.

        Returns:
            [n] the page for each content; 0 for one that is here already, whose parent is not, or that has no room.

        Raises:
            ValueError, TypeError: There is no prefix cache, or the arrays are not those of `cached_pages` of an
                allocator with this page size.
        """
        index = self.index
        if not index.pool.caching:
            raise ValueError("`adopt` needs a prefix cache: PageAllocator(prefix_caching=True).")
        _check_cached_pages(pages, index.page_size)
        digests, parents = (as_digests([x.tobytes()]) for x in (pages.digests, pages.parents))
        pool = index.pool
        room = min(pool.num_uncached_pages, pool.num_free_pages - self._reservations.num_pages)
        chosen = index.adoptable(digests, parents)[:room]
        adopted = np.zeros(len(digests), np.int32)
        adopted[chosen] = index.adopt(digests[chosen], parents[chosen])
        if index.partial_hits is not None and pages.tokens is not None:
            index.partial_hits.insert(adopted[chosen].astype(np.intp), parents[chosen], pages.tokens[chosen])
        return adopted

    @verb
    def take_copies(self) -> list[PageCopy]:
        """Return the copies for hits that end inside a page, since the last call.

        Take them right after `add`, and run them in order with those of `append`.
        """
        copies, self.copies = self.copies, []
        return copies

    @verb
    def take_evictions(self) -> list[Eviction]:
        """Return the contents evicted since the last call, with `offload=True`: export them before others are moved."""
        return self.index.take_evictions()

    @verb
    def take_restores(self) -> list[Restore]:
        """Return the pages that `add(..., host=...)` found there since the last call: import them before the step."""
        return self.index.take_restores()

    @verb
    def take_events(self) -> list[PageEvent]:
        """Return what became and what ceased to be cached since the last call, with `record_events=True`.

        A router that gets the events of all engines, in order, knows which engine has which prefix: it computes the
        digests of a prompt with `digests.hash_pages`.
        """
        return self.index.take_events()

    # What `PageAllocator.add` asks: no verbs

    def look_up(self, tokens: npt.NDArray[np.int32], keys: tuple[Key, ...], host: HostPages | None) -> Prompt:
        """Return a prompt, of at least one token, with what it hits."""
        hits = self.index.find(tokens, keys, (len(tokens) - 1) // self.index.page_size, host)
        source, in_part = self.index.find_partial(tokens, keys, hits)
        return Prompt(tokens, keys, hits, source, hits.num_pages * self.index.page_size + in_part)

    def cost(self, prompt: Prompt, num_tokens: int) -> int:
        """Return the free pages that the first tokens of a prompt would take, cached pages that it hits included."""
        hits = prompt.hits
        needed = cdiv(num_tokens, self.index.page_size) * len(self.index.groups)
        needed -= sum(int(np.count_nonzero(page_ids != ON_HOST)) for page_ids in hits.page_ids)
        return needed + self.index.pool.num_unreferenced(hits.on_device)

    def add(self, seq_id: Hashable, prompt: Prompt, num_tokens: int) -> None:
        """Add a sequence of the first tokens of a prompt: its hits, and new pages for the rest, which are free."""
        row = self._place(seq_id, prompt, num_tokens)
        in_part = prompt.num_hit_tokens - prompt.hits.num_pages * self.index.page_size
        if in_part:  # the page to copy from may have been evicted just now, but keeps its content until the copy
            copy_to = self._sequences.tables[0].pages(row).item(prompt.hits.num_pages)
            self.copies.append(PageCopy(prompt.copy_from, copy_to))
        self.num_hit_tokens += prompt.num_hit_tokens
        self.num_missed_tokens += len(prompt.tokens) - prompt.num_hit_tokens

    def _place(self, seq_id: Hashable, prompt: Prompt, num_tokens: int) -> int:
        """Give a new sequence its hits, and new pages for the rest and for what comes back from the host."""
        index, hits, size = self.index, prompt.hits, self.index.page_size
        index.pool.share(hits.on_device)
        num_new = cdiv(num_tokens, size) - hits.num_pages
        on_host = [page_ids == ON_HOST for page_ids in hits.page_ids]
        counts = [count for found in on_host for count in (int(np.count_nonzero(found)), num_new)]
        parts = np.split(index.take(sum(counts)), np.cumsum(counts)[:-1])
        restored, new = parts[::2], parts[1::2]
        for page_ids, found, restored_ids in zip(hits.page_ids, on_host, restored, strict=True):
            page_ids[found] = restored_ids
        pages = [np.concatenate(pair) for pair in zip(hits.page_ids, new, strict=True)]
        row = self._sequences.add_with(seq_id, num_tokens, pages, prompt.keys)
        for group, table in enumerate(self._sequences.tables):
            table.num_passed[row] = table.group.num_passed_pages(hits.num_pages * size, size)
            if len(restored[group]):
                index.insert_restored(group, restored[group], np.flatnonzero(on_host[group]), hits)
        self.commits.set(row, hits.num_pages)
        return row

    def _name_of(self, tokens: npt.NDArray[np.int32], keys: Sequence[Key]) -> bytes:
        """Return the digest of a prefix's last full page, or the root's where it has none."""
        chain = self.index.chain_of(tokens, keys)
        return as_bytes(chain[-1]) if len(chain) else self.index.root


def _as_time(value: float, label: str) -> float:
    """Return a time as a float: all pins are compared with it."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{label} must be a number of the caller's clock; got {value!r} ({type(value).__name__}).")
    if math.isnan(value):
        raise ValueError(f"{label} must be a number of the caller's clock; got nan, which no time reaches.")
    return float(value)


def _check_cached_pages(pages: CachedPages, page_size: int) -> None:
    """Raise by name for what `cached_pages` of an allocator with this page size cannot have given."""
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
