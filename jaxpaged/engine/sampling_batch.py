"""`SamplingBatch`: how each row of a batch is to be sampled, as arrays, and the host code that makes it from requests.

Every feature that no request uses is None, and is then no part of the compiled program. `SamplingFeatures` names the
program: an engine that joins with `|` what its requests need compiles few of them.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, Protocol

import jax
import numpy as np
from jaxtyping import Array, Float, Int, UInt

from jaxpaged.engine.request import SamplingParams

PAD = 2**31 - 1
"""A token id past every vocabulary: scatters drop it."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Penalties:
    """Penalties for tokens that a row's sequence holds.

    Attributes:
        token_ids: Prompt and output, one behind the other; PAD anywhere counts as nothing.
        num_prompt: Columns of `token_ids` that are prompt.
        repetition, frequency, presence: As in `SamplingParams`.
    """

    token_ids: Int[Array, "num_seqs width"]
    num_prompt: Int[Array, "num_seqs"]
    repetition: Float[Array, "num_seqs"]
    frequency: Float[Array, "num_seqs"]
    presence: Float[Array, "num_seqs"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SamplingBatch:
    """How each row of a batch is to be sampled.

    Attributes:
        position: Index of the token to draw in its sequence. Seed and position make the draw.
        temperature: 0 takes the likeliest token. None, as `seed` then is, says that all rows do.
        seed: Of the request.
        top_k, top_p, min_p: 0, 1 and 0 keep all tokens; None says that all rows do.
        penalties: For tokens that the sequence holds.
        bias_ids, bias_values: Added to the logits of these tokens. PAD is dropped.
        stop_ids, min_position: Tokens that may not be drawn at positions before `min_position`. PAD is dropped.
        num_logprobs: None for no log-probabilities; n for those of the token drawn and of the n likeliest.
        next_ids: The token whose log-probability is told instead of that of the one drawn; -1 for none.
    """

    position: Int[Array, "num_seqs"]
    temperature: Float[Array, "num_seqs"] | None = None
    seed: UInt[Array, "num_seqs"] | None = None
    top_k: Int[Array, "num_seqs"] | None = None
    top_p: Float[Array, "num_seqs"] | None = None
    min_p: Float[Array, "num_seqs"] | None = None
    penalties: Penalties | None = None
    bias_ids: Int[Array, "num_seqs num_biases"] | None = None
    bias_values: Float[Array, "num_seqs num_biases"] | None = None
    stop_ids: Int[Array, "num_seqs num_stops"] | None = None
    min_position: Int[Array, "num_seqs"] | None = None
    next_ids: Int[Array, "num_seqs"] | None = None
    num_logprobs: int | None = dataclasses.field(default=None, metadata={"static": True})


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SamplingFeatures:
    """What a sampling program can do; `a | b` can do what either can. Each one more is one more compilation.

    Attributes:
        draws: Some rows have a temperature.
        filters: Some of them leave tokens out.
        history_width, num_biases, num_stops: Columns of `Penalties.token_ids`, `bias_ids` and `stop_ids`: powers of
            two, and 0 without the feature.
        num_logprobs: None, 0 or a power of two.
    """

    draws: bool = False
    filters: bool = False
    history_width: int = 0
    num_biases: int = 0
    num_stops: int = 0
    num_logprobs: int | None = None

    def __or__(self, other: "SamplingFeatures") -> "SamplingFeatures":
        logprobs = [n for n in (self.num_logprobs, other.num_logprobs) if n is not None]
        return SamplingFeatures(
            draws=self.draws or other.draws,
            filters=self.filters or other.filters,
            history_width=max(self.history_width, other.history_width),
            num_biases=max(self.num_biases, other.num_biases),
            num_stops=max(self.num_stops, other.num_stops),
            num_logprobs=max(logprobs, default=None),
        )


class SamplingRequest(Protocol):
    """What sampling has to know of a request; `jaxpaged.engine.request.Request` is one."""

    @property
    def params(self) -> SamplingParams: ...  # noqa: D102
    @property
    def prompt_token_ids(self) -> Sequence[int]: ...  # noqa: D102
    @property
    def output_token_ids(self) -> Sequence[int]: ...  # noqa: D102


def features_of(requests: Sequence[SamplingRequest]) -> SamplingFeatures:
    """What these requests need for their next token. O(requests)."""
    draws = filters = False
    width = biases = stops = 0
    logprobs = None
    for request in requests:
        params = request.params
        if params.temperature > 0:
            draws = True
            filters = filters or params.has_filters
        if params.has_penalties:
            width = max(width, len(request.prompt_token_ids) + len(request.output_token_ids))
        if params.logit_bias:
            biases = max(biases, len(params.logit_bias))
        if params.min_new_tokens > len(request.output_token_ids):
            stops = max(stops, len(params.stop_token_ids))
        if params.num_logprobs is not None:
            logprobs = max(logprobs or 0, params.num_logprobs)
    return SamplingFeatures(
        draws=draws,
        filters=filters,
        history_width=bucket(width),
        num_biases=bucket(biases),
        num_stops=bucket(stops),
        num_logprobs=None if logprobs is None else bucket(logprobs),
    )


def make_sampling_batch(
    requests: Sequence[SamplingRequest],
    num_rows: int,
    *,
    num_pending: Sequence[int] | int = 0,
    features: SamplingFeatures | None = None,
    next_ids: np.ndarray | None = None,
) -> SamplingBatch | None:
    """How to sample the next token of each request, or None when all that is wanted is the likeliest.

    O(requests), and O(tokens) of those with penalties. Arrays are numpy's: the caller uploads them.

    Args:
        requests: In batch order.
        num_rows: Rows of the logits, >= len(requests); the rest are padding, and greedy.
        num_pending: Tokens of each request that are known on the device and not yet here: a step that is still running
            will tell. They count in positions; a request with penalties must have none, for its history needs them.
        features: At least what these requests need, by `features_of`; None is exactly that.
        next_ids: `[num_rows]` int32, of `SamplingBatch`, for features with log-probabilities; None is -1 for all.

    Raises:
        ValueError: More requests than rows, or `features` lack something.
    """
    if len(requests) > num_rows:
        raise ValueError(f"`num_rows` must be at least the number of requests, {len(requests)}; got {num_rows}.")
    pending = [num_pending] * len(requests) if isinstance(num_pending, int) else num_pending
    needed = features_of(requests)
    features = features or needed
    if features | needed != features:
        raise ValueError(f"`features` must cover {needed}; got {features}. Join them with `|`.")
    if features == SamplingFeatures():
        return None

    def column(values: Sequence[float], dtype: type, padding: float = 0) -> Any:
        padded = np.full(num_rows, padding, dtype)
        padded[: len(values)] = values
        return padded

    params = [r.params for r in requests]
    num_prompt = [len(r.prompt_token_ids) for r in requests]
    num_known = [n + len(r.output_token_ids) for n, r in zip(num_prompt, requests, strict=True)]
    fields: dict[str, Any] = {"position": column([n + p for n, p in zip(num_known, pending, strict=True)], np.int32)}
    if features.draws:
        fields["temperature"] = column([p.temperature for p in params], np.float32)
        fields["seed"] = column([p.seed for p in params], np.uint32)
    if features.filters:
        # Greedy rows keep all: a filter that nobody asked for could still be slow to find.
        fields["top_k"] = column([min(p.top_k, 2**31 - 1) if p.temperature else 0 for p in params], np.int32)
        fields["top_p"] = column([p.top_p if p.temperature else 1 for p in params], np.float32, 1)
        fields["min_p"] = column([p.min_p for p in params], np.float32)
    if features.num_biases:
        biases = [dict(p.logit_bias) for p in params]
        fields["bias_ids"] = _table([[*bias] for bias in biases], num_rows, features.num_biases)
        values = [[*bias.values()] for bias in biases]
        fields["bias_values"] = _table(values, num_rows, features.num_biases, 0, np.float32)
    if features.num_stops:
        ends = [n + p.min_new_tokens for n, p in zip(num_prompt, params, strict=True)]
        waits = [end > known for end, known in zip(ends, num_known, strict=True)]
        stop_ids = [p.stop_token_ids if waits else () for p, waits in zip(params, waits, strict=True)]
        fields["stop_ids"] = _table(stop_ids, num_rows, features.num_stops)
        fields["min_position"] = column(ends, np.int32)
    if features.num_logprobs is not None:
        fields["next_ids"] = column([], np.int32, -1) if next_ids is None else next_ids
    penalties = None
    if features.history_width:
        assert not any(n for n, p in zip(pending, params, strict=True) if p.has_penalties)
        penalties = Penalties(
            token_ids=_history(requests, num_rows, features.history_width),
            num_prompt=column(num_prompt, np.int32),
            repetition=column([p.repetition_penalty for p in params], np.float32, 1),
            frequency=column([p.frequency_penalty for p in params], np.float32),
            presence=column([p.presence_penalty for p in params], np.float32),
        )
    return SamplingBatch(**fields, penalties=penalties, num_logprobs=features.num_logprobs)


def _history(requests: Sequence[SamplingRequest], num_rows: int, width: int) -> Any:
    table = np.full((num_rows, width), PAD, np.int32)
    for row, request in zip(table, requests, strict=False):
        if request.params.has_penalties:
            num_prompt, num_output = len(request.prompt_token_ids), len(request.output_token_ids)
            row[:num_prompt] = request.prompt_token_ids
            row[num_prompt : num_prompt + num_output] = request.output_token_ids
    return table


def _table(
    rows: Sequence[Sequence[float]], num_rows: int, width: int, padding: float = PAD, dtype: type = np.int32
) -> Any:
    table = np.full((num_rows, width), padding, dtype)
    for row, values in zip(table, rows, strict=False):
        row[: len(values)] = values
    return table


def bucket(n: int) -> int:
    """The smallest power of two that is at least `n`; 0 of 0."""
    return 1 << (int(n) - 1).bit_length() if n else 0  # numpy's integers have no bit_length
