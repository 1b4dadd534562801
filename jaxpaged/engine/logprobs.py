"""Log-probabilities on the host: of one token, and of the rows of one step. Plain Python and numpy."""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt


class TokenLogprobs(NamedTuple):
    """How likely a token was at its place: the log-softmax of the model's own logits there, float32.

    Attributes:
        token_id: The token drawn, or that of the prompt.
        logprob: The log-probability of that token.
        top: The likeliest tokens with their log-probabilities, best first; of equal ones the smaller id first.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class StepLogprobs(NamedTuple):
    """The log-probabilities of a step: in each row, of the token that came, and of the likeliest ones.

    Attributes:
        logprobs: `[num_rows]`.
        top_ids, top_logprobs: `[num_rows, num_top]`, best first.
    """

    logprobs: npt.NDArray[np.float32]
    top_ids: npt.NDArray[np.int32]
    top_logprobs: npt.NDArray[np.float32]

    def of(self, row: int, token_id: int, num_top: int) -> TokenLogprobs:
        """Return the log-probabilities at a row, of `token_id` and of the `num_top` likeliest tokens."""
        top = zip(self.top_ids[row, :num_top].tolist(), self.top_logprobs[row, :num_top].tolist(), strict=True)
        return TokenLogprobs(token_id, self.logprobs.item(row), tuple(top))
