"""Beam search against what `transformers` finds: `tests/data/make_beams.py` made the record."""

import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

import jaxpaged as jp
from jaxpaged.engine import Engine, EngineCore, FinishReason, SchedulerConfig
from jaxpaged.engine.beam_scores import BeamParams, BeamScores
from jaxpaged.models.llama import Llama
from jaxpaged.models.loading import load_model
from tests.engine.beam_cases import BUILTIN_OPTIONS, CONFIG, NUM_NEW, OPTIONS, PROMPTS, make_weights
from tests.engine.tiny import Stepped
from tests.models.dense_llama import dense_logits

RECORD = json.loads((Path(__file__).parent.parent / "data/beams.json").read_text("utf-8"))
LIMITS = SchedulerConfig(max_num_seqs=8, max_step_tokens=8, max_model_len=64)
TOLERANCE = 2e-5  # of a score in float32, whose terms differ in rounding


@pytest.fixture(scope="module")
def model() -> Llama:
    return Llama.from_params(CONFIG, make_weights(), dtype=jnp.float32, backend="auto", layer_loop="calls")


def make_engine(model, num_pages: int = 120, limits: SchedulerConfig = LIMITS, **options) -> Stepped:
    """A sequence that no step sees holds the rest of the pool: each size would be compiled."""
    core = EngineCore(model, model.cache_config(num_pages=120, page_size=4), limits, **options)
    if num_pages < 120:
        core.pages.add("elsewhere", (120 - num_pages) * 4)
    return Stepped(core)


def make_front(model, num_pages: int = 120) -> Engine:
    return Engine(model, model.cache_config(num_pages=num_pages, page_size=4), LIMITS)


def tokens_of(found) -> list[list[tuple[int, ...]]]:
    return [[output.token_ids for output in outputs] for outputs in found]


def check_beams(outputs, expected) -> None:
    assert [list(o.token_ids) for o in outputs] == [tokens for tokens, _ in expected]
    np.testing.assert_allclose([o.score for o in outputs], [score for _, score in expected], rtol=TOLERANCE)


@pytest.mark.slow
def test_beam_search_of_every_option_equals_transformers(model):
    """Prompts together, in waves; the record is of each alone."""
    engine = make_engine(model)
    stopped = 0
    for options, expected in zip(OPTIONS, RECORD["tiny"], strict=True):
        found = engine.beam_search(PROMPTS, max_new_tokens=NUM_NEW, **options)
        for outputs, beams in zip(found, expected, strict=True):
            check_beams(outputs, beams)
            for output in outputs:
                is_stopped = output.token_ids[-1] in options["stop_token_ids"]
                assert output.finish_reason is (FinishReason.STOP if is_stopped else FinishReason.LENGTH)
                stopped += is_stopped
        assert engine.pages.num_free_pages == 119
    assert stopped > 50


@pytest.mark.slow
def test_beam_search_of_the_builtin_model_equals_transformers():
    model, tokenizer = load_model()
    config = SchedulerConfig(max_num_seqs=16, max_model_len=128)
    engine = Stepped(EngineCore(model, model.cache_config(num_pages=40, page_size=16), config, tokenizer=tokenizer))
    found = engine.beam_search(RECORD["builtin_prompts"], **BUILTIN_OPTIONS)
    for outputs, beams in zip(found, RECORD["builtin"], strict=True):
        check_beams(outputs, beams)
        assert [o.text for o in outputs] == [tokenizer.decode(tokens) for tokens, _ in beams]
    assert engine.pages.num_free_pages == 39


@pytest.mark.slow
def test_beam_search_scores_are_log_probabilities_in_float64(model):
    found = make_engine(model).beam_search(PROMPTS, num_beams=3, max_new_tokens=6)
    for prompt, outputs in zip(PROMPTS, found, strict=True):
        for output in outputs:
            logits = dense_logits(model, [*prompt, *output.token_ids])[len(prompt) - 1 : -1]
            logits -= logits.max(-1, keepdims=True)
            logprobs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
            total = logprobs[np.arange(6), list(output.token_ids)].sum()
            assert output.score == pytest.approx(total / 6, rel=TOLERANCE)


@pytest.mark.parametrize(
    ("num_pages", "limits"),
    [
        (30, LIMITS),
        pytest.param(120, SchedulerConfig(max_num_seqs=3, max_step_tokens=5, max_model_len=64), marks=pytest.mark.slow),
    ],
    ids=["few pages", "short chunks"],
)
def test_beam_search_in_waves_and_chunks_finds_the_same(model, num_pages, limits):
    options = {"num_beams": 3, "max_new_tokens": 6, "stop_token_ids": [5], "num_return_sequences": 2}
    expected = make_engine(model).beam_search(PROMPTS, **options)
    assert [len(outputs) for outputs in expected] == [2] * 4
    engine = make_engine(model, num_pages, limits)
    found = engine.beam_search(PROMPTS, **options)
    assert tokens_of(found) == tokens_of(expected)
    assert engine.pages.num_free_pages == num_pages - 1
    assert engine.stats().num_steps == sum(engine.stats().programs.values())


