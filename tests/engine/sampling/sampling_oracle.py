"""Sampling one row at a time in float64 numpy, written from the definitions, and random requests to try it on."""

import dataclasses
from collections import Counter

import numpy as np

from jaxpaged.engine.sampling.batch import SamplingBatch, make_sampling_batch
from jaxpaged.engine.sampling.params import SamplingParams, SamplingRow


@dataclasses.dataclass
class Row:
    """What sampling knows of a request."""

    params: SamplingParams
    prompt_token_ids: tuple[int, ...] = (1,)
    output_token_ids: list[int] = dataclasses.field(default_factory=list)
    num_pending: int = 0

    def in_seat(self, seat: int) -> SamplingRow:
        """The same as the package has it."""
        num_prompt = len(self.prompt_token_ids)
        num_tokens = num_prompt + len(self.output_token_ids) + self.num_pending
        return SamplingRow(self.params, num_prompt, num_tokens, seat if self.params.has_penalties else -1)


def make_batch(rows: list[Row], num_rows: int, **options) -> SamplingBatch | None:
    """`make_sampling_batch` of these rows; row i has seat i."""
    return make_sampling_batch([row.in_seat(i) for i, row in enumerate(rows)], num_rows, **options)


def make_counts(rows: list[Row], vocab_size: int) -> np.ndarray:
    """The counts of `jaxpaged.engine.sampling.counts`, by their definition."""
    counts = np.zeros((len(rows), vocab_size), np.int32)
    for seat, row in zip(counts, rows, strict=True):
        seat[list(row.prompt_token_ids)] = 1
        np.add.at(seat, row.output_token_ids, 2)
    return counts


def processed_logits(logits: np.ndarray, row: Row) -> np.ndarray:
    """Bans, bias, repetition, frequency, presence."""
    x, p = np.array(logits, np.float64), row.params
    if len(row.output_token_ids) < p.min_new_tokens:
        for token in p.stop_token_ids:
            x[token] = -np.inf
    for token, bias in p.logit_bias:
        x[token] += bias
    for token in {*row.prompt_token_ids, *row.output_token_ids}:
        x[token] = x[token] / p.repetition_penalty if x[token] > 0 else x[token] * p.repetition_penalty
    for token, count in Counter(row.output_token_ids).items():
        x[token] -= p.frequency_penalty * count + p.presence_penalty
    return x


def probabilities(logits: np.ndarray, row: Row) -> np.ndarray:
    """Of each token to be drawn."""
    p = row.params
    x = processed_logits(logits, row)
    if p.temperature == 0:
        return np.eye(len(x))[x.argmax()]
    x /= p.temperature
    order = np.argsort(-x, kind="stable")[: p.top_k or None]
    weights = np.exp(x[order] - x.max())
    before = np.concatenate([[0], np.cumsum(weights / weights.sum())[:-1]])
    kept = (before < p.top_p) & (weights >= p.min_p)
    drawn = np.zeros(len(x))
    drawn[order[kept]] = weights[kept] / weights[kept].sum()
    return drawn


def random_rows(rng: np.random.Generator, num_rows: int, vocab_size: int) -> list[Row]:
    """Requests of every kind: each feature is used by about half of them."""

    def maybe(value, otherwise):
        return value if rng.random() < 0.5 else otherwise

    def tokens(most: int) -> list[int]:
        return [int(t) for t in rng.integers(0, vocab_size, rng.integers(1, most))]

    rows = []
    for _ in range(num_rows):
        output = maybe(tokens(20), [])
        params = SamplingParams(
            temperature=maybe(float(rng.uniform(0.3, 2)), 0.0),
            top_k=maybe(int(rng.integers(1, vocab_size)), 0),
            top_p=maybe(float(rng.uniform(0.3, 1)), 1.0),
            min_p=maybe(float(rng.uniform(0, 0.2)), 0.0),
            repetition_penalty=maybe(float(rng.uniform(0.7, 2)), 1.0),
            frequency_penalty=maybe(float(rng.uniform(-1, 2)), 0.0),
            presence_penalty=maybe(float(rng.uniform(-1, 2)), 0.0),
            logit_bias=maybe({t: float(rng.uniform(-5, 5)) for t in tokens(6)}, {}),
            min_new_tokens=maybe(10, 0),
            stop_token_ids=maybe(tuple(tokens(5)), ()),
            seed=int(rng.integers(2**32)),
            num_logprobs=maybe(int(rng.integers(0, 5)), None),
        )
        params.check(vocab_size)
        rows.append(Row(params=params, prompt_token_ids=tuple(tokens(30)), output_token_ids=output))
    return rows
