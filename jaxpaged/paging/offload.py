"""Evicted prefix pages into a swap space and back: the exchange between an `add` and the step that reads its pages."""

import contextlib
from collections.abc import Hashable
from typing import Any

import numpy as np

from jaxpaged.config import NULL_PAGE
from jaxpaged.paging.allocator import PageAllocator
from jaxpaged.paging.pool import OutOfPagesError
from jaxpaged.paging.reports import Eviction
from jaxpaged.paging.swap import SwapSpace


def exchange_pages(
    pages: PageAllocator, space: SwapSpace, cache: Any, seq_id: Hashable, num_prefix_tokens: int
) -> tuple[Any, int]:
    """Moves what `pages.add(seq_id, tokens, host=space)` decided: evicted pages out, and in those that it found there.

    Call it right after the `add`, before copies are run and anything is written. (After another verb that may evict,
    with the same `seq_id` and its number: then nothing comes in.) Evicted pages for which sequences leave no room are
    lost. A page that the file did not keep whole is as if it had never been found: from there on the sequence is
    computed anew; from its first token on where a window no longer has the pages that are seen from there.

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
    """
    restores, evictions = pages.take_restores(), pages.take_evictions()
    # Read first: to make room for the evicted, the space may give up just those that are wanted.
    found, is_found = space.get_pages([restore.digest for restore in restores])
    _keep(space, cache, evictions)
    page_ids = np.array([restore.page_id for restore in restores], np.int32)
    if is_found.any():
        empty = cache.export_pages(np.zeros(0, np.int32))
        cache = cache.import_pages(page_ids[is_found], type(empty).from_host(found))
    if not is_found.all():
        num_whole = min(num_prefix_tokens, _num_whole_tokens(pages, seq_id, page_ids[~is_found]))
        num_prefix_tokens = 0 if _window_has_passed(pages, seq_id, num_whole) else num_whole
        try:
            pages.invalidate(seq_id, num_whole)
        except OutOfPagesError:
            pages.forget_pages(page_ids[~is_found])  # or others would hit them
            pages.free(seq_id)
            raise
        _keep(space, cache, pages.take_evictions())  # made for the new pages of its windows
    return cache, num_prefix_tokens


def _keep(space: SwapSpace, cache: Any, evictions: list[Eviction]) -> None:
    """Moves evicted pages out, as far as there is room."""
    if evictions:
        block = cache.export_pages(np.array([eviction.page_id for eviction in evictions], np.int32))
        with contextlib.suppress(OutOfPagesError):
            space.put_pages([eviction.digest for eviction in evictions], block.to_host())


def _window_has_passed(pages: PageAllocator, seq_id: Hashable, num_tokens: int) -> bool:
    """Whether token `num_tokens` of a sequence sees pages that it does not hold any more."""
    tables = {group: pages.page_ids(seq_id, group=group.name) for group in pages.groups}
    return any(
        np.count_nonzero(page_ids == NULL_PAGE) > group.num_dead_pages(num_tokens, pages.page_size)
        for group, page_ids in tables.items()
    )


def _num_whole_tokens(pages: PageAllocator, seq_id: Hashable, lost: np.ndarray) -> int:
    """Tokens of a sequence before the first page, of any group, that is lost."""
    by_group = (pages.page_ids(seq_id, group=group.name) for group in pages.groups)
    return min(int(np.argmax(is_lost)) for ids in by_group if (is_lost := np.isin(ids, lost)).any()) * pages.page_size
