import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpaged.engine.sampling import SamplingBatch, keep_likeliest, sample

VOCAB = 37


def logits_of(num_seqs: int, seed: int = 0) -> jnp.ndarray:
    return jnp.asarray(3 * np.random.default_rng(seed).standard_normal((num_seqs, VOCAB)), jnp.float32)


def params_of(num_seqs: int, **change) -> SamplingBatch:
    fields = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "seed": 0, "position": 0} | change
    dtypes = {"temperature": jnp.float32, "top_k": jnp.int32, "top_p": jnp.float32, "seed": jnp.uint32}
    arrays = {k: jnp.broadcast_to(jnp.asarray(v, dtypes.get(k, jnp.int32)), (num_seqs,)) for k, v in fields.items()}
    return SamplingBatch(**arrays)


def kept_by_sorting(logits: np.ndarray, top_k: int, top_p: float) -> np.ndarray:
    """What top-k and then top-p keep, by a sort: tokens while the probability before them is below p."""
    kept = np.zeros(VOCAB, bool)
    order = np.argsort(-logits, kind="stable")[: top_k or VOCAB]
    p = np.exp(logits[order] - logits.max())
    before = np.concatenate([[0], np.cumsum(p / p.sum())[:-1]])
    kept[order if top_p == 1 else order[before < top_p]] = True
    return kept


@pytest.mark.parametrize("top_k", [0, 1, 5, VOCAB, 1000])
@pytest.mark.parametrize("top_p", [1e-6, 0.3, 0.9, 1.0])
def test_keep_likeliest_equals_a_sort(top_k, top_p):
    logits = logits_of(20, seed=top_k)
    kept = jax.jit(keep_likeliest)(logits, jnp.full(20, top_k), jnp.full(20, top_p, jnp.float32))
    expected = [kept_by_sorting(np.asarray(row), min(top_k, VOCAB), top_p) for row in logits]
    np.testing.assert_array_equal(kept, expected)


def test_keep_likeliest_of_extreme_logits_keeps_the_best():
    logits = jnp.array([[-0.0, 0.0, -1e30, -jnp.inf], [-5.0, -4.0, -3.0, -jnp.inf]])
    kept = keep_likeliest(logits, jnp.array([1, 2]), jnp.array([1.0, 1.0]))
    assert kept.tolist() == [[False, True, False, False], [False, True, True, False]]


def test_sample_greedy_takes_the_largest_logit():
    logits = logits_of(4)
    np.testing.assert_array_equal(sample(logits, None), np.argmax(logits, -1))
    np.testing.assert_array_equal(sample(logits, params_of(4, temperature=0.0)), np.argmax(logits, -1))


def test_sample_of_one_row_is_the_same_in_any_batch():
    logits = logits_of(6)
    whole = sample(logits, params_of(6, seed=jnp.arange(6), position=jnp.arange(6) + 10))
    alone = [int(sample(logits[i : i + 1], params_of(1, seed=i, position=i + 10)).token_ids[0]) for i in range(6)]
    assert whole.tolist() == alone


def test_sample_mixed_batch_keeps_greedy_rows_greedy():
    logits = jnp.tile(logits_of(1), (64, 1))
    temperature = jnp.where(jnp.arange(64) % 2, 5.0, 0.0)
    tokens = np.asarray(sample(logits, params_of(64, temperature=temperature, seed=jnp.arange(64))))
    assert set(tokens[::2]) == {int(np.argmax(logits[0]))}
    assert len(set(tokens[1::2])) > 5


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"), [(1.0, 0, 1.0), (0.7, 0, 1.0), (1.5, 6, 1.0), (1.0, 0, 0.8)]
)
def test_sample_draws_follow_the_distribution(temperature, top_k, top_p):
    draws = 20_000
    row = np.asarray(logits_of(1, seed=5)[0], np.float64) / temperature
    kept = kept_by_sorting(row, top_k, top_p)
    p = np.where(kept, np.exp(row - row.max()), 0)
    p /= p.sum()
    params = params_of(draws, temperature=temperature, top_k=top_k, top_p=top_p, position=jnp.arange(draws))
    tokens = jax.jit(sample)(jnp.tile(logits_of(1, seed=5), (draws, 1)), params)
    counts = np.bincount(np.asarray(tokens), minlength=VOCAB)
    assert not counts[~kept].any()
    expected = draws * p[kept]
    # Chi-squared has mean n - 1 and variance 2 (n - 1): six deviations are one in a billion, and the seed is fixed.
    freedom = kept.sum() - 1
    assert ((counts[kept] - expected) ** 2 / expected).sum() < freedom + 6 * (2 * freedom) ** 0.5


def test_sample_with_another_seed_or_position_draws_anew():
    logits = jnp.zeros((1, VOCAB))
    draws = {int(sample(logits, params_of(1, seed=s, position=p)).token_ids[0]) for s in range(5) for p in range(5)}
    assert len(draws) > 10


def test_sample_returns_int32():
    chex.assert_type([sample(logits_of(2), None), sample(logits_of(2), params_of(2))], jnp.int32)
