"""`StepPlan`: what one step does, decided by the scheduler and carried out by the runner; and the limits of a step."""

import dataclasses
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from jaxpaged.checks import as_count
from jaxpaged.config import cdiv
from jaxpaged.engine.logprobs import PromptRows
from jaxpaged.engine.request import Request
from jaxpaged.paging import Eviction, OutOfPagesError, PageCopy
from jaxpaged.paging.offload import Restored


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
    """What one step computes. It is carried out in this order: what leaves, page copies, what comes back, the model.

    Attributes:
        requests: In batch order. May be empty where pages are swapped in only.
        num_new_tokens: Of each request, >= 1, drafts not counted; pages for them are allocated.
        samples: Whether these reach the last token of the request, so that what follows is drawn.
        page_copies: Copy-on-write.
        evictions: Contents to keep in the swap space, in pages that this step may write.
        restores: Contents that come back from there. What is computed in this step may see them.
        drafts: Of each request the tokens guessed to follow; empty where nobody has any.
        prompt_rows: Tokens of prompts whose log-probabilities are wanted.
    """

    requests: tuple[Request, ...]
    num_new_tokens: tuple[int, ...]
    samples: tuple[bool, ...]
    page_copies: tuple[PageCopy, ...] = ()
    swap_outs: tuple[SwapOut, ...] = ()
    swap_ins: tuple[SwapIn, ...] = ()
    evictions: tuple[Eviction, ...] = ()
    restores: tuple[Restored, ...] = ()
    drafts: tuple[tuple[int, ...], ...] = ()
    prompt_rows: tuple[PromptRows, ...] = ()

    @property
    def num_drafts(self) -> int:
        """Of all requests."""
        return sum(map(len, self.drafts))

    @property
    def is_decode(self) -> bool:
        """Every request has one new token."""
        return sum(self.num_new_tokens) == len(self.requests)


class StepBuilder:
    """A plan in the making.

    Attributes:
        budget: Tokens that may still be added.
        prompts: Requests with several tokens, or the last of a prompt, and how many.
    """

    def __init__(self, budget: int):
        self.budget = budget
        self.prompts: dict[Request, int] = {}
        self.copies: list[PageCopy] = []
        self.swap_outs: list[SwapOut] = []
        self.swap_ins: list[SwapIn] = []
        self.evictions: list[Eviction] = []
        self.restores: list[Restored] = []
        self.num_swapped_pages = 0
        self._decoding: list[Request] = []
        self._drafts: dict[Request, tuple[int, ...]] = {}

    @property
    def num_decoding(self) -> int:
        """Requests with one token that follows the last."""
        return len(self._decoding)

    def decode(self, requests: list[Request]) -> None:
        """Adds one token of each of these, before anything else is added."""
        self._decoding = requests
        self.budget -= len(requests)

    def draft(self, request: Request, drafts: tuple[int, ...]) -> None:
        """Adds guesses behind the token of a request that decodes."""
        self._drafts[request] = drafts
        self.budget -= len(drafts)

    def prompt(self, request: Request) -> None:
        """Adds the tokens of a request that are left, or as many as the step may have."""
        self.prompts[request] = num_new = min(request.num_remaining, self.budget)
        self.budget -= num_new

    def remove(self, request: Request) -> None:
        """Takes a request out again, if it is there."""
        if request in self.prompts:
            self.budget += self.prompts.pop(request)
        elif request in self._decoding:
            self._decoding = [r for r in self._decoding if r is not request]
            self.budget += 1 + len(self._drafts.pop(request, ()))

    def build(self) -> StepPlan | None:
        """The plan; None where there is nothing to do."""
        requests = (*self._decoding, *self.prompts)
        if not requests and not self.swap_ins and not self.swap_outs:
            return None
        ends = (r.num_computed_tokens + n == r.num_tokens for r, n in self.prompts.items())
        return StepPlan(
            requests=requests,
            num_new_tokens=((1,) * self.num_decoding) + tuple(self.prompts.values()),
            samples=((True,) * self.num_decoding) + tuple(ends),
            page_copies=tuple(self.copies),
            swap_outs=tuple(self.swap_outs),
            swap_ins=tuple(self.swap_ins),
            evictions=tuple(self.evictions),
            restores=tuple(self.restores),
            drafts=tuple(self._drafts.get(r, ()) for r in requests) if self._drafts else (),
            prompt_rows=tuple(self._prompt_rows()),
        )

    def _prompt_rows(self) -> Iterator[PromptRows]:
        for index, (request, num_new) in enumerate(self.prompts.items(), self.num_decoding):
            begin = request.num_computed_tokens
            num_wanted = len(request.prompt_token_ids) - 1 - begin
            if request.needs_prompt_logits and num_wanted > 0:
                yield PromptRows(index, begin, min(num_new - 1, num_wanted))


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
            value = getattr(self, field.name)
            if value is not None or field.default is not None:
                as_count(value, f"`{field.name}`", minimum=1)  # pyright: ignore[reportArgumentType]

    def check_request(self, request: Request, num_pages: int, page_size: int) -> None:
        """Raises where a request can never run: see `Scheduler.add`."""
        length, limit = len(request.prompt_token_ids), self.max_model_len
        if length == 0:
            raise ValueError("`prompt` must hold at least one token; got none. There is nothing to continue.")
        if length >= limit:
            raise ValueError(
                f"`prompt` must be shorter than the context of {limit} tokens, to leave room for one more; got "
                f"{length} tokens. Shorten it."
            )
        needed, usable = cdiv(request.max_tokens - 1, page_size), num_pages - 1
        if needed > usable:  # The last token is never stored.
            what = f"`prompt` of {length} tokens with up to {request.max_new_tokens} new ones, in pages of {page_size},"
            raise OutOfPagesError(needed, usable, what)
