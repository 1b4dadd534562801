"""The scheduler: who computes how many tokens in the next step. It deals in integers and never sees an array of JAX.

First one token for every request in decode; then prefill, in chunks, with what is left of the step's tokens: requests
begun, then those waiting, by priority and arrival. Where pages run out, the last request in that order is preempted and
waits: it is swapped out where there is room, else it starts over later with what it has generated. All requests end,
for each fits into the pool alone, and the first that runs can preempt all others.

A step is scheduled before the tokens of the one before are known: `num_tokens` counts them, `output_token_ids` does
not hold them yet. A request whose next step depends on its last token (it drafts, or is a beam) sits one step out until
that is known; the others go on. Those that wait do so together, so that they fill the same steps.

A beam's token is not chosen here: `update` hands out the row, and whoever searches calls `accept` or `fork`.
"""

import bisect
import dataclasses
import heapq
import math
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from operator import attrgetter
from typing import NamedTuple

import numpy as np

from jaxpaged.config import NULL_PAGE, cdiv
from jaxpaged.engine.config import SchedulerConfig
from jaxpaged.engine.holdings import Holdings
from jaxpaged.engine.plan import StepPlan
from jaxpaged.engine.request import FinishReason, Request, RequestStatus
from jaxpaged.engine.speculation import NgramSpeculation
from jaxpaged.engine.stats import Counters
from jaxpaged.engine.step_builder import StepBuilder
from jaxpaged.paging import OutOfPagesError, PageAllocator
from jaxpaged.paging.store.swap import SwapSpace

_ORDER = attrgetter("order")
_new_tuple = tuple.__new__  # half of what a NamedTuple's own constructor takes, once a token
_NEW_FORK = {
    "status": RequestStatus.WAITING,
    "siblings": [],
    "num_computed_tokens": 0,
    "num_cached_tokens": None,
    "num_slots": 0,
    "_buffer": None,
    "_num_buffered": 0,
}
_UNTOLD = (FinishReason.ABORT, FinishReason.DEADLINE, FinishReason.ERROR)
"""Reasons to end without a token."""


class NewTokenId(NamedTuple):
    """A token that a step sampled for a request, why the request ends with it if it does, and the row it is from."""

    request_id: int
    token_id: int
    finish_reason: FinishReason | None
    row: int


