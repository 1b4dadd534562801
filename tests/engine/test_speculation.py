"""Speculation: what n-grams guess, and that guesses of whatever quality change no token and no distribution."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxpaged as jp
from jaxpaged.config import CacheConfig
from jaxpaged.engine import EngineCore, FinishReason, NgramSpeculation, SamplingParams, SchedulerConfig
from jaxpaged.engine.request import Request
from tests.engine.tiny import Stepped

VOCAB_SIZE, NUM_NEW = 7, 12
CACHE = CacheConfig(num_layers=1, num_pages=129, page_size=8, num_kv_heads=1, head_dim=8, dtype="float32")
LIMITS = SchedulerConfig(max_num_seqs=32, max_step_tokens=256, max_model_len=32)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Bigrams:
    """A model whose next token hangs on the last one alone: its logits are a row of a table."""

    table: jax.Array

    def __call__(self, cache: jp.KVCache, batch: jp.Batch) -> tuple[jax.Array, jp.KVCache]:
        """Nothing is written: no token looks back."""
        last = (
            jnp.arange(len(batch.ragged.seq_lens)) if batch.ragged.cu_q_lens is None else batch.ragged.cu_q_lens[1:] - 1
        )
        return self.table[batch.token_ids[last]], cache


class Guesses:
    """Drafts of a user's own: any tokens."""

    num_drafts = 3

    def __init__(self, seed: int):
        self.rng = np.random.default_rng(seed)

    def propose(self, request: Request, limit: int) -> tuple[int, ...]:
        """From none to three."""
        return tuple(self.rng.integers(0, VOCAB_SIZE, min(limit, self.rng.integers(0, 4))).tolist())


@pytest.fixture(scope="module")
def bigrams() -> Bigrams:
    return Bigrams(jnp.asarray(np.random.default_rng(0).standard_normal((VOCAB_SIZE, VOCAB_SIZE)), jnp.float32))


def generate(model, speculation, params: list[SamplingParams], limits: SchedulerConfig = LIMITS):
    """Token ids of a request for each of `params`, from nine zeros, and what the engine counted."""
    engine = Stepped(EngineCore(model, CACHE, limits, speculation=speculation))
    outputs = engine.generate([[0] * 9] * len(params), params)
    assert engine.pages.num_free_pages == CACHE.num_pages - 1
    return [output.token_ids for output in outputs], engine.stats()


def transitions(sentences) -> np.ndarray:
    """`[VOCAB_SIZE, VOCAB_SIZE]`, how often the second followed the first."""
    counts = np.zeros((VOCAB_SIZE, VOCAB_SIZE), int)
    for tokens in sentences:
        np.add.at(counts, ([0, *tokens[:-1]], list(tokens)), 1)
    return counts


@pytest.mark.slow
def test_guesses_leave_the_distribution_as_it_is(bigrams):
    """Each transition as often as it is likely, and a guess stands as often: five deviations of a binomial."""
    temperature = 0.8
    params = [SamplingParams(max_new_tokens=NUM_NEW, temperature=temperature, seed=i) for i in range(1500)]
    sentences, stats = generate(bigrams, Guesses(0), params)
    p = np.asarray(jax.nn.softmax(bigrams.table / temperature))
    counts = transitions(sentences)
    total = counts.sum(1, keepdims=True)
    assert total.sum() == 1500 * NUM_NEW
    assert (abs(counts - p * total) <= 5 * (p * (1 - p) * total) ** 0.5).all()
    # Guesses are uniform, so that one that is looked at stands with probability 1 / VOCAB_SIZE, whatever p is; those
    # behind one that fell are not looked at. Of one, two or three drafts (a third each):
    q = 1 / VOCAB_SIZE
    expected = (3 * q + 2 * q**2 + q**3) / 6
    num = stats.num_drafts
    assert num > 10_000
    assert abs(stats.num_accepted_drafts / num - expected) <= 5 * (expected / num) ** 0.5
    # The draws are the same ones, so the tokens are, too.
    assert generate(bigrams, None, params)[0] == sentences


