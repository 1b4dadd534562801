"""Swap space: pages that left the device, in host memory or in a file. It decides what stays; `KVCache` moves them.

    space.put_sequence(seq_id, cache.export_pages(pages.page_ids(seq_id)).to_host())
    pages.swap_out(seq_id)  # once there was room for it
    ...
    page_ids = pages.swap_in(seq_id)
    block = PageBlock.from_host(space.take_sequence(seq_id))
    cache = cache.import_pages(page_ids, block)

It holds whole sequences, which stay until they are taken, and single pages of evicted prefixes, which give way: to
sequences, and to pages used later. Host memory is filled first, then the file. One owner: a call that begins while
another thread is inside one raises.
"""

import dataclasses
import os
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Sequence
from typing import Any, SupportsIndex

import numpy as np
import numpy.typing as npt

from jaxpaged.checks import as_count
from jaxpaged.paging.owner import Owner, verb
from jaxpaged.paging.pool import OutOfPagesError
from jaxpaged.paging.sequences import unhashable
from jaxpaged.paging.store.layout import Block, num_pages_of
from jaxpaged.paging.store.page_store import PageStore, Places


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SwapStats:
    """A snapshot of a swap space.

    Attributes:
        num_host_pages: Places in host memory.
        num_file_pages: Places in the file.
        num_used_host_pages: Places in host memory that hold a page.
        num_used_file_pages: Places in the file that hold a page.
        num_sequences: Sequences here.
        num_sequence_pages: Pages of sequences.
        num_prefix_pages: Single pages of prefixes.
        num_evicted_pages: Prefix pages that have given way since the space was made.
        num_lost_pages: Pages that came back from the file other than they were written, and so counted as missed.
        page_nbytes: Bytes a page; 0 before the first.
    """

    num_host_pages: int
    num_file_pages: int
    num_used_host_pages: int
    num_used_file_pages: int
    num_sequences: int
    num_sequence_pages: int
    num_prefix_pages: int
    num_evicted_pages: int
    num_lost_pages: int
    page_nbytes: int

    @property
    def nbytes(self) -> int:
        """Bytes of the pages that are here."""
        return (self.num_used_host_pages + self.num_used_file_pages) * self.page_nbytes


