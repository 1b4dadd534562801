"""Samples of one prompt: computed once, on pages that are forked."""

import dataclasses

import pytest

from jaxpaged.engine import NgramSpeculation, QueueFullError, SamplingParams
from jaxpaged.paging.store.swap import SwapSpace
from tests.engine.tiny import LIMITS, PROMPTS, make_engine, make_front

SAMPLED = SamplingParams(max_new_tokens=9, temperature=1.3)


@pytest.fixture(scope="module")
def solo(model):
    """The tokens of a request alone."""
    engine = make_engine(model, prefix_caching=False)
    return lambda prompt, params: engine.generate([prompt], params)[0].token_ids


@pytest.mark.parametrize(
    "options",
    [
        {"prefix_caching": False},
        pytest.param({"num_pages": 16}, marks=pytest.mark.slow),
        {"num_pages": 16, "swap": SwapSpace(40), "prefix_caching": False},
        pytest.param({"speculation": NgramSpeculation(min_ngram=1)}, marks=pytest.mark.slow),
    ],
    ids=["forked", "preempted", "swapped", "speculating"],
)
def test_generate_of_n_samples_equals_those_of_their_seeds(model, solo, options):
    """Prompts that end with a page, one token into one, and in a page."""
    options = {"num_pages": 80, **options}
    num_pages = options.pop("num_pages")
    params = dataclasses.replace(SAMPLED, n=3, seed=5)
    prompts = [PROMPTS[1][:16], PROMPTS[1], PROMPTS[2][:18]]
    engine = make_engine(model, num_pages, **options)
    outputs = engine.generate([*prompts, PROMPTS[0]], [params] * 3 + [SAMPLED])
    each = [solo(p, dataclasses.replace(SAMPLED, seed=5 + i)) for p in prompts for i in range(3)]
    assert [o.token_ids for o in outputs] == [*each, solo(PROMPTS[0], SAMPLED)]
    assert len(set(each)) == 9
    assert engine.pages.num_free_pages == num_pages - 1
    stats = engine.stats()
    assert (stats.num_preemptions > 0) == (num_pages == 16)
    assert stats.num_forks == 6 or (num_pages == 16 and stats.num_forks > 2)


def test_generate_of_n_samples_computes_the_prompt_once_and_shares_its_pages(model, monkeypatch):
    engine = make_engine(model, prefix_caching=False)
    dispatch, plans = engine.runner.dispatch, []
    monkeypatch.setattr(engine.runner, "dispatch", lambda plan: plans.append(plan) or dispatch(plan))
    params = dataclasses.replace(SAMPLED, n=4, num_logprobs=1, prompt_logprobs=1)
    outputs = engine.generate([PROMPTS[2][:38]], params)
    assert sum(plan.num_new_tokens.sum() for plan in plans) == 38 + 3 + 4 * 8  # the last token is never computed
    assert sum(len(plan.page_copies) for plan in plans) == 3
    assert engine.stats().peak_num_pages == 9 + 4 * 3  # whole pages of the prompt; of each the rest of it, and 9 tokens
    assert all(o.prompt_logprobs == outputs[0].prompt_logprobs for o in outputs)
    assert [len(o.logprobs) for o in outputs] == [9] * 4
    for i, output in enumerate(outputs):
        [alone] = make_engine(model).generate([PROMPTS[2][:38]], params.of_sample(i))
        assert output.token_ids == alone.token_ids
        for ours, theirs in zip(output.logprobs, alone.logprobs, strict=True):
            assert ours.token_id == theirs.token_id
            assert ours.logprob == pytest.approx(theirs.logprob, abs=2e-5)


def test_add_samples_gives_the_tokens_of_each_seed_by_id(model, solo):
    engine = make_engine(model)
    ids = engine.add_samples(PROMPTS[1], dataclasses.replace(SAMPLED, n=2), priority=1)
    tokens = {request_id: [] for request_id in ids}
    while engine.has_unfinished():
        for new in engine.step():
            tokens[new.request_id].append(new.token_id)
    assert [tuple(tokens[i]) for i in ids] == [solo(PROMPTS[1], SAMPLED.of_sample(i)) for i in range(2)]
    assert engine.stats().num_forks == 1


def test_add_samples_that_the_queue_cannot_take_queues_none(model):
    with make_front(model, limits=dataclasses.replace(LIMITS, max_num_waiting=2)) as engine:
        with pytest.raises(QueueFullError, match="0 requests are waiting, 3 are to come"):
            engine.add_samples(PROMPTS[1], dataclasses.replace(SAMPLED, n=3))
        assert len(engine.add_samples(PROMPTS[1], dataclasses.replace(SAMPLED, n=2))) == 2


def test_add_samples_of_more_than_one_is_what_add_request_points_to(model):
    with pytest.raises(ValueError, match="`n` must be 1 here; got 2. `add_samples`"):
        make_front(model).add_request(PROMPTS[1], dataclasses.replace(SAMPLED, n=2))
