"""Evicted prefix pages into a swap space and back: the exchange between an `add` and the step that reads its pages."""

from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from jaxpaged.config import NULL_PAGE
from jaxpaged.paging.allocator import PageAllocator
from jaxpaged.paging.records import Eviction
from jaxpaged.paging.store.layout import Block
from jaxpaged.paging.store.swap import SwapSpace


class PageImport(NamedTuple):
    """Pages to import: this block of a swap space into these pages, before the step that reads them."""

    page_ids: npt.NDArray[np.int32]
    block: Block


def exchange_pages(
    pages: PageAllocator, space: SwapSpace, cache: Any, seq_id: Hashable, num_prefix_tokens: int
) -> tuple[Any, int]:
    """Move what `pages.add(seq_id, tokens, host=space)` decided: evicted pages out, and in those that it found there.

    Call it right after the `add`, before copies are run and anything is written. (After another verb that may evict,
    with the same `seq_id` and its number: then nothing comes in.) Where sequences leave too little room for all evicted
    pages, the first ones are lost. A page that the file did not keep whole is as if it had never been found: from there
    on the sequence is computed anew; from its first token on where a window no longer has the pages that are seen from
    there.

    Args:
        pages: With `offload=True`.
        space: The `host` of the `add`.
        cache: A `KVCache`.
        seq_id: The sequence that was added.
        num_prefix_tokens: What `add` returned.

    Returns:
        The cache, and how many of the sequence's tokens are in it.

    Raises:
        OutOfPagesError: A page was lost, and too few are free to compute the sequence anew. It is freed: add it again
            later.
        OSError: The file of the space cannot be made or written. Where pages were to come in, the sequence is freed.
    """
    try:  # Read first: to make room for the evicted, the space may give up just those that are wanted.
        (page_ids, block), num_prefix_tokens = read_restored(pages, space, seq_id, num_prefix_tokens)
    except BaseException:
        _keep(space, cache, pages.prefix.take_evictions())
        raise
    try:
        _keep(space, cache, pages.prefix.take_evictions())
    except BaseException:
        if len(page_ids):
            _give_up(pages, seq_id, page_ids)
        raise
    if len(page_ids):
        empty = cache.export_pages(np.zeros(0, np.int32))
        cache = cache.import_pages(page_ids, type(empty).from_host(block))
    return cache, num_prefix_tokens


def read_restored(
    pages: PageAllocator, space: SwapSpace, seq_id: Hashable, num_prefix_tokens: int
) -> tuple[PageImport, int]:
    """Return the pages that an `add` found in the space, and how many tokens are in the cache after their import.

    Args, Raises: As `exchange_pages`. Whatever is raised, the sequence is freed.
    """
    restores = pages.prefix.take_restores()
    page_ids = np.array([restore.page_id for restore in restores], np.int32)
    try:
        block, is_found = space.get_pages([restore.digest for restore in restores])
        if not is_found.all():
            num_whole = min(num_prefix_tokens, _num_whole_tokens(pages, seq_id, page_ids[~is_found]))
            num_prefix_tokens = 0 if _window_has_passed(pages, seq_id, num_whole) else num_whole
            pages.invalidate(seq_id, num_whole)
    except BaseException:
        _give_up(pages, seq_id, page_ids)
        raise
    return PageImport(page_ids[is_found], block), num_prefix_tokens


def put_evicted(space: SwapSpace, digests: Sequence[bytes], block: Block) -> None:
    """Keep pages, given in the order of their eviction; where there is room for some only, the last ones."""
    first = max(0, len(digests) - space.num_free_pages)
    if first < len(digests):
        space.put_pages(digests[first:], {name: x[:, first:] for name, x in block.items()})


def _keep(space: SwapSpace, cache: Any, evictions: list[Eviction]) -> None:
    """Move evicted pages out of a cache."""
    if evictions:
        block = cache.export_pages(np.array([eviction.page_id for eviction in evictions], np.int32))
        put_evicted(space, [eviction.digest for eviction in evictions], block.to_host())


def _give_up(pages: PageAllocator, seq_id: Hashable, page_ids: npt.NDArray[np.int32]) -> None:
    """Free a sequence whose pages do not come in, so that nobody hits them."""
    pages.prefix.forget(page_ids)
    pages.free(seq_id)


def _window_has_passed(pages: PageAllocator, seq_id: Hashable, num_tokens: int) -> bool:
    """Whether token `num_tokens` of a sequence sees pages that it does not hold any more."""
    tables = {group: pages.page_ids(seq_id, group=group.name) for group in pages.groups}
    return any(
        np.count_nonzero(page_ids == NULL_PAGE) > group.num_passed_pages(num_tokens, pages.page_size)
        for group, page_ids in tables.items()
    )


def _num_whole_tokens(pages: PageAllocator, seq_id: Hashable, lost: np.ndarray) -> int:
    """Count the tokens of a sequence before the first page, of any group, that is lost."""
    by_group = (pages.page_ids(seq_id, group=group.name) for group in pages.groups)
    return min(int(np.argmax(is_lost)) for ids in by_group if (is_lost := np.isin(ids, lost)).any()) * pages.page_size
