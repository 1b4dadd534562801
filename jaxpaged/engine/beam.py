"""Beam search: a driver over requests that the scheduler forks, beside all other requests and through preemption.

A beam is a request whose next token nobody samples: its row's likeliest tokens are handed out. When those of all beams
of a prompt are there, the search says which beams go on with which tokens (`jaxpaged.engine.beam_scores`). A beam goes
on with the first of its tokens; for each further one the scheduler forks it.
"""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from jaxpaged.engine.beam_scores import BeamParams, BeamScores
from jaxpaged.engine.config import SchedulerConfig
from jaxpaged.engine.request import FinishReason, Request
from jaxpaged.engine.scheduler import Scheduler
from jaxpaged.paging import PageAllocator


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BeamOutput:
    """One of the sentences found for a prompt.

    Attributes:
        token_ids: What was generated, a stop token included.
        score: Sum of the tokens' log-probabilities over their number to the power of `length_penalty`.
        finish_reason: STOP, or LENGTH at `max_new_tokens` or the end of the context.
        text: Where the engine has a tokenizer.
    """

    token_ids: tuple[int, ...]
    score: float
    finish_reason: FinishReason
    text: str = ""


class BeamsFound(NamedTuple):
    """The end of a beam search: the sentences, best first, or why there are none."""

    request_id: int
    outputs: tuple[BeamOutput, ...] = ()
    error: Exception | None = None


def num_beam_pages(num_prompt: int, max_len: int, num_beams: int, pages: PageAllocator, config: SchedulerConfig) -> int:
    """Return the pages that a search may take.

    For sure all beams share the whole pages of the prompt in groups that see all tokens, and no others.
    """
    alone = config.num_pages_for(max_len - 1, pages)
    num_shared = num_prompt // pages.page_size * sum(group.sliding_window is None for group in pages.groups)
    return num_shared + num_beams * (alone - num_shared)


class BeamSearch:
    """The beams of one prompt, in the order of their scores.

    Args:
        prompt: The first beam; its `family` is the id of the search.
        params: Checked.
        new_id: Gives ids to forks.

    Attributes:
        prompt: The first beam.
        beams: Those that go on.
        scores: What was found so far.
    """

    def __init__(self, scheduler: Scheduler, prompt: Request, params: BeamParams, new_id: Callable[[], int]):
        self.prompt = prompt
        self.scores = BeamScores(params, prompt.max_new_tokens)
        self.beams = [prompt]
        self._scheduler = scheduler
        self._new_id = new_id
        self._rows: dict[int, tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]] = {}

    def take(self, request_id: int, top_ids: npt.NDArray[np.int32], top_logprobs: npt.NDArray[np.float32]) -> None:
        """Take the likeliest next tokens of a beam, and go on when those of all beams are there."""
        self._rows[request_id] = (top_ids, top_logprobs)
        if len(self._rows) < len(self.beams):
            return
        rows = [self._rows[beam.request_id] for beam in self.beams]
        num_top = min(len(ids) for ids, _ in rows)
        self._rows = {}
        all_ids, all_logprobs = np.stack([r[0][:num_top] for r in rows]), np.stack([r[1][:num_top] for r in rows])
        chosen = self.scores.advance(all_ids, all_logprobs)
        heirs = dict(reversed(chosen))  # the first token of each beam that goes on
        self._scheduler.end([b for i, b in enumerate(self.beams) if i not in heirs], FinishReason.ABORT)
        beams, is_taken = [], set()
        for parent, token_id in chosen:
            if parent in is_taken:
                beams.append(self._scheduler.fork(self.beams[parent], self._new_id(), token_id))
            else:
                is_taken.add(parent)
                beams.append(self.beams[parent])
        for parent, token_id in heirs.items():
            self._scheduler.accept(self.beams[parent], token_id)
        self.beams = beams

    def forget_rows(self) -> None:
        """Forget what steps gave since the beams last went on: it is computed again."""
        self._rows = {}

    def end(self) -> None:
        """End all beams."""
        self._scheduler.end(self.beams, FinishReason.ABORT)
