"""`StepBuilder`: a plan in the making. It holds live requests; the `StepPlan` that it builds holds none."""

from collections.abc import Iterator, Mapping, Sequence
from operator import attrgetter

import numpy as np

from jaxpaged.engine.plan import PromptRows, Seating, StepPlan, SwapIn, SwapOut, lay_out
from jaxpaged.engine.request import Request
from jaxpaged.engine.sampling.params import SamplingRow
from jaxpaged.paging import Eviction, PageAllocator, PageCopy
from jaxpaged.paging.store.offload import PageImport

_REQUEST_ID = attrgetter("request_id")
_NUM_COMPUTED = attrgetter("num_computed_tokens")
_IS_PLAIN = attrgetter("is_plain")


class StepBuilder:
    """Collects what a step is to do, in any order but that of its tokens: decode first.

    Attributes:
        budget: Tokens that may still be added.
        prefills: Requests with several tokens, or the last of a prompt, and how many.
    """

    def __init__(self, budget: int):
        self.budget = budget
        self.prefills: dict[Request, int] = {}
        self.copies: list[PageCopy] = []
        self.swap_outs: list[SwapOut] = []
        self.swap_ins: list[SwapIn] = []
        self.evictions: list[Eviction] = []
        self.restores: list[PageImport] = []
        self.num_swapped_pages = 0
        self._decodes: list[Request] = []
        self._drafts: dict[Request, tuple[int, ...]] = {}

    @property
    def num_decodes(self) -> int:
        """Requests with one token that follows the last."""
        return len(self._decodes)

    @property
    def is_empty(self) -> bool:
        """Whether nothing is to be computed or moved yet."""
        return not (self._decodes or self.prefills or self.swap_ins or self.swap_outs)

    def decode(self, requests: list[Request]) -> None:
        """Add one token of each of these, before anything else is added."""
        self._decodes = requests
        self.budget -= len(requests)

    def draft(self, request: Request, drafts: tuple[int, ...]) -> None:
        """Add guesses behind the token of a request that decodes."""
        self._drafts[request] = drafts
        self.budget -= len(drafts)

    def prefill(self, request: Request) -> None:
        """Add the tokens of a request that are left, or as many as the step may have."""
        self.prefills[request] = num_new = min(request.num_remaining, self.budget)
        self.budget -= num_new

    def remove(self, request: Request) -> None:
        """Take a request out again, if it is there."""
        if request in self.prefills:
            self.budget += self.prefills.pop(request)
        elif request in self._decodes:
            self._decodes = [r for r in self._decodes if r is not request]
            self.budget += 1 + len(self._drafts.pop(request, ()))

    def build(
        self, pages: PageAllocator, max_pages: int, rows_before: Mapping[int, int], free_seats: list[int]
    ) -> StepPlan | None:
        """Return the plan; None where there is nothing to do.

        Args:
            pages: Which pages each request has.
            max_pages: Columns of the page tables.
            rows_before: Of each request in the last step that ran, the row in which it sampled.
            free_seats: Seats for requests with penalties; taken from the end.
        """
        moves = {
            "page_copies": tuple(self.copies),
            "swap_outs": tuple(self.swap_outs),
            "swap_ins": tuple(self.swap_ins),
            "evictions": tuple(self.evictions),
            "restores": tuple(self.restores),
        }
        if not self._decodes and not self.prefills:
            return StepPlan(**moves) if self.swap_ins or self.swap_outs else None
        requests = [*self._decodes, *self.prefills]
        request_ids = tuple(map(_REQUEST_ID, requests))
        begins = np.fromiter(map(_NUM_COMPUTED, requests), np.int32, len(requests))
        num_new = np.ones(len(requests), np.int32)
        is_sampled = np.ones(len(requests), np.bool_)
        if self.prefills:
            num_new[self.num_decodes :] = list(self.prefills.values())
            is_sampled[self.num_decodes :] = [n == r.num_remaining for r, n in self.prefills.items()]
        drafts = tuple(self._drafts.get(r, ()) for r in requests) if self._drafts else ()
        seatings = self._seatings(requests, is_sampled, free_seats)
        prompt_rows = list(self._prompt_rows())
        token_ids, from_rows = self._tokens(requests, drafts, prompt_rows, rows_before)
        return StepPlan(
            request_ids=request_ids,
            begins=begins,
            num_new_tokens=num_new,
            is_sampled=is_sampled,
            drafts=drafts,
            rows=lay_out(begins, num_new, drafts, prompt_rows),
            token_ids=token_ids,
            from_rows=from_rows,
            page_tables=pages.page_tables(request_ids, max_pages),
            sampling=_sampling(requests, is_sampled.tolist(), drafts),
            seatings=seatings,
            num_prompt_logprobs=max((requests[i].params.prompt_logprobs or 0 for i, *_ in prompt_rows), default=None),
            **moves,
        )

    def _prompt_rows(self) -> Iterator[PromptRows]:
        for index, (request, num_new) in enumerate(self.prefills.items(), self.num_decodes):
            begin, prompt = request.num_computed_tokens, request.prompt_token_ids
            num_wanted = len(prompt) - 1 - begin
            if request.needs_prompt_logits and num_wanted > 0:
                end = begin + min(num_new - 1, num_wanted)
                after = begin + num_new
                last = prompt[after] if after < len(prompt) else -1
                yield PromptRows(index, prompt[begin:end], (*prompt[begin + 1 : end + 1], last))

    def _tokens(
        self,
        requests: list[Request],
        drafts: Sequence[Sequence[int]],
        prompt_rows: Sequence[PromptRows],
        rows_before: Mapping[int, int],
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the new tokens row by row, and of each the row of the step before in which it was sampled, or -1."""
        pending = [r.num_tokens > r.num_prompt + len(r.output_token_ids) for r in self._decodes]
        decodes = [0 if p else r.output_token_ids[-1] for p, r in zip(pending, self._decodes, strict=True)]
        sources = [rows_before[r.request_id] if p else -1 for p, r in zip(pending, self._decodes, strict=True)]
        if not self.prefills and not drafts:
            return np.array(decodes, np.int32), np.array(sources, np.int32)
        elsewhere = {rows.request: len(rows.token_ids) for rows in prompt_rows}
        parts: list[Sequence[int] | np.ndarray] = []
        for index, request in enumerate(requests):
            if index < len(decodes):
                parts.append(decodes[index : index + 1])
            else:
                begin = request.num_computed_tokens
                end = begin + self.prefills[request]
                parts.append(request.known_tokens()[begin + elsewhere.get(index, 0) : end])
            if drafts:
                parts.append(drafts[index])
        parts += [rows.token_ids for rows in prompt_rows]
        token_ids = np.concatenate([np.asarray(part, np.int32) for part in parts])
        from_rows = np.full(len(token_ids), -1, np.int32)
        counts = [1 + len(d) for d in drafts[: len(decodes)]] if drafts else [1] * len(decodes)
        from_rows[np.cumsum([0, *counts])[: len(decodes)]] = sources
        return token_ids, from_rows

    def _seatings(self, requests: list[Request], is_sampled: np.ndarray, free_seats: list[int]) -> tuple[Seating, ...]:
        """Seat for the requests with penalties that sample and have none, with the tokens known, which are all."""
        seatings = []
        for request, samples in zip(requests, is_sampled.tolist(), strict=True):
            if samples and not request.is_plain and request.params.has_penalties:
                if request.seat is None:
                    request.seat, request.is_seat_stale = free_seats.pop(), True
                if request.is_seat_stale:
                    history = request.known_tokens().copy()
                    seatings.append(Seating(request.seat, history, request.num_prompt))
                request.is_seat_stale = bool(self._drafts.get(request))
        return tuple(seatings)


def _sampling(
    requests: Sequence[Request], is_sampled: Sequence[bool], drafts: Sequence[Sequence[int]]
) -> tuple[SamplingRow, ...]:
    """Return how each row is sampled, a row for each draft behind that of its request; empty where all are plain."""
    if all(map(_IS_PLAIN, requests)):
        return ()
    rows = []
    for request, samples, guesses in zip(requests, is_sampled, drafts or ((),) * len(requests), strict=True):
        seat = -1 if request.seat is None or not samples else request.seat
        # Which drafts are right is not known on the device: such a request sits down anew when the host knows.
        is_counted = seat >= 0 and not guesses
        row = SamplingRow(request.params, request.num_prompt, request.num_tokens, seat, (), is_counted)
        rows.append(row)
        for end in range(1, len(guesses) + 1):
            rows.append(row._replace(num_tokens=row.num_tokens + end, recent=tuple(guesses[:end])))
    return tuple(rows)