def test_beam_search_in_the_fewest_pages_it_may_take_ends_and_in_one_less_is_refused(model):
    """17 tokens are 4 pages for all and a rest; 17 + 12 - 1 tokens are 7, so 3 of each of 5 beams."""
    options = {"num_beams": 5, "max_new_tokens": 12}
    [expected] = make_engine(model).beam_search([PROMPTS[3]], **options)
    engine = make_engine(model, 20)
    [found] = engine.beam_search([PROMPTS[3]], **options)
    assert [o.token_ids for o in found] == [o.token_ids for o in expected]
    assert engine.pages.num_free_pages == 19
    message = "Prompt 1 of 17 tokens, with 5 beams of 12 new ones, needs 19 pages; 18 are free"
    with make_front(model, 19) as front, pytest.raises(jp.OutOfPagesError, match=message):
        front.beam_search([PROMPTS[0], PROMPTS[3]], **options)


def test_beam_search_shares_pages_and_copies_only_those_that_are_written(model, monkeypatch):
    engine = make_engine(model, prefix_caching=False)
    dispatch, sharing, copies = engine.runner.dispatch, [], []

    def watch(plan):
        sharing.append(engine.pages.sharing(plan.request_ids))
        copies.append(len(plan.page_copies))
        return dispatch(plan)

    monkeypatch.setattr(engine.runner, "dispatch", watch)
    engine.beam_search([PROMPTS[3]], num_beams=4, max_new_tokens=12)
    assert all(s.num_held_pages <= 4 + 4 * 3 for s in sharing)
    assert sharing[-1].num_unshared_pages == 4 * 7
    assert engine.stats().peak_num_pages == max(s.num_held_pages for s in sharing)
    assert sum(copies) > 0
    assert all(n <= 3 for n in copies)  # the last of those that share a page writes it in place


def test_beam_search_hits_prefixes_and_leaves_them_for_others(model):
    engine = make_engine(model)
    first = engine.beam_search([PROMPTS[3]], num_beams=3, max_new_tokens=6)
    second = engine.beam_search([PROMPTS[3]], num_beams=3, max_new_tokens=6)
    assert [o.token_ids for o in first[0]] == [o.token_ids for o in second[0]]
    assert engine.stats().num_hit_tokens == 16
    assert engine.generate([PROMPTS[3]])[0].token_ids
    assert engine.stats().num_hit_tokens == 32


@pytest.mark.slow
def test_beam_search_after_warmup_compiles_nothing(model):
    limits = SchedulerConfig(max_num_seqs=4, max_step_tokens=8, max_model_len=64)
    engine = make_engine(model, limits=limits)
    engine.warmup([jp.SamplingParams(num_logprobs=4)], greedy=False)
    before = set(engine.runner.programs)
    engine.beam_search(PROMPTS, num_beams=2, max_new_tokens=6, stop_token_ids=(5,))
    assert set(engine.runner.programs) == before


def test_beam_search_of_one_beam_is_greedy(model):
    engine = make_engine(model)
    greedy = engine.generate(PROMPTS, jp.SamplingParams(max_new_tokens=12))
    found = engine.beam_search(PROMPTS, num_beams=1, max_new_tokens=12)
    assert [outputs[0].token_ids for outputs in found] == [o.token_ids for o in greedy]


def test_beam_search_to_the_end_of_the_context_stops_there(model):
    [outputs] = make_engine(model).beam_search([PROMPTS[3] * 3], num_beams=2, max_new_tokens=1000)
    assert [len(o.token_ids) for o in outputs] == [64 - 51] * 2


class Broken:
    """A model that fails at its fourth step."""

    compiles_itself, vocab_size, max_position = True, 48, 64

    def __init__(self, model: Llama, how: str):
        self.model, self.how, self.num_steps = model, how, 0

    def __call__(self, cache, batch):
        logits, new_cache = self.model(cache, batch)
        self.num_steps += 1
        if self.num_steps == 4 and self.how == "raise":
            new_cache.k_pages.delete()
            raise RuntimeError("the model is broken")
        return logits * (jnp.nan if self.num_steps == 4 else 1), new_cache


@pytest.mark.parametrize(("how", "error"), [("raise", RuntimeError), ("nan", FloatingPointError)])
def test_beam_search_that_fails_gives_all_pages_back_and_the_engine_goes_on(model, how, error):
    config = model.cache_config(num_pages=120, page_size=4)
    engine = Stepped(EngineCore(Broken(model, how), config, LIMITS))
    with pytest.raises(error, match="broken" if how == "raise" else "are not finite"):
        engine.beam_search(PROMPTS, num_beams=4, max_new_tokens=6)
    assert engine.pages.num_free_pages == 119
    found = engine.beam_search(PROMPTS, num_beams=4, max_new_tokens=6)
    expected = make_engine(model).beam_search(PROMPTS, num_beams=4, max_new_tokens=6)
    assert tokens_of(found) == tokens_of(expected)


