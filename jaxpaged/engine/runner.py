"""The runner: turns a `StepPlan` into arrays, runs the model, samples. The one place where lists become arrays.

A step is dispatched and read apart: between the two the host schedules the next one, whose tokens are then still on
the device. `from_row` says of each token in which row of the step before it was drawn; -1 where the host knows it.

Drafts are rows of their own: a sequence with k drafts stands in the batch k + 1 times, each time one token longer. The
keys of all are written before any is read, so each row sees the drafts before it, and any model can check drafts. The
same holds for the tokens of a prompt whose log-probabilities are wanted; their rows stand behind all others.
"""

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from jaxpaged.batch import Batch
from jaxpaged.config import NULL_PAGE, cdiv
from jaxpaged.engine.logprobs import StepLogprobs, locate_prompt_rows
from jaxpaged.engine.packing import Layout, pack, unpack
from jaxpaged.engine.page_mover import PageMover
from jaxpaged.engine.plan import SchedulerConfig, StepPlan
from jaxpaged.engine.request import Request, SamplingParams
from jaxpaged.engine.sampling import RowLogprobs, sample
from jaxpaged.engine.sampling_batch import SamplingBatch, SamplingFeatures, bucket, features_of, make_sampling_batch
from jaxpaged.kv_cache import KVCache
from jaxpaged.paging import PageAllocator
from jaxpaged.paging.swap import SwapSpace

_MIN_TOKENS = 8
"""Tokens that a step with prompts is padded to at least: fewer take as long, and each size is a compilation."""
_TOKENS_PER_ROW = 8
"""Such a step has at least a row for so many tokens. A row of padding costs its logits: for SmolLM2 a quarter of what a
token costs, so 3 % of the step, and half of the compilations are spared."""


class Model(Protocol):
    """What the engine runs: a pytree (a Flax NNX module is one) with a forward pass over a paged cache.

    A function `(params, cache, batch) -> (logits, cache)` is one as `jax.tree_util.Partial(function, params)`.
    In each layer it writes the new K and V before it attends, as `jaxpaged.nn` does.
    """

    def __call__(self, cache: KVCache, batch: Batch) -> tuple[jax.Array, KVCache]:
        """Logits `[num_seqs, vocab_size]` float32 after each sequence's last new token, and the cache written."""
        ...


class Program(NamedTuple):
    """One compilation of a step.

    Attributes:
        num_rows: Sequences, or more than those where they have drafts.
        num_tokens: Tokens of a step with prompts; None where each row has one.
        sampling: What its sampling can do.
    """

    num_rows: int
    num_tokens: int | None
    sampling: SamplingFeatures


class InFlight(NamedTuple):
    """A step that was dispatched: what it draws, still on the device."""

    token_ids: jax.Array
    is_finite: jax.Array
    logprobs: RowLogprobs | None
    num_drawn: int
    num_rows: int


