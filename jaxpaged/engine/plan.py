"""`StepPlan`: what one step does, decided by the scheduler and carried out by the runner. Plain Python and numpy."""

import dataclasses
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from jaxpaged.engine.request import Request
from jaxpaged.paging import PageCopy


class SwapOut(NamedTuple):
    """Export these pages into the swap space under the request's id, before anything else is moved or written."""

    request_id: int
    page_ids: npt.NDArray[np.int32]


class SwapIn(NamedTuple):
    """Import the request's pages from the swap space into these. The request runs from the next step on."""

    request: Request
    page_ids: npt.NDArray[np.int32]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """What one step computes. It is carried out in this order: swap-outs, page copies, swap-ins, the model.

    Attributes:
        requests: In batch order. May be empty where pages are swapped in only.
        num_new_tokens: Of each request, >= 1, drafts not counted; pages for them are allocated.
        samples: Whether these reach the last token of the request, so that what follows is drawn.
        page_copies: Copy-on-write.
        drafts: Of each request the tokens guessed to follow; empty where nobody has any.
    """

    requests: tuple[Request, ...]
    num_new_tokens: tuple[int, ...]
    samples: tuple[bool, ...]
    page_copies: tuple[PageCopy, ...] = ()
    swap_outs: tuple[SwapOut, ...] = ()
    swap_ins: tuple[SwapIn, ...] = ()
    drafts: tuple[tuple[int, ...], ...] = ()

    @property
    def is_decode(self) -> bool:
        """Every request has one new token."""
        return sum(self.num_new_tokens) == len(self.requests)


class StepBuilder:
    """A plan in the making.

    Attributes:
        budget: Tokens that may still be added.
    """

    __slots__ = ("_entries", "budget", "copies", "num_preempted", "num_swapped_pages", "swap_ins", "swap_outs")

    def __init__(self, budget: int):
        self.budget = budget
        self.copies: list[PageCopy] = []
        self.swap_outs: list[SwapOut] = []
        self.swap_ins: list[SwapIn] = []
        self.num_preempted = 0
        self.num_swapped_pages = 0
        self._entries: dict[Request, tuple[int, tuple[int, ...]]] = {}

    def decode(self, requests: list[Request]) -> None:
        """Adds one token of each of these."""
        self._entries = dict.fromkeys(requests, (1, ()))
        self.budget -= len(requests)

    def add(self, request: Request, num_new: int, drafts: tuple[int, ...] = ()) -> None:
        """Adds a request, or gives one that is there its drafts."""
        if request in self._entries:
            self.budget += self._entries[request][0]
        self._entries[request] = num_new, drafts
        self.budget -= num_new + len(drafts)

    def remove(self, request: Request) -> None:
        """Takes a request out again, if it is there."""
        num_new, drafts = self._entries.pop(request, (0, ()))
        self.budget += num_new + len(drafts)

    def __iter__(self):
        return iter(self._entries)

    def build(self) -> StepPlan | None:
        """The plan; None where there is nothing to do."""
        if not self._entries and not self.swap_ins and not self.swap_outs:
            return None
        requests = tuple(self._entries)
        counts, drafts = zip(*self._entries.values(), strict=True) if requests else ((), ())
        return StepPlan(
            requests=requests,
            num_new_tokens=counts,
            samples=tuple(r.num_computed_tokens + n == r.num_tokens for r, n in zip(requests, counts, strict=True)),
            page_copies=tuple(self.copies),
            swap_outs=tuple(self.swap_outs),
            swap_ins=tuple(self.swap_ins),
            drafts=drafts if any(drafts) else (),
        )
