"""Steps and requests that fail, are aborted or are late: each ends with its cause, and nothing else does."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import pytest

import jaxpaged as jp
from jaxpaged.engine import EngineCore, FinishReason, SamplingParams
from jaxpaged.paging.store.swap import SwapSpace
from tests.engine.faults import BAD, GOOD, Broken, Failing, FewLetters, Letters, good_params, solo
from tests.engine.tiny import LIMITS, PROMPTS, make_engine

SAMPLED = SamplingParams(max_new_tokens=9, temperature=1.3, top_k=20, top_p=0.95)


def iter_steps(engine):
    while engine.has_unfinished():
        yield from engine.step()


@pytest.mark.parametrize("swap_pages", [pytest.param(0, marks=pytest.mark.slow), 40])
def test_logits_not_finite_of_a_request_preempted_meanwhile_leave_nothing_to_hit(model, swap_pages):
    """Its pages were computed and committed before anybody knew."""
    params = good_params(model)
    limits = dataclasses.replace(LIMITS, max_num_seqs=1)
    swap = SwapSpace(swap_pages) if swap_pages else None
    engine = make_engine(Broken(model, 63, "nan"), limits=limits, swap=swap)
    prompt = [*range(7), 63]
    bad = engine.add_request(prompt, params, priority=1)
    assert engine.step() == []
    good = engine.add_request(GOOD, params)
    tokens = list(iter_steps(engine))
    assert {t.request_id: t.finish_reason for t in tokens if t.finish_reason} == {
        bad: FinishReason.ERROR,
        good: FinishReason.LENGTH,
    }
    assert engine.stats().num_preemptions == 1
    assert engine.pages.prefix.match(prompt) == 0
    assert engine.pages.num_free_pages == 79


def test_logits_not_finite_of_a_request_aborted_meanwhile_leave_nothing_to_hit(model):
    engine = make_engine(Broken(model, 63, "nan"))
    request_id = engine.add_request([*range(7), 63], good_params(model))
    engine.step()
    engine.abort(request_id)
    assert engine.pages.prefix.match([*range(7), 62]) == 4  # nobody knows yet
    [_] = engine.generate([[1, 2]], good_params(model))
    assert engine.pages.prefix.match([*range(7), 62]) == 0


def test_logits_not_finite_inside_a_prompt_end_it_there(model):
    engine = make_engine(Broken(model, 63, "nan"))
    bad = engine.add_request([*range(15), 63, *range(40)], good_params(model))
    good = engine.add_request(GOOD, good_params(model))
    ends = {token.request_id: token for token in iter_steps(engine) if token.finish_reason is not None}
    assert str(ends[bad].error) == f"Request {bad}: the model's logits inside its prompt are not finite."
    assert engine.pages.prefix.match([*range(15), 62]) == 0
    assert ends[good].finish_reason is FinishReason.LENGTH


def test_model_whose_logits_have_a_row_a_token_is_refused(model):
    def every_token(model, cache, batch):
        logits, cache = model(cache, batch)
        return jnp.zeros((len(batch.token_ids), logits.shape[1])), cache

    engine = make_engine(jax.tree_util.Partial(every_token, model))
    with pytest.raises(ValueError, match=r"logits must have shape \(num_seqs, vocab_size\), with 1 sequences here"):
        engine.generate([PROMPTS[1]], SAMPLED)


def test_model_over_a_cache_of_another_shape_is_refused(model):
    config = dataclasses.replace(model.cache_config(num_pages=8), num_layers=1)
    with pytest.raises(ValueError, match=r"^`cache_config` must have .* = \(2, 2, 8\), as .*; got \(1, 2, 8\)"):
        EngineCore(model, config)


SLOW = pytest.mark.slow


@pytest.mark.parametrize("after", [3, *(pytest.param(n, marks=SLOW) for n in (0, 1, 2, 4, 5))])
def test_abort_at_any_step_frees_pages_and_leaves_the_others(model, after):
    engine = make_engine(model)
    ids = [engine.add_request(prompt, SAMPLED) for prompt in PROMPTS]
    got: dict[int, list[int]] = {i: [] for i in ids}
    steps = 0
    while engine.has_unfinished():
        if steps == after:
            engine.abort(ids[1])
            engine.abort(ids[1])
            engine.abort(999)
        for token in engine.step():
            if token.token_id is not None:
                got[token.request_id].append(token.token_id)
        steps += 1
    for i in (0, 2, 3):
        assert tuple(got[ids[i]]) == solo(model, PROMPTS[i], SAMPLED)
    expected = solo(model, PROMPTS[1], SAMPLED)
    assert tuple(got[ids[1]]) == expected[: len(got[ids[1]])] != expected
    assert engine.pages.num_free_pages == 79


def test_add_request_past_its_deadline_fails_by_name(model):
    now = [0.0]
    engine = make_engine(model, clock=lambda: now[0])
    late = engine.add_request(PROMPTS[0], SamplingParams(max_new_tokens=50), deadline=5.0)
    tokens = []
    while engine.has_unfinished():
        tokens += engine.step()
        now[0] += 1
    assert tokens[-1].request_id == late
    assert tokens[-1].finish_reason is FinishReason.DEADLINE
    assert "passed its deadline by 1 s" in str(tokens[-1].error)


@pytest.mark.parametrize("how", ["raise", "nan"])
def test_step_with_a_broken_request_fails_that_one_with_the_cause(model, how):
    params = good_params(model)
    engine = make_engine(Broken(model, 63, how))
    good = engine.add_request(GOOD, params)
    tokens = engine.step() + engine.step()
    bad = engine.add_request(BAD, params)
    alone = how == "nan"  # a step that raises fails all of its requests
    while engine.has_unfinished():
        tokens += engine.step()
    ends = {t.request_id: t for t in tokens if t.finish_reason is not None}
    assert ends[bad].finish_reason is FinishReason.ERROR
    assert re.search("broken" if how == "raise" else "logits after token 3 are not finite", str(ends[bad].error))
    if alone:
        got = tuple(t.token_id for t in tokens if t.request_id == good)
        assert got == solo(model, GOOD, params)
    else:
        assert ends[good].error is ends[bad].error
    assert engine.pages.num_free_pages == 79
    [after] = engine.generate([GOOD], params)  # the engine goes on
    assert after.token_ids == solo(model, GOOD, params)


@pytest.mark.parametrize("how", ["raise", "raise and lose"])
def test_step_that_raises_leaves_requests_that_were_not_in_it(model, how):
    """A second prompt waits for tokens of the step: it is not in the one that fails, and starts over if need be."""
    params = good_params(model)
    limits = dataclasses.replace(LIMITS, max_num_seqs=1)
    engine = make_engine(Broken(model, 63, how), limits=limits)
    bad, good = engine.add_request(BAD, params), engine.add_request(GOOD, params)
    tokens = []
    while engine.has_unfinished():
        tokens += engine.step()
    assert [t.finish_reason for t in tokens if t.request_id == bad] == [FinishReason.ERROR]
    assert tuple(t.token_id for t in tokens if t.request_id == good) == solo(model, GOOD, params)
    assert engine.pages.num_free_pages == 79


def test_step_whose_result_cannot_be_read_fails_its_requests_and_the_rest_start_over(model, monkeypatch):
    """As on a device that runs out of memory: the error comes when the tokens are read, one step later."""
    limits = dataclasses.replace(LIMITS, max_step_tokens=8)
    engine = make_engine(model, limits=limits)
    read, calls = engine.runner.read, []

    def failing(in_flight):
        calls.append(in_flight)
        if len(calls) == 3:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")
        return read(in_flight)

    monkeypatch.setattr(engine.runner, "read", failing)
    first, second = engine.add_request(PROMPTS[3], SAMPLED), engine.add_request(PROMPTS[2][::-1], SAMPLED)
    tokens = []
    while engine.has_unfinished():
        tokens += engine.step()
    ends = {t.request_id: t for t in tokens if t.finish_reason is not None}
    assert ends[first].finish_reason is ends[second].finish_reason is FinishReason.ERROR
    assert "RESOURCE_EXHAUSTED" in str(ends[first].error)
    assert engine.pages.num_free_pages == 79
    assert engine.pages.prefix.match(PROMPTS[2][::-1]) == 0  # what the lost cache held cannot be hit
    [after] = engine.generate([PROMPTS[3]], SAMPLED)
    assert after.token_ids == solo(model, PROMPTS[3], SAMPLED)


def test_generate_where_every_prompt_fails_raises_the_cause(model):
    engine = make_engine(Broken(model, 63, "raise"))
    with pytest.raises(RuntimeError, match="the model is broken"):
        engine.generate([BAD], good_params(model))


def test_generate_with_a_tokenizer_that_fails_ends_that_request_with_the_cause(model):
    expected = [solo(model, prompt, SAMPLED) for prompt in PROMPTS]
    others = [*expected, *PROMPTS]
    token = next(t for t in expected[1] if sum(t in tokens for tokens in others) == 1)
    engine = make_engine(model, tokenizer=Failing(token))
    outputs = engine.generate(PROMPTS, SAMPLED)
    assert [o.finish_reason for o in outputs].count(FinishReason.ERROR) == 1
    assert str(outputs[1].error) == f"no text for {token}"
    assert outputs[1].token_ids == expected[1][: expected[1].index(token) + 1]
    for i in (0, 2, 3):
        assert outputs[i].token_ids == expected[i]
        assert outputs[i].text == Letters().decode(expected[i])
    assert engine.pages.num_free_pages == 79


def test_generate_of_tokens_that_the_tokenizer_does_not_know_gives_replacement_characters(model):
    engine = make_engine(model, tokenizer=FewLetters())
    tokens = dict.fromkeys(range(len(PROMPTS)), "")

    def take(token):
        tokens[token.request_id] += token.text

    outputs = engine.generate(PROMPTS, SAMPLED, on_token=take)
    for i, (output, prompt) in enumerate(zip(outputs, PROMPTS, strict=True)):
        assert output.finish_reason is FinishReason.LENGTH
        assert output.text == tokens[i] == "".join(chr(48 + t) if t < 32 else "\ufffd" for t in output.token_ids)
        assert output.token_ids == solo(model, prompt, SAMPLED)
    assert "\ufffd" in "".join(o.text for o in outputs)


def test_step_without_pages_that_somebody_else_holds_says_so(model):
    engine = make_engine(model, 8)
    engine.pages.add("mine", 20)
    with pytest.raises(jp.OutOfPagesError, match="Request 0, alone in the engine, needs 5 pages; 2 are free"):
        engine.generate([PROMPTS[1]], SamplingParams(max_new_tokens=5))
    assert engine.pages.num_free_pages == 2
