"""A request: what was asked for, and how far it has come. The scheduler changes it, nobody else. Plain Python."""

import dataclasses
import enum
import operator
from collections.abc import Iterable

import numpy as np

from jaxpaged.engine.sampling.params import SamplingParams
from jaxpaged.paging import Key


class RequestStatus(enum.Enum):
    """Where a request is on its way."""

    WAITING = "waiting"
    """It holds no pages: it is new, or was preempted and computes all its tokens again."""
    PREFILL = "prefill"
    """Some of its tokens besides the last are not computed.

    It holds pages for the chunk that comes next, or for all.
    """
    DECODE = "decode"
    """All its tokens but the last are computed."""
    SWAPPED = "swapped"
    """It was preempted, and its pages are in the swap space."""
    FINISHED = "finished"
    """It holds nothing; `finish_reason` says why."""


class FinishReason(enum.Enum):
    """Why a request ended."""

    STOP = "stop"
    """It generated a stop token."""
    LENGTH = "length"
    """It reached `max_new_tokens`, or the end of the model's context."""
    ABORT = "abort"
    """The caller gave it up."""
    DEADLINE = "deadline"
    """Its deadline passed."""
    ERROR = "error"
    """Its step failed, or the model's logits for it were not finite; `error` says how."""


@dataclasses.dataclass(slots=True, weakref_slot=True, kw_only=True, eq=False)
class Request:
    """One prompt and what has been generated from it.

    Attributes:
        max_len: Prompt and output together, at most, in tokens.
        num_prompt: Tokens of the prompt.
        priority: Lower numbers go first; among equals the lower id, which came first.
        deadline: When it fails if it has not ended, by the clock of `Scheduler.schedule`.
        siblings: The samples of the same prompt, which share its pages, itself among them; empty where it is alone.
        status: Where it is on its way.
        output_token_ids: Tokens sampled and read from the device.
        num_tokens: Prompt and output, with tokens that a step which is still running samples.
        num_computed_tokens: Tokens whose K and V the steps dispatched so far write. Back to 0 when it starts over.
        num_cached_tokens: Tokens found by prefix hit, or shared with a sibling, when it first began; None before that.
        num_slots: Its length in the page manager: tokens that there is room for, and that it may write.
        num_prompt_logprobs: Tokens of the prompt whose log-probabilities were read, where its params ask for them; the
            first, which nothing precedes, counts.
        is_plain: Whether it takes the likeliest token and wants nothing else.
        family: Id of the beam search that it is a beam of, or None.
        cache_salt: Requests share pages of the prefix cache only with those of the same salt.
        seat: Row of the device's counts of its tokens, where its params have penalties and it runs; None before.
        is_seat_stale: Whether the counts there lack tokens: after drafts only the host knows which were right.
        num_pages: Pages that it held when it finished.
        finish_reason: Why it finished.
        error: The cause, where the reason is ERROR or DEADLINE.
    """

    request_id: int
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    max_len: int
    priority: int = 0
    deadline: float | None = None
    siblings: "list[Request]" = dataclasses.field(default_factory=list)
    status: RequestStatus = RequestStatus.WAITING
    output_token_ids: list[int] = dataclasses.field(default_factory=list)
    num_prompt: int = dataclasses.field(init=False)
    num_tokens: int = dataclasses.field(init=False)
    is_plain: bool = dataclasses.field(init=False)
    family: int | None = None
    cache_salt: str | None = None
    seat: int | None = None
    is_seat_stale: bool = False
    num_computed_tokens: int = 0
    num_cached_tokens: int | None = None
    num_slots: int = 0
    num_prompt_logprobs: int = 1
    num_pages: int = 0
    finish_reason: FinishReason | None = None
    error: Exception | None = None
    _buffer: np.ndarray | None = None
    _num_buffered: int = 0

    def __post_init__(self) -> None:
        self.num_prompt = self.num_tokens = len(self.prompt_token_ids)
        self.is_plain = self.params.is_plain

    @property
    def order(self) -> tuple[int, int, int]:
        """What requests are sorted by: beams of one search stand together."""
        return self.priority, self.request_id if self.family is None else self.family, self.request_id

    @property
    def keys(self) -> tuple[Key, ...]:
        """What its pages of the prefix cache are known by, besides their tokens."""
        return () if self.cache_salt is None else (Key("cache_salt", self.cache_salt),)

    @property
    def max_new_tokens(self) -> int:
        """Tokens that `max_len` leaves for the output."""
        return self.max_len - self.num_prompt

    @property
    def num_known(self) -> int:
        """Tokens of prompt and output that the host knows."""
        return self.num_prompt + len(self.output_token_ids)

    @property
    def num_pending(self) -> int:
        """Tokens that a running step samples: only the device knows them."""
        return self.num_tokens - self.num_known

    @property
    def num_remaining(self) -> int:
        """Tokens that are not yet computed; 1 during decode."""
        return self.num_tokens - self.num_computed_tokens

    @property
    def needs_prompt_logits(self) -> bool:
        """Whether logits inside its prompt are wanted that have not been read, so that no page of it may be a hit."""
        return self.params.prompt_logprobs is not None and self.num_prompt_logprobs < self.num_prompt

    def known_tokens(self) -> np.ndarray:
        """[num_known] Return prompt and output, int32: a view, not to be written to.

        O(tokens new since the last call).
        """
        num_prompt, num_known = self.num_prompt, self.num_known
        if self._buffer is None:
            self._buffer = np.empty(max(self.max_len, num_known), np.int32)
            self._buffer[:num_prompt] = self.prompt_token_ids
            self._num_buffered = num_prompt
        if num_known > self._num_buffered:
            self._buffer[self._num_buffered : num_known] = self.output_token_ids[self._num_buffered - num_prompt :]
            self._num_buffered = num_known
        return self._buffer[:num_known]


class QueueFullError(RuntimeError):
    """As many requests wait as `max_num_waiting` allows: try again later."""


def check_token_ids(token_ids: Iterable[int], vocab_size: int | None) -> tuple[int, ...]:
    """Return a prompt as plain integers.

    Raises TypeError or ValueError for the first that is no token, by its place.
    """
    limit = 2**31 if vocab_size is None else vocab_size
    checked = []
    for place, token_id in enumerate(token_ids):
        try:
            checked.append(operator.index(token_id))
        except TypeError as error:
            raise TypeError(f"`prompt_token_ids[{place}]` must be an integer; got {token_id!r}. Encode it.") from error
        if not 0 <= checked[-1] < limit:
            raise ValueError(
                f"`prompt_token_ids[{place}]` must be from 0 to vocab_size - 1 = {limit - 1}; got {token_id}. "
                "Does the tokenizer belong to this model?"
            )
    return tuple(checked)
