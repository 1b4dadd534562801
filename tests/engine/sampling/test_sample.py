"""Sampling on the device: processors against float64, draws by chi-squared, rows that do not know each other."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpaged.engine.sampling import sample as sample_module
from jaxpaged.engine.sampling.batch import SamplingFeatures, make_sampling_batch
from jaxpaged.engine.sampling.counts import count_sampled, seat_history
from jaxpaged.engine.sampling.params import SamplingParams, SamplingRow
from jaxpaged.engine.sampling.sample import keep_likeliest, process, sample, token_logprobs
from tests.engine.sampling.sampling_oracle import (
    Row,
    make_batch,
    make_counts,
    probabilities,
    processed_logits,
    random_rows,
)

VOCAB = 37
ALL = SamplingFeatures(draws=True, filters=True, penalties=True, num_biases=8, num_stops=4, num_logprobs=4)
compiled = jax.jit(sample)


def logits_of(num_seqs: int, seed: int = 0, vocab_size: int = VOCAB) -> jnp.ndarray:
    return jnp.asarray(3 * np.random.default_rng(seed).standard_normal((num_seqs, vocab_size)), jnp.float32)


def rows_of(num_seqs: int, **changes) -> list[Row]:
    return [Row(SamplingParams(**{"temperature": 1.0, "seed": i} | changes)) for i in range(num_seqs)]


def drawn(logits, rows: list[Row], features: SamplingFeatures | None = None) -> sample_module.Sampled:
    return compiled(logits, make_batch(rows, len(logits), features=features), make_counts(rows, logits.shape[1]))


def kept_by_sorting(logits: np.ndarray, top_k: int, top_p: float) -> np.ndarray:
    return probabilities(logits, Row(SamplingParams(temperature=1.0, top_k=top_k, top_p=top_p))) > 0


# Which tokens are left.


@pytest.mark.parametrize("top_k", [0, 1, 5, VOCAB, 1000])
@pytest.mark.parametrize("top_p", [1e-6, 0.3, 0.9, 1.0])
def test_keep_likeliest_equals_a_sort(top_k, top_p):
    logits = logits_of(20, seed=top_k)
    kept = jax.jit(keep_likeliest)(logits, jnp.full(20, top_k), jnp.full(20, top_p, jnp.float32))
    expected = [kept_by_sorting(np.asarray(row), min(top_k, VOCAB), top_p) for row in logits]
    np.testing.assert_array_equal(kept, expected)


@pytest.mark.parametrize("by", ["keep_likeliest", "_thresholds_by_bits"])
def test_keep_likeliest_of_rows_that_need_many_candidates_equals_a_sort(by, monkeypatch):
    """A row that the first candidates do not settle, beside some that they do; and what a GPU does for all."""
    if by != "keep_likeliest":
        monkeypatch.setattr(sample_module, "_thresholds_by_candidates", getattr(sample_module, by))
    top_k = [0, 300, 40, 0, 999, 256, 257, 0]
    top_p = [0.99, 1.0, 0.7, 0.1, 0.95, 1.0, 0.5, 1.0]
    logits = logits_of(8, vocab_size=1000) / 4
    kept = jax.jit(lambda *args: keep_likeliest(*args))(logits, jnp.array(top_k), jnp.array(top_p))
    expected = [kept_by_sorting(np.asarray(x), k, p) for x, k, p in zip(logits, top_k, top_p, strict=True)]
    np.testing.assert_array_equal(kept, expected)
    assert max(np.sum(expected, axis=-1)[[0, 4]]) > 2 * sample_module._NUM_CANDIDATES


def test_keep_likeliest_of_extreme_logits_keeps_the_best_and_its_ties():
    logits = jnp.array([[-0.0, 0.0, -1e30, -jnp.inf], [-5.0, -4.0, -3.0, -jnp.inf], [2.0, 2.0, 2.0, 1.0]])
    kept = keep_likeliest(logits, jnp.array([1, 2, 2]), jnp.array([1.0, 1.0, 1.0]))
    assert kept.tolist() == [[True, True, False, False], [False, True, True, False], [True, True, True, False]]


# Processors.

CHANGES = {
    "repetition": {"repetition_penalty": 1.7},
    "repetition_below_1": {"repetition_penalty": 0.6},
    "frequency": {"frequency_penalty": 0.4},
    "presence": {"presence_penalty": -0.8},
    "bias": {"logit_bias": {3: 2.5, 30: -np.inf, 36: -1.0}},
    "ban": {"min_new_tokens": 9, "stop_token_ids": (5, 36)},
    "ban_over": {"min_new_tokens": 8, "stop_token_ids": (5, 36)},
    "all": {
        "repetition_penalty": 1.3,
        "frequency_penalty": 0.4,
        "presence_penalty": 0.3,
        "logit_bias": {3: 2.5, 7: -1.0, 5: 9.0},
        "min_new_tokens": 64,
        "stop_token_ids": (5, 36),
    },
}
PROMPT, OUTPUT = (3, 7, 7, 0, 36), [7, 11, 11, 11, 2, 9, 36, 5]


@pytest.mark.parametrize("change", CHANGES)
def test_process_equals_float64(change):
    """Beside a row without any feature, which must come through to the bit."""
    row = Row(SamplingParams(**CHANGES[change]), PROMPT, OUTPUT)
    logits = logits_of(2, seed=1)
    rows = [row, Row(SamplingParams())]
    out = np.asarray(jax.jit(process)(logits, make_batch(rows, 2, features=ALL), make_counts(rows, VOCAB)))
    expected = processed_logits(np.asarray(logits[0]), row)
    np.testing.assert_allclose(out[0], expected, rtol=3e-7, atol=3e-7)
    np.testing.assert_array_equal(out[1], logits[1])
    assert np.array_equal(expected, np.float64(logits[0])) == (change == "ban_over")


@pytest.mark.parametrize("seed", range(3))
def test_process_of_random_requests_equals_float64(seed):
    rows = random_rows(np.random.default_rng(seed), 24, VOCAB)
    logits = logits_of(24, seed=seed)
    out = jax.jit(process)(logits, make_batch(rows, 24, features=ALL), make_counts(rows, VOCAB))
    expected = [processed_logits(np.asarray(x), row) for x, row in zip(logits, rows, strict=True)]
    np.testing.assert_allclose(out, expected, rtol=1e-6, atol=1e-6)


def test_sample_draws_only_what_float64_leaves():
    """Random requests of every kind, 300 draws each: never a token outside, and nearly all tokens inside."""
    rows = random_rows(np.random.default_rng(7), 16, VOCAB)
    logits = logits_of(16, seed=7)
    batch = make_batch(rows, 16, features=ALL)
    seen = [set() for _ in rows]
    for seed in range(300):
        seeded = dataclasses.replace(batch, seed=np.full(16, seed, np.uint32))
        tokens = compiled(logits, seeded, make_counts(rows, VOCAB)).token_ids
        for tokens_of_row, token in zip(seen, tokens.tolist(), strict=True):
            tokens_of_row.add(token)
    for x, row, tokens_of_row in zip(logits, rows, seen, strict=True):
        p = probabilities(np.asarray(x), row)
        assert tokens_of_row <= set(np.flatnonzero(p))
        assert tokens_of_row >= set(np.flatnonzero(p > 0.1))  # missed in 300 draws: one in 5e13


@pytest.mark.parametrize("change", [c for c in CHANGES if c not in ("frequency", "presence", "all")])
@pytest.mark.parametrize("warp", [{}, {"top_k": 5}, {"top_p": 0.7}, {"min_p": 0.1}, {"top_k": 9, "top_p": 0.9}])
def test_sample_probabilities_equal_those_of_transformers(change, warp):
    """What can be drawn, and how likely. It has no frequency and presence penalties."""
    torch = pytest.importorskip("torch", reason="needs the package torch")
    transformers = pytest.importorskip("transformers", reason="needs the package transformers")
    row = Row(SamplingParams(temperature=0.8, **warp, **CHANGES[change]), PROMPT, OUTPUT)
    p, logits = row.params, logits_of(1, seed=2)
    ids, length = torch.tensor([[*PROMPT, *OUTPUT]]), len(PROMPT)
    stop = list(p.stop_token_ids)
    processors = [
        *([transformers.MinNewTokensLengthLogitsProcessor(length, p.min_new_tokens, stop)] if stop else []),
        *([transformers.SequenceBiasLogitsProcessor({(t,): b for t, b in p.logit_bias})] if p.logit_bias else []),
        transformers.RepetitionPenaltyLogitsProcessor(p.repetition_penalty),
        transformers.TemperatureLogitsWarper(p.temperature),
        *([transformers.TopKLogitsWarper(p.top_k)] if p.top_k else []),
        *([transformers.TopPLogitsWarper(p.top_p)] if p.top_p < 1 else []),
        *([transformers.MinPLogitsWarper(p.min_p)] if p.min_p else []),
    ]
    theirs = transformers.LogitsProcessorList(processors)(ids, torch.tensor(np.asarray(logits))).softmax(-1).numpy()[0]
    batch = make_batch([row], 1, features=ALL)
    ours = np.asarray(
        sample_module._weights(process(logits, batch, make_counts([row], logits.shape[1])), batch.temperature, batch)
    )[0]
    np.testing.assert_allclose(ours / ours.sum(), theirs, rtol=2e-6, atol=1e-9)
    np.testing.assert_array_equal(ours > 0, theirs > 0)


# Draws.


def chi_squared(counts: np.ndarray, p: np.ndarray) -> float:
    expected = counts.sum() * p
    return float(((counts - expected) ** 2 / expected).sum())


@functools.cache
def compiled_with(lanes: int):
    """Compiled once for each number of lanes, which tracing reads."""
    return jax.jit(lambda *args: sample(*args).token_ids)


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"temperature": 0.7},
        {"temperature": 1.5, "top_k": 6},
        {"top_p": 0.8},
        {"min_p": 0.3},
        {"logit_bias": {4: 2}},
    ],
)
@pytest.mark.parametrize("lanes", [4, 16])
def test_sample_draws_follow_the_distribution(change, lanes, monkeypatch):
    """In 400,000 draws, so closely that one probability 5 % off would fail; 11 tokens are 3 groups of 4, or 1 of 16."""
    monkeypatch.setattr(sample_module, "_LANES", lanes)
    num_draws = 400_000
    logits = logits_of(1, seed=5, vocab_size=11) / 3
    [row] = rows_of(1, **change)
    p = probabilities(np.asarray(logits[0]), row)
    batch = make_batch([row], 1, features=dataclasses.replace(ALL, penalties=False, num_logprobs=None))
    many = jax.tree.map(lambda x: np.repeat(x, num_draws, axis=0), batch)
    many = dataclasses.replace(many, position=np.arange(num_draws, dtype=np.int32))
    tokens = compiled_with(lanes)(jnp.tile(logits, (num_draws, 1)), many)
    counts = np.bincount(np.asarray(tokens), minlength=11)
    assert not counts[p == 0].any()
    kept = p > 0
    # Chi-squared has mean n - 1 and variance 2 (n - 1): six deviations are one in a billion, and the seed is fixed.
    freedom = kept.sum() - 1
    limit = freedom + 6 * (2 * freedom) ** 0.5
    assert chi_squared(counts[kept], p[kept]) < limit
    for token in np.flatnonzero(p > 0.1):
        for error in (0.95, 1.05):
            wrong = p * np.where(np.arange(11) == token, error, 1)
            assert chi_squared(counts[kept], (wrong / wrong.sum())[kept]) > limit


def test_sample_of_a_peaked_row_over_a_whole_vocabulary_is_its_peak():
    """A tail of 50,000 tokens of 1e-9 each, together 5e-5: in 2,000 draws about none of it; and the groups' edges."""
    for peak in (0, 255, 256, 49_151):
        logits = jnp.full((1, 49_152), -20.7).at[0, peak].set(0.0)
        tokens = drawn(jnp.tile(logits, (100, 1)), rows_of(100)).token_ids
        assert set(tokens.tolist()) == {peak}


