"""What the page manager tells others: plain, frozen records."""

import dataclasses
from collections.abc import Hashable

import numpy as np
import numpy.typing as npt


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
"""Values of `PoolSnapshot.state`. A pinned page is one that nothing but a pin holds."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PoolSnapshot:
    """The whole pool at one moment, in arrays of its own.

    Attributes:
        owner: [num_pages] int32, the first of `seq_ids` that holds the page, by its place there; -1 where none does.
        ref_count: [num_pages] int32.
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