class StepResult(NamedTuple):
    """What a step drew.

    Attributes:
        token_ids: Of each row, but those of `StepPlan.prompt_rows`.
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
        compile_whole: Compile model and sampling into one program, with the cache donated. False calls the model as it
            is, for one that compiles its own pieces (`Llama(layer_loop="calls")`).
        rows_per_seq: Rows of one sequence at most: 1 and its drafts.
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
        swap: SwapSpace | None = None,
        rows_per_seq: int = 1,
    ):
        self.pages = pages
        self.config = config
        self.cache = cache
        self.max_pages = cdiv(config.max_model_len, self.cache.page_size)
        self.mover = PageMover(swap)
        self.programs: dict[Program, int] = {}
        """Steps of each program so far."""
        self._make_cache = make_cache
        self._max_rows = bucket(min(config.max_num_seqs * rows_per_seq, config.max_num_seqs + config.max_step_tokens))
        self._call = _WholeStep(model) if compile_whole else partial(_step_in_pieces, model)
        self._previous = jnp.zeros(self._max_rows, jnp.int32)
        self._row_of: dict[int, int] = {}

    def move(self, plan: StepPlan) -> list[Request]:
        """Brings the pages of a step to their places; the requests whose pages did not come back whole."""
        self.cache, lost = self.mover.move(self.cache, plan)
        return lost

    def dispatch(self, plan: StepPlan) -> InFlight:
        """Starts a step whose pages are in place, and does not wait for it."""
        packed, layout, program = self._pack(plan)
        self.programs[program] = self.programs.get(program, 0) + 1
        *drawn, self.cache = self._call(self.cache, jax.device_put(packed), self._previous, layout)
        for x in jax.tree.leaves(drawn):
            x.copy_to_host_async()
        num_drawn = len(plan.requests) + plan.num_drafts
        num_rows = num_drawn + sum(entry.num_rows for entry in plan.prompt_rows)
        in_flight = InFlight(*drawn, num_drawn=num_drawn, num_rows=num_rows)
        self._previous = in_flight.token_ids
        return in_flight

    def read(self, in_flight: InFlight) -> StepResult:
        """Waits for a step."""
        is_finite = np.asarray(in_flight.is_finite)[: in_flight.num_rows]
        logprobs = in_flight.logprobs
        return StepResult(
            token_ids=np.asarray(in_flight.token_ids)[: in_flight.num_drawn].tolist(),
            non_finite=frozenset() if is_finite.all() else frozenset(np.flatnonzero(~is_finite).tolist()),
            logprobs=None if logprobs is None else _on_host(logprobs),
        )

    def restore_cache(self, *, is_lost: bool) -> bool:
        """An empty cache in place of one that a failed step took with it; whether there was need for one.

        What was on its way to the swap space is dropped: nobody knows whether it was right.

        Args:
            is_lost: Whether what the cache holds is lost in any case.
        """
        self.mover.forget_leaving()
        is_lost = is_lost or any(x.is_deleted() for x in jax.tree.leaves(self.cache))
        if is_lost:
            self.cache = self._make_cache()
            self._previous = jnp.zeros(self._max_rows, jnp.int32)
        return is_lost

    def warm_up(self, program: Program) -> None:
        """Compiles a program, by running it on padding."""
        batch = Batch(**self._padding(program.num_rows, program.num_tokens))
        sampling = make_sampling_batch([], program.num_rows, features=program.sampling)
        packed, layout = pack((batch, np.full(len(batch.token_ids), -1, np.int32), sampling))
        *drawn, self.cache = self._call(self.cache, jax.device_put(packed), self._previous, layout)
        jax.block_until_ready(drawn)
        self.programs.setdefault(program, 0)

    def all_programs(self, params: Sequence[SamplingParams] = (), *, greedy: bool = True) -> list[Program]:
        """Every program that steps can need whose requests are greedy, or else sample like these, all together."""
        kinds = {SamplingFeatures(): None} if greedy else {}
        joined = SamplingFeatures()
        # Those without log-probabilities first: what they need together runs no program that has them.
        for p in sorted(params, key=lambda p: p.num_logprobs is not None):
            request = Request(request_id=0, prompt_token_ids=(0,), params=p, max_tokens=self.config.max_model_len)
            features = features_of([request])
            for width in _powers(1, bucket(self.config.max_model_len)) if features.history_width else [0]:
                kind = dataclasses.replace(features, history_width=width)
                joined = joined | kind
                kinds |= {kind: None, joined: None}
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
        """Rows and tokens of a batch, with padding; None for a token a row."""
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

    def make_batch(self, plan: StepPlan) -> Batch:
        """The arrays of a step, padded to bucketed shapes, in numpy. Tokens that only the device knows are 0."""
        return self._make_batch(plan)[0]

    def _pack(self, plan: StepPlan) -> tuple[np.ndarray, Layout, Program]:
        batch, from_row, rows = self._make_batch(plan)
        num_rows = len(batch.seq_lens)
        num_pending = [r.num_pending for r in rows]
        features, next_ids = features_of(rows), None
        if plan.prompt_rows:
            num_top = max(plan.requests[entry.place].params.prompt_logprobs or 0 for entry in plan.prompt_rows)
            features |= SamplingFeatures(num_logprobs=bucket(num_top))
            next_ids = _next_ids(plan, num_rows)
        program = self._program(num_rows, None if batch.cu_q_lens is None else len(batch.token_ids), features)
        sampling = make_sampling_batch(
            rows, num_rows, num_pending=num_pending, features=program.sampling, next_ids=next_ids
        )
        packed, layout = pack((batch, from_row, sampling))
        return packed, layout, program

    def _program(self, num_rows: int, num_tokens: int | None, features: SamplingFeatures) -> Program:
        """One that can do it, and is compiled if there is such a one."""
        exact = Program(num_rows, num_tokens, features)
        if exact in self.programs:
            return exact
        able = (p for p in self.programs if p[:2] == exact[:2] and p.sampling | features == p.sampling)
        # Log-probabilities cost a pass over the logits and a sort: nobody pays for them who has not asked.
        tells = features.num_logprobs is not None
        return next((p for p in able if (p.sampling.num_logprobs is not None) == tells), exact)

    def _make_batch(self, plan: StepPlan) -> tuple[Batch, np.ndarray, Sequence[Any]]:
        """The batch, `from_row`, and of each row what its sampling has to know."""
        rows, q_lens, begins = _rows_of(plan)
        ids = [r.request_id for r in plan.requests]
        table = self.pages.page_table(ids, self.max_pages)
        if plan.drafts:
            table = np.repeat(table, [1 + len(d) for d in plan.drafts], axis=0)
        make_shape = self._shape
        if plan.prompt_rows:
            table, q_lens, begins = _with_prompt_rows(plan, table, q_lens, begins)
            make_shape = self._wide_shape
        num_rows, num_tokens = len(q_lens), int(q_lens.sum())
        is_decode = num_rows == num_tokens
        shape = make_shape(num_rows, None if is_decode else num_tokens)
        arrays = self._padding(*shape)
        from_row = np.full(len(arrays["token_ids"]), -1, np.int32)
        row_of_token, positions = np.arange(num_rows), begins
        if not is_decode:
            row_of_token = np.repeat(row_of_token, q_lens)
            first = np.cumsum(q_lens) - q_lens
            positions = np.arange(num_tokens) + np.repeat(begins - first, q_lens)
            arrays["cu_q_lens"][:num_rows] = first
            arrays["cu_q_lens"][num_rows:] = num_tokens
        page, offset = np.divmod(positions, self.cache.page_size)
        arrays["slot_mapping"][:num_tokens] = table[row_of_token, page] * self.cache.page_size + offset
        arrays["positions"][:num_tokens] = positions
        arrays["page_table"][:num_rows] = table
        arrays["seq_lens"][:num_rows] = begins + q_lens
        self._fill_tokens(plan, arrays["token_ids"], from_row)
        self._row_of = dict(zip(ids, range(len(ids)), strict=True)) if not plan.drafts else {}
        return Batch(**arrays), from_row, rows

    def _fill_tokens(self, plan: StepPlan, token_ids: np.ndarray, from_row: np.ndarray) -> None:
        place = 0
        every_drafts = plan.drafts or [()] * len(plan.requests)
        elsewhere = {entry.place: entry.num_rows for entry in plan.prompt_rows}
        for i, (request, num_new, drafts) in enumerate(
            zip(plan.requests, plan.num_new_tokens, every_drafts, strict=True)
        ):
            if num_new > 1 or request.is_prompting:
                end = request.num_computed_tokens + num_new
                num_new -= elsewhere.get(i, 0)
                token_ids[place : place + num_new] = request.known_tokens()[end - num_new : end]
            elif request.num_pending:
                from_row[place] = self._row_of[request.request_id]
            else:
                token_ids[place] = request.output_token_ids[-1]
            place += num_new
            if drafts:
                token_ids[place : place + len(drafts)] = drafts
                place += len(drafts)
        for entry in plan.prompt_rows:
            end = entry.begin + entry.num_rows
            token_ids[place : place + entry.num_rows] = plan.requests[entry.place].prompt_token_ids[entry.begin : end]
            place += entry.num_rows

    def _padding(self, num_rows: int, num_tokens: int | None) -> dict[str, Any]:
        """A batch of nothing. Its slots are past the pool, and distinct: the scatter may assume unique indices."""
        count = num_tokens or num_rows
        return {
            "token_ids": np.zeros(count, np.int32),
            "positions": np.zeros(count, np.int32),
            "slot_mapping": self.cache.num_slots + np.arange(count, dtype=np.int32),
            "page_table": np.full((num_rows, self.max_pages), NULL_PAGE, np.int32),
            "seq_lens": np.zeros(num_rows, np.int32),
            "cu_q_lens": None if num_tokens is None else np.zeros(num_rows + 1, np.int32),
        }


class _DraftRow(NamedTuple):
    """What sampling has to know of a row that stands behind drafts."""

    params: SamplingParams
    prompt_token_ids: Sequence[int]
    output_token_ids: Sequence[int]
    num_pending: int = 0


def _rows_of(plan: StepPlan) -> tuple[Sequence[Any], np.ndarray, np.ndarray]:
    """The rows of a step, the new tokens of each, and its tokens before those."""
    begins = [r.num_computed_tokens for r in plan.requests]
    if not plan.drafts:
        return plan.requests, np.array(plan.num_new_tokens, np.int32), np.array(begins, np.int32)
    rows, counts, starts = [], [], []
    for request, num_new, drafts, begin in zip(plan.requests, plan.num_new_tokens, plan.drafts, begins, strict=True):
        rows.append(request)
        counts += [num_new, *[1] * len(drafts)]
        starts += range(begin, begin + 1 + len(drafts))
        for i in range(len(drafts)):
            seen = [*request.output_token_ids, *drafts[: i + 1]]
            rows.append(_DraftRow(request.params, request.prompt_token_ids, seen))
    return rows, np.array(counts, np.int32), np.array(starts, np.int32)


def _with_prompt_rows(
    plan: StepPlan, table: np.ndarray, q_lens: np.ndarray, begins: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Page table, new tokens and tokens before them, with a row more for each of `plan.prompt_rows`."""
    q_lens, begins = q_lens.copy(), begins.copy()
    own = np.array([entry.place + plan.num_drafts for entry in plan.prompt_rows])
    counts = np.array([entry.num_rows for entry in plan.prompt_rows], np.int32)
    q_lens[own] -= counts
    begins[own] += counts
    first = [np.arange(begin, begin + count, dtype=np.int32) for _, begin, count in plan.prompt_rows]
    table = np.concatenate([table, table[np.repeat(own, counts)]])
    return table, np.concatenate([q_lens, np.ones(counts.sum(), np.int32)]), np.concatenate([begins, *first])