@pytest.mark.parametrize("temperature", [1e-38, 1e-6])
def test_sample_with_a_tiny_temperature_takes_the_likeliest(temperature):
    logits = logits_of(16)
    tokens = drawn(logits, rows_of(16, temperature=temperature)).token_ids
    np.testing.assert_array_equal(tokens, np.argmax(logits, -1))


def test_sample_with_another_seed_or_position_draws_anew_and_with_the_same_again():
    def draw(seed: int, position: int) -> int:
        row = Row(SamplingParams(temperature=1.0, seed=seed), prompt_token_ids=tuple(range(position)))
        return int(drawn(jnp.zeros((1, VOCAB)), [row]).token_ids[0])

    pairs = [(seed, position) for seed in (0, 1, 2, 2**32 - 1) for position in range(1, 6)]
    draws = [draw(*pair) for pair in pairs]
    assert len(set(draws)) > 10
    assert draws == [draw(*pair) for pair in pairs]


# One row and the rest of its batch.


def test_sample_greedy_takes_the_first_of_the_largest():
    logits = logits_of(6).at[0, 3:9].set(50.0).at[1].set(0.0).at[2].set(-0.0).at[2, 5].set(0.0)
    logits = logits.at[3].set(-jnp.inf).at[3, 9].set(-1e38)
    expected = jnp.argmax(logits, -1).tolist()
    assert compiled(logits, None).token_ids.tolist() == expected
    assert drawn(logits, [Row(SamplingParams())] * 6, ALL).token_ids.tolist() == expected


