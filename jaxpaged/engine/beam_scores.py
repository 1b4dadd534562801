"""Which beams of one prompt go on, and which sentences are finished: the rules of beam search, on plain numbers.

Source: `transformers` 5, `GenerationMixin._beam_search`, whose results these are, score for score.
"""

import dataclasses
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from jaxpaged.checks import as_count, check_number

_MAX_LENGTH_PENALTY = 32  # of it, a length of a million tokens is still a float64


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BeamParams:
    """How beams are chosen, and when to stop.

    A sentence is finished when it draws a stop token or reaches its length. Its score is the sum of the
    log-probabilities of its new tokens over `length ** length_penalty`.

    Attributes:
        num_beams: Sentences that go on at the same time.
        max_new_tokens: Tokens to generate at most.
        length_penalty: Above 0 it favours long sentences, below 0 short ones; 0 leaves the sum as it is.
        early_stopping: True ends when `num_beams` sentences are finished. False ends when then the likeliest beam, if
            it ended now, would score no better than the worst of them. "never" asks that of the most that it could
            score at any length.
        num_return_sequences: Sentences to return, at most `num_beams`; None is all.
        stop_token_ids: A generated token of these finishes a sentence; it is part of it.
    """

    num_beams: int
    max_new_tokens: int
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False
    num_return_sequences: int | None = None
    stop_token_ids: tuple[int, ...] = ()

    @property
    def num_candidates(self) -> int:
        """Continuations to look at: enough that `num_beams` of them go on whatever stops."""
        return max(2, 1 + len(self.stop_token_ids)) * self.num_beams

    def check(self, vocab_size: int | None = None) -> None:
        """Raise ValueError for a value out of range, TypeError for one of the wrong kind, by name."""
        for name in ("num_beams", "max_new_tokens"):
            as_count(getattr(self, name), f"`{name}`", minimum=1)
        if self.num_return_sequences is not None:
            as_count(self.num_return_sequences, "`num_return_sequences`", minimum=1)
            if self.num_return_sequences > self.num_beams:
                raise ValueError(
                    f"`num_return_sequences` must be at most `num_beams` = {self.num_beams}; got "
                    f"{self.num_return_sequences}."
                )
        check_number("length_penalty", self.length_penalty)
        if not abs(self.length_penalty) <= _MAX_LENGTH_PENALTY:
            limit = _MAX_LENGTH_PENALTY
            raise ValueError(f"`length_penalty` must be from -{limit} to {limit}; got {self.length_penalty}.")
        if not isinstance(self.early_stopping, bool) and self.early_stopping != "never":
            raise ValueError(f"`early_stopping` must be True, False or 'never'; got {self.early_stopping!r}.")
        if vocab_size is not None and self.num_candidates > vocab_size:
            limit, num_stops = vocab_size * self.num_beams // self.num_candidates, len(self.stop_token_ids)
            raise ValueError(
                f"`num_beams` must be at most {limit}, with a vocabulary of {vocab_size} and {num_stops} stop tokens; "
                f"got {self.num_beams}."
            )


class Continuation(NamedTuple):
    """A beam that goes on: the place of the one before it, and the token that it adds."""

    parent: int
    token_id: int


class Sentence(NamedTuple):
    """A finished one."""

    token_ids: tuple[int, ...]
    score: float
    is_stopped: bool


class BeamScores:
    """The scores of one prompt's beams. There is one, the prompt, at first.

    Args:
        params: Checked.
        max_new_tokens: Tokens after which all sentences are finished.

    Attributes:
        finished: The best sentences so far, best first, at most `num_beams`.
        is_done: Whether nothing can change `finished` any more.
    """

    def __init__(self, params: BeamParams, max_new_tokens: int):
        self.params = params
        self.max_new_tokens = max_new_tokens
        self.finished: list[Sentence] = []
        self.is_done = False
        self._running = np.zeros(1, np.float32)
        self._tokens: list[tuple[int, ...]] = [()]

    @property
    def results(self) -> list[Sentence]:
        """The sentences that the search returns, best first."""
        return self.finished[: self.params.num_return_sequences]

    def advance(
        self, top_ids: npt.NDArray[np.int32], top_logprobs: npt.NDArray[np.float32]
    ) -> tuple[Continuation, ...]:
        """Return the beams that go on, best first; none when it is done.

        Args:
            top_ids: `[num_beams, num_top]`, of each beam the likeliest next tokens, best first; `num_top` is at least
                `num_candidates`.
            top_logprobs: Their log-probabilities.
        """
        params, num_new = self.params, len(self._tokens[0]) + 1
        sums = self._running[:, None] + top_logprobs
        order = np.argsort(-sums, axis=None, kind="stable")[: params.num_candidates]
        parents, columns = np.unravel_index(order, sums.shape)
        going, ended = [], []
        for rank, (parent, column) in enumerate(zip(parents.tolist(), columns.tolist(), strict=True)):
            token_id, value = top_ids.item(parent, column), sums.item(parent, column)
            is_stopped = token_id in params.stop_token_ids
            if is_stopped or num_new == self.max_new_tokens:
                if rank < params.num_beams:  # those behind stand in for beams that stop, and are no results
                    tokens = (*self._tokens[parent], token_id)
                    ended.append(Sentence(tokens, self._score(value, num_new), is_stopped))
            elif len(going) < params.num_beams:
                going.append((Continuation(parent, token_id), value))
        best_first = sorted([*self.finished, *ended], key=lambda sentence: -sentence.score)
        self.finished = best_first[: params.num_beams]
        self._tokens = [(*self._tokens[c.parent], c.token_id) for c, _ in going]
        self._running = np.array([value for _, value in going], np.float32)
        self.is_done = not going or not self._can_improve(num_new)
        return () if self.is_done else tuple(c for c, _ in going)

    def _score(self, value: float, length: int) -> float:
        return float(np.float32(value) / np.float32(length**self.params.length_penalty))

    def _can_improve(self, num_new: int) -> bool:
        if len(self.finished) < self.params.num_beams:
            return True
        if self.params.early_stopping is True:
            return False
        at_best = self.params.early_stopping == "never" and self.params.length_penalty > 0
        length = self.max_new_tokens if at_best else num_new
        return self._score(self._running.item(0), length) > self.finished[-1].score
