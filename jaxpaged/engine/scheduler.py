"""The scheduler: who computes how many tokens in the next step. It deals in integers and never sees an array of JAX.

First one token for every request that decodes; then prompts, in chunks, with what is left of the step's tokens: those
begun, then those waiting, by priority and arrival. Where pages run out, the last request in that order gives its own
back and waits: they are swapped out where there is room, else it starts over later with what it has generated. The
first running request is never preempted for want of pages and always goes on, and each one fits alone: all end.

A step is scheduled before the tokens of the one before are known: `num_tokens` counts them, `output_token_ids` does
not hold them yet.
"""

import bisect
import dataclasses
import heapq
import math
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from operator import attrgetter

import numpy as np

from jaxpaged.checks import as_count
from jaxpaged.config import cdiv
from jaxpaged.engine.plan import StepBuilder, StepPlan, SwapIn, SwapOut
from jaxpaged.engine.request import FinishReason, NewToken, QueueFullError, Request
from jaxpaged.engine.speculation import NgramSpeculation
from jaxpaged.paging import OutOfPagesError, PageAllocator
from jaxpaged.paging.swap import SwapSpace

_ORDER = attrgetter("order")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Limits of a step.

    Attributes:
        max_num_seqs: Requests that run at the same time.
        max_step_tokens: Tokens in one step. Decoding comes first; longer prompts take several steps.
        max_model_len: Tokens of a sequence, prompt and output. Also the width of the page tables.
        max_num_waiting: Requests that may wait; one more is refused. None is no limit.
    """

    max_num_seqs: int = 64
    max_step_tokens: int = 512
    max_model_len: int = 8192
    max_num_waiting: int | None = None

    def check(self) -> None:
        """Raises ValueError for a limit below 1, TypeError for one that is no integer, by name."""
        for field in dataclasses.fields(self):
            if (value := getattr(self, field.name)) is not None or field.default is not None:
                as_count(value, f"`{field.name}`", minimum=1)


class Scheduler:
    """Owns the requests and, through `pages`, who holds which page.

    One thread calls it; only `add` may come from others too.

    Args:
        swap: Where preempted requests keep their pages; None lets them start over.
        speculation: Guesses tokens that a step then checks; None guesses nothing.

    Attributes:
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
    ):
        config.check()
        self.config = config
        self.pages = pages
        self.swap = swap
        self.speculation = speculation
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.num_preemptions = 0
        self.num_swap_outs = 0
        self.num_drafts = 0
        self.num_accepted_drafts = 0
        self.peak_num_pages = 0
        self._arrivals: deque[Request] = deque()
        self._deadlines: list[tuple[float, int, Request]] = []
        self._ended: list[NewToken] = []
        self._has_ended = False
        self._num_with_history = 0
        self._refusal: tuple[Request, int] | None = None  # who did not fit, and how many pages were free

    @property
    def num_waiting(self) -> int:
        """Requests that wait to run."""
        return len(self.waiting) + len(self._arrivals)

    @property
    def needs_tokens(self) -> bool:
        """Whether the next step can only be scheduled when all tokens of those before are known."""
        return self.speculation is not None or self._num_with_history > 0

    def add(self, request: Request) -> None:
        """Queues a request.

        Raises:
            ValueError: The prompt is empty or as long as the context.
            OutOfPagesError: The request needs more pages than the pool has, so that it could never finish.
            QueueFullError: `max_num_waiting` requests wait.
        """
        length, limit = len(request.prompt_token_ids), self.config.max_model_len
        if length == 0:
            raise ValueError("`prompt` must hold at least one token; got none. There is nothing to continue.")
        if length >= limit:
            raise ValueError(
                f"`prompt` must be shorter than the context of {limit} tokens, to leave room for one more; got "
                f"{length} tokens. Shorten it."
            )
        needed, usable = cdiv(request.max_tokens - 1, self.pages.page_size), self.pages.num_pages - 1
        if needed > usable:  # The last token is never stored.
            new = request.max_tokens - length
            what = f"`prompt` of {length} tokens with up to {new} new ones, in pages of {self.pages.page_size},"
            raise OutOfPagesError(needed, usable, what)
        if self.config.max_num_waiting is not None and self.num_waiting >= self.config.max_num_waiting:
            raise QueueFullError(
                f"{self.num_waiting} requests are waiting, and `max_num_waiting` is {self.config.max_num_waiting}. "
                "Step the engine, or try again later."
            )
        self._arrivals.append(request)

    def schedule(self, now: float = -math.inf) -> StepPlan | None:
        """The next step, with pages allocated for it; None when there is nothing to compute.

        Args:
            now: The time, by the clock of the requests' deadlines.

        Raises:
            OutOfPagesError: Pages that no request here holds are missing for the only one that could run.
        """
        self._take_in(now)
        step = StepBuilder(self.config.max_step_tokens)
        self._decode(step)
        for request in self.running:
            if request.is_prompting and step.budget > 0:
                step.add(request, min(request.num_remaining, step.budget))
        if self.waiting and not step.num_preempted:
            self._admit(step)
        self.peak_num_pages = max(self.peak_num_pages, self.pages.num_pages - 1 - self.pages.num_free_pages)
        plan = step.build()
        if plan is None and self.waiting and not self.running and not self.waiting[0].num_pending:
            self._raise_alone(self.waiting[0])
        return plan

    def dispatched(self, plan: StepPlan) -> None:
        """Counts the tokens of a step as computed: whatever is dispatched from now on comes after it."""
        for request, num_new, samples in zip(plan.requests, plan.num_new_tokens, plan.samples, strict=True):
            request.num_computed_tokens += num_new
            if request.is_prompting:
                self.pages.commit(request.request_id, request.known_tokens()[: request.num_computed_tokens])
                request.is_prompting = not samples
            if samples:
                request.num_tokens += 1

    def update(
        self, plan: StepPlan, token_ids: Sequence[int], non_finite: Collection[int] = frozenset()
    ) -> list[NewToken]:
        """Takes in the token that followed each request of a step, and each of its drafts.

        Args:
            token_ids: Row by row: one of each request, and one of each of its drafts behind it.
            non_finite: Rows whose logits were not finite. Their requests fail.

        Returns:
            The new tokens, in batch order. Requests that finished have given their pages back.
        """
        if plan.drafts or non_finite or not all(plan.samples):
            drawn = self._drawn(plan, token_ids, non_finite)
        else:
            drawn = zip(plan.requests, token_ids, strict=True)
        new = []
        for request, token_id in drawn:
            if request.finish_reason is not None:  # it ended while the step ran
                continue
            output = request.output_token_ids
            output.append(token_id)
            if token_id in request.params.stop_token_ids:
                self._end(request, FinishReason.STOP)
            elif len(output) >= request.max_new_tokens:
                self._end(request, FinishReason.LENGTH)
            new.append(NewToken(request.request_id, token_id, request.finish_reason))
        self._forget_ended()
        return new

    def end(self, requests: Collection[Request], reason: FinishReason, error: Exception | None = None) -> None:
        """Ends requests, wherever they are, and frees their pages; those that have ended stay as they are."""
        self._take_in(-math.inf)
        for request in requests:
            if request.finish_reason is None:
                self._end(request, reason, error)
        self._forget_ended()

    def take_ended(self) -> list[NewToken]:
        """The requests that ended without a token since the last call."""
        ended, self._ended = self._ended, []
        return ended

    def fail(self, plan: StepPlan, error: Exception) -> None:
        """Ends the requests of a step that failed with its error."""
        self.end([*plan.requests, *(request for request, _ in plan.swap_ins)], FinishReason.ERROR, error)
        self._restart_unswapped()

    def restart_all(self) -> None:
        """Makes all requests start over, with the tokens known: what steps drew or wrote since is lost."""
        self.pages.reset()
        for request in self.running:
            self._restart(request)
        self.waiting = sorted([*self.running, *self.waiting], key=_ORDER)
        self.running = []
        self._restart_unswapped(with_pending=True)
        for request in self.waiting:
            request.num_tokens = request.num_known

    def lose(self, request: Request) -> None:
        """Makes one running request start over: its pages did not come back from the swap space."""
        self.running.remove(request)
        self._restart(request)
        bisect.insort(self.waiting, request, key=_ORDER)

    def _take_in(self, now: float) -> None:
        """Sorts in the requests that arrived, and ends those whose deadline is past."""
        while self._arrivals:
            request = self._arrivals.popleft()
            bisect.insort(self.waiting, request, key=_ORDER)
            self._num_with_history += request.needs_history
            if request.deadline is not None:
                heapq.heappush(self._deadlines, (request.deadline, request.request_id, request))
        while self._deadlines and self._deadlines[0][0] < now:
            _, request_id, request = heapq.heappop(self._deadlines)
            late = TimeoutError(
                f"Request {request_id} passed its deadline by {now - (request.deadline or now):.3g} s, with "
                f"{len(request.output_token_ids)} of up to {request.max_new_tokens} new tokens."
            )
            self.end([request], FinishReason.DEADLINE, late)

    def _decode(self, step: StepBuilder) -> None:
        """One token for each request that decodes. Preempts from the end of the running ones until all have room."""
        decoding = [r for r in self.running if not r.is_prompting and r.num_tokens < r.max_tokens]
        while decoding:
            try:
                step.copies += self.pages.append_many([r.request_id for r in decoding], 1)
                break
            except OutOfPagesError:
                if len(self.running) == 1:
                    if not step.swap_outs:  # those are to be carried out first
                        self._raise_alone(decoding[0])
                    return
                victim = self._preempt_last(step)
                decoding = [r for r in decoding if r is not victim]
        step.decode(decoding)
        if self.speculation is not None:
            for request in decoding:
                self._draft(request, step)

    def _draft(self, request: Request, step: StepBuilder) -> None:
        """Guesses what follows, as far as tokens and free pages are left."""
        assert self.speculation is not None
        limit = min(step.budget, request.max_tokens - request.num_tokens - 1)
        drafts = self.speculation.propose(request, limit) if limit > 0 else ()
        if drafts and self.pages.num_pages_needed(request.request_id, len(drafts)) <= self.pages.num_free_pages:
            step.copies += self.pages.append(request.request_id, len(drafts))
            step.add(request, 1, drafts)
            self.num_drafts += len(drafts)

    def _admit(self, step: StepBuilder) -> None:
        """Lets waiting requests run while tokens, places and pages are left."""
        while self.waiting and step.budget > 0:
            request = self.waiting[0]
            if request.num_pending or self._is_being_computed(request, step) or not self._make_way(request, step):
                return
            self.waiting.remove(request)
            bisect.insort(self.running, request, key=_ORDER)
            if request.is_swapped:
                request.is_swapped = False
                step.swap_ins.append(SwapIn(request, self.pages.swap_in(request.request_id)))
                continue
            request.num_prefix_tokens = self.pages.add(request.request_id, request.known_tokens())
            request.num_computed_tokens = request.num_prefix_tokens
            step.add(request, min(request.num_remaining, step.budget))

    def _is_being_computed(self, request: Request, step: StepBuilder) -> bool:
        """Whether a prompt that begins alike is in this step for the first time: after it, its pages can be hit."""
        size = self.pages.page_size
        if not self.pages.prefix_caching or request.is_swapped or request.num_tokens <= size:
            return False
        begin = request.known_tokens()[:size]
        fresh = (r for r in step if r.is_prompting and r.num_computed_tokens == 0 and r.num_tokens > size)
        return any(np.array_equal(r.known_tokens()[:size], begin) for r in fresh)

    def _make_way(self, request: Request, step: StepBuilder) -> bool:
        """Whether there is a place and pages for a waiting request, if need be those of requests of lower priority."""
        while len(self.running) >= self.config.max_num_seqs or not self._fits(request):
            if not self.running or self.running[-1].priority <= request.priority:
                return False
            self._preempt_last(step)
        return True

    def _fits(self, request: Request) -> bool:
        """Whether pages are left for all tokens of a request, and one more for each that runs, to grow."""
        spare, free = len(self.running), self.pages.num_free_pages
        num_tokens = request.num_computed_tokens if request.is_swapped else request.num_tokens
        if cdiv(num_tokens, self.pages.page_size) + spare <= free:
            return True
        if request.is_swapped or not self.pages.prefix_caching:
            return False
        if self.running and self._refusal is not None and self._refusal[0] is request and free <= self._refusal[1]:
            return False  # to look for its prefix every step would cost more than the step
        grown = np.append(request.known_tokens(), np.zeros(spare * self.pages.page_size, np.int32))
        self._refusal = None if (fits := self.pages.can_allocate(grown)) else (request, free)
        return fits

    def _preempt_last(self, step: StepBuilder) -> Request:
        """Takes the pages of the last running request."""
        victim = self.running.pop()
        step.remove(victim)
        step.num_preempted += 1
        self.num_preemptions += 1
        request_id, num_computed = victim.request_id, victim.num_computed_tokens
        if self.swap is not None and not victim.is_prompting:
            num_pages = cdiv(num_computed, self.pages.page_size)
            if step.num_swapped_pages + num_pages <= self.swap.num_free_pages:
                self.pages.truncate(request_id, num_computed)  # what this step gave it is not written
                step.swap_outs.append(SwapOut(request_id, self.pages.swap_out(request_id)))
                step.num_swapped_pages += num_pages
                self.num_swap_outs += 1
                victim.is_swapped = True
        if not victim.is_swapped:
            self._commit(victim)
            self._restart(victim)
        bisect.insort(self.waiting, victim, key=_ORDER)
        return victim

    def _restart(self, request: Request) -> None:
        """Takes the pages of a request that runs or is swapped, and lets it compute all of its tokens again."""
        self.pages.free(request.request_id)
        request.is_prompting, request.is_swapped, request.num_computed_tokens = True, False, 0

    def _restart_unswapped(self, *, with_pending: bool = False) -> None:
        """Lets those start over whose pages did not reach the swap space, for the step that was to move them failed.

        Args:
            with_pending: Also those whose pages there end with a token that nobody knows.
        """
        for request in self.waiting:
            if not request.is_swapped or self.swap is None:
                continue
            is_there = request.request_id in self.swap
            if not is_there or (with_pending and request.num_pending):
                self._restart(request)
                if is_there:
                    self.swap.drop(request.request_id)

    def _commit(self, request: Request) -> None:
        """Makes the full pages that a request has computed findable."""
        known = request.known_tokens()
        self.pages.commit(request.request_id, known[: min(request.num_computed_tokens, len(known))])

    def _drawn(
        self, plan: StepPlan, token_ids: Sequence[int], non_finite: Collection[int]
    ) -> Iterator[tuple[Request, int]]:
        """The tokens of a step that count: none inside a prompt, and of drafts those that stand and one more."""
        row = 0
        every_drafts = plan.drafts or [()] * len(plan.requests)
        for request, samples, drafts in zip(plan.requests, plan.samples, every_drafts, strict=True):
            tokens = token_ids[row : row + 1 + len(drafts)]
            num_accepted = next((i for i, d in enumerate(drafts) if d != tokens[i]), len(drafts))
            rows = range(row, row + 1 + num_accepted)
            row += len(tokens)
            if not samples or request.finish_reason is not None:
                continue
            if any(i in non_finite for i in rows):
                self._end_non_finite(request)
                continue
            request.num_computed_tokens += num_accepted
            request.num_tokens += num_accepted
            self.num_accepted_drafts += num_accepted
            for token_id in tokens[: num_accepted + 1]:
                yield request, token_id
            if drafts and request.finish_reason is None:
                self.pages.truncate(request.request_id, request.num_computed_tokens)

    def _end_non_finite(self, request: Request) -> None:
        error = FloatingPointError(
            f"Request {request.request_id}: the model's logits after token {request.num_known} are not finite."
        )
        if request.request_id in self.pages and not request.is_swapped:  # nobody may find what it wrote
            self.pages.invalidate(request.request_id, request.num_prefix_tokens)
            request.num_computed_tokens = request.num_prefix_tokens
        self._end(request, FinishReason.ERROR, error)

    def _end(self, request: Request, reason: FinishReason, error: Exception | None = None) -> None:
        """Ends a request and frees its pages; `_forget_ended` then takes it from the lists."""
        request.finish_reason, request.error = reason, error
        self._num_with_history -= request.needs_history
        num_stored = min(request.num_computed_tokens, request.num_known - 1)
        if request.request_id in self.pages:
            request.num_pages = cdiv(num_stored, self.pages.page_size)
            if not request.is_swapped and error is None:
                self._commit(request)
            self.pages.free(request.request_id)
        if self.swap is not None and request.request_id in self.swap:
            self.swap.drop(request.request_id)
        if reason not in (FinishReason.STOP, FinishReason.LENGTH):
            self._ended.append(NewToken(request.request_id, None, reason, error))
        self._has_ended = True

    def _forget_ended(self) -> None:
        if self._has_ended:
            self.running = [r for r in self.running if r.finish_reason is None]
            self.waiting = [r for r in self.waiting if r.finish_reason is None]
            self._has_ended = False

    def _raise_alone(self, request: Request) -> None:
        needed = cdiv(request.num_tokens, self.pages.page_size)
        raise OutOfPagesError(needed, self.pages.num_free_pages, "The oldest request, alone in the engine,")
