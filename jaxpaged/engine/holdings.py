"""What each request holds: pages of the pool, or places in the swap space. It knows nothing of order and limits."""

from collections.abc import Iterable, Sequence

import numpy as np

from jaxpaged.config import cdiv
from jaxpaged.engine.plan import StepBuilder, SwapIn, SwapOut
from jaxpaged.engine.request import Request
from jaxpaged.paging import Eviction, PageAllocator, PageCopy
from jaxpaged.paging.offload import read_restored
from jaxpaged.paging.swap import SwapSpace


class Holdings:
    """Gives pages to requests and takes them back, and keeps `Request.num_computed_tokens` true to that."""

    def __init__(self, pages: PageAllocator, swap: SwapSpace | None):
        self.pages = pages
        self.swap = swap
        self.num_swap_outs = 0
        self.num_forks = 0
        self.num_restored_pages = 0
        self._refusal: tuple[Request, int] | None = None  # who did not fit, and how many pages were free

    def parent_of(self, request: Request, step: StepBuilder) -> Request | None:
        """A request whose pages hold the prompt of this new one before the step, or None."""
        if request.is_swapped or request.output_token_ids:
            return None
        moving = [r for r, _ in step.swap_ins]
        able = (r for r in request.samples if not r.is_prompting and not r.is_swapped and r.finish_reason is None)
        return next((r for r in able if r not in moving), None)

    def fits(self, request: Request, num_running: int, step: StepBuilder) -> bool:
        """Whether pages are left for all tokens of a waiting request, and one more for each that runs, to grow."""
        free = self.pages.num_free_pages
        if self.parent_of(request, step) is not None:
            num_shared = (len(request.prompt_token_ids) - 1) // self.pages.page_size
            return cdiv(request.num_tokens, self.pages.page_size) - num_shared + num_running <= free
        num_tokens = request.num_computed_tokens if request.is_swapped else request.num_tokens
        if cdiv(num_tokens, self.pages.page_size) + num_running <= free:
            return True
        if request.is_swapped or request.needs_prompt_logits or not self.pages.prefix_caching:
            return False
        if num_running and self._refusal is not None and self._refusal[0] is request and free <= self._refusal[1]:
            return False  # to look for its prefix every step would cost more than the step
        grown = np.append(request.known_tokens(), np.zeros(num_running * self.pages.page_size, np.int32))
        fits = self.pages.can_allocate(grown)
        self._refusal = None if fits else (request, free)
        return fits

    def begin(self, request: Request, step: StepBuilder) -> None:
        """Gives a waiting request its pages.

        Those from the swap space come back; a sample of a prompt that another has computed shares the pages, and
        computes the last token only; others begin with prefix hits, some of which may come from the swap space too.
        """
        if request.is_swapped:
            request.is_swapped = False
            step.swap_ins.append(SwapIn(request, self.pages.swap_in(request.request_id)))
            request.num_slots = request.num_computed_tokens
        elif (parent := self.parent_of(request, step)) is not None:
            self._fork(parent, request, step)
            step.prompt(request)
        else:
            # A count of tokens hits nothing.
            tokens = request.num_tokens if request.needs_prompt_logits else request.known_tokens()
            num_hits = self.pages.add(request.request_id, tokens, host=self.swap)
            if self.swap is not None and num_hits:
                restored, num_hits = read_restored(self.pages, self.swap, request.request_id, num_hits)
                if len(restored.page_ids):
                    step.restores.append(restored)
                    self.num_restored_pages += len(restored.page_ids)
            self._note_prefix(request, num_hits)
            request.num_computed_tokens = num_hits
            request.num_slots = request.num_tokens
            step.prompt(request)

    def _fork(self, parent: Request, child: Request, step: StepBuilder) -> None:
        num_shared = len(child.prompt_token_ids) - 1
        self.pages.fork(parent.request_id, child.request_id)
        self.pages.truncate(child.request_id, num_shared)
        # At once: the parent has room in the last page, and writes there without asking who else sees it.
        step.copies += self.pages.append(child.request_id, child.num_tokens - num_shared)
        self._note_prefix(child, num_shared)
        child.num_computed_tokens = num_shared
        child.num_slots = child.num_tokens
        self.num_forks += 1

    @staticmethod
    def _note_prefix(request: Request, num_tokens: int) -> None:
        """Tokens that others had computed. When it starts over, those that it finds may be its own."""
        if request.num_prefix_tokens is None:
            request.num_prefix_tokens = num_tokens

    def grow(self, requests: Sequence[Request]) -> list[PageCopy]:
        """Makes room for the next token of requests that decode, up to the end of a page.

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
        needed = [r for r in soon if r.num_slots < r.max_tokens - 1]  # the last token is never stored
        return self._append(needed if len(needed) <= self.pages.num_free_pages else full)

    def _append(self, requests: Sequence[Request]) -> list[PageCopy]:
        size = self.pages.page_size
        counts = [min(size - r.num_slots % size, r.max_tokens - 1 - r.num_slots) for r in requests]
        copies = self.pages.append_many([r.request_id for r in requests], counts)
        for request, count in zip(requests, counts, strict=True):
            request.num_slots += count
        return copies

    def grow_for_drafts(self, request: Request, num_drafts: int) -> list[PageCopy] | None:
        """Makes room for drafts behind the next token; None, and no change, where too few pages are free."""
        missing = request.num_computed_tokens + 1 + num_drafts - request.num_slots
        if missing <= 0:
            return []
        if self.pages.num_pages_needed(request.request_id, missing) > self.pages.num_free_pages:
            return None
        request.num_slots += missing
        return self.pages.append(request.request_id, missing)

    def take_evictions(self) -> list[Eviction]:
        """Contents given up since the last call that the swap space lacks and has room for, the last used of them."""
        if self.swap is None:
            return []
        evictions = [eviction for eviction in self.pages.take_evictions() if not self.swap.has(eviction.digest)]
        return evictions[max(0, len(evictions) - self.swap.num_free_pages) :]

    def commit(self, request: Request) -> None:
        """Makes the full pages that a request has computed findable."""
        known = request.known_tokens()
        self.pages.commit(request.request_id, known[: min(request.num_computed_tokens, len(known))])

    def set_aside(self, request: Request, step: StepBuilder) -> None:
        """Takes the pages of a running request: into the swap space if there is room, else it starts over."""
        request_id, num_computed = request.request_id, request.num_computed_tokens
        num_pages = cdiv(num_computed, self.pages.page_size)
        has_room = self.swap is not None and step.num_swapped_pages + num_pages <= self.swap.num_free_pages
        if not has_room or request.is_prompting:
            self.commit(request)
            self.restart(request)
            return
        self.pages.truncate(request_id, num_computed)
        step.swap_outs.append(SwapOut(request_id, self.pages.swap_out(request_id)))
        step.num_swapped_pages += num_pages
        self.num_swap_outs += 1
        request.is_swapped = True

    def restart(self, request: Request) -> None:
        """Takes the pages of a request that runs or is swapped, and lets it compute all of its tokens again."""
        self._forget(request)
        request.is_prompting, request.is_swapped, request.num_computed_tokens = True, False, 0

    def restart_unswapped(self, waiting: Iterable[Request], *, with_pending: bool = False) -> None:
        """Lets those start over whose pages did not reach the swap space, for the step that was to move them failed.

        Args:
            with_pending: Also those whose last token nobody knows.
        """
        for request in waiting:
            is_lost = self.swap is None or request.request_id not in self.swap
            if request.is_swapped and (is_lost or (with_pending and request.num_pending)):
                self.restart(request)

    def end(self, request: Request) -> None:
        """Takes all that a request holds. What it computed can be hit, unless it ended by an error."""
        if request.request_id in self.pages:
            num_stored = min(request.num_computed_tokens, request.num_known - 1)
            request.num_pages = cdiv(num_stored, self.pages.page_size)
            if not request.is_swapped and request.error is None:
                self.commit(request)
        self._forget(request)

    def _forget(self, request: Request) -> None:
        if request.request_id in self.pages:
            self.pages.free(request.request_id)
        if self.swap is not None and request.request_id in self.swap:
            self.swap.drop(request.request_id)
