"""A request and how its tokens are to be chosen. Plain Python: the scheduler changes it, nobody else."""

import dataclasses
import enum
import math
import operator
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from jaxpaged.checks import check_integer, check_number
from jaxpaged.engine.logprobs import TokenLogprobs
from jaxpaged.engine.text import TextStream


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How tokens are chosen, and when to stop.

    Logits are changed in this order, which is that of vLLM as far as the penalties and that of Hugging Face
    `transformers` from the temperature on: stop tokens banned before `min_new_tokens`; `logit_bias`; repetition,
    then frequency, then presence penalty; the likeliest token is taken here where the temperature is 0; temperature;
    top-k; top-p of what top-k left; min-p. `jaxpaged.engine.sampling.sample` does it, on the device.

    Attributes:
        max_new_tokens: Tokens to generate at most.
        min_new_tokens: Until so many are generated no stop token is, and stop strings do not count.
        temperature: 0 takes the likeliest token. Above 0 it divides the logits before the draw.
        top_k: Draw from the k likeliest tokens; 0 keeps all.
        top_p: Draw from the likeliest tokens that together have at least this probability, in (0, 1].
        min_p: Draw from tokens at least this many times as likely as the likeliest, in [0, 1]; 0 keeps all.
        repetition_penalty: Divides the logits above 0 of tokens in prompt or output, and multiplies those below
            (`transformers`, vLLM). 1 changes nothing.
        presence_penalty: Taken off the logit of each token that the output (not the prompt) holds, as in OpenAI's API
            and vLLM. 0 changes nothing.
        frequency_penalty: The same, times how often the output holds it.
        logit_bias: Pairs (token id, number added to its logit); a mapping is taken too. -inf bans a token.
        seed: The draws of a request follow from its seed and its tokens alone, whatever else is in the batch.
        n: Samples of the same prompt, which is computed once; sample i is drawn as a request with `of_sample(i)` is.
            Of `Engine.generate` only.
        stop_token_ids: A generated token of these ends the request; it is part of the output.
        stop: A text of these ends the request, wherever tokens cut it.
        include_stop: Leave the stop text in the output text.
        num_logprobs: Log-probabilities to return: of the token drawn and of so many of the likeliest; 0 is only the
            token drawn, None nothing. They are the model's own, before anything above changed a logit.
        prompt_logprobs: The same for the tokens of the prompt, which then takes no pages of the prefix cache: each
            of its tokens is computed, and is a row of logits in its step.
    """

    max_new_tokens: int = 64
    min_new_tokens: int = 0
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] | Mapping[int, float] = ()
    seed: int = 0
    n: int = 1
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] | str = ()
    include_stop: bool = False
    num_logprobs: int | None = None
    prompt_logprobs: int | None = None

    def __post_init__(self) -> None:
        """Freezes what may come as a list, a mapping or a single string, so that params are hashable."""
        bias = self.logit_bias.items() if isinstance(self.logit_bias, Mapping) else self.logit_bias
        object.__setattr__(self, "logit_bias", _frozen(bias))
        object.__setattr__(self, "stop", (self.stop,) if isinstance(self.stop, str) else _frozen(self.stop))
        object.__setattr__(self, "stop_token_ids", _frozen(self.stop_token_ids))

    @property
    def has_penalties(self) -> bool:
        """Whether earlier tokens change logits."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0

    @property
    def has_filters(self) -> bool:
        """Whether the draw leaves tokens out."""
        return self.top_k != 0 or self.top_p != 1 or self.min_p != 0

    def of_sample(self, index: int) -> "SamplingParams":
        """The params of one of the `n` samples: alone, with seed + index (as in vLLM; it wraps at 32 bits)."""
        return dataclasses.replace(self, n=1, seed=(self.seed + index) % 2**32)

    def check(self, vocab_size: int | None = None) -> None:
        """Raises ValueError for a value out of range, TypeError for one of the wrong kind, by name.

        Args:
            vocab_size: Token ids must be below, where it is given.
        """
        for name in ("max_new_tokens", "min_new_tokens", "top_k", "seed", "n"):
            check_integer(name, getattr(self, name))
        for name in ("num_logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                check_integer(name, getattr(self, name))
        for name in ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"):
            check_number(name, getattr(self, name))
        rules = {
            "max_new_tokens": (self.max_new_tokens >= 1, "be at least 1"),
            "min_new_tokens": (0 <= self.min_new_tokens <= self.max_new_tokens, "be from 0 to `max_new_tokens`"),
            "temperature": (0 <= self.temperature <= 3e38, "be finite and not negative"),  # float32 ends at 3.4e38
            "top_k": (self.top_k >= 0, "be 0 (all tokens) or more"),
            "top_p": (0 < self.top_p <= 1, "be above 0 and at most 1"),
            "min_p": (0 <= self.min_p <= 1, "be from 0 (all tokens) to 1"),
            "repetition_penalty": (1e-6 <= self.repetition_penalty <= 1e6, "be from 1e-6 to 1e6; 1 is none"),
            "presence_penalty": (abs(self.presence_penalty) <= 1e6, "be from -1e6 to 1e6"),
            "frequency_penalty": (abs(self.frequency_penalty) <= 1e6, "be from -1e6 to 1e6"),
            "seed": (0 <= self.seed < 2**32, "fit 32 bits without a sign"),
            "n": (self.n >= 1, "be at least 1"),
            "num_logprobs": (self.num_logprobs is None or self.num_logprobs >= 0, "be None, or 0 or more"),
            "prompt_logprobs": (self.prompt_logprobs is None or self.prompt_logprobs >= 0, "be None, or 0 or more"),
        }
        for name, (holds, expected) in rules.items():
            if not holds:
                raise ValueError(f"`{name}` must {expected}; got {getattr(self, name)}.")
        self._check_tokens(vocab_size)
        self._check_stop()

    def _check_tokens(self, vocab_size: int | None) -> None:
        limit = 2**31 - 1 if vocab_size is None else vocab_size  # 2**31 - 1 pads rows of ids on the device
        pairs: Any = self.logit_bias  # frozen by now, but for what is no pair
        for pair in pairs:
            if not isinstance(pair, tuple) or len(pair) != 2:
                raise TypeError(f"`logit_bias` must be pairs (token id, number) or a mapping; got {pair!r} in it.")
            check_number("logit_bias", pair[1])
            if not (abs(pair[1]) <= 3e38 or pair[1] == -math.inf):  # float32 ends at 3.4e38
                raise ValueError(f"`logit_bias` must add finite numbers or -inf; got {pair[1]} for token {pair[0]}.")
        ids = {"logit_bias": [pair[0] for pair in pairs], "stop_token_ids": self.stop_token_ids}
        for name, token_ids in ids.items():
            for token_id in token_ids:
                check_integer(name, token_id)
                if not 0 <= token_id < limit:
                    raise ValueError(f"`{name}` must name tokens from 0 to {limit - 1}; got {token_id}.")
        if len(set(ids["logit_bias"])) < len(self.logit_bias):
            raise ValueError(f"`logit_bias` must name each token once; got {sorted(ids['logit_bias'])}.")

    def _check_stop(self) -> None:
        for text in self.stop:
            if not isinstance(text, str):
                raise TypeError(f"`stop` must be a string or strings; got {text!r}.")
            if not text:
                raise ValueError("`stop` must hold no empty string: it would end every request before its first token.")
        if not isinstance(self.include_stop, bool):
            raise TypeError(f"`include_stop` must be True or False; got {self.include_stop!r}.")


def _frozen(values: Any) -> Any:
    """Lists and other iterables as tuples, two levels deep; what is no iterable stays for `check` to name."""
    if isinstance(values, str) or not isinstance(values, Iterable):
        return (values,)
    return tuple(tuple(value) if isinstance(value, list) else value for value in values)


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


class QueueFullError(RuntimeError):
    """As many requests wait as `max_num_waiting` allows: try again later."""


class NewToken(NamedTuple):
    """One generated token, or the end of a request that ended without one.

    Attributes:
        token_id: None where the request ended by abort, deadline or error.
        finish_reason: Why it ended, if this was the last of it.
        error: The cause, where the reason is DEADLINE or ERROR.
        text: What the token adds to the text, if the engine has a tokenizer: nothing that may yet change, and nothing
            of a stop string. With the finish reason comes what was held back.
        logprobs: Where `num_logprobs` asks for them.
        prompt_logprobs: Where `prompt_logprobs` asks for them, with the first token: as in `RequestOutput`.
    """

    request_id: int
    token_id: int | None
    finish_reason: FinishReason | None = None
    error: Exception | None = None
    text: str = ""
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None


@dataclasses.dataclass(slots=True, weakref_slot=True, kw_only=True, eq=False)
class Request:
    """One prompt and what has been generated from it.

    Attributes:
        max_tokens: Prompt and output together, at most.
        priority: Lower numbers go first; among equals the lower id, which came first.
        text: Makes text of its tokens and finds stop strings, or None.
        samples: The requests of the same prompt that share its pages, itself among them; empty where it is alone. They
            share `prompt_logprobs` too.
        deadline: When it fails if it has not ended, by the clock of `Scheduler.schedule`.
        output_token_ids: What has been read from the device.
        output_text: Their text, as far as it is final.
        logprobs: Of these, where `params.num_logprobs` asks for them.
        prompt_logprobs: Of the prompt's tokens so far, where `params.prompt_logprobs` asks for them: None for the
            first, which nothing precedes.
        num_tokens: Prompt and output, with tokens that a step which is still running will have drawn.
        num_computed_tokens: Tokens whose K and V the steps dispatched so far write. Back to 0 when it starts over.
        num_prefix_tokens: Found by prefix hit, or shared with another sample, when it first began; None before that.
        num_slots: Its length in the page manager: tokens that there is room for, and that it may write.
        is_prompting: Its pages are allocated up to the last token known, which is not computed yet.
        is_swapped: Its pages are in the swap space.
        max_new_tokens: What `max_tokens` leaves for the output.
        stop_token_ids: Of `params`.
        needs_history: Drawing its next token takes all earlier ones on the host, so that steps cannot overlap.
        num_pages: Pages it held when it finished.
    """

    request_id: int
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    max_tokens: int
    priority: int = 0
    deadline: float | None = None
    text: TextStream | None = None
    samples: "list[Request]" = dataclasses.field(default_factory=list)
    output_token_ids: list[int] = dataclasses.field(default_factory=list)
    output_text: str = ""
    logprobs: list[TokenLogprobs] = dataclasses.field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs | None] = dataclasses.field(default_factory=lambda: [None])
    num_tokens: int = 0
    num_computed_tokens: int = 0
    num_prefix_tokens: int | None = None
    num_slots: int = 0
    is_prompting: bool = True
    is_swapped: bool = False
    num_pages: int = 0
    finish_reason: FinishReason | None = None
    error: Exception | None = None
    max_new_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    needs_history: bool = False
    _buffer: np.ndarray | None = None
    _num_buffered: int = 0

    def __post_init__(self) -> None:
        self.num_tokens = len(self.prompt_token_ids)
        self.max_new_tokens = self.max_tokens - self.num_tokens
        self.stop_token_ids = self.params.stop_token_ids
        self.needs_history = self.params.has_penalties

    @property
    def order(self) -> tuple[int, int]:
        """What requests are sorted by."""
        return self.priority, self.request_id

    @property
    def num_known(self) -> int:
        """Tokens of prompt and output that the host knows."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def num_pending(self) -> int:
        """Tokens drawn by a step that is still running: only the device knows them."""
        return self.num_tokens - self.num_known

    @property
    def num_remaining(self) -> int:
        """Tokens that are not yet computed; 1 while it decodes."""
        return self.num_tokens - self.num_computed_tokens

    @property
    def needs_prompt_logits(self) -> bool:
        """Whether logits inside its prompt are wanted that have not been read, so that no page of it may be a hit."""
        return self.params.prompt_logprobs is not None and len(self.prompt_logprobs) < len(self.prompt_token_ids)

    def known_tokens(self) -> np.ndarray:
        """[num_known] int32, prompt and output: a view, not to be written to. O(tokens new since the last call)."""
        num_prompt, num_known = len(self.prompt_token_ids), self.num_known
        if self._buffer is None:
            self._buffer = np.empty(max(self.max_tokens, num_known), np.int32)
            self._buffer[:num_prompt] = self.prompt_token_ids
            self._num_buffered = num_prompt
        if num_known > self._num_buffered:
            self._buffer[self._num_buffered : num_known] = self.output_token_ids[self._num_buffered - num_prompt :]
            self._num_buffered = num_known
        return self._buffer[:num_known]


def check_token_ids(token_ids: Iterable[int], vocab_size: int | None) -> tuple[int, ...]:
    """A prompt as plain integers. Raises TypeError or ValueError for the first that is no token, by its place."""
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
