"""The scheduler: who computes how many tokens in the next step. It deals in integers and never sees an array of JAX.

First one token for every request that decodes; then prompts, in chunks, with what is left of the step's tokens: those
begun, then those waiting, by priority and arrival. Where pages run out, the last request in that order gives its own
back and waits: they are swapped out where there is room, else it starts over later with what it has generated. The
first running request is never preempted for want of pages and always goes on, and each one fits alone: all end.

A step is scheduled before the tokens of the one before are known: `num_tokens` counts them, `output_token_ids` does
not hold them yet.
"""

import bisect
import heapq
import math
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from operator import attrgetter

import numpy as np

from jaxpaged.config import cdiv
from jaxpaged.engine.holdings import Holdings
from jaxpaged.engine.logprobs import StepLogprobs, TokenLogprobs, locate_prompt_rows
from jaxpaged.engine.plan import SchedulerConfig, StepBuilder, StepPlan
from jaxpaged.engine.request import FinishReason, NewToken, QueueFullError, Request
from jaxpaged.engine.speculation import NgramSpeculation
from jaxpaged.paging import OutOfPagesError, PageAllocator
from jaxpaged.paging.swap import SwapSpace

_ORDER = attrgetter("order")
_new_tuple = tuple.__new__  # half of what a NamedTuple's own constructor takes, once a token