class SwapSpace:
    """Room for pages of one cache outside the device.

    Args:
        num_pages: Pages in host memory. The memory is claimed when the first pages come.
        file: Where to make the file for pages that do not fit; it is removed by `close`. One that is there is replaced
            if it is a file of pages, and refused otherwise. None is no file.
        num_file_pages: Pages in the file, whose whole length is claimed when the first pages come.

    Raises:
        ValueError, TypeError: A number is not a count, one of the last two is given without the other, or there is no
            room at all.
    """

    __slots__ = ("_free_file", "_free_host", "_num_evicted", "_num_lost", "_owner", "_prefixes", "_sequences", "_store")

    def __init__(
        self,
        num_pages: SupportsIndex,
        *,
        file: str | os.PathLike | None = None,
        num_file_pages: SupportsIndex = 0,
    ):
        num_pages = as_count(num_pages, "`num_pages`, those in host memory,")
        num_file_pages = as_count(num_file_pages, "`num_file_pages`")
        if (file is None) != (num_file_pages == 0):
            raise ValueError(
                f"`file` and `num_file_pages` must be given both or neither; got {file!r} and {num_file_pages}."
            )
        if num_pages + num_file_pages == 0:
            raise ValueError("`num_pages` must be at least 1 where there is no file; got 0.")
        self._store = PageStore(num_pages, file, num_file_pages)
        self._free_host = list(range(num_pages - 1, -1, -1))
        self._free_file = list(range(num_pages + num_file_pages - 1, num_pages - 1, -1))
        self._sequences: dict[Hashable, Places] = {}
        self._prefixes: OrderedDict[bytes, int] = OrderedDict()  # place by digest, the least recently used first
        self._num_evicted = 0
        self._num_lost = 0
        self._owner = Owner()

    @property
    def num_free_pages(self) -> int:
        """Pages that a sequence can have now: empty ones, and those of prefixes, which give way."""
        return self._num_empty + len(self._prefixes)

    def __contains__(self, seq_id: Hashable) -> bool:
        """Whether this sequence is here."""
        try:
            return seq_id in self._sequences
        except TypeError:
            raise unhashable("seq_id", seq_id) from None

    def has(self, digest: bytes) -> bool:
        """Whether the prefix page of this digest is here. That it was kept whole shows when it is read."""
        return digest in self._prefixes

    @verb
    def put_sequence(self, seq_id: Hashable, block: Block) -> None:
        """Keep the pages of a sequence, in their order, until `take_sequence` or `drop`.

        Raises:
            OutOfPagesError: Too few pages are free; nothing was changed.
            ValueError, TypeError: The sequence is here already, or `block` is no block like those before it.
            OSError: The file cannot be made or written.
        """
        if seq_id in self:
            raise ValueError(f"`seq_id` must be a sequence that is not here; got {seq_id!r}. Take or drop it first.")
        num_pages = num_pages_of(block)
        if num_pages > self.num_free_pages:
            raise OutOfPagesError(num_pages, self.num_free_pages, f"swapping out sequence {seq_id!r}")
        self._store.prepare(block)
        self._sequences[seq_id] = self._keep(block, range(num_pages))

    @verb
    def take_sequence(self, seq_id: Hashable) -> dict[str, npt.NDArray[Any]]:
        """Give a sequence's pages back and forget them.

        Returns:
            The block. It ends before the first page that the file did not keep whole. Where the pages are those of one
            group without a window, n pages hold the first n * page_size tokens, and the rest are to be computed again.
            Of other sequences a block with fewer pages than were put is of no use: compute them anew.

        Raises:
            ValueError: The sequence is not here.
        """
        places = self._places_of(seq_id)
        block, whole = self._store.read(places)
        self._num_lost += len(whole) - int(whole.sum())
        self._forget(seq_id)
        return _chosen(block, np.logical_and.accumulate(whole))

    @verb
    def drop(self, seq_id: Hashable) -> None:
        """Forget a sequence. Raises ValueError when it is not here."""
        self._forget(seq_id)

    @verb
    def put_pages(self, digests: Sequence[bytes], block: Block) -> None:
        """Keep single pages of prefixes for as long as nothing else needs their room.

        A digest names its content: pages that are here are not written again. Later ones count as used later, so let
        the tail of a chain come before its head, as evictions do; then the tail goes first.

        Raises:
            OutOfPagesError: Sequences leave too little room; nothing was changed.
            ValueError, TypeError: The digests are not as many bytes objects as `block`, one like those before it, has
                pages.
            OSError: The file cannot be made or written.
        """
        digests = _checked_digests(digests)
        num_pages = num_pages_of(block)
        if len(digests) != num_pages:
            raise ValueError(f"`digests` must be {num_pages}, one for each page of `block`; got {len(digests)}.")
        new = {digest: i for i, digest in enumerate(digests) if digest not in self._prefixes}
        held = self._prefixes.keys() & set(digests)
        room = self.num_free_pages - len(held)
        if len(new) > room:
            raise OutOfPagesError(len(new), room, "keeping evicted pages")
        self._store.prepare(block)
        self._touch(held)  # what is given here is not what gives way to it
        places = self._keep(block, list(new.values()))
        self._prefixes.update(zip(new, places.tolist(), strict=True))
        self._touch(digests)

    @verb
    def get_pages(self, digests: Sequence[bytes]) -> tuple[dict[str, npt.NDArray[Any]], npt.NDArray[np.bool_]]:
        """Read pages of a prefix, in order from its head. They stay here.

        Returns:
            The block of those that were found, without gaps for the others, and a mask [len(digests)] that says which
            were. A page that the file did not keep whole is not found, now and from here on. The block of a space that
            never held a page is empty.

        Raises:
            TypeError: A digest is not a bytes object.
        """
        digests = _checked_digests(digests)
        found = np.array([digest in self._prefixes for digest in digests], bool)
        if self._store.layout is None:
            return {}, found
        here = [digest for digest in digests if digest in self._prefixes]
        block, whole = self._store.read(np.array([self._prefixes[digest] for digest in here], np.intp))
        found[found] = whole
        lost = {digest for digest, is_whole in zip(here, whole, strict=True) if not is_whole}
        self._num_lost += len(lost)
        self._forget_pages(lost)
        self._touch(digest for digest in reversed(here) if digest not in lost)
        return _chosen(block, whole), found

    @verb
    def drop_pages(self, digests: Iterable[bytes] | None = None) -> None:
        """Forget those of these prefix pages that are here; None forgets all."""
        chosen = list(self._prefixes) if digests is None else _checked_digests(digests)
        self._forget_pages(chosen)

    @verb
    def stats(self) -> SwapStats:
        """Count pages and sequences."""
        return SwapStats(
            num_host_pages=self._store.num_host_pages,
            num_file_pages=self._store.num_file_pages,
            num_used_host_pages=self._store.num_host_pages - len(self._free_host),
            num_used_file_pages=self._store.num_file_pages - len(self._free_file),
            num_sequences=len(self._sequences),
            num_sequence_pages=sum(map(len, self._sequences.values())),
            num_prefix_pages=len(self._prefixes),
            num_evicted_pages=self._num_evicted,
            num_lost_pages=self._num_lost,
            page_nbytes=0 if self._store.layout is None else self._store.layout.nbytes,
        )

    @verb
    def close(self) -> None:
        """Forget everything, give back the memory and remove the file; what is put afterwards is refused."""
        for seq_id in list(self._sequences):
            self._forget(seq_id)
        self._forget_pages(list(self._prefixes))
        self._store.close()

    def __enter__(self) -> "SwapSpace":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def _num_empty(self) -> int:
        return len(self._free_host) + len(self._free_file)

    def _keep(self, block: Block, pages: Sequence[int]) -> Places:
        """Write some pages of a block into places of their own. There is room for them, and memory."""
        while self._num_empty < len(pages):
            self._release([self._prefixes.popitem(last=False)[1]])
            self._num_evicted += 1
        places = [(self._free_host or self._free_file).pop() for _ in pages]
        try:
            self._store.write(np.array(places, np.intp), block, pages)
        except OSError:
            self._release(places)
            raise
        return np.array(places, np.intp)

    def _release(self, places: list[int]) -> None:
        for place in reversed(places):
            (self._free_host if place < self._store.num_host_pages else self._free_file).append(place)

    def _touch(self, digests: Iterable[bytes]) -> None:
        for digest in digests:
            self._prefixes.move_to_end(digest)

    def _places_of(self, seq_id: Hashable) -> Places:
        if seq_id not in self:
            raise ValueError(f"`seq_id` must be a sequence that is here (put_sequence brings one); got {seq_id!r}.")
        return self._sequences[seq_id]

    def _forget(self, seq_id: Hashable) -> None:
        self._release(self._places_of(seq_id).tolist())
        del self._sequences[seq_id]

    def _forget_pages(self, digests: Iterable[bytes]) -> None:
        self._release([self._prefixes.pop(digest) for digest in digests if digest in self._prefixes])


def _chosen(block: dict[str, npt.NDArray[Any]], mask: npt.NDArray[np.bool_]) -> dict[str, npt.NDArray[Any]]:
    """Return the pages of a block for which the mask is true, or the block itself where that is all of them."""
    return block if mask.all() else {name: x[:, mask] for name, x in block.items()}


def _checked_digests(digests: Iterable[bytes]) -> list[bytes]:
    if isinstance(digests, bytes):
        raise TypeError("`digests` must be a list of bytes objects; got one bytes object.")
    digests = list(digests)
    for digest in digests:
        if not isinstance(digest, bytes):
            raise TypeError(f"`digests` must be bytes objects; got {type(digest).__name__}.")
    return digests
