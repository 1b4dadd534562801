"""`SamplingParams`: how the tokens of a request are chosen, and when it stops. Plain Python."""

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from jaxpaged.checks import check_integer, check_number


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How tokens are chosen, and when to stop.

    Logits are changed in this order, which is that of vLLM as far as the penalties and that of Hugging Face
    `transformers` from the temperature on: stop tokens banned before `min_new_tokens`; `logit_bias`; repetition,
    then frequency, then presence penalty; the likeliest token is taken here where the temperature is 0; temperature;
    top-k; top-p of what top-k left; min-p. `jaxpaged.engine.sampling.sample.sample` does it, on the device.

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
        """Freeze what may come as a list, a mapping or a single string, so that params are hashable."""
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

    @property
    def is_plain(self) -> bool:
        """Whether each token is the likeliest by the model's own logits, and nothing else is wanted of its row."""
        changes = self.temperature > 0 or self.has_penalties or self.logit_bias or self.num_logprobs is not None
        return not changes and not (self.min_new_tokens and self.stop_token_ids)

    def of_sample(self, index: int) -> "SamplingParams":
        """Return the params of one of the `n` samples: alone, with seed + index (as in vLLM; it wraps at 32 bits)."""
        return dataclasses.replace(self, n=1, seed=(self.seed + index) % 2**32)

    def check(self, vocab_size: int | None = None) -> None:
        """Raise ValueError for a value out of range, TypeError for one of the wrong kind, by name.

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


class SamplingRow(NamedTuple):
    """What sampling has to know of a row: a value, which no later step changes.

    Attributes:
        params: Those of its request.
        num_prompt: Tokens of the prompt.
        num_tokens: Tokens of the sequence before the one to sample, which is its position.
        seat: Row of the counts on the device that holds how often the sequence has each token, where `params` has
            penalties; -1 for none.
        recent: The last tokens of the sequence that are not in the counts: drafts.
        is_counted: Whether the token that is sampled enters the counts.
    """

    params: SamplingParams
    num_prompt: int
    num_tokens: int
    seat: int = -1
    recent: tuple[int, ...] = ()
    is_counted: bool = False


def _frozen(values: Any) -> Any:
    """List and other iterables as tuples, two levels deep; what is no iterable stays for `check` to name."""
    if isinstance(values, str) or not isinstance(values, Iterable):
        return (values,)
    return tuple(tuple(value) if isinstance(value, list) else value for value in values)
