"""The verbs of the prefix cache: what can be hit, why, for how long, and who is told."""

import math
import numbers
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from jaxpaged.config import cdiv
from jaxpaged.paging.digests import Key, TokenIds, as_bytes, as_tokens, check_keys, hash_pages, root_digest
from jaxpaged.paging.explain import explain_pages
from jaxpaged.paging.owner import verb
from jaxpaged.paging.pool import OutOfPagesError
from jaxpaged.paging.promises import Promises
from jaxpaged.paging.reports import Eviction, PageCopy, PageEvent, PageExplanation, Restore


class CacheVerbs(Promises):
    """`match`, `explain`, `pin`, `reset`, and what must be moved or told."""

    __slots__ = ()

    @verb
    def match(self, token_ids: TokenIds, *, keys: Iterable[Key] = ()) -> int:
        """How many tokens of a prompt an `add` now would find; changes nothing."""
        tokens = as_tokens(token_ids)
        if self._cache is None or not len(tokens):
            return 0
        keys = check_keys(keys)
        hits = self._cache.find(tokens, keys, (len(tokens) - 1) // self._page_size)
        return hits.num_pages * self._page_size + self._cache.partial_hit(tokens, keys, hits)[1]

    @verb
    def explain(self, token_ids: TokenIds, *, keys: Iterable[Key] = ()) -> list[PageExplanation]:
        """Page by page, why an `add` of this prompt now would hit it or miss it; changes nothing."""
        tokens, keys = as_tokens(token_ids), check_keys(keys)
        if self._cache is None:
            reason = "prefix caching is off: PageAllocator(prefix_caching=True) turns it on"
            return [PageExplanation(i, False, 0, 0, reason) for i in range(cdiv(len(tokens), self._page_size))]
        return explain_pages(self._cache, tokens, keys)

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
            self._settle_copies()

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
        return [restore for restore in restores if self._cache is not None and self._cache.holds(*restore)]

    @verb
    def take_events(self) -> list[PageEvent]:
        """What became and what ceased to be cached since the last call, with `record_events=True`."""
        if self._cache is None or self._cache.events is None:
            return []
        events, self._cache.events = self._cache.events, []
        return events

    def _name_of(self, tokens: npt.NDArray[np.int32], keys: Sequence[Key]) -> bytes:
        """The digest of a prefix's last full page; the root's where it has none."""
        root = root_digest(self._page_size)
        chain = hash_pages(tokens, self._page_size, parent=root, keys=keys)
        return as_bytes(chain[-1]) if len(chain) else root


def _as_time(value: float, label: str) -> float:
    """A time as a float: all pins are compared with it."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{label} must be a number of the caller's clock; got {value!r} ({type(value).__name__}).")
    if math.isnan(value):
        raise ValueError(f"{label} must be a number of the caller's clock; got nan, which no time reaches.")
    return float(value)