@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in range(1, 4))])
def test_sample_of_one_row_is_the_same_in_any_batch(seed):
    """Tokens to the bit, log-probabilities to the last place; one row also with no more features than it needs."""
    rows = random_rows(np.random.default_rng(seed), 11, 1000)
    logits = logits_of(16, seed, vocab_size=1000)
    whole = drawn(logits, rows, ALL)
    for i, row in enumerate(rows):
        alone = drawn(logits[i : i + 1], [row], ALL)
        same = jax.tree.map(lambda x, i=i: x[i : i + 1], whole)
        chex.assert_trees_all_equal(alone.token_ids, same.token_ids)
        chex.assert_trees_all_equal(alone.logprobs.top_ids, same.logprobs.top_ids)
        chex.assert_trees_all_close(alone.logprobs, same.logprobs, rtol=3e-7, atol=1e-6)  # of numbers up to 12
    bare = compiled(logits[seed : seed + 1], make_batch([rows[seed]], 1), make_counts([rows[seed]], logits.shape[1]))
    assert bare.token_ids[0] == whole.token_ids[seed]


def test_sample_mixed_batch_keeps_greedy_rows_greedy():
    logits = jnp.tile(logits_of(1), (64, 1))
    rows = [Row(SamplingParams(temperature=5.0 * (i % 2), seed=i)) for i in range(64)]
    tokens = np.asarray(drawn(logits, rows).token_ids)
    assert set(tokens[::2]) == {int(np.argmax(logits[0]))}
    assert len(set(tokens[1::2])) > 5


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("features", [None, ALL])
def test_sample_flags_rows_that_are_not_finite_and_leaves_the_others_alone(bad, features):
    clean = logits_of(8, seed=3)
    dirty = clean.at[2, 5].set(bad).at[6].set(bad)
    rows = random_rows(np.random.default_rng(1), 8, VOCAB) if features else [Row(SamplingParams())] * 8
    a, b = drawn(clean, rows, features), drawn(dirty, rows, features)
    assert a.is_finite.all()
    assert b.is_finite.tolist() == [i not in (2, 6) for i in range(8)]
    good = np.asarray(b.is_finite)
    chex.assert_trees_all_equal(*(jax.tree.map(lambda x: x[good], (s.token_ids, s.logprobs)) for s in (a, b)))
    assert ((b.token_ids >= 0) & (b.token_ids < VOCAB)).all()