@pytest.mark.parametrize("num_pages", [120, 20])
def test_beam_search_beside_other_requests_and_through_preemption_finds_the_same(model, num_pages):
    """Beams of two prompts, and requests that decode; in the small pool some are preempted and come back."""
    params = jp.SamplingParams(max_new_tokens=12)
    expected = make_engine(model).beam_search(PROMPTS[2:], num_beams=3, max_new_tokens=12)
    alone = [output.token_ids for output in make_engine(model).generate(PROMPTS, params)]
    engine = make_engine(model, num_pages)
    ids = [engine.add_request(prompt, params) for prompt in PROMPTS]
    assert tokens_of(engine.beam_search(PROMPTS[2:], num_beams=3, max_new_tokens=12)) == tokens_of(expected)
    assert [engine.outputs.finished[i].token_ids for i in ids] == alone
    assert (engine.stats().num_preemptions > 0) == (num_pages == 20)
    assert engine.pages.num_free_pages == num_pages - 1


def test_beam_search_makes_nobody_else_wait(model):
    """A request beside it has a token in each step; the beams sit every second one out, until theirs is known."""
    engine = make_engine(model)
    request_id = engine.add_request(PROMPTS[0], jp.SamplingParams(max_new_tokens=20))
    dispatch, plans = engine.runner.dispatch, []
    engine.runner.dispatch = lambda plan: plans.append(plan) or dispatch(plan)
    engine.beam_search([PROMPTS[1]], num_beams=2, max_new_tokens=8)
    assert all(request_id in plan.request_ids for plan in plans[:20])
    assert (
        sum(len(plan.request_ids) > 1 for plan in plans[:20]) == 1 + 7
    )  # both prompts; then seven tokens more of two beams


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"num_beams": 0}, ValueError, "`num_beams` must be an integer >= 1; got 0"),
        ({"num_beams": 9}, ValueError, "`num_beams` must be at most `max_num_seqs` = 8; got 9"),
        ({"num_beams": 25}, ValueError, "`num_beams` must be at most 24, with a vocabulary of 48 and 0 stop tokens"),
        ({"num_return_sequences": 3}, ValueError, "`num_return_sequences` must be at most `num_beams` = 2; got 3"),
        ({"max_new_tokens": 1.5}, TypeError, "`max_new_tokens` must be an integer >= 1; got 1.5"),
        ({"length_penalty": float("nan")}, ValueError, "`length_penalty` must be from -32 to 32; got nan"),
        ({"length_penalty": "1"}, TypeError, "`length_penalty` must be a number; got '1'"),
        ({"early_stopping": "always"}, ValueError, "`early_stopping` must be True, False or 'never'; got 'always'"),
        ({"stop_token_ids": (48,)}, ValueError, "`stop_token_ids` must name tokens from 0 to 47; got 48"),
        ({"prompts": [[1], []]}, ValueError, "`prompt` must hold at least one token"),
        ({"prompts": [[1] * 64]}, ValueError, "shorter than the context of 64 tokens"),
        ({"prompts": [[48]]}, ValueError, "must be from 0 to vocab_size - 1 = 47; got 48"),
    ],
)
def test_beam_search_with_a_bad_argument_names_it(model, change, error, message):
    with make_front(model) as engine, pytest.raises(error, match=message):
        engine.beam_search(**{"prompts": PROMPTS, "num_beams": 2, **change})


def test_beam_scores_keep_finished_sentences_that_nothing_running_can_beat():
    """By hand: two beams, token 0 stops."""
    scores = BeamScores(BeamParams(num_beams=2, max_new_tokens=9, stop_token_ids=(0,)), 9)
    assert not scores.is_done
    going = scores.advance(np.array([[0, 1, 2, 3]]), np.log([[0.5, 0.3, 0.1, 0.05]]).astype(np.float32))
    assert going == ((0, 1), (0, 2))
    assert [s.token_ids for s in scores.finished] == [(0,)]
    logprobs = np.log([[0.9, 0.05, 0.03, 0.02], [0.4, 0.3, 0.2, 0.1]]).astype(np.float32)
    # The likeliest are 0.27 and 0.04, which stop; then 0.03 and 0.02, which go on.
    going = scores.advance(np.array([[0, 1, 2, 3], [0, 1, 2, 3]]), logprobs)
    assert [s.token_ids for s in scores.finished] == [(1, 0), (0,)]
    assert scores.finished[0].score == pytest.approx(np.log(0.27) / 2)
    assert scores.finished[1].score == pytest.approx(np.log(0.5))
    assert scores.is_done
    assert going == ()