def _next_ids(plan: StepPlan, num_rows: int) -> np.ndarray:
    """`[num_rows]` int32, the token of the prompt that follows each row of a prompt; -1 of others."""
    next_ids = np.full(num_rows, -1, np.int32)
    for entry, rows, positions in locate_prompt_rows(plan.prompt_rows, plan.num_new_tokens, plan.num_drafts):
        prompt = plan.requests[entry.place].prompt_token_ids
        for row, position in zip(rows, positions, strict=True):
            if position + 1 < len(prompt):
                next_ids[row] = prompt[position + 1]
    return next_ids


def _on_host(x: RowLogprobs) -> StepLogprobs:
    return StepLogprobs(np.asarray(x.logprobs), np.asarray(x.top_ids), np.asarray(x.top_logprobs))


def _powers(first: int, last: int) -> list[int]:
    """The powers of two from `first` to `last`."""
    return [1 << i for i in range((first - 1).bit_length(), last.bit_length())]


def _enter(packed: jax.Array, previous: jax.Array, layout: Layout) -> tuple[Batch, SamplingBatch | None]:
    """The batch, with the tokens that the step before drew in their places, and how to sample."""
    batch, from_row, sampling = unpack(packed, layout)
    token_ids = jnp.where(from_row >= 0, previous[jnp.maximum(from_row, 0)], batch.token_ids)
    return dataclasses.replace(batch, token_ids=token_ids), sampling


