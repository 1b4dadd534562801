"""`SamplingBatch`: how each row of a batch is to be sampled, as arrays, and the host code that makes it from rows.

Every feature that no request uses is None, and is then no part of the compiled program. `SamplingFeatures` names the
program: an engine that joins with `|` what its requests need compiles few of them.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Float, Int, UInt

from jaxpaged.engine.sampling.params import SamplingRow

PAD = 2**31 - 1
"""A token id past every vocabulary, and a seat past every other: scatters drop it."""
_MIN_BIASES, _MIN_STOPS = 8, 4


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Penalties:
    """Penalties for tokens that a row's sequence holds. How often it does is counted on the device: see `TokenCounts`.

    Attributes:
        seat: Row of the counts; past the last one for rows without penalties.
        counted: The seat in which the sampled token is counted; past the last one for none.
        recent: Tokens of the sequence that the counts lack; PAD is nothing.
        repetition, frequency, presence: As in `SamplingParams`.
    """

    seat: Int[Array, "num_seqs"]
    counted: Int[Array, "num_seqs"]
    recent: Int[Array, "num_seqs num_recent"]
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
        penalties: Some rows have penalties.
        num_recent, num_biases, num_stops: Columns of `Penalties.recent`, `bias_ids` and `stop_ids`: powers of two, and
            0 without the feature.
        num_logprobs: None, 0 or a power of two.
    """

    draws: bool = False
    filters: bool = False
    penalties: bool = False
    num_recent: int = 0
    num_biases: int = 0
    num_stops: int = 0
    num_logprobs: int | None = None

    @property
    def rung(self) -> "SamplingFeatures":
        """The program that does this in the engine: the least of a few that it compiles, each able to do more.

        The likeliest token; draws; draws with filters; all there is. So a step's program follows from the step alone,
        and few are compiled whatever comes together. Log-probabilities cost a pass over the logits and a sort: they are
        part of a program only where they are wanted.
        """
        logprobs = SamplingFeatures(num_logprobs=self.num_logprobs)
        if self.penalties or self.num_biases or self.num_stops:
            return logprobs | SamplingFeatures(
                draws=True,
                filters=True,
                penalties=True,
                num_recent=self.num_recent,
                num_biases=max(self.num_biases, _MIN_BIASES),
                num_stops=max(self.num_stops, _MIN_STOPS),
            )
        return logprobs | SamplingFeatures(draws=self.draws, filters=self.filters)

    def __or__(self, other: "SamplingFeatures") -> "SamplingFeatures":
        logprobs = [n for n in (self.num_logprobs, other.num_logprobs) if n is not None]
        return SamplingFeatures(
            draws=self.draws or other.draws,
            filters=self.filters or other.filters,
            penalties=self.penalties or other.penalties,
            num_recent=max(self.num_recent, other.num_recent),
            num_biases=max(self.num_biases, other.num_biases),
            num_stops=max(self.num_stops, other.num_stops),
            num_logprobs=max(logprobs, default=None),
        )


def features_of(rows: Sequence[SamplingRow]) -> SamplingFeatures:
    """Return what these rows need. O(rows)."""
    draws = filters = penalties = False
    recent = biases = stops = 0
    logprobs = None
    for row in rows:
        params = row.params
        if params.temperature > 0:
            draws = True
            filters = filters or params.has_filters
        if params.has_penalties:
            penalties = True
            recent = max(recent, len(row.recent))
        if params.logit_bias:
            biases = max(biases, len(params.logit_bias))
        if params.min_new_tokens > row.num_tokens - row.num_prompt:
            stops = max(stops, len(params.stop_token_ids))
        if params.num_logprobs is not None:
            logprobs = max(logprobs or 0, params.num_logprobs)
    return SamplingFeatures(
        draws=draws,
        filters=filters,
        penalties=penalties,
        num_recent=bucket(recent),
        num_biases=bucket(biases),
        num_stops=bucket(stops),
        num_logprobs=None if logprobs is None else bucket(logprobs),
    )


def make_sampling_batch(
    rows: Sequence[SamplingRow],
    num_rows: int,
    *,
    features: SamplingFeatures | None = None,
    next_ids: np.ndarray | None = None,
) -> SamplingBatch | None:
    """Return how to sample the next token of each row, or None when all that is wanted is the likeliest.

    O(rows). Arrays are numpy's: the caller uploads them.

    Args:
        rows: In batch order.
        num_rows: Rows of the logits, >= len(rows); the rest are padding, and greedy.
        features: At least what these rows need, by `features_of`; None is exactly that.
        next_ids: `[num_rows]` int32, of `SamplingBatch`, for features with log-probabilities; None is -1 for all.

    Raises:
        ValueError: More rows than `num_rows`, or `features` lack something.
    """
    if len(rows) > num_rows:
        raise ValueError(f"`num_rows` must be at least the number of rows to sample, {len(rows)}; got {num_rows}.")
    needed = features_of(rows)
    features = features or needed
    if features | needed != features:
        raise ValueError(f"`features` must cover {needed}; got {features}. Join them with `|`.")
    if features == SamplingFeatures():
        return None

    def column(values: Sequence[float], dtype: type, padding: float = 0) -> Any:
        padded = np.full(num_rows, padding, dtype)
        padded[: len(values)] = values
        return padded

    params = [row.params for row in rows]
    num_tokens = [row.num_tokens for row in rows]
    fields: dict[str, Any] = {"position": column(num_tokens, np.int32)}
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
        ends = [row.num_prompt + row.params.min_new_tokens for row in rows]
        waits = [end > n for end, n in zip(ends, num_tokens, strict=True)]
        stop_ids = [p.stop_token_ids if waits else () for p, waits in zip(params, waits, strict=True)]
        fields["stop_ids"] = _table(stop_ids, num_rows, features.num_stops)
        fields["min_position"] = column(ends, np.int32)
    if features.num_logprobs is not None:
        fields["next_ids"] = column([], np.int32, -1) if next_ids is None else next_ids
    penalties = None
    if features.penalties:
        penalties = Penalties(
            seat=column([row.seat if row.seat >= 0 else PAD for row in rows], np.int32, PAD),
            counted=column([row.seat if row.is_counted else PAD for row in rows], np.int32, PAD),
            recent=_table([row.recent for row in rows], num_rows, features.num_recent),
            repetition=column([p.repetition_penalty for p in params], np.float32, 1),
            frequency=column([p.frequency_penalty for p in params], np.float32),
            presence=column([p.presence_penalty for p in params], np.float32),
        )
    return SamplingBatch(**fields, penalties=penalties, num_logprobs=features.num_logprobs)


def _table(
    rows: Sequence[Sequence[float]], num_rows: int, width: int, padding: float = PAD, dtype: type = np.int32
) -> Any:
    table = np.full((num_rows, width), padding, dtype)
    for row, values in zip(table, rows, strict=False):
        row[: len(values)] = values
    return table


def bucket(n: int) -> int:
    """Return the smallest power of two that is at least `n`; 0 of 0."""
    return 1 << (int(n) - 1).bit_length() if n else 0  # numpy's integers have no bit_length
