"""Speculation: accepted drafts are the tokens that come without drafts, and stand as often as they are likely."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpaged.engine.request import SamplingParams
from jaxpaged.engine.sampling import accept_drafts, append_tokens, process, sample
from jaxpaged.engine.sampling_batch import PAD, SamplingFeatures, make_sampling_batch
from tests.engine.sampling_oracle import Row, probabilities, processed_logits, random_rows

VOCAB, NUM_DRAFTS = 23, 4
FEATURES = SamplingFeatures(draws=True, filters=True, history_width=64, num_biases=8, num_stops=4, num_logprobs=4)
compiled_sample, compiled_accept = jax.jit(sample), jax.jit(accept_drafts)


def next_logits(tokens: list[int]) -> np.ndarray:
    """A model whose next token hangs on all tokens before it, and is rather sure."""
    rng = np.random.default_rng([len(tokens), *tokens])
    return (4 * rng.standard_normal(VOCAB)).astype(np.float32)


def one_by_one(rows: list[Row], num_new: int) -> list[list[int]]:
    """Without speculation."""
    rows = [dataclasses.replace(r, output_token_ids=list(r.output_token_ids)) for r in rows]
    for _ in range(num_new):
        logits = jnp.stack([next_logits([*r.prompt_token_ids, *r.output_token_ids]) for r in rows])
        batch = make_sampling_batch(rows, len(rows), features=FEATURES)
        for row, token in zip(rows, compiled_sample(logits, batch).token_ids.tolist(), strict=True):
            row.output_token_ids.append(token)
    return [r.output_token_ids[-num_new:] for r in rows]


def logits_after(rows: list[Row], drafts: np.ndarray) -> jnp.ndarray:
    return jnp.stack(
        [
            jnp.stack([next_logits([*r.prompt_token_ids, *r.output_token_ids, *d[:j]]) for j in range(len(d) + 1)])
            for r, d in zip(rows, drafts.tolist(), strict=True)
        ]
    )


@pytest.mark.parametrize("seed", range(6))
def test_accept_drafts_gives_the_tokens_of_one_by_one(seed):
    """With every feature mixed, greedy rows among them: drafts right for 0 to 4 tokens, then wrong; some not drafts."""
    rng = np.random.default_rng(seed)
    rows = random_rows(rng, 12, VOCAB)
    expected = np.array(one_by_one(rows, NUM_DRAFTS + 1))
    drafts = expected[:, :-1].copy()
    num_right = rng.integers(0, NUM_DRAFTS + 1, 12)
    for row, right in zip(drafts, num_right, strict=True):
        row[right:] = (row[right:] + rng.integers(1, VOCAB)) % VOCAB
    num_drafts = rng.integers(0, NUM_DRAFTS + 1, 12)
    out = compiled_accept(
        logits_after(rows, drafts), drafts, num_drafts, make_sampling_batch(rows, 12, features=FEATURES)
    )
    np.testing.assert_array_equal(out.num_accepted, np.minimum(num_right, num_drafts))
    assert out.is_finite.all()
    for row, tokens, num in zip(out.token_ids.tolist(), expected.tolist(), out.num_accepted.tolist(), strict=True):
        assert row[: num + 1] == tokens[: num + 1]
    assert (expected[:, 0] >= 0).all()
    assert {r.params.temperature > 0 for r in rows} == {True, False}


def test_accept_drafts_greedy_accepts_while_the_draft_is_the_likeliest():
    logits = jnp.eye(5)[jnp.array([[1, 2, 3], [1, 2, 3], [1, 2, 3], [1, 2, 3]])]
    drafts = jnp.array([[1, 2], [1, 0], [0, 2], [1, 2]])
    out = compiled_accept(logits, drafts, jnp.array([2, 2, 2, 1]), None)
    assert out.num_accepted.tolist() == [2, 1, 0, 1]
    assert [t[: n + 1] for t, n in zip(out.token_ids.tolist(), out.num_accepted.tolist(), strict=True)] == [
        [1, 2, 3],
        [1, 2],
        [1],
        [1, 2],
    ]
    assert out.logprobs is None


def test_accept_drafts_of_no_drafts_is_sample():
    rows = random_rows(np.random.default_rng(3), 8, VOCAB)
    logits = jnp.asarray(np.random.default_rng(3).standard_normal((8, VOCAB)), jnp.float32)
    batch = make_sampling_batch(rows, 8, features=FEATURES)
    out = compiled_accept(logits[:, None], jnp.zeros((8, 0), jnp.int32), jnp.zeros(8, jnp.int32), batch)
    alone = compiled_sample(logits, batch)
    assert out.num_accepted.tolist() == [0] * 8
    assert out.token_ids[:, 0].tolist() == alone.token_ids.tolist()
    np.testing.assert_array_equal(out.logprobs.logprobs[:, 0], alone.logprobs.logprobs)
    np.testing.assert_array_equal(out.logprobs.top_ids[:, 0], alone.logprobs.top_ids)


@pytest.mark.parametrize("draft", [0, 3, 6])
def test_accept_drafts_accepts_with_the_probability_of_the_draft_and_else_draws_from_the_rest(draft):
    """Leviathan et al. 2023 for a draft that is certain, in 200,000 draws: five deviations of a binomial."""
    num = 200_000
    logits = np.random.default_rng(1).standard_normal(7).astype(np.float32)
    row = Row(SamplingParams(temperature=0.9, top_p=0.95))
    p = probabilities(logits, row)
    batch = jax.tree.map(lambda x: np.repeat(x, num, axis=0), make_sampling_batch([row], 1))
    batch = dataclasses.replace(batch, seed=np.arange(num, dtype=np.uint32))
    out = compiled_accept(
        jnp.broadcast_to(logits, (num, 2, 7)), jnp.full((num, 1), draft), jnp.ones(num, jnp.int32), batch
    )
    accepted = np.asarray(out.num_accepted) == 1
    tokens = np.asarray(out.token_ids)
    assert abs(accepted.mean() - p[draft]) <= 5 * (p[draft] * (1 - p[draft]) / num) ** 0.5
    rest = np.bincount(tokens[~accepted, 0], minlength=7) / (~accepted).sum()
    expected = np.where(np.arange(7) == draft, 0, p) / (1 - p[draft])
    assert rest[draft] == 0
    assert (abs(rest - expected) <= 5 * (expected * (1 - expected) / (~accepted).sum()) ** 0.5).all()
    if p[draft]:  # the token after an accepted draft is a draw of its own
        after = np.bincount(tokens[accepted, 1], minlength=7) / accepted.sum()
        assert (abs(after - p) <= 5 * (p * (1 - p) / accepted.sum()) ** 0.5).all()


def test_accept_drafts_flags_only_logits_that_made_a_token():
    logits = jnp.eye(5)[jnp.array([[1, 2, 3]] * 4)]
    logits = logits.at[0, 2, 4].set(jnp.nan).at[1, 2, 4].set(jnp.nan).at[2, 0].set(jnp.inf)
    out = compiled_accept(logits, jnp.array([[1, 2], [0, 2], [1, 2], [1, 2]]), jnp.full(4, 2), None)
    assert out.is_finite.tolist() == [False, True, False, True]


def test_accept_drafts_of_another_width_raises():
    with pytest.raises(ValueError, match=r"`drafts` must have shape \(num_seqs, num_queries - 1\) = \(2, 2\); got"):
        accept_drafts(jnp.zeros((2, 3, 5)), jnp.zeros((2, 3), jnp.int32), jnp.zeros(2, jnp.int32), None)


def test_append_tokens_equals_a_history_that_had_them():
    """What a step that still runs will tell joins the history on the device; PAD is nobody's token."""
    params = SamplingParams(frequency_penalty=0.5, presence_penalty=0.2, repetition_penalty=1.4)
    before = [Row(params, (1, 2), [3, 3]), Row(params, (4,), [])]
    after = [Row(params, (1, 2), [3, 3, 5]), Row(params, (4,), [])]
    batch = make_sampling_batch(before, 2, num_pending=[1, 0], features=FEATURES)
    assert batch.position.tolist() == [5, 1]
    logits = jnp.asarray(np.random.default_rng(0).standard_normal((2, VOCAB)), jnp.float32)
    out = process(logits, append_tokens(batch, jnp.array([[5], [PAD]])))
    np.testing.assert_array_equal(out, process(logits, make_sampling_batch(after, 2, features=FEATURES)))
    expected = [processed_logits(np.asarray(x), row) for x, row in zip(logits, after, strict=True)]
    np.testing.assert_allclose(out, expected, rtol=1e-6)
    plain = make_sampling_batch([Row(SamplingParams(temperature=1.0))], 1)
    assert append_tokens(plain, jnp.array([[5]])) is plain
