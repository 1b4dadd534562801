"""Log-probabilities on the host: of one token, and of the rows of one step. Plain Python and numpy."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt


class TokenLogprobs(NamedTuple):
    """How likely a token was at its place: the log-softmax of the model's own logits there, float32.

    Attributes:
        token_id: The token drawn, or that of the prompt.
        logprob: Its own.
        top: The likeliest tokens and theirs, best first; of equal ones the smaller id first.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class StepLogprobs(NamedTuple):
    """Of one token in each row of a step, and of the likeliest.

    Attributes:
        logprobs: `[num_rows]`.
        top_ids, top_logprobs: `[num_rows, num_top]`, best first.
    """

    logprobs: npt.NDArray[np.float32]
    top_ids: npt.NDArray[np.int32]
    top_logprobs: npt.NDArray[np.float32]

    def of(self, row: int, token_id: int, num_top: int) -> TokenLogprobs:
        """Those of the token of a row."""
        top = zip(self.top_ids[row, :num_top].tolist(), self.top_logprobs[row, :num_top].tolist(), strict=True)
        return TokenLogprobs(token_id, self.logprobs.item(row), tuple(top))


class PromptRows(NamedTuple):
    """Tokens of a prompt that are rows of their own in a step, so that the logits after each come out.

    The last token of the prompt's part in the step stays in the request's own row, and what precedes it there.

    Attributes:
        place: Of the request in the step.
        begin: Position of the first.
        num_rows: How many, >= 0; their rows stand behind all others of the step, in the order of requests.
    """

    place: int
    begin: int
    num_rows: int


def locate_prompt_rows(
    prompt_rows: tuple[PromptRows, ...], num_new_tokens: tuple[int, ...], num_drafts: int
) -> Iterator[tuple[PromptRows, list[int], list[int]]]:
    """Of each entry the rows that hold logits after its tokens, and the positions of these tokens.

    Args:
        num_drafts: Of the whole step. Whoever has drafts stands before those that read a prompt.
    """
    next_row = len(num_new_tokens) + num_drafts
    for entry in prompt_rows:
        rows = [*range(next_row, next_row + entry.num_rows), entry.place + num_drafts]
        last = entry.begin + num_new_tokens[entry.place] - 1
        next_row += entry.num_rows
        yield entry, rows, [*range(entry.begin, entry.begin + entry.num_rows), last]
