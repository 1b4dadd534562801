"""A device in small, for tests of the page manager: what each slot holds, and what was exported.

KV depends on a token and on all before it, so what a slot holds is told by its group, the tokens up to and including
its own, and the keys among them: a page of another context is seen even where the token is the same.
"""

import functools
from collections import Counter

import numpy as np

from jaxpaged.paging import Key, PageAllocator
from jaxpaged.paging.digests import as_bytes, hash_pages

Content = tuple[int, tuple[int, ...], tuple[Key, ...]]
STALE: Content = (-1, (), ())


def content(group: int, tokens: list[int], position: int, keys: tuple[Key, ...]) -> Content:
    """What the slot of token `position` holds."""
    return group, tuple(tokens[: position + 1]), tuple(key for key in keys if key.position <= position)


@functools.lru_cache(maxsize=100_000)
def digest_of(last: Content, page_size: int, root: bytes, tag: int) -> bytes:
    """The digest, in its group, of the page whose last slot holds this."""
    _, tokens, keys = last
    chain = hash_pages(np.array(tokens, np.int32), page_size, parent=root, keys=keys)
    return as_bytes(chain[-1] ^ np.array([tag, 0], np.uint64))


class Device:
    """Slots, on which what the allocator decides is done, and a host that keeps what is exported."""

    def __init__(self, pages: PageAllocator):
        self.pages = pages
        self.slots: list[list[Content]] = [[STALE] * pages.page_size for _ in range(pages.num_pages)]
        self.host: dict[bytes, list[Content]] = {}

    def has(self, digest: bytes) -> bool:
        return digest in self.host

    def move(self, copies=()) -> None:
        """Does what the last verb decided, in the order that its documents give."""
        for digest, page_id in self.pages.prefix.take_evictions():
            self.host[digest] = list(self.slots[page_id])
        for src, dst in [*copies, *self.pages.prefix.take_copies()]:
            self.slots[dst] = list(self.slots[src])
        for digest, page_id in self.pages.prefix.take_restores():
            self.slots[page_id] = list(self.host[digest])

    def export_pages(self, page_ids) -> list[list[Content]]:
        return [list(self.slots[page_id]) for page_id in page_ids]

    def import_pages(self, page_ids, block) -> None:
        for page_id, slots in zip(page_ids, block, strict=True):
            self.slots[page_id] = list(slots)

    def write(self, seq_id, tokens: list[int], start: int, keys: tuple[Key, ...]) -> None:
        """Stores the tokens from `start` on, which lie in pages that no window has passed."""
        size = self.pages.page_size
        for index, group in enumerate(self.pages.groups):
            slots = self.pages.slot_mapping([seq_id], [len(tokens) - start], group=group.name)
            assert slots.dtype == np.int32
            for position, slot in zip(range(start, len(tokens)), slots.tolist(), strict=True):
                if slot >= size:  # not in the null page
                    self.slots[slot // size][slot % size] = content(index, tokens, position, keys)

    def indexed(self) -> dict[int, tuple[bytes, Content]]:
        """Of each page that can be hit, what it holds and the digest that this should have."""
        index = self.pages.prefix.index
        last = {page_id: self.slots[page_id][-1] for page_id in index.pool.indexed_pages().tolist()}
        return {
            page_id: (digest_of(held, self.pages.page_size, index.root, int(index.tags[held[0]])), held)
            for page_id, held in last.items()
        }

    def owners(self, seq_ids, *, pins=True) -> Counter:
        """How many own each page: sequences, and pins unless they are not wanted."""
        held = [
            page_id
            for group in self.pages.groups
            for seq_id in seq_ids
            for page_id in self.pages.page_ids(seq_id, group=group.name).tolist()
        ]
        pinned = self.pages.prefix.pins.page_ids().tolist() if pins else []
        return Counter(page_id for page_id in [*held, *pinned] if page_id)
