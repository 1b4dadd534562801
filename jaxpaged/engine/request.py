"""A request and how its tokens are to be chosen. Plain Python: the scheduler changes it, nobody else."""

import dataclasses
import enum

import numpy as np


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How tokens are chosen, and when to stop.

    Attributes:
        max_new_tokens: Tokens to generate at most.
        temperature: 0 takes the likeliest token. Above 0 it divides the logits before the draw.
        top_k: Draw from the k likeliest tokens; 0 keeps all.
        top_p: Draw from the likeliest tokens that together have at least this probability, in (0, 1].
        seed: The draws of a request follow from its seed and its tokens alone, whatever else is in the batch.
        stop_token_ids: A generated token of these ends the request; it is part of the output.
    """

    max_new_tokens: int = 64
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    stop_token_ids: tuple[int, ...] = ()

    def check(self) -> None:
        """Raises ValueError for a number out of range, TypeError for a count that is none, by name."""
        for name in ("max_new_tokens", "top_k", "seed"):
            value = getattr(self, name)
            if not isinstance(value, int | np.integer) or isinstance(value, bool):
                raise TypeError(f"`{name}` must be an integer; got {value!r}.")
        rules = {
            "max_new_tokens": (self.max_new_tokens >= 1, "be at least 1"),
            "temperature": (0 <= self.temperature <= 3e38, "be finite and not negative"),  # float32 ends at 3.4e38
            "top_k": (self.top_k >= 0, "be 0 (all tokens) or more"),
            "top_p": (0 < self.top_p <= 1, "be above 0 and at most 1"),
            "seed": (0 <= self.seed < 2**32, "fit 32 bits without a sign"),
        }
        for name, (holds, expected) in rules.items():
            if not holds:
                raise ValueError(f"`{name}` must {expected}; got {getattr(self, name)}.")


class FinishReason(enum.Enum):
    """Why a request ended."""

    STOP = "stop"
    """It generated a stop token."""
    LENGTH = "length"
    """It reached `max_new_tokens`, or the end of the model's context."""


@dataclasses.dataclass(slots=True, kw_only=True, eq=False)
class Request:
    """One prompt and what has been generated from it.

    Attributes:
        max_tokens: Prompt and output together, at most.
        num_computed_tokens: Tokens whose K and V are in the cache. Back to 0 when the request is preempted.
        num_pages: Pages it held when it finished.
    """

    request_id: int
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    max_tokens: int
    output_token_ids: list[int] = dataclasses.field(default_factory=list)
    num_computed_tokens: int = 0
    num_pages: int = 0
    finish_reason: FinishReason | None = None

    @property
    def num_tokens(self) -> int:
        """Prompt and output so far."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def num_remaining(self) -> int:
        """Tokens that are known and not yet computed; 1 while it decodes."""
        return self.num_tokens - self.num_computed_tokens

    def tokens(self, begin: int, end: int) -> list[int]:
        """Tokens `begin` to `end` of prompt and output, one behind the other."""
        prompt = len(self.prompt_token_ids)
        return [
            *self.prompt_token_ids[begin:end],
            *self.output_token_ids[max(0, begin - prompt) : max(0, end - prompt)],
        ]
