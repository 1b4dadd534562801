"""The runner: turns a `StepPlan` into arrays and runs the step. The one place where lists become arrays.

A step is dispatched and read apart: between the two the host schedules the next one, whose tokens are then still on
the device. `from_rows` says of each token in which row of the step before it was sampled; -1 where the host knows it.

Rows that a request has beside its own (drafts, tokens of a prompt: see `jaxpaged.engine.plan.Rows`) are sequences of
the batch like all others, with the same pages, each some tokens longer. So any model can check drafts.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxpaged.cache.batch import Batch
from jaxpaged.cache.kv_cache import KVCache
from jaxpaged.cache.ragged import Ragged
from jaxpaged.config import NULL_PAGE, cdiv
from jaxpaged.engine.config import SchedulerConfig
from jaxpaged.engine.logprobs import StepLogprobs
from jaxpaged.engine.packing import Layout, pack
from jaxpaged.engine.page_mover import PageMover
from jaxpaged.engine.plan import StepPlan
from jaxpaged.engine.sampling.batch import SamplingFeatures, bucket, features_of, make_sampling_batch
from jaxpaged.engine.sampling.counts import seat_history
from jaxpaged.engine.sampling.params import SamplingParams, SamplingRow
from jaxpaged.engine.sampling.sample import RowLogprobs, Sampled
from jaxpaged.engine.stats import Counters, Program
from jaxpaged.engine.step import Model, make_step
from jaxpaged.paging.store.swap import SwapSpace

_MIN_TOKENS = 8
"""Tokens that a step with prompts is padded to at least: fewer take as long, and each size is a compilation."""
_TOKENS_PER_ROW = 8
"""Such a step has at least a row for so many tokens. A row of padding costs its logits: for SmolLM2 a quarter of what a
token costs, so 3 % of the step, and half of the compilations are spared."""


class InFlight(NamedTuple):
    """A step that was dispatched: what it samples, still on the device, and its rows."""

    sampled: Sampled
    num_sampling: int
    num_rows: int


class StepResult(NamedTuple):
    """What a step sampled.

    Attributes:
        token_ids: Of each row, but those of prompt tokens.
        non_finite: Rows whose logits were not finite, among all.
        logprobs: Of all rows, where any are wanted.
    """

    token_ids: list[int]
    non_finite: frozenset[int] = frozenset()
    logprobs: StepLogprobs | None = None


class Runner:
    """Holds model and cache.

    Args:
        make_cache: Makes an empty cache like `cache`.
        compile_whole: See `make_step`.
        num_drafts: Drafts of one sequence at most.
        counters: What it counts in; None is new ones.
    """

    def __init__(
        self,
        model: Model,
        cache: KVCache,
        config: SchedulerConfig,
        *,
        make_cache: Callable[[], KVCache],
        compile_whole: bool,
        swap: SwapSpace | None = None,
        num_drafts: int = 0,
        counters: Counters | None = None,
    ):
        self.config = config
        self.cache = cache
        self.max_pages = cdiv(config.max_model_len, cache.page_size)
        self.mover = PageMover(swap)
        self.programs = (counters or Counters()).programs
        self._make_cache = make_cache
        self._num_drafts = num_drafts
        most = min(config.max_num_seqs * (1 + num_drafts), config.max_num_seqs + config.max_step_tokens)
        self._max_rows = bucket(most)
        self._step = make_step(model, compile_whole=compile_whole)
        self._previous = jax.device_put(np.zeros(self._max_rows, np.int32))
        self._model = model
        self._counts: jax.Array | None = None  # made when a request with penalties first runs

    def move(self, plan: StepPlan) -> list[int]:
        """Bring the pages of a step to their places.

        Returns the ids of requests whose pages did not come back whole.
        """
        self.cache, lost = self.mover.move(self.cache, plan)
        return lost

    def dispatch(self, plan: StepPlan) -> InFlight:
        """Start a step whose pages are in place, without waiting for it."""
        packed, layout, program = self.pack(plan)
        self.programs[program] = self.programs.get(program, 0) + 1
        for seating in plan.seatings:
            self._counts = seat_history(self._seats(), *seating)
        sampled = self._run(packed, layout, program)
        for x in jax.tree.leaves(sampled):
            x.copy_to_host_async()
        self._previous = sampled.token_ids
        return InFlight(sampled, plan.rows.num_sampling, len(plan.rows))

    def read(self, in_flight: InFlight) -> StepResult:
        """Wait for a step."""
        sampled, num_sampling, num_rows = in_flight
        is_finite, logprobs = jax.device_get(sampled.is_finite)[:num_rows], sampled.logprobs
        return StepResult(
            token_ids=jax.device_get(sampled.token_ids)[:num_sampling].tolist(),
            non_finite=frozenset() if is_finite.all() else frozenset(np.flatnonzero(~is_finite).tolist()),
            logprobs=None if logprobs is None else _on_host(logprobs),
        )

    def restore_cache(self, *, is_lost: bool) -> bool:
        """Return an empty cache in place of one that a failed step took with it; whether there was need for one.

        What was on its way to the swap space is dropped: nobody knows whether it was right.

        Args:
            is_lost: Whether what the cache holds is lost in any case.
        """
        self.mover.forget_leaving()
        is_lost = is_lost or any(x.is_deleted() for x in jax.tree.leaves((self.cache, self._counts)))
        if is_lost:
            self.cache, self._counts = self._make_cache(), None
            self._previous = jax.device_put(np.zeros(self._max_rows, np.int32))
        return is_lost

    def warm_up(self, program: Program) -> None:
        """Compile a program, by running it on padding."""
        batch = _batch_of(self._padding(program.num_rows, program.num_tokens))
        sampling = make_sampling_batch([], program.num_rows, features=program.sampling)
        packed, layout = pack((batch, np.full(len(batch.token_ids), -1, np.int32), sampling))
        jax.block_until_ready(self._run(packed, layout, program))
        self.programs.setdefault(program, 0)

    def all_programs(self, params: Sequence[SamplingParams] = (), *, greedy: bool = True) -> list[Program]:
        """Return every program that steps can need whose requests are greedy, or sample like these, all together."""
        kinds = {SamplingFeatures(): None} if greedy else {}
        for p in params:
            features = features_of([SamplingRow(p, 1, 1)])
            recents = [0, *_powers(1, bucket(self._num_drafts))] if features.penalties else [0]
            kinds |= {(features | SamplingFeatures(num_recent=n)).rung: None for n in recents}
        while joined := {a | b for a in kinds for b in kinds} - kinds.keys():
            kinds |= dict.fromkeys(sorted(joined, key=repr))
        counts = _powers(1, self._max_rows)
        most = bucket(max(self.config.max_step_tokens, self.config.max_num_seqs))
        shapes = {self._shape(n, None): None for n in counts}
        shapes |= {self._shape(n, t): None for n in counts for t in _powers(max(n, _MIN_TOKENS), most)}
        programs = [Program(rows, tokens, kind) for kind in kinds for rows, tokens in shapes]
        num_top = max((p.prompt_logprobs for p in params if p.prompt_logprobs is not None), default=None)
        if num_top is not None:
            wide = [kind | SamplingFeatures(num_logprobs=bucket(num_top)) for kind in kinds]
            pairs = [(t, tokens) for t in _powers(1, most) for tokens in (None, max(t, _MIN_TOKENS))]
            programs += [Program(*self._wide_shape(t, tokens), kind) for kind in wide for t, tokens in pairs]
        return list(dict.fromkeys(programs))

    def _shape(self, num_rows: int, num_tokens: int | None) -> tuple[int, int | None]:
        """Return rows and tokens of a batch, with padding; None for a token a row."""
        if num_tokens is None:
            return bucket(num_rows), None
        num_tokens = max(bucket(num_tokens), _MIN_TOKENS)
        return max(bucket(num_rows), min(num_tokens // _TOKENS_PER_ROW, self._max_rows)), num_tokens

    def _wide_shape(self, num_rows: int, num_tokens: int | None) -> tuple[int, int | None]:
        """`_shape` of a step with rows for the tokens of prompts: one for each of all tokens, to spare compilations."""
        if num_tokens is None:
            return bucket(num_rows), None
        num_tokens = max(bucket(num_tokens), _MIN_TOKENS)
        return num_tokens, num_tokens

    def pack(self, plan: StepPlan) -> tuple[np.ndarray, Layout, Program]:
        """Return all arrays of a step in one, how to find them there, and the program that takes them."""
        batch, from_rows = self._arrays(plan)
        features, next_ids = SamplingFeatures(), None
        if plan.sampling:
            features = features_of(plan.sampling)
        if plan.num_prompt_logprobs is not None:
            features |= SamplingFeatures(num_logprobs=bucket(plan.num_prompt_logprobs))
            next_ids = _padded(plan.rows.next_ids, batch.ragged.num_seqs, -1)
        num_tokens = None if batch.ragged.cu_q_lens is None else len(batch.token_ids)
        program = Program(batch.ragged.num_seqs, num_tokens, features.rung)
        sampling = make_sampling_batch(plan.sampling, program.num_rows, features=program.sampling, next_ids=next_ids)
        packed, layout = pack((batch, from_rows, sampling))
        return packed, layout, program

    def make_batch(self, plan: StepPlan) -> Batch:
        """Return the arrays of a step, padded to bucketed shapes, in numpy. Tokens that only the device knows are 0."""
        return self._arrays(plan)[0]

    def _arrays(self, plan: StepPlan) -> tuple[Batch, np.ndarray]:
        rows, num_tokens = plan.rows, len(plan.token_ids)
        num_rows = len(rows)
        make_shape = self._shape if rows.next_ids is None else self._wide_shape
        arrays = self._padding(*make_shape(num_rows, None if plan.is_decode else num_tokens))
        tables = plan.page_tables if num_rows == len(plan.request_ids) else plan.page_tables[:, rows.requests]
        row_of_token, positions = np.arange(num_rows), rows.begins
        if not plan.is_decode:
            row_of_token = np.repeat(row_of_token, rows.num_tokens)
            first = np.cumsum(rows.num_tokens) - rows.num_tokens
            positions = np.arange(num_tokens) + np.repeat(rows.begins - first, rows.num_tokens)
            arrays["cu_q_lens"][:num_rows] = first
            arrays["cu_q_lens"][num_rows:] = num_tokens
        page, offset = np.divmod(positions, self.cache.page_size)
        arrays["slot_mapping"][:, :num_tokens] = tables[:, row_of_token, page] * self.cache.page_size + offset
        arrays["positions"][:num_tokens] = positions
        arrays["page_table"][:, :num_rows] = tables
        arrays["seq_lens"][:num_rows] = rows.begins + rows.num_tokens
        arrays["token_ids"][:num_tokens] = plan.token_ids
        return _batch_of(arrays), _padded(plan.from_rows, len(arrays["token_ids"]), -1)

    def _run(self, packed: np.ndarray, layout: Layout, program: Program) -> Sampled:
        counts = self._seats() if program.sampling.penalties else None
        sampled, self.cache, counts = self._step(self.cache, counts, jax.device_put(packed), self._previous, layout)
        if program.sampling.penalties:
            self._counts = counts
        return sampled

    def _seats(self) -> jax.Array:
        """Return the counts of tokens for penalties, `[max_num_seqs, vocab_size]`."""
        if self._counts is None:
            vocab_size = getattr(self._model, "vocab_size", None)
            if vocab_size is None:
                batch = _batch_of(self._padding(1, None))
                logits, _ = jax.eval_shape(
                    lambda model, cache, batch: model(cache, batch), self._model, self.cache, batch
                )
                vocab_size = logits.shape[1]
            self._counts = counts = jax.device_put(np.zeros((self.config.max_num_seqs, vocab_size), np.int32))
            return counts
        return self._counts

    def _padding(self, num_rows: int, num_tokens: int | None) -> dict[str, Any]:
        """Return a batch of nothing.

        Its slots are past the pool, and distinct: the scatter may assume unique indices.
        """
        count, num_groups = num_tokens or num_rows, self.cache.num_groups
        nowhere = self.cache.num_slots + np.arange(count, dtype=np.int32)
        return {
            "token_ids": np.zeros(count, np.int32),
            "positions": np.zeros(count, np.int32),
            "slot_mapping": np.tile(nowhere, (num_groups, 1)),
            "page_table": np.full((num_groups, num_rows, self.max_pages), NULL_PAGE, np.int32),
            "seq_lens": np.zeros(num_rows, np.int32),
            "cu_q_lens": None if num_tokens is None else np.zeros(num_rows + 1, np.int32),
        }


def _padded(values: np.ndarray | None, length: int, padding: int) -> np.ndarray:
    padded = np.full(length, padding, np.int32)
    if values is not None:
        padded[: len(values)] = values
    return padded


def _on_host(x: RowLogprobs) -> StepLogprobs:
    return StepLogprobs(*jax.device_get((x.logprobs, x.top_ids, x.top_logprobs)))


def _batch_of(arrays: dict[str, Any]) -> Batch:
    """Return the batch of what `Runner._padding` names."""
    rest = {name: x for name, x in arrays.items() if name not in ("token_ids", "positions")}
    ragged = Ragged(**rest)
    if ragged.num_groups == 1:
        ragged = ragged.of_group(0)
    return Batch(token_ids=arrays["token_ids"], positions=arrays["positions"], ragged=ragged)


def _powers(first: int, last: int) -> list[int]:
    """Return the powers of two from `first` to `last`."""
    return [1 << i for i in range((first - 1).bit_length(), last.bit_length())]