class Scheduler:
    """Owns the requests and, through `pages`, who holds which page.

    One thread calls it; only `add` may come from others too.

    Args:
        swap: Where preempted requests keep their pages; None lets them start over. Evicted prefixes go there too, where
            `pages` lists them.
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
        self.holdings = Holdings(pages, swap)
        self.speculation = speculation
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.num_preemptions = 0
        self.num_drafts = 0
        self.num_accepted_drafts = 0
        self.peak_num_pages = 0
        self._arrivals: deque[Request] = deque()
        self._deadlines: list[tuple[float, int, Request]] = []
        self._ended: list[NewToken] = []
        self._has_ended = False
        self._num_with_history = 0

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
        self.config.check_request(request, self.pages.num_pages, self.pages.page_size)
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
        if step.num_decoding < len(self.running):
            for request in self.running:
                if request.is_prompting and step.budget > 0:
                    step.prompt(request)
        self._admit(step)
        self.peak_num_pages = max(self.peak_num_pages, self.pages.num_pages - 1 - self.pages.num_free_pages)
        step.evictions = self.holdings.take_evictions()
        plan = step.build()
        if plan is None and self.waiting and not self.running and not self.waiting[0].num_pending:
            self._raise_alone(self.waiting[0])
        return plan

    def dispatched(self, plan: StepPlan) -> None:
        """Counts the tokens of a step as computed: whatever is dispatched from now on comes after it."""
        for request, num_new, samples in zip(plan.requests, plan.num_new_tokens, plan.samples, strict=True):
            request.num_computed_tokens += num_new
            if request.is_prompting:
                self.holdings.commit(request)
                request.is_prompting = not samples
            if samples:
                request.num_tokens += 1

    def update(
        self,
        plan: StepPlan,
        token_ids: Sequence[int],
        non_finite: frozenset[int] = frozenset(),
        logprobs: StepLogprobs | None = None,
    ) -> list[NewToken]:
        """Takes in the token that followed each request of a step, and each of its drafts.

        Args:
            token_ids: Row by row: one of each request, and one of each of its drafts behind it.
            non_finite: Rows whose logits were not finite. Their requests fail.
            logprobs: Of the rows, those of `plan.prompt_rows` included, where any are wanted.

        Returns:
            The new tokens, in batch order. Requests that finished have given their pages back.
        """
        drawn: Iterable[tuple[Request, int]]
        if plan.drafts or non_finite or logprobs is not None or not all(plan.samples):
            if logprobs is not None:
                self._take_prompt_logprobs(plan, non_finite, logprobs)
            drawn = self._drawn(plan, token_ids, non_finite, logprobs)
        else:
            drawn = zip(plan.requests, token_ids, strict=True)
        new, tells = [], logprobs is not None
        for request, token_id in drawn:
            if request.finish_reason is not None:  # it ended while the step ran
                continue
            output, reason, text = request.output_token_ids, None, ""
            output.append(token_id)
            num_output = len(output)
            if request.text is not None:
                text = self._push_text(request, token_id)
            if request.finish_reason is not None:  # the tokenizer failed
                pass
            elif token_id in request.stop_token_ids or (request.text is not None and request.text.stopped_by):
                reason = FinishReason.STOP
            elif num_output >= request.max_new_tokens:
                reason = FinishReason.LENGTH
            if reason is not None:
                text += self._end(request, reason)
            of_token = request.logprobs[-1] if tells and request.logprobs else None
            of_prompt = _prompt_logprobs(request) if num_output == 1 else None
            new.append(_new_tuple(NewToken, (request.request_id, token_id, reason, None, text, of_token, of_prompt)))
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
        for restored in plan.restores:  # they may not have come
            self.pages.forget_pages(restored.page_ids)
        self.holdings.restart_unswapped(self.waiting)

    def restart_all(self) -> None:
        """Makes all requests start over, with the tokens known: what steps drew or wrote since is lost."""
        self.pages.reset()
        for request in self.running:
            self.holdings.restart(request)
        self.waiting = sorted([*self.running, *self.waiting], key=_ORDER)
        self.running = []
        self.holdings.restart_unswapped(self.waiting, with_pending=True)
        for request in self.waiting:
            request.num_tokens = request.num_known

    def lose(self, request: Request) -> None:
        """Makes one running request start over: its pages did not come back from the swap space."""
        self.running.remove(request)
        self.holdings.restart(request)
        bisect.insort(self.waiting, request, key=_ORDER)

    def _take_in(self, now: float) -> None:
        """Sorts in the requests that arrived, and ends those whose deadline is past."""
        while self._arrivals:
            request = self._arrivals.popleft()
            bisect.insort(self.waiting, request, key=_ORDER)
            self._num_with_history += request.needs_history
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
        """One token for each request that decodes. Preempts from the end of the running ones until all have room."""
        decoding = [r for r in self.running if not r.is_prompting and r.num_tokens < r.max_tokens]
        while decoding:
            try:
                step.copies += self.holdings.grow(decoding)
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
        copies = self.holdings.grow_for_drafts(request, len(drafts)) if drafts else None
        if copies is not None:
            step.copies += copies
            step.draft(request, drafts)
            self.num_drafts += len(drafts)

    def _admit(self, step: StepBuilder) -> None:
        """Lets waiting requests run while tokens, places and pages are left."""
        while self.waiting and step.budget > 0:
            request = self.waiting[0]
            if request.num_pending or self._is_being_computed(request, step) or not self._make_way(request, step):
                return
            self.waiting.remove(request)
            bisect.insort(self.running, request, key=_ORDER)
            try:
                self.holdings.begin(request, step)
            except BaseException as error:  # of the swap space
                if not isinstance(error, Exception):
                    raise
                self.end([request], FinishReason.ERROR, error)

    def _is_being_computed(self, request: Request, step: StepBuilder) -> bool:
        """Whether pages that it could share are on their way.

        Another sample of its prompt reads it, or a prompt of this step begins alike, up to the page that it is at.
        """
        if request.samples and not request.is_swapped and not request.output_token_ids:
            if self.holdings.parent_of(request, step) is not None:
                return False
            if any(r.is_prompting and r.request_id in self.pages for r in request.samples):
                return True
        if not self.pages.prefix_caching or request.is_swapped or request.needs_prompt_logits:
            return False
        size, known = self.pages.page_size, request.known_tokens()
        for other in step.prompts:
            end = (other.num_computed_tokens // size + 1) * size  # of the page that it is at
            if end < len(known) and np.array_equal(other.known_tokens()[:end], known[:end]):
                return True
        return False

    def _make_way(self, request: Request, step: StepBuilder) -> bool:
        """Whether there is a place and pages for a waiting request, if need be those of requests of lower priority."""
        while len(self.running) >= self.config.max_num_seqs or not self.holdings.fits(request, len(self.running), step):
            if not self.running or self.running[-1].priority <= request.priority:
                return False
            self._preempt_last(step)
        return True

    def _preempt_last(self, step: StepBuilder) -> Request:
        """Takes the pages of the last running request."""
        victim = self.running.pop()
        step.remove(victim)
        self.num_preemptions += 1
        self.holdings.set_aside(victim, step)
        bisect.insort(self.waiting, victim, key=_ORDER)
        return victim

    def _drawn(
        self, plan: StepPlan, token_ids: Sequence[int], non_finite: frozenset[int], logprobs: StepLogprobs | None
    ) -> Iterator[tuple[Request, int]]:
        """The tokens of a step that count: none inside a prompt, and of drafts those that stand and one more.

        Before each comes out, its request has its log-probabilities.
        """
        row = 0
        every_drafts = plan.drafts or [()] * len(plan.requests)
        for request, samples, drafts in zip(plan.requests, plan.samples, every_drafts, strict=True):
            tokens = token_ids[row : row + 1 + len(drafts)]
            falls = (i for i, d in enumerate(drafts) if d != tokens[i] or row + i in non_finite)
            num_accepted = next(falls, len(drafts))
            rows = range(row, row + 1 + num_accepted)
            row += len(tokens)
            if not samples or request.finish_reason is not None:
                if not non_finite.isdisjoint(range(rows.start, row)):
                    self._end_non_finite(request, "inside its prompt")
                continue
            request.num_computed_tokens += num_accepted
            request.num_tokens += num_accepted
            self.num_accepted_drafts += num_accepted
            num_top = request.params.num_logprobs
            for i, token_id in zip(rows, tokens[: num_accepted + 1], strict=True):
                if request.finish_reason is not None:
                    break
                if i in non_finite:
                    self._end_non_finite(request, f"after token {request.num_known}")
                    break
                if logprobs is not None and num_top is not None:
                    request.logprobs.append(logprobs.of(i, token_id, num_top))
                yield request, token_id

    def _push_text(self, request: Request, token_id: int) -> str:
        """The text that a token adds. Where the tokenizer fails, the request ends with its error."""
        assert request.text is not None
        try:
            text = request.text.push((token_id,))
        except BaseException as error:
            if not isinstance(error, Exception):
                raise
            request.text, text = None, ""
            self._end(request, FinishReason.ERROR, error)
        request.output_text += text
        return text

    def _take_prompt_logprobs(self, plan: StepPlan, non_finite: frozenset[int], logprobs: StepLogprobs) -> None:
        """Those of prompt tokens, each once: a request that started over computes some again."""
        for entry, rows, positions in locate_prompt_rows(plan.prompt_rows, plan.num_new_tokens, plan.num_drafts):
            request = plan.requests[entry.place]
            prompt, known = request.prompt_token_ids, request.prompt_logprobs
            for row, position in zip(rows, positions, strict=True):
                if request.finish_reason is not None or position + 1 != len(known) or position + 1 == len(prompt):
                    continue
                if row in non_finite:
                    for sample in request.samples or (request,):  # that have the same prompt
                        self._end_non_finite(sample, f"after token {position + 1}")
                else:
                    known.append(logprobs.of(row, prompt[position + 1], request.params.prompt_logprobs or 0))

    def _end_non_finite(self, request: Request, where: str) -> None:
        """Ends a request, unless it has ended while the step ran, and forgets what it wrote."""
        if self.pages.prefix_caching:  # nobody may find what it wrote, be it preempted by now
            begin = (request.num_prefix_tokens or 0) // self.pages.page_size
            wrote = self.pages.explain(request.known_tokens())[begin:]
            self.pages.forget_pages(np.array([page.page_id for page in wrote if page.page_id], np.int32))
        if request.finish_reason is None:
            error = FloatingPointError(f"Request {request.request_id}: the model's logits {where} are not finite.")
            self._end(request, FinishReason.ERROR, error)

    def _end(self, request: Request, reason: FinishReason, error: Exception | None = None) -> str:
        """Ends a request and frees its pages; `_forget_ended` then takes it from the lists. Returns the last text."""
        request.finish_reason, request.error = reason, error
        self._num_with_history -= request.needs_history
        self.holdings.end(request)
        text = request.text.finish() if request.text is not None else ""
        request.output_text += text
        if reason not in (FinishReason.STOP, FinishReason.LENGTH):
            self._ended.append(NewToken(request.request_id, None, reason, error, text))
        self._has_ended = True
        return text

    def _forget_ended(self) -> None:
        if self._has_ended:
            self.running = [r for r in self.running if r.finish_reason is None]
            self.waiting = [r for r in self.waiting if r.finish_reason is None]
            self._has_ended = False

    def _raise_alone(self, request: Request) -> None:
        needed = cdiv(request.num_tokens, self.pages.page_size)
        raise OutOfPagesError(needed, self.pages.num_free_pages, "The oldest request, alone in the engine,")


def _prompt_logprobs(request: Request) -> tuple[TokenLogprobs | None, ...] | None:
    return None if request.params.prompt_logprobs is None else tuple(request.prompt_logprobs)
