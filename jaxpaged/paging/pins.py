"""Pins: indexed pages that are referenced under a name, so that nobody evicts them."""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from jaxpaged.paging.lru import PageIds
from jaxpaged.paging.pool import PagePool


class Pins:
    """The pages of each pin, and when it expires. A pin holds one reference to each of its pages."""

    __slots__ = ("_pins", "_pool")

    def __init__(self, pool: PagePool):
        self._pool = pool
        self._pins: dict[bytes, tuple[npt.NDArray[np.int32], float | None]] = {}

    def __contains__(self, name: bytes) -> bool:
        return name in self._pins

    def pin(self, name: bytes, page_ids: PageIds, expires_at: float | None) -> None:
        """Reference indexed pages under a name; takes the place of an earlier pin of that name."""
        self._pool.share(page_ids)
        self.unpin(name)
        self._pins[name] = page_ids.astype(np.int32), expires_at

    def unpin(self, name: bytes) -> bool:
        """Give up what is pinned under a name. Returns whether there was a pin."""
        pin = self._pins.pop(name, None)
        if pin is not None:
            self._pool.drop(pin[0].astype(np.intp))
        return pin is not None

    def expire(self, now: float) -> None:
        """End the pins whose time is up."""
        self._unpin_where(lambda _, expires_at: expires_at is not None and expires_at <= now)

    def unpin_pages(self, marked: npt.NDArray[np.bool_]) -> None:
        """End the pins that hold a marked page; `marked` is [num_pages]."""
        self._unpin_where(lambda page_ids, _: bool(marked[page_ids].any()))

    def clear(self) -> None:
        """End all pins."""
        self._unpin_where(lambda *_: True)

    def page_ids(self) -> PageIds:
        """Return the pages of all pins, each as often as pins hold it."""
        return np.concatenate([np.zeros(0, np.intp), *(page_ids for page_ids, _ in self._pins.values())]).astype(
            np.intp
        )

    def num_pages(self) -> int:
        """Count the pages that nothing but pins references. Costs O(pinned pages)."""
        page_ids, counts = np.unique(self.page_ids(), return_counts=True)
        return int(np.count_nonzero(self._pool.ref_counts(page_ids) == counts))

    def _unpin_where(self, ends: Callable[[npt.NDArray[np.int32], float | None], bool]) -> None:
        for name, pin in list(self._pins.items()):
            if ends(*pin):
                self.unpin(name)