@pytest.mark.slow
def test_guesses_beside_every_way_to_sample_change_no_token(bigrams):
    """Penalties see the guesses before them, stop tokens end a run of guesses, and a bias can make one stand."""
    kind = SamplingParams(
        max_new_tokens=NUM_NEW,
        min_new_tokens=4,
        stop_token_ids=(2, 5),
        repetition_penalty=1.3,
        frequency_penalty=0.4,
        presence_penalty=-0.5,
        logit_bias={3: 2.5},
        top_k=5,
        top_p=0.9,
        min_p=0.01,
        num_logprobs=2,
    )
    params = [dataclasses.replace(kind, temperature=0.5 * (i % 4), seed=i) for i in range(60)]
    few = dataclasses.replace(LIMITS, max_num_seqs=4)  # few programs
    expected, _ = generate(bigrams, None, params, few)
    actual, stats = generate(bigrams, Guesses(1), params, few)
    assert actual == expected
    assert stats.num_accepted_drafts > 40
    assert {len(tokens) < NUM_NEW for tokens in expected} == {True, False}


def test_guess_whose_logits_are_not_finite_counts_only_where_it_stands(bigrams):
    """Token 6 is followed by NaN. Greedy, it never comes; a guess that says so falls and harms nobody."""
    table = bigrams.table.at[:, 6].set(-20.0).at[6].set(jnp.nan)

    class Six(Guesses):
        def propose(self, request: Request, limit: int) -> tuple[int, ...]:
            return (6,) * min(limit, 2)

    params = [SamplingParams(max_new_tokens=NUM_NEW)] * 2
    expected, _ = generate(Bigrams(table), None, params)
    assert generate(Bigrams(table), Six(0), params)[0] == expected
    # After 1, which follows the prompt, it comes: what the guess that stands gave is told, and then the request ends.
    stands = Bigrams(table.at[0, 1].set(20.0).at[1, 6].set(20.0))
    for speculation in (None, Six(0)):
        engine = Stepped(EngineCore(stands, CACHE, LIMITS, speculation=speculation))
        engine.add_request([0], params[0])
        tokens = []
        while engine.has_unfinished():
            tokens += engine.step()
        assert [t.token_id for t in tokens] == [1, 6, None]
        assert tokens[-1].finish_reason is FinishReason.ERROR
        assert str(tokens[-1].error) == "Request 0: the model's logits after token 3 are not finite."
        assert engine.stats().num_accepted_drafts == (speculation is not None)
        assert engine.pages.num_free_pages == CACHE.num_pages - 1


@pytest.mark.parametrize(
    ("tokens", "limit", "expected"),
    [
        ((1, 2, 3, 4, 5, 1, 2), 9, (3, 4, 5, 1)),  # the run of two; four drafts
        ((1, 2, 3, 4, 5, 1, 2), 2, (3, 4)),
        ((9, 1, 2, 5, 7, 1, 2, 6, 9, 1, 2), 9, (5, 7, 1, 2)),  # three tokens before two, though those came later
        ((1, 2, 5, 1, 2, 6, 1, 2), 9, (6, 1, 2)),  # of equal runs the last
        ((4, 4, 4), 9, (4,)),
        ((1, 2, 3, 2), 9, ()),  # one token is no run
        ((5,), 9, ()),
    ],
)
def test_ngrams_propose_what_followed_the_longest_run(tokens, limit, expected):
    request = Request(request_id=0, prompt_token_ids=tokens[:1], params=SamplingParams(), max_len=40)
    speculation = NgramSpeculation()
    for token in tokens[1:]:  # as a request grows: what it has seen is not read again
        speculation.propose(request, 9)
        request.output_token_ids.append(token)
    assert speculation.propose(request, limit) == expected
    whole = Request(request_id=1, prompt_token_ids=tokens, params=SamplingParams(), max_len=40)
    assert speculation.propose(whole, limit) == expected