@pytest.mark.slow
def test_sample_of_bfloat16_logits_computes_in_float32():
    logits = logits_of(4).astype(jnp.bfloat16)
    rows = rows_of(4, num_logprobs=2, top_p=0.9)
    chex.assert_trees_all_equal(drawn(logits, rows), drawn(logits.astype(jnp.float32), rows))


def test_sample_returns_int32_and_compiles_once_for_all_requests_of_the_same_features():
    chex.clear_trace_counter()
    counted = jax.jit(chex.assert_max_traces(sample, n=1))
    for seed in range(3):
        rows = random_rows(np.random.default_rng(seed), 7, VOCAB)
        out = counted(logits_of(8), make_batch(rows, 8, features=ALL), make_counts(rows, VOCAB))
        chex.assert_type([out.token_ids, out.is_finite, out.logprobs.logprobs], [jnp.int32, jnp.bool_, jnp.float32])


# Log-probabilities.


def test_token_logprobs_equal_float64_and_ignore_what_processing_did():
    logits = logits_of(5).at[:, 7].set(logits_of(5)[:, 8])  # a tie
    x = np.asarray(logits, np.float64)
    expected = x - np.log(np.exp(x).sum(-1, keepdims=True))
    row = Row(SamplingParams(temperature=0.5, num_logprobs=6, logit_bias={0: 50.0}, repetition_penalty=2.0, top_k=1))
    out = drawn(logits, [row] * 5)
    assert out.token_ids.tolist() == [0] * 5
    for logprobs, token in ((out.logprobs, 0), (token_logprobs(logits, jnp.full(5, 0), 8), 0)):
        np.testing.assert_allclose(logprobs.logprobs, expected[:, token], rtol=1e-5)
        order = np.argsort(-expected, axis=-1, kind="stable")[:, :8]  # 6 is asked for, 8 is its bucket
        np.testing.assert_array_equal(logprobs.top_ids, order)
        np.testing.assert_allclose(logprobs.top_logprobs, np.take_along_axis(expected, order, -1), rtol=1e-5)


