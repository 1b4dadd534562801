"""What each request holds: pages of the pool, or places in the swap space. It knows nothing of order and limits."""

from collections.abc import Iterable, Sequence

import numpy as np

from jaxpaged.config import cdiv
from jaxpaged.engine.config import SchedulerConfig
from jaxpaged.engine.plan import SwapIn, SwapOut
from jaxpaged.engine.request import Request, RequestStatus
from jaxpaged.engine.stats import Counters
from jaxpaged.engine.step_builder import StepBuilder
from jaxpaged.paging import Eviction, OutOfPagesError, PageAllocator, PageCopy
from jaxpaged.paging.store.offload import read_restored
from jaxpaged.paging.store.swap import SwapSpace


class Holdings:
    """Gives pages to requests and takes them back, and keeps `Request.num_computed_tokens` true to that."""

    def __init__(self, pages: PageAllocator, swap: SwapSpace | None, counters: Counters, config: SchedulerConfig):
        self.pages = pages
        self.swap = swap
        self.free_seats = list(range(config.max_num_seqs))
        self._config = config
        self._counters = counters
        # Where a window gives pages back, a prompt gets its pages chunk by chunk; else all at once.
        self._by_chunks = any(group.sliding_window is not None for group in pages.groups)
        self._refusal: tuple[Request, int] | None = None  # who did not fit, and how many pages were free

    def parent_of(self, request: Request, step: StepBuilder) -> Request | None:
        """Return a request whose pages hold the prompt of this new one before the step, or None."""
        if request.status is RequestStatus.SWAPPED or request.output_token_ids:
            return None
        moving, num_shared = [request_id for request_id, _ in step.swap_ins], len(request.prompt_token_ids) - 1
        able = (r for r in request.siblings if r.status is RequestStatus.DECODE and r.request_id not in moving)
        return next((r for r in able if self.pages.can_truncate(r.request_id, num_shared)), None)

    def fits(self, request: Request, running: Sequence[Request], step: StepBuilder) -> bool:
        """Return whether pages are left for all tokens of a waiting request, and for each that runs to grow: one in
        each group, and what is missing for its prompt.
        """
        size, num_groups, free = self.pages.page_size, len(self.pages.groups), self.pages.num_free_pages
        kept = len(running) * num_groups + self._num_missing(running)
        if self.parent_of(request, step) is not None:
            num_shared = (len(request.prompt_token_ids) - 1) // size
            return (cdiv(request.num_tokens, size) - num_shared) * num_groups + kept <= free
        if request.status is RequestStatus.SWAPPED:
            return self.pages.num_held_pages(request.request_id) + kept <= free
        if self._config.num_pages_for(request.num_tokens, self.pages) + kept <= free:
            return True
        if request.needs_prompt_logits or not self.pages.prefix_caching:
            return False
        if running and self._refusal is not None and self._refusal[0] is request and free <= self._refusal[1]:
            return False  # to look for its prefix every step would cost more than the step
        grown = np.append(request.known_tokens(), np.zeros(cdiv(kept, num_groups) * size, np.int32))
        fits = self.pages.can_allocate(grown, keys=request.keys)
        self._refusal = None if fits else (request, free)
        return fits

    def _num_missing(self, running: Sequence[Request]) -> int:
        """Count the pages that prompts in computation are still to get."""
        if not self._by_chunks:
            return 0
        prompts = [r for r in running if r.status is RequestStatus.PREFILL]
        needed = (self._config.num_pages_for(r.num_tokens, self.pages) for r in prompts)
        held = (self.pages.num_held_pages(r.request_id) for r in prompts)
        return sum(max(0, n - h) for n, h in zip(needed, held, strict=True))

    def begin(self, request: Request, step: StepBuilder) -> None:
        """Give a waiting request its pages; where a window gives pages back, those of the first chunk only.

        Those from the swap space come back; a sample of a prompt that another has computed shares the pages, and
        computes the last token only; others begin with prefix hits, some of which may come from the swap space too.
        """
        if request.status is RequestStatus.SWAPPED:
            step.swap_ins.append(SwapIn(request.request_id, self.pages.swap_in(request.request_id)))
            request.num_slots = request.num_computed_tokens
            request.status = RequestStatus.DECODE
            return
        if (parent := self.parent_of(request, step)) is not None:
            self._fork(parent, request, step)
        else:
            # A count of tokens hits nothing.
            tokens = request.num_tokens if request.needs_prompt_logits else request.known_tokens()
            chunk = step.budget if self._by_chunks else None
            num_hits = self.pages.add(request.request_id, tokens, host=self.swap, keys=request.keys, chunk=chunk)
            if self.swap is not None and num_hits:
                restored, num_hits = read_restored(self.pages, self.swap, request.request_id, num_hits)
                if len(restored.page_ids):
                    step.restores.append(restored)
                    self._counters.num_restored_pages += len(restored.page_ids)
            self._note_prefix(request, num_hits)
            request.num_computed_tokens = num_hits
            request.num_slots = self.pages.seq_len(request.request_id)
        request.status = RequestStatus.PREFILL
        step.prefill(request)

    def _fork(self, parent: Request, child: Request, step: StepBuilder) -> None:
        num_shared = len(child.prompt_token_ids) - 1
        self.pages.fork(parent.request_id, child.request_id)
        self.pages.truncate(child.request_id, num_shared)
        # At once: the parent has room in the last page, and writes there without asking who else sees it.
        step.copies += self.pages.append(child.request_id, child.num_tokens - num_shared)
        self._note_prefix(child, num_shared)
        child.num_computed_tokens = num_shared
        child.num_slots = child.num_tokens
        self._counters.num_forks += 1

    def share(self, parent: Request, child: Request) -> None:
        """Give a fork the pages of a request in decode, as far as those are computed."""
        self.pages.fork(parent.request_id, child.request_id)
        self.pages.truncate(child.request_id, parent.num_computed_tokens)
        child.num_computed_tokens = child.num_slots = parent.num_computed_tokens
        child.num_cached_tokens = parent.num_computed_tokens
        child.status = RequestStatus.DECODE
        self._counters.num_forks += 1

    @staticmethod
    def _note_prefix(request: Request, num_tokens: int) -> None:
        """Note how many tokens others had computed. When it starts over, those that it finds may be its own."""
        if request.num_cached_tokens is None:
            request.num_cached_tokens = num_tokens

    def grow_prompt(self, request: Request, num_new: int) -> list[PageCopy]:
        """Make room for the next tokens of a prompt in computation, where it has not got all of its pages.

        Raises:
            OutOfPagesError: Too few pages are free; nothing was changed.
        """
        missing = request.num_computed_tokens + num_new - request.num_slots
        if missing <= 0:
            return []
        copies = self.pages.append(request.request_id, missing, num_computed=request.num_computed_tokens)
        request.num_slots += missing
        return copies

    def grow(self, requests: Sequence[Request]) -> list[PageCopy]:
        """Make room for the next token of requests that decode, up to the end of a page.

        Those that need a page soon get it with those that need one now, as long as there are enough: a call of the
        page manager costs the same for one sequence as for a hundred.

        Raises:
            OutOfPagesError: Too few pages are free; nothing was changed.
        """
        full = [r for r in requests if r.num_slots == r.num_computed_tokens]
        if not full:
            return []
        half = self.pages.page_size // 2
        soon = [r for r in requests if 0 <= r.num_slots - r.num_computed_tokens <= half]
        needed = [r for r in soon if r.num_slots < r.max_len - 1]  # the last token is never stored
        return self._append(needed if len(needed) * len(self.pages.groups) <= self.pages.num_free_pages else full)

    def _append(self, requests: Sequence[Request]) -> list[PageCopy]:
        size = self.pages.page_size
        counts = [min(size - r.num_slots % size, r.max_len - 1 - r.num_slots) for r in requests]
        num_computed = [r.num_computed_tokens for r in requests] if self._by_chunks else None  # only windows ask
        copies = self.pages.append_many([r.request_id for r in requests], counts, num_computed=num_computed)
        for request, count in zip(requests, counts, strict=True):
            request.num_slots += count
        return copies

    def grow_for_drafts(self, request: Request, num_drafts: int) -> list[PageCopy] | None:
        """Make room for drafts behind the next token.

        Returns None, and changes nothing, where too few pages are free.
        """
        try:
            return self.grow_prompt(request, 1 + num_drafts)
        except OutOfPagesError:
            return None

    def take_evictions(self) -> list[Eviction]:
        """Return contents given up since the last call that the swap space lacks and has room for, the last used of
        them.
        """
        if self.swap is None:
            return []
        evictions = [eviction for eviction in self.pages.prefix.take_evictions() if not self.swap.has(eviction.digest)]
        return evictions[max(0, len(evictions) - self.swap.num_free_pages) :]

    def commit(self, request: Request) -> None:
        """Make the full pages that a request has computed findable."""
        known = request.known_tokens()
        self.pages.commit(request.request_id, known[: min(request.num_computed_tokens, len(known))])

    def set_aside(self, request: Request, step: StepBuilder) -> None:
        """Take the pages of a running request: into the swap space if there is room, else it starts over."""
        request_id, num_computed = request.request_id, request.num_computed_tokens
        self.pages.truncate(request_id, num_computed)
        num_pages = self.pages.num_held_pages(request_id)
        has_room = self.swap is not None and step.num_swapped_pages + num_pages <= self.swap.num_free_pages
        if not has_room or request.status is RequestStatus.PREFILL:
            self.commit(request)
            self.restart(request)
            return
        step.swap_outs.append(SwapOut(request_id, self.pages.swap_out(request_id)))
        step.num_swapped_pages += num_pages
        self._counters.num_swap_outs += 1
        request.status = RequestStatus.SWAPPED
        self._stand_up(request)

    def restart(self, request: Request) -> None:
        """Take the pages of a request that runs or is swapped, and let it compute all of its tokens again."""
        self._forget(request)
        request.status, request.num_computed_tokens = RequestStatus.WAITING, 0

    def restart_unswapped(self, waiting: Iterable[Request], *, with_pending: bool = False) -> None:
        """Let those start over whose pages did not reach the swap space, for the step that was to move them failed.

        Args:
            with_pending: Also those whose last token nobody knows.
        """
        for request in waiting:
            is_lost = self.swap is None or request.request_id not in self.swap
            if request.status is RequestStatus.SWAPPED and (is_lost or (with_pending and request.num_pending)):
                self.restart(request)

    def end(self, request: Request) -> None:
        """Take all that a request holds. What it computed can be hit, unless it ended by an error."""
        if request.request_id in self.pages:
            size, num_slots = self.pages.page_size, self.pages.seq_len(request.request_id)
            num_stored = min(request.num_computed_tokens, request.num_known - 1)
            num_empty = (cdiv(num_slots, size) - cdiv(num_stored, size)) * len(self.pages.groups)
            request.num_pages = self.pages.num_held_pages(request.request_id) - num_empty
            if request.status is not RequestStatus.SWAPPED and request.error is None:
                self.commit(request)
        self._forget(request)
        request.status = RequestStatus.FINISHED

    def _stand_up(self, request: Request) -> None:
        if request.seat is not None:
            self.free_seats.append(request.seat)
            request.seat = None

    def _forget(self, request: Request) -> None:
        self._stand_up(request)
        if request.request_id in self.pages:
            self.pages.free(request.request_id)
        if self.swap is not None and request.request_id in self.swap:
            self.swap.drop(request.request_id)
