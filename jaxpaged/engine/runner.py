"""The runner: turns a `StepPlan` into arrays, runs the model, samples. The one place where lists become arrays.

Shapes are rounded up to powers of two, so that a run of any length compiles a bounded number of programs: with at most
`n` sequences and `t` tokens a step, `log2(n) + 1` for decoding and `(log2(n) + 1) (log2(t) + 1)` for prompts.
"""

from collections.abc import Callable
from functools import partial
from typing import Protocol

import jax
import numpy as np

from jaxpaged.batch import Batch
from jaxpaged.config import NULL_PAGE, cdiv
from jaxpaged.engine.sampling import sample
from jaxpaged.engine.sampling_batch import SamplingBatch, make_sampling_batch
from jaxpaged.engine.scheduler import SchedulerConfig, StepPlan
from jaxpaged.kv_cache import KVCache
from jaxpaged.paging import PageAllocator


class Model(Protocol):
    """What the engine runs: a pytree (a Flax NNX module is one) with a forward pass over a paged cache."""

    def __call__(self, cache: KVCache, batch: Batch) -> tuple[jax.Array, KVCache]:
        """Logits `[num_seqs, vocab_size]` float32 after each sequence's last new token, and the cache written."""
        ...


class Runner:
    """Holds model and cache; one step at a time.

    Args:
        make_cache: Makes an empty cache like `cache`.
        compile_whole: Compile model and sampling into one program, with the cache donated. False calls the model as it
            is, for one that compiles its own pieces (`Llama(layer_loop="calls")`).
    """

    def __init__(
        self,
        model: Model,
        cache: KVCache,
        pages: PageAllocator,
        config: SchedulerConfig,
        *,
        make_cache: Callable[[], KVCache],
        compile_whole: bool,
    ):
        self.model = model
        self._make_cache = make_cache
        self.cache = cache
        self.pages = pages
        self.max_pages = cdiv(config.max_model_len, cache.page_size)
        self._step = _compiled_step if compile_whole else _step_in_pieces

    def run(self, plan: StepPlan) -> list[int]:
        """Computes one step. Returns the token that follows each request's last new token."""
        if plan.page_copies:
            src, dst = np.asarray(plan.page_copies, np.int32).T
            self.cache = _copy_pages(self.cache, src, dst)
        batch, sampling = self.make_batch(plan), self.make_sampling(plan)
        token_ids, self.cache = self._step(self.model, self.cache, batch, sampling)
        return np.asarray(token_ids)[: len(plan.requests)].tolist()

    def restore_cache(self) -> None:
        """An empty cache in place of one that a failed step took with it."""
        if any(x.is_deleted() for x in jax.tree.leaves(self.cache)):
            self.cache = self._make_cache()

    def make_batch(self, plan: StepPlan) -> Batch:
        """The arrays of a step, padded to bucketed shapes."""
        ids = [r.request_id for r in plan.requests]
        q_lens = np.asarray(plan.num_new_tokens, np.int32)
        begins = np.asarray([r.num_computed_tokens for r in plan.requests], np.int32)
        num_seqs = bucket(len(ids))
        num_tokens = num_seqs if plan.is_decode else bucket(int(q_lens.sum()))

        token_ids = [t for r, n in zip(plan.requests, q_lens, strict=True)
                     for t in r.tokens(r.num_computed_tokens, r.num_computed_tokens + int(n))]  # fmt: skip
        first = np.cumsum(q_lens) - q_lens
        positions = np.arange(len(token_ids), dtype=np.int32) + np.repeat(begins - first, q_lens)
        cu_q_lens = np.full(num_seqs + 1, len(token_ids), np.int32)
        cu_q_lens[: len(ids)] = first
        # Padding slots are past the pool, and distinct: the scatter may assume unique indices.
        slots = self.cache.num_slots + np.arange(num_tokens, dtype=np.int32)
        slots[: len(token_ids)] = self.pages.slot_mapping(ids, q_lens)
        page_table = np.full((num_seqs, self.max_pages), NULL_PAGE, np.int32)
        page_table[: len(ids)] = self.pages.page_table(ids, self.max_pages)
        arrays = {
            "token_ids": _padded(token_ids, num_tokens, np.int32),
            "positions": _padded(positions, num_tokens, np.int32),
            "slot_mapping": slots,
            "page_table": page_table,
            "seq_lens": _padded(begins + q_lens, num_seqs, np.int32),
            "cu_q_lens": None if plan.is_decode else cu_q_lens,
        }
        return Batch(**jax.device_put(arrays))  # once, here: a model in pieces would upload them for each piece

    def make_sampling(self, plan: StepPlan) -> SamplingBatch | None:
        """How to sample each row, or None when all are plainly greedy."""
        sampling = make_sampling_batch(plan.requests, bucket(len(plan.requests)))
        return None if sampling is None else jax.device_put(sampling)


def bucket(n: int) -> int:
    """The smallest power of two that is at least `n`."""
    return 1 << (n - 1).bit_length()


def _padded(values, length: int, dtype) -> np.ndarray:
    padded = np.zeros(length, dtype)
    padded[: len(values)] = values
    return padded


def _step_in_pieces(model: Model, cache: KVCache, batch: Batch, sampling: SamplingBatch | None):
    logits, cache = model(cache, batch)
    return _sample(logits, sampling).token_ids, cache


_sample = jax.jit(sample)


@partial(jax.jit, donate_argnames="cache")
def _compiled_step(model: Model, cache: KVCache, batch: Batch, sampling: SamplingBatch | None):
    logits, cache = model(cache, batch)
    return sample(logits, sampling).token_ids, cache


@partial(jax.jit, donate_argnames="cache")
def _copy_pages(cache: KVCache, src: jax.Array, dst: jax.Array) -> KVCache:
    return cache.copy_pages(src, dst)