def test_token_logprobs_of_more_than_the_vocabulary_are_all():
    out = token_logprobs(logits_of(2), jnp.array([1, 2]), 64)
    assert out.top_ids.shape == (2, VOCAB)
    np.testing.assert_allclose(np.exp(out.top_logprobs).sum(-1), 1, rtol=1e-6)
    assert token_logprobs(logits_of(2), jnp.array([1, 2])).top_ids.shape == (2, 0)


# Counts.


def test_counts_of_a_seat_follow_its_history_and_what_is_sampled():
    """What steps count on the device is what a history uploaded anew would say; other seats stay as they are."""
    rng, rows = np.random.default_rng(0), random_rows(np.random.default_rng(1), 5, VOCAB)
    counts = jnp.asarray(rng.integers(0, 9, (7, VOCAB)), jnp.int32)
    before, first = np.array(counts), counts
    for seat, row in enumerate(rows):
        history = np.array([*row.prompt_token_ids, *row.output_token_ids], np.int32)
        counts = seat_history(counts, seat, history, len(row.prompt_token_ids))
    assert first.is_deleted()  # in place: they may be hundreds of MB
    np.testing.assert_array_equal(counts[:5], make_counts(rows, VOCAB))
    params = SamplingParams(presence_penalty=1.0)
    sampling = [SamplingRow(params, 1, 2, 3, (), True), SamplingRow(params, 1, 2, 0, (), False)]
    batch = make_sampling_batch(sampling, 4)
    for token_ids in rng.integers(0, VOCAB, (6, 4)):
        counts = count_sampled(counts, batch.penalties, token_ids)
        rows[3].output_token_ids.append(int(token_ids[0]))
    np.testing.assert_array_equal(counts[:5], make_counts(rows, VOCAB))
    np.testing.assert_array_equal(counts[5:], before[5:])
