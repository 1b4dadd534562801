"""What the page manager returns to others: plain, frozen records."""

import dataclasses
from collections.abc import Hashable
from typing import Literal, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt


class PageCopy(NamedTuple):
    """Copy page `src` to page `dst`, in all layers, before anything is written to either."""

    src: int
    dst: int


class Eviction(NamedTuple):
    """Page `page_id` holds the content `digest` until the next write, and no longer: export it before that."""

    digest: bytes
    page_id: int


class Restore(NamedTuple):
    """Import the content `digest` into page `page_id` before the step that reads it."""

    digest: bytes
    page_id: int


class HostPages(Protocol):
    """Where evicted pages may be found again, such as `SwapSpace`."""

    def has(self, digest: bytes) -> bool:
        """Whether the content is there."""
        ...


class PageEvent(NamedTuple):
    """One change of what can be hit, for a router that knows prompts by the digests of their pages.

    Attributes:
        kind: "stored": the content can be hit from now on; "removed": no longer; "cleared": none can be.
        digest: The content; empty for "cleared".
        parent: The content of the page before; None for a first page, and for "removed" and "cleared".
        page_id: Where it lies or lay; 0 for "cleared".
        num_tokens: Tokens of the page; 0 for "cleared".
    """

    kind: Literal["stored", "removed", "cleared"]
    digest: bytes = b""
    parent: bytes | None = None
    page_id: int = 0
    num_tokens: int = 0


class PageExplanation(NamedTuple):
    """Why one page of a prompt would be hit, or missed.

    Attributes:
        page_index: The place of the page in the prompt.
        hit: Whether an `add` now would share it.
        page_id: The page that holds its content, hit or not, in the first group that has one, or the page to copy from
            where the page is hit in part; 0 where there is none.
        num_references: How many sequences and pins reference that page.
        reason: In words.
    """

    page_index: int
    hit: bool
    page_id: int
    num_references: int
    reason: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SharingStats:
    """What some sequences hold together, as in beam search.

    Attributes:
        num_unshared_pages: Pages they would hold without sharing.
        num_held_pages: Pages they hold, each counted once.
    """

    num_unshared_pages: int
    num_held_pages: int

    @property
    def num_saved_pages(self) -> int:
        """Pages that sharing saves."""
        return self.num_unshared_pages - self.num_held_pages

    @property
    def saved_fraction(self) -> float:
        """Pages that sharing saves, as a fraction of what unshared sequences would hold; 0 when there are none."""
        return self.num_saved_pages / max(1, self.num_unshared_pages)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PageStats:
    """A snapshot of the pool. Counts are of pages that can be allocated: the null page is in none of them.

    Attributes:
        num_usable_pages: Used and free ones.
        num_used_pages: Pages that some sequence or pin references, each counted once.
        num_shared_pages: Used pages with several references.
        num_unshared_pages: What the same sequences would hold without sharing.
        num_sequences: Live sequences, those swapped out not counted.
        num_tokens: The sum of their lengths.
        page_size: Tokens a page.
        num_cached_pages: Free pages whose content can still be hit, until they are evicted.
        num_reserved_pages: Free pages that are reserved for a sequence.
        num_swapped_sequences: Sequences that are swapped out.
        num_hit_tokens: Tokens that prefix hits spared since the allocator was made.
        num_missed_tokens: Tokens of the same prompts that had to be computed.
        num_evictions: Cached pages whose content was given up because the page was needed.
        num_pinned_pages: Used pages that nothing but a pin references.
        num_stored_tokens: Tokens in the pages of the sequences, those of each group counted; fewer than `num_tokens` of
            a group whose window has passed some.
    """

    num_usable_pages: int
    num_used_pages: int
    num_shared_pages: int
    num_unshared_pages: int
    num_sequences: int
    num_tokens: int
    page_size: int
    num_cached_pages: int
    num_reserved_pages: int
    num_swapped_sequences: int
    num_hit_tokens: int
    num_missed_tokens: int
    num_evictions: int
    num_pinned_pages: int
    num_stored_tokens: int

    @property
    def num_free_pages(self) -> int:
        """Pages that nobody references, cached ones included."""
        return self.num_usable_pages - self.num_used_pages

    @property
    def num_saved_pages(self) -> int:
        """Pages that sharing saves."""
        return self.num_unshared_pages - (self.num_used_pages - self.num_pinned_pages)

    @property
    def saved_fraction(self) -> float:
        """Pages that sharing saves, as a fraction of what unshared sequences would hold; 0 when there are none."""
        return self.num_saved_pages / max(1, self.num_unshared_pages)

    @property
    def utilisation(self) -> float:
        """Used pages as a fraction of the usable ones."""
        return self.num_used_pages / self.num_usable_pages

    @property
    def occupancy(self) -> float:
        """Used slots as a fraction of those of the sequences' pages; the rest is the ends of last pages."""
        return self.num_stored_tokens / max(1, self.num_unshared_pages * self.page_size)

    @property
    def hit_rate(self) -> float:
        """Hit tokens as a fraction of all that were looked for; 0 when there were none."""
        return self.num_hit_tokens / max(1, self.num_hit_tokens + self.num_missed_tokens)

    def saved_bytes(self, page_bytes: int) -> int:
        """Memory that sharing saves now, given the bytes of a page over all layers."""
        return self.num_saved_pages * page_bytes

    def hit_bytes(self, page_bytes: int) -> int:
        """K and V that prefix hits spared the model since the allocator was made, given the bytes of a page."""
        return self.num_hit_tokens * page_bytes // self.page_size


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CachedPages:
    """Contents that can be hit, parents before children: what another process needs to hit them too.

    Attributes:
        digests: [n, 16] uint8.
        parents: [n, 16] uint8, of the pages before.
        page_ids: [n] int32, where they lie.
        tokens: [n, page_size] int32 where `partial_hits` keeps them, or None.
    """

    digests: npt.NDArray[np.uint8]
    parents: npt.NDArray[np.uint8]
    page_ids: npt.NDArray[np.int32]
    tokens: npt.NDArray[np.int32] | None = None


FREE, NULL, USED, SHARED, CACHED, PINNED = range(6)
"""Values of `PoolSnapshot.state`. A pinned page is one that nothing but a pin references."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PoolSnapshot:
    """The whole pool at one moment, in arrays of its own.

    Attributes:
        owner: [num_pages] int32, the first of `seq_ids` that holds the page, by its place there; -1 where none does.
        ref_count: [num_pages] int32, how many sequences hold the page; a pin is none.
        state: [num_pages] uint8: FREE, NULL, USED, SHARED, CACHED or PINNED.
        fill: [num_pages] int32, tokens in the page.
        seq_ids: The live sequences.
        page_size: Tokens a page.
    """

    owner: npt.NDArray[np.int32]
    ref_count: npt.NDArray[np.int32]
    state: npt.NDArray[np.uint8]
    fill: npt.NDArray[np.int32]
    seq_ids: tuple[Hashable, ...]
    page_size: int