def _leave(
    logits: jax.Array, sampling: SamplingBatch | None, num_out: int
) -> tuple[jax.Array, jax.Array, RowLogprobs | None]:
    """The token drawn for each row, cut or padded to `num_out`; of all rows, whether logits were finite; and more."""
    with jax.named_scope("sample"):
        drawn = sample(logits, sampling)
    token_ids = drawn.token_ids[:num_out]
    return jnp.pad(token_ids, (0, num_out - len(token_ids))), drawn.is_finite, drawn.logprobs


def _checked(logits: jax.Array, batch: Batch) -> jax.Array:
    """What the model returned, if it has a row for each sequence."""
    num_seqs = len(batch.seq_lens)
    if logits.ndim != 2 or logits.shape[0] != num_seqs:
        raise ValueError(
            f"The model's logits must have shape (num_seqs, vocab_size), with {num_seqs} sequences here; got "
            f"{logits.shape}. A row is wanted after the last new token of each."
        )
    return logits


class _WholeStep:
    """A step as one program. The model is taken apart once: a tree of hundreds of modules takes milliseconds."""

    def __init__(self, model: Model):
        self._leaves, self._treedef = jax.tree.flatten(model)

    def __call__(self, cache: KVCache, packed: jax.Array, previous: jax.Array, layout: Layout):
        return _compiled_step(self._leaves, cache, packed, previous, self._treedef, layout)


@partial(jax.jit, static_argnames=("treedef", "layout"), donate_argnames="cache")
def _compiled_step(leaves: list, cache: KVCache, packed: jax.Array, previous: jax.Array, treedef: Any, layout: Layout):
    batch, sampling = _enter(packed, previous, layout)
    with jax.named_scope("model"):
        logits, cache = jax.tree.unflatten(treedef, leaves)(cache, batch)
    return *_leave(_checked(logits, batch), sampling, len(previous)), cache


def _step_in_pieces(model: Model, cache: KVCache, packed: jax.Array, previous: jax.Array, layout: Layout):
    batch, sampling = _compiled_enter(packed, previous, layout)
    logits, cache = model(cache, batch)
    return *_compiled_leave(_checked(logits, batch), sampling, len(previous)), cache


_compiled_enter = jax.jit(_enter, static_argnames="layout")
_compiled_leave = jax.jit(_leave, static_argnames="num_out")
