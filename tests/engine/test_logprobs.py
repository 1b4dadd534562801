"""Log-probabilities in outputs, against the log-softmax of the same network in float64."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from jaxpaged.engine import FinishReason, NgramSpeculation, SamplingParams, SchedulerConfig, TokenLogprobs
from jaxpaged.models.llama import Llama
from jaxpaged.paging.store.swap import SwapSpace
from tests.engine.tiny import LIMITS, PROMPTS, make_engine
from tests.models.dense_llama import dense_logits

SAMPLED = SamplingParams(max_new_tokens=9, temperature=1.3)
BOTH = SamplingParams(max_new_tokens=9, num_logprobs=3, prompt_logprobs=4)
EACH = [
    BOTH,
    dataclasses.replace(SAMPLED, num_logprobs=0, seed=1),
    dataclasses.replace(SAMPLED, num_logprobs=4, prompt_logprobs=0),
    SamplingParams(max_new_tokens=9, prompt_logprobs=3),
]


def log_softmax(model: Llama, tokens: list[int]) -> np.ndarray:
    logits = dense_logits(model, tokens)
    logits -= logits.max(-1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def check_output(model, output, params: SamplingParams) -> None:
    """What an output tells about its tokens and its prompt, and that it tells nothing else."""
    prompt = list(output.prompt_token_ids)
    expected = log_softmax(model, [*prompt, *output.token_ids])
    if params.num_logprobs is None:
        assert output.logprobs is None
    else:
        rows = expected[len(prompt) - 1 :]
        assert len(output.logprobs) == len(output.token_ids)
        for told, token_id, row in zip(output.logprobs, output.token_ids, rows[:-1], strict=True):
            check_token(told, token_id, row, params.num_logprobs)
    if params.prompt_logprobs is None:
        assert output.prompt_logprobs is None
    else:
        assert output.prompt_logprobs[0] is None
        assert len(output.prompt_logprobs) == len(prompt)
        for told, token_id, row in zip(output.prompt_logprobs[1:], prompt[1:], expected, strict=False):
            check_token(told, token_id, row, params.prompt_logprobs)


def check_token(told: TokenLogprobs, token_id: int, expected: np.ndarray, num_top: int) -> None:
    assert told.token_id == token_id
    np.testing.assert_allclose(told.logprob, expected[token_id], rtol=0, atol=2e-5)
    values = [value for _, value in told.top]
    np.testing.assert_allclose(values, np.sort(expected)[::-1][:num_top], rtol=0, atol=2e-5)
    np.testing.assert_allclose(values, expected[[i for i, _ in told.top]], rtol=0, atol=2e-5)
    assert values == sorted(values, reverse=True)


@pytest.mark.parametrize(
    "options",
    [
        {},
        pytest.param({"limits": dataclasses.replace(LIMITS, max_step_tokens=7)}, marks=pytest.mark.slow),
        pytest.param({"num_pages": 16}, marks=pytest.mark.slow),
        {"num_pages": 16, "swap": SwapSpace(40)},
        pytest.param({"speculation": NgramSpeculation(min_ngram=1)}, marks=pytest.mark.slow),  # and below
        pytest.param({"prefix_caching": False}, marks=pytest.mark.slow),
    ],
    ids=["together", "chunked", "preempted", "swapped", "speculating", "uncached"],
)
def test_generate_with_logprobs_tells_those_of_the_model(model, options):
    """A request that asks for none stands beside."""
    prompts, params = [*PROMPTS, PROMPTS[1][::-1]], [*EACH, SamplingParams(max_new_tokens=9)]
    engine = make_engine(model, **options)
    outputs = engine.generate(prompts, params)
    for output, p in zip(outputs, params, strict=True):
        check_output(model, output, p)
    free = options.get("num_pages", 80) - 1
    assert engine.pages.num_free_pages == free
    assert (engine.stats().num_preemptions > 0) == (free == 15)


def test_generate_with_logprobs_draws_the_tokens_that_come_without(model):
    plain = [dataclasses.replace(p, num_logprobs=None, prompt_logprobs=None) for p in EACH]
    outputs, expected = (make_engine(model).generate(PROMPTS, params) for params in (EACH, plain))
    assert [o.token_ids for o in outputs] == [o.token_ids for o in expected]
    assert all(o.logprobs is None and o.prompt_logprobs is None for o in expected)


def test_generate_of_one_at_a_time_has_more_rows_than_requests(model):
    engine = make_engine(model, limits=dataclasses.replace(LIMITS, max_num_seqs=1))
    params = dataclasses.replace(BOTH, prompt_logprobs=70)  # more than there are tokens
    for output in engine.generate(PROMPTS[1:3], params):
        check_output(model, output, params)
    assert max(program.num_rows for program in engine.stats().programs) == 8


def test_generate_with_greedy_logprobs_names_the_likeliest(model):
    engine = make_engine(model)
    params = SamplingParams(max_new_tokens=9, num_logprobs=2)
    for output in engine.generate(PROMPTS, params):
        check_output(model, output, params)
        assert [told.top[0][0] for told in output.logprobs] == list(output.token_ids)


def test_generate_with_accepted_drafts_tells_logprobs_of_each(model):
    params = SamplingParams(max_new_tokens=24, num_logprobs=2, prompt_logprobs=1)
    engine = make_engine(model, speculation=NgramSpeculation(min_ngram=1))
    prompts = [[3, 4, 5, 6] * 6, [7] * 20]
    for output in engine.generate(prompts, params):
        check_output(model, output, params)
    assert engine.stats().num_accepted_drafts > 0


def test_generate_with_prompt_logprobs_takes_no_prefix_hits_and_leaves_pages_for_others(model):
    engine = make_engine(model)
    for params in (SamplingParams(max_new_tokens=2), BOTH, BOTH):
        [output] = engine.generate([PROMPTS[2]], params)
        check_output(model, output, params)
        assert engine.stats().num_hit_tokens == 0
    engine.generate([PROMPTS[2]], dataclasses.replace(BOTH, prompt_logprobs=None))
    assert engine.stats().num_hit_tokens == 36


def test_generate_without_logprobs_runs_no_program_that_has_them(model):
    engine = make_engine(model)
    engine.generate(PROMPTS, EACH)
    before = dict(engine.stats().programs)
    engine.generate(PROMPTS, SamplingParams(max_new_tokens=9))
    ran = [program for program, count in engine.stats().programs.items() if count > before.get(program, 0)]
    assert ran
    assert all(program.sampling.num_logprobs is None for program in ran)


@pytest.mark.slow
def test_warmup_with_logprobs_compiles_all_that_steps_need(model):
    limits = dataclasses.replace(LIMITS, max_num_seqs=2, max_step_tokens=8)
    engine = make_engine(model, limits=limits)
    engine.warmup([BOTH])
    before = set(engine.runner.programs)
    engine.generate([*PROMPTS, PROMPTS[1]], [BOTH, BOTH, BOTH, BOTH, SamplingParams(max_new_tokens=9)])
    assert set(engine.runner.programs) == before


def test_step_by_hand_yields_logprobs_with_each_token_and_those_of_the_prompt_with_the_first(model):
    engine = make_engine(model)
    engine.add_request(PROMPTS[2], BOTH)
    tokens = []
    while engine.has_unfinished():
        tokens += engine.step()
    [output] = make_engine(model).generate([PROMPTS[2]], BOTH)
    assert tuple(t.logprobs for t in tokens) == output.logprobs
    assert [t.prompt_logprobs for t in tokens] == [output.prompt_logprobs] + [None] * 8


@pytest.mark.parametrize("num_steps", [2, 6])
def test_abort_yields_those_of_the_prompt_unless_they_came_with_a_token(model, num_steps):
    engine = make_engine(model)
    request_id = engine.add_request(PROMPTS[1], BOTH)
    tokens = [token for _ in range(num_steps) for token in engine.step()]
    engine.abort(request_id)
    last = (tokens + engine.step())[-1]
    assert last.finish_reason is FinishReason.ABORT
    [output] = make_engine(model).generate([PROMPTS[1]], BOTH)
    told = last.prompt_logprobs
    assert (told is None) == bool(tokens)
    assert told is None or 1 < len(told) < len(PROMPTS[1])
    assert told is None or told == output.prompt_logprobs[: len(told)]


def test_each_request_of_a_step_gets_as_many_prompt_logprobs_as_it_asks_for(model):
    each = [SamplingParams(max_new_tokens=2, prompt_logprobs=n) for n in (0, 3)]
    for output, params in zip(make_engine(model).generate([[1, 2, 3], [4, 5, 6]], each), each, strict=True):
        check_output(model, output, params)


class NotFinite:
    """A model whose logits after one token are not finite."""

    compiles_itself, vocab_size, max_position = True, 64, 96

    def __init__(self, model: Llama, token_id: int):
        self.model, self.token_id = model, token_id

    def __call__(self, cache, batch):
        logits, cache = self.model(cache, batch)
        ends = (
            np.arange(len(batch.ragged.seq_lens))
            if batch.ragged.cu_q_lens is None
            else np.asarray(batch.ragged.cu_q_lens)[1:] - 1
        )
        hit = np.asarray(batch.token_ids)[ends] == self.token_id
        return jnp.where(hit[:, None], jnp.nan, logits), cache


@pytest.mark.slow
def test_prompt_logprobs_that_are_not_finite_fail_their_request_alone(model):
    params = dataclasses.replace(BOTH, logit_bias={63: float("-inf")})
    engine = make_engine(NotFinite(model, 63))
    bad, good = engine.generate([[1, 2, 63, 4, 5], [1, 2, 3, 4, 5]], params)
    assert bad.finish_reason is FinishReason.ERROR
    assert "logits after token 3 are not finite" in str(bad.error)
    assert len(bad.prompt_logprobs) == 3
    check_output(model, good, params)
    assert engine.pages.num_free_pages == 79
    assert engine.pages.prefix.match([1, 2, 63, 4, 5]) == 0


def test_prompt_logprobs_that_are_not_finite_fail_all_samples_of_the_prompt(model):
    """Others, forked from one whose chunk nobody had read yet, would end without them."""
    params = dataclasses.replace(BOTH, n=3, temperature=1.0, logit_bias={63: float("-inf")})
    engine = make_engine(NotFinite(model, 63), limits=dataclasses.replace(LIMITS, max_step_tokens=4))
    *bad, good = engine.generate([[1, 2, 4, 5, 6, 63, 7], [1, 2, 3]], [params, dataclasses.replace(params, n=1)])
    assert [output.finish_reason for output in bad] == [FinishReason.ERROR] * 3
    check_output(model, good, dataclasses.replace(params, n=1))
    assert engine.pages.num_free_pages == 79


def test_warmup_of_logprobs_alone_compiles_also_what_asks_for_none(model):
    engine = make_engine(model, limits=SchedulerConfig(max_num_seqs=2, max_step_tokens=8, max_model_len=96))
    engine.warmup([SamplingParams(num_logprobs=1)], greedy=False)
    programs = set(engine.runner.programs)
    engine.generate(PROMPTS[:2], [SamplingParams(max_new_tokens=6), SamplingParams(max_new_tokens=3, num_logprobs=1)])
    assert set(engine.runner.programs) == programs
