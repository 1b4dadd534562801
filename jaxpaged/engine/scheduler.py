"""The scheduler: who computes how many tokens in the next step. It deals in integers and never sees an array.

Prompts first, in order of arrival and in chunks under a token budget; then one token for every running request. Where
pages run out, the request that arrived last gives its own back and starts over later with what it has generated. The
oldest request always goes on, and each one fits alone, so all of them end.
"""

import dataclasses
from collections import deque

from jaxpaged.checks import as_count
from jaxpaged.config import cdiv
from jaxpaged.engine.request import FinishReason, Request
from jaxpaged.paging import OutOfPagesError, PageAllocator, PageCopy


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Limits of a step.

    Attributes:
        max_num_seqs: Requests that run at the same time.
        max_step_tokens: Prompt tokens in one step; longer prompts take several.
        max_model_len: Tokens of a sequence, prompt and output. Also the width of the page tables.
    """

    max_num_seqs: int = 64
    max_step_tokens: int = 512
    max_model_len: int = 8192

    def check(self) -> None:
        """Raises ValueError for a limit below 1, TypeError for one that is no integer, by name."""
        for field in dataclasses.fields(self):
            as_count(getattr(self, field.name), f"`{field.name}`", minimum=1)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """What one step computes.

    Attributes:
        requests: In batch order.
        num_new_tokens: Of each request, >= 1; pages for them are allocated.
        page_copies: To be made before anything is written (copy-on-write).
    """

    requests: tuple[Request, ...]
    num_new_tokens: tuple[int, ...]
    page_copies: tuple[PageCopy, ...]

    @property
    def is_decode(self) -> bool:
        """Every request has one new token."""
        return all(n == 1 for n in self.num_new_tokens)


class Scheduler:
    """Owns the requests and, through `pages`, who holds which page. One thread."""

    def __init__(self, config: SchedulerConfig, pages: PageAllocator):
        config.check()
        self.config = config
        self.pages = pages
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []  # in order of arrival
        self.num_preemptions = 0
        self.peak_num_pages = 0

    def add(self, request: Request) -> None:
        """Queues a request.

        Raises:
            ValueError: The prompt is empty or as long as the context.
            OutOfPagesError: The request needs more pages than the pool has, so that it could never finish.
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
        self.waiting.append(request)

    def schedule(self) -> StepPlan | None:
        """The next step, with pages allocated for it; None when all requests are done."""
        self._admit()
        prompting = any(r.num_remaining > 1 for r in self.running)
        budget = self.config.max_step_tokens if prompting else len(self.running)
        scheduled: list[tuple[Request, int]] = []
        copies: list[PageCopy] = []
        index = 0
        while index < len(self.running) and budget > 0:  # preemption shortens the list from its end
            request = self.running[index]
            index += 1
            if prompting and request.num_remaining == 1:
                continue
            num_new = min(request.num_remaining, budget)
            if not self._make_room(request, num_new):
                break
            copies += self.pages.append(request.request_id, num_new)
            scheduled.append((request, num_new))
            budget -= num_new
        self.peak_num_pages = max(self.peak_num_pages, self.pages.num_pages - 1 - self.pages.num_free_pages)
        if not scheduled and self.waiting:  # each one fits the pool alone, so somebody else holds pages
            needed = cdiv(self.waiting[0].num_tokens, self.pages.page_size)
            raise OutOfPagesError(needed, self.pages.num_free_pages, "The oldest request, alone in the engine,")
        if not scheduled:
            return None
        requests, num_new_tokens = zip(*scheduled, strict=True)
        return StepPlan(requests=requests, num_new_tokens=num_new_tokens, page_copies=tuple(copies))

    def update(self, plan: StepPlan, token_ids: list[int]) -> list[Request]:
        """Takes in the token that followed each request of a step.

        Returns:
            The requests that got a new token, in batch order. Those that finished have given their pages back.
        """
        progressed = []
        for request, num_new, token_id in zip(plan.requests, plan.num_new_tokens, token_ids, strict=True):
            request.num_computed_tokens += num_new
            if request.num_remaining > 0:  # inside its prompt: what follows is known
                continue
            request.output_token_ids.append(token_id)
            progressed.append(request)
            if token_id in request.params.stop_token_ids:
                self._finish(request, FinishReason.STOP)
            elif request.num_tokens >= request.max_tokens:
                self._finish(request, FinishReason.LENGTH)
        return progressed

    def preempt_all(self) -> None:
        """Makes every running request start over: what they had computed is lost."""
        while self.running:
            self._preempt_last()

    def drop(self, request: Request) -> None:
        """Forgets a request, wherever it is, and frees its pages."""
        if request in self.running:
            self.running.remove(request)
            self.pages.free(request.request_id)
        elif request in self.waiting:
            self.waiting.remove(request)

    def _admit(self) -> None:
        """Moves waiting requests to the running ones while pages for all their tokens are left."""
        if not self.waiting:
            return
        promised = sum(self.pages.num_pages_needed(r.request_id, r.num_remaining) for r in self.running)
        while self.waiting and len(self.running) < self.config.max_num_seqs:
            request = self.waiting[0]
            promised += cdiv(request.num_tokens, self.pages.page_size)
            if promised > self.pages.num_free_pages:
                return
            self.pages.add(request.request_id, 0)
            self.running.append(self.waiting.popleft())

    def _make_room(self, request: Request, num_new: int) -> bool:
        """Preempts from the end of the running requests until `request` can grow; False if it was preempted itself."""
        while self.pages.num_pages_needed(request.request_id, num_new) > self.pages.num_free_pages:
            if self._preempt_last() is request:
                return False
        return True

    def _preempt_last(self) -> Request:
        victim = self.running.pop()
        self.pages.free(victim.request_id)
        victim.num_computed_tokens = 0
        self.waiting.appendleft(victim)
        self.num_preemptions += 1
        return victim

    def _finish(self, request: Request, reason: FinishReason) -> None:
        request.finish_reason = reason
        request.num_pages = len(self.pages.page_ids(request.request_id))
        self.drop(request)