class Scheduler:
    """Owns the requests and, through `pages`, who holds which page.

    One thread calls it; only `add` may come from others too.

    Args:
        swap: Where preempted requests keep their pages; None lets them start over. Evicted prefixes go there too, where
            `pages` lists them.
        speculation: Guesses tokens that a step then checks; None guesses nothing.
        counters: What it counts in; None is new ones.

    Attributes:
        requests: All that have not ended, by id.
        waiting: In order of priority and arrival, those preempted among them.
        running: In the same order.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        pages: PageAllocator,
        *,
        swap: SwapSpace | None = None,
        speculation: NgramSpeculation | None = None,
        counters: Counters | None = None,
    ):
        config.check()
        self.config = config
        self.pages = pages
        self.counters = counters or Counters()
        self.holdings = Holdings(pages, swap, self.counters, config)
        self.speculation = speculation
        self.requests: dict[int, Request] = {}
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self._max_pages = cdiv(config.max_model_len, pages.page_size)
        self._rows_before: dict[int, int] = {}  # of the last step that ran, the row in which each request sampled
        self._arrivals: deque[Request] = deque()
        self._deadlines: list[tuple[float, int, Request]] = []
        self._in_flight: deque[list[Request]] = deque()  # of each step that runs, its requests
        self._waiters_in_flight: deque[bool] = deque()  # of each, whether one in decode waits for its token
        self._ended: list[Request] = []
        self._has_ended = False
        self._num_beams = 0

    @property
    def num_waiting(self) -> int:
        """Requests that wait to run."""
        return len(self.waiting) + len(self._arrivals)

    def add(self, request: Request) -> None:
        """Queue a request.

        Raises:
            ValueError: The prompt is empty or as long as the context.
            OutOfPagesError: The request needs more pages than the pool has, so that it could never finish.
        """
        self.config.check_request(len(request.prompt_token_ids), request.max_len, self.pages)
        self._num_beams += request.family is not None
        self.requests[request.request_id] = request
        self._arrivals.append(request)

    def schedule(self, now: float = -math.inf) -> StepPlan | None:
        """Return the next step, with pages allocated for it; None when there is nothing to compute.

        Args:
            now: The time, by the clock of the requests' deadlines.
        """
        self._take_in(now)
        step = StepBuilder(self.config.max_step_tokens)
        self._decode(step)
        if step.num_decodes < len(self.running):
            for request in list(self.running):
                if request.status is RequestStatus.PREFILL and step.budget > 0:
                    self._prefill(request, step)
        self._admit(step)
        while step.is_empty and not self._in_flight and self.running and any(not r.num_pending for r in self.waiting):
            self._preempt_last(step)  # all that run are beams which wait for another that has no room
            self._admit(step)
        num_pages = self.pages.num_pages - 1 - self.pages.num_free_pages
        self.counters.peak_num_pages = max(self.counters.peak_num_pages, num_pages)
        step.evictions = self.holdings.take_evictions()
        plan = step.build(self.pages, self._max_pages, self._rows_before, self.holdings.free_seats)
        if plan is None and not self._in_flight and not self.running:
            stuck = next((r for r in self.waiting if not r.num_pending), None)
            if stuck is not None:
                self._end_alone(stuck)
                return self.schedule(now)
        return plan

    def dispatched(self, plan: StepPlan) -> None:
        """Count the tokens of a step as computed: whatever is dispatched from now on comes after it."""
        requests = [self.requests[request_id] for request_id in plan.request_ids]
        waits = self._has_waiters and any(r.status is RequestStatus.DECODE and self._waits(r) for r in requests)
        columns = zip(requests, plan.num_new_tokens.tolist(), plan.is_sampled.tolist(), strict=True)
        for request, num_new, is_sampled in columns:
            request.num_computed_tokens += num_new
            if request.status is RequestStatus.PREFILL:
                self.holdings.commit(request)
                if is_sampled:
                    request.status = RequestStatus.DECODE
            if is_sampled:
                request.num_tokens += 1
        if requests:
            self._in_flight.append(requests)
            self._waiters_in_flight.append(waits)
            self._rows_before = dict(zip(plan.request_ids, plan.rows.own.tolist(), strict=True))

    def update(
        self, plan: StepPlan, token_ids: Sequence[int], non_finite: frozenset[int] = frozenset()
    ) -> list[NewTokenId]:
        """Take in the token that followed each request of the oldest step that runs, and each of its drafts.

        Args:
            token_ids: Of each row but those of prompt tokens.
            non_finite: Rows whose logits were not finite. Their requests fail.

        Returns:
            The new tokens, in batch order. Requests that finished have given their pages back.
        """
        requests = []
        if plan.request_ids:
            requests = self._in_flight.popleft()
            self._waiters_in_flight.popleft()
        if plan.rows.next_ids is not None:
            self._count_prompt_rows(plan, requests, non_finite)
        if plan.drafts or non_finite or not plan.is_sampled.all():
            sampled = self._accepted(plan, requests, token_ids, non_finite)
        else:
            sampled = zip(requests, token_ids, range(len(requests)), strict=True)
        new = []
        for request, token_id, row in sampled:
            if request.finish_reason is not None:  # it ended while the step ran
                continue
            if request.family is not None:
                new.append(_new_tuple(NewTokenId, (request.request_id, token_id, None, row)))
                continue
            output, reason = request.output_token_ids, None
            output.append(token_id)
            if token_id in request.params.stop_token_ids:
                reason = FinishReason.STOP
            elif request.num_prompt + len(output) >= request.max_len:
                reason = FinishReason.LENGTH
            if reason is not None:
                self._end(request, reason)
            new.append(_new_tuple(NewTokenId, (request.request_id, token_id, reason, row)))
        self._forget_ended()
        return new

    def accept(self, beam: Request, token_id: int) -> None:
        """Choose the token that a beam goes on with. Its last row must have been handed out."""
        beam.output_token_ids.append(token_id)

    def fork(self, beam: Request, request_id: int, token_id: int) -> Request:
        """Make another beam that goes on from this one with a token of its own. Call it before `accept`.

        It shares the pages, if this one has them here and there is a place to run in; else it waits for its turn, and
        computes what the prefix cache does not have.

        Args:
            request_id: A new id.
        """
        fork = dataclasses.replace(beam, request_id=request_id, **_NEW_FORK)
        fork.output_token_ids = [*beam.output_token_ids, token_id]
        fork.num_tokens = fork.num_known
        self.requests[request_id] = fork
        self._num_beams += 1
        if beam.status is RequestStatus.DECODE and len(self.running) < self.config.max_num_seqs:
            self.holdings.share(beam, fork)
            bisect.insort(self.running, fork, key=_ORDER)
        else:
            bisect.insort(self.waiting, fork, key=_ORDER)
        return fork

    def end(self, requests: Collection[Request], reason: FinishReason, error: Exception | None = None) -> None:
        """End requests, wherever they are, and frees their pages; those that have ended stay as they are."""
        self._take_in(-math.inf)
        for request in requests:
            if request.finish_reason is None:
                self._end(request, reason, error)
        self._forget_ended()

    def end_at(
        self, request: Request, num_output_tokens: int, reason: FinishReason, error: Exception | None = None
    ) -> None:
        """End a request with one of its last tokens, also where it has ended by a token that came behind."""
        del request.output_token_ids[num_output_tokens:]
        if request.finish_reason is None:
            self._end(request, reason, error)
            self._forget_ended()
            return
        request.finish_reason, request.error = reason, error
        if reason in _UNTOLD:
            self._ended.append(request)

    def take_ended(self) -> list[Request]:
        """Return the requests that ended without a token since the last call."""
        ended, self._ended = self._ended, []
        return ended

    def fail(self, plan: StepPlan, error: Exception) -> None:
        """End the requests of a step that failed with its error."""
        request_ids = [*plan.request_ids, *(request_id for request_id, _ in plan.swap_ins)]
        self.end([self.requests[i] for i in request_ids if i in self.requests], FinishReason.ERROR, error)
        for restored in plan.restores:  # they may not have come
            self.pages.prefix.forget(restored.page_ids)
        self.holdings.restart_unswapped(self.waiting)

    def restart_all(self) -> None:
        """Make all requests start over, with the tokens known: what steps drew or wrote since is lost."""
        self.pages.prefix.reset()
        self._in_flight.clear()
        self._waiters_in_flight.clear()
        for request in self.running:
            self.holdings.restart(request)
        self.waiting = sorted([*self.running, *self.waiting], key=_ORDER)
        self.running = []
        self.holdings.restart_unswapped(self.waiting, with_pending=True)
        for request in self.waiting:
            request.num_tokens = request.num_known

    def lose(self, request_id: int) -> None:
        """Make one running request start over: its pages did not come back from the swap space."""
        request = self.requests[request_id]
        self.running.remove(request)
        self.holdings.restart(request)
        bisect.insort(self.waiting, request, key=_ORDER)

    def _take_in(self, now: float) -> None:
        """Sort in the requests that arrived, and ends those whose deadline is past."""
        while self._arrivals:
            request = self._arrivals.popleft()
            bisect.insort(self.waiting, request, key=_ORDER)
            if request.deadline is not None and request.deadline < math.inf:
                heapq.heappush(self._deadlines, (request.deadline, request.request_id, request))
        while self._deadlines and self._deadlines[0][0] < now:
            deadline, request_id, request = heapq.heappop(self._deadlines)
            late = TimeoutError(
                f"Request {request_id} passed its deadline by {now - deadline:.3g} s, with "
                f"{len(request.output_token_ids)} of up to {request.max_new_tokens} new tokens."
            )
            self.end([request], FinishReason.DEADLINE, late)

    def _decode(self, step: StepBuilder) -> None:
        """Schedule one token for each request that decodes.

        Preempts from the end of the running ones until all have room.
        """
        decoding = [r for r in self.running if r.status is RequestStatus.DECODE and r.num_tokens < r.max_len]
        if self._has_waiters:
            is_their_turn = not any(self._waiters_in_flight)
            decoding = [r for r in decoding if not self._waits(r) or (is_their_turn and not r.num_pending)]
        while decoding:
            try:
                step.copies += self.holdings.grow(decoding)
                break
            except OutOfPagesError:
                victim = self._give_way(step)
                if victim is None:
                    return
                decoding = [r for r in decoding if r is not victim]
        step.decode(decoding)
        if self.speculation is not None:
            for request in decoding:
                if request.family is None:
                    self._draft(request, step)

    def _prefill(self, request: Request, step: StepBuilder) -> None:
        """Schedule the next chunk of a prompt in computation.

        Preempts from the end of the running ones until it has room.
        """
        while request.status is RequestStatus.PREFILL:
            try:
                step.copies += self.holdings.grow_prompt(request, min(request.num_remaining, step.budget))
            except OutOfPagesError:
                if self._give_way(step) is None:
                    return
            else:
                step.prefill(request)
                return

    def _give_way(self, step: StepBuilder) -> Request | None:
        """Preempt the last running request, where pages ran out; None if it is the only one.

        Then it ends, for it can never go on, unless pages are to leave first.
        """
        if len(self.running) > 1:
            return self._preempt_last(step)
        if not step.swap_outs:
            self._end_alone(self.running[0])
        return None

    def _draft(self, request: Request, step: StepBuilder) -> None:
        """Guess what follows, as far as tokens and free pages are left."""
        assert self.speculation is not None
        limit = min(step.budget, request.max_len - request.num_tokens - 1)
        drafts = self.speculation.propose(request, limit) if limit > 0 else ()
        copies = self.holdings.grow_for_drafts(request, len(drafts)) if drafts else None
        if copies is not None:
            step.copies += copies
            step.draft(request, drafts)
            self.counters.num_drafts += len(drafts)

    def _admit(self, step: StepBuilder) -> None:
        """Let waiting requests run while tokens, places and pages are left."""
        while step.budget > 0:
            # A beam whose next token is not chosen stands in nobody's way: another may have to come before it is.
            free = (r for r in self.waiting if not (r.num_pending and r.family is not None))
            request = next(free, None)
            if request is None or request.num_pending or self._is_being_computed(request, step):
                return
            if not self._make_way(request, step):
                return
            self.waiting.remove(request)
            bisect.insort(self.running, request, key=_ORDER)
            try:
                self.holdings.begin(request, step)
            except Exception as error:  # noqa: BLE001 whatever the swap space raises ends the request, with the cause
                self.end([request], FinishReason.ERROR, error)

    def _is_being_computed(self, request: Request, step: StepBuilder) -> bool:
        """Return whether pages that it could share are on their way.

        Another sample of its prompt reads it, or a prompt of this step begins alike, up to the page that it is at.
        """
        if request.status is RequestStatus.SWAPPED:
            return False
        if request.siblings and not request.output_token_ids:
            if self.holdings.parent_of(request, step) is not None:
                return False
            if any(r.status is RequestStatus.PREFILL for r in request.siblings):
                return True
        if not self.pages.prefix_caching or request.needs_prompt_logits:
            return False
        size, known = self.pages.page_size, request.known_tokens()
        for other in step.prefills:
            end = (other.num_computed_tokens // size + 1) * size  # of the page that it is at
            if other.cache_salt != request.cache_salt:
                continue
            if end < len(known) and np.array_equal(other.known_tokens()[:end], known[:end]):
                return True
        return False

    def _make_way(self, request: Request, step: StepBuilder) -> bool:
        """Return whether there is a place and pages for a waiting request, if need be those of requests of lower
        priority.
        """
        while len(self.running) >= self.config.max_num_seqs or not self.holdings.fits(request, self.running, step):
            if not self.running or self.running[-1].priority <= request.priority:
                return False
            self._preempt_last(step)
        return True

    def _preempt_last(self, step: StepBuilder) -> Request:
        """Take the pages of the last running request."""
        victim = self.running.pop()
        step.remove(victim)
        self.counters.num_preemptions += 1
        self.holdings.set_aside(victim, step)
        bisect.insort(self.waiting, victim, key=_ORDER)
        return victim

    def _accepted(
        self, plan: StepPlan, requests: Sequence[Request], token_ids: Sequence[int], non_finite: frozenset[int]
    ) -> Iterator[tuple[Request, int, int]]:
        """Return the tokens of a step that count, with their rows: none inside a prompt, and of a request with drafts
        those that are equal to its drafts and one more.
        """
        every_drafts = plan.drafts or ((),) * len(requests)
        columns = zip(requests, plan.is_sampled.tolist(), plan.rows.own.tolist(), every_drafts, strict=True)
        for request, is_sampled, own, drafts in columns:
            rows = range(own, own + 1 + len(drafts))
            if not is_sampled or request.finish_reason is not None:
                if not non_finite.isdisjoint(rows):
                    self._end_non_finite(request, "inside its prompt")
                continue
            if request.status is not RequestStatus.DECODE:  # preempted meanwhile: pages that drafts wrote are gone
                drafts = ()
            refuted = (i for i, d in enumerate(drafts) if d != token_ids[own + i] or own + i in non_finite)
            num_accepted = next(refuted, len(drafts))
            request.num_computed_tokens += num_accepted
            request.num_tokens += num_accepted
            self.counters.num_accepted_drafts += num_accepted
            for row in rows[: num_accepted + 1]:
                if request.finish_reason is not None:
                    break
                if row in non_finite:
                    self._end_non_finite(request, f"after token {request.num_known}")
                    break
                yield request, token_ids[row], row

    def _count_prompt_rows(self, plan: StepPlan, requests: Sequence[Request], non_finite: frozenset[int]) -> None:
        """Count the prompt tokens whose log-probabilities a step gave, each once; siblings share them."""
        for row, index, position, _ in plan.rows.of_prompts():
            request = requests[index]
            if request.finish_reason is not None or position + 1 != request.num_prompt_logprobs:
                continue
            for sibling in request.siblings or (request,):  # that have the same prompt
                if row in non_finite:
                    self._end_non_finite(sibling, f"after token {position + 1}")
                else:
                    sibling.num_prompt_logprobs += 1

    def _end_non_finite(self, request: Request, where: str) -> None:
        """End a request, unless it has ended while the step ran, and forgets what it wrote."""
        if self.pages.prefix_caching:  # nobody may find what it wrote, be it preempted by now
            begin = (request.num_cached_tokens or 0) // self.pages.page_size
            for group in self.pages.groups:
                wrote = self.pages.prefix.find(request.known_tokens(), keys=request.keys, group=group.name)[begin:]
                self.pages.prefix.forget(wrote[wrote != NULL_PAGE])
        if request.finish_reason is None:
            error = FloatingPointError(f"Request {request.request_id}: the model's logits {where} are not finite.")
            self._end(request, FinishReason.ERROR, error)

    def _end(self, request: Request, reason: FinishReason, error: Exception | None = None) -> None:
        """End a request and frees its pages; `_forget_ended` then takes it from the lists."""
        request.finish_reason, request.error = reason, error
        self._num_beams -= request.family is not None
        self.holdings.end(request)
        del self.requests[request.request_id]
        self._has_ended = True
        if reason in _UNTOLD:
            self._ended.append(request)

    def _forget_ended(self) -> None:
        if self._has_ended:
            self.running = [r for r in self.running if r.finish_reason is None]
            self.waiting = [r for r in self.waiting if r.finish_reason is None]
            self._has_ended = False

    def _end_alone(self, request: Request) -> None:
        """End a request that has the pool to itself and does not fit: somebody else holds pages of it."""
        needed, free = self.config.num_pages_for(request.num_tokens, self.pages), self.pages.num_free_pages
        error = OutOfPagesError(needed, free, f"Request {request.request_id}, alone in the engine,")
        self.end([request], FinishReason.ERROR, error)

    @property
    def _has_waiters(self) -> bool:
        return self.speculation is not None or self._num_beams > 0

    def _waits(self, request: Request) -> bool:
        """Return whether a request's next step depends on its last token."""
        return self.speculation is not None or request.family is not None
