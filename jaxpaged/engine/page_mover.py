"""Pages on the move before a step: out to the swap space, from page to page, and back in.

Evicted pages leave without being waited for: they reach the space with the next step, or are lost if one fails. To keep
them is no part of any step: where the space cannot take them, there is a warning.

Pages go a fixed number at a time, padded, so that each of the three is one program however many there are.
"""

import warnings
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np

from jaxpaged.cache.kv_cache import KVCache, PageBlock
from jaxpaged.config import NULL_PAGE, cdiv
from jaxpaged.engine.plan import StepPlan
from jaxpaged.paging import PageCopy
from jaxpaged.paging.store.layout import Block
from jaxpaged.paging.store.offload import put_evicted
from jaxpaged.paging.store.swap import SwapSpace

_AT_ONCE = 16
_MAX_UNDERWAY = 4
"""So many times as many evicted pages may take the device's memory a second time, on their way out."""


class PageMover:
    """Carries out what a plan says about pages."""

    def __init__(self, swap: SwapSpace | None):
        self.swap = swap
        self._leaving: list[tuple[list[bytes], PageBlock]] = []

    def move(self, cache: KVCache, plan: StepPlan) -> tuple[KVCache, list[int]]:
        """Return the cache with all pages of the plan in place, and ids of requests whose pages did not come back
        whole.
        """
        self.keep_leaving()
        for begin in range(0, len(plan.evictions), _AT_ONCE):
            digests, page_ids = zip(*plan.evictions[begin : begin + _AT_ONCE], strict=True)
            block = _export_pages(cache, _sources(np.array(page_ids, np.int32)))
            self._leaving.append((list(digests), block.to_pinned_memory()))
            if len(self._leaving) >= _MAX_UNDERWAY:
                jax.block_until_ready(self._leaving[-_MAX_UNDERWAY][1])
        for request_id, page_ids in plan.swap_outs:
            assert self.swap is not None
            self.swap.put_sequence(request_id, _export(cache, page_ids))
        for copies in _batches(plan.page_copies):
            src, dst = np.asarray(copies, np.int32).T
            cache = _copy_pages(cache, _sources(src), _targets(dst, cache.num_pages))
        for page_ids, block in plan.restores:
            cache = _import(cache, page_ids, block)
        lost = []
        for request_id, page_ids in plan.swap_ins:
            assert self.swap is not None
            block = self.swap.take_sequence(request_id)
            if block["k"].shape[1] < len(page_ids):
                lost.append(request_id)
            else:
                cache = _import(cache, page_ids, block)
        return cache, lost

    def forget_leaving(self) -> None:
        """Drop the pages that are on their way to the swap space."""
        self._leaving = []

    def forget_prefixes(self) -> None:
        """Drop these, and all pages of prefixes that are there."""
        self.forget_leaving()
        if self.swap is not None:
            self.swap.drop_pages()

    def keep_leaving(self) -> None:
        """Put the pages that are on their way into the swap space."""
        leaving, self._leaving = self._leaving, []
        try:
            for digests, block in leaving:
                assert self.swap is not None
                put_evicted(self.swap, digests, {name: x[:, : len(digests)] for name, x in block.to_host().items()})
        except (OSError, MemoryError, jax.errors.JaxRuntimeError) as error:
            warnings.warn(
                f"Evicted pages are lost, for they could not be kept: {error!r}", RuntimeWarning, stacklevel=2
            )

    def warm_up(self, cache: KVCache) -> KVCache:
        """Compile the programs, by moving nothing."""
        nowhere, nothing = _targets(np.zeros(0, np.int32), cache.num_pages), _sources(np.zeros(0, np.int32))
        cache = _copy_pages(cache, nothing, nowhere)
        if self.swap is not None:
            block = _export_pages(cache, nothing).to_host()
            cache = _import_pages(cache, nowhere, PageBlock.from_host(block))
        return cache


def _batches(copies: Sequence[PageCopy]) -> Iterator[list[PageCopy]]:
    """Yield copies that can be made at the same time: none reads or writes what one before it writes."""
    batch: list[PageCopy] = []
    for copy in copies:
        if len(batch) == _AT_ONCE or any(dst in copy for _, dst in batch):
            yield batch
            batch = []
        batch.append(copy)
    if batch:
        yield batch


def _export(cache: KVCache, page_ids: np.ndarray) -> dict[str, np.ndarray]:
    pieces = [
        _export_pages(cache, _sources(page_ids[begin : begin + _AT_ONCE])).to_host()
        for begin in range(0, len(page_ids), _AT_ONCE)
    ]
    return {name: np.concatenate([p[name] for p in pieces], axis=1)[:, : len(page_ids)] for name in pieces[0]}


def _import(cache: KVCache, page_ids: np.ndarray, block: Block) -> KVCache:
    for i in range(cdiv(len(page_ids), _AT_ONCE)):
        part = slice(i * _AT_ONCE, (i + 1) * _AT_ONCE)
        targets = _targets(page_ids[part], cache.num_pages)
        piece = {name: _padded(x[:, part], 0, axis=1) for name, x in block.items()}
        cache = _import_pages(cache, targets, PageBlock.from_host(piece))
    return cache


def _padded(values: np.ndarray, padding: int, axis: int = 0) -> np.ndarray:
    widths = [(0, 0)] * values.ndim
    widths[axis] = (0, _AT_ONCE - values.shape[axis])
    return np.pad(values, widths, constant_values=padding) if widths[axis][1] else values


def _sources(page_ids: np.ndarray) -> jax.Array:
    """Return page ids followed by the null page."""
    return jax.device_put(_padded(page_ids, NULL_PAGE))


def _targets(page_ids: Sequence[int] | np.ndarray, num_pages: int) -> jax.Array:
    """Return page ids followed by distinct ones past the pool, which are dropped."""
    targets = num_pages + np.arange(_AT_ONCE, dtype=np.int32)
    targets[: len(page_ids)] = page_ids
    return jax.device_put(targets)


@partial(jax.jit, donate_argnames="cache")
def _copy_pages(cache: KVCache, src: Any, dst: Any) -> KVCache:
    return cache.copy_pages(src, dst)


@jax.jit
def _export_pages(cache: KVCache, page_ids: Any) -> PageBlock:
    return cache.export_pages(page_ids)


@partial(jax.jit, donate_argnames="cache")
def _import_pages(cache: KVCache, page_ids: Any, block: PageBlock) -> KVCache:
    return cache.import_pages(page_ids, block)
