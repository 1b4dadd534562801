"""What `generate` gives, alone and together, with every feature that must not change a token."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxpaged.engine import EngineCore, FinishReason, NgramSpeculation, SamplingParams, SchedulerConfig
from jaxpaged.models.llama import Llama
from jaxpaged.paging.store.swap import SwapSpace
from tests.engine.faults import solo
from tests.engine.tiny import CONFIG, LIMITS, PROMPTS, Stepped, make_engine

SAMPLED = SamplingParams(max_new_tokens=9, temperature=1.3, top_k=20, top_p=0.95)


@pytest.mark.parametrize("params", [SamplingParams(max_new_tokens=9), SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("num_pages", [80, 16])
def test_generate_together_equals_one_by_one(model, params, num_pages):
    """In one batch, in chunks, and with a pool so small that requests are preempted and start over."""
    engine = make_engine(model, num_pages)
    each = [dataclasses.replace(params, seed=i) for i in range(len(PROMPTS))]
    outputs = engine.generate(PROMPTS, each)
    assert (engine.stats().num_preemptions > 0) == (num_pages == 16)
    for prompt, p, output in zip(PROMPTS, each, outputs, strict=True):
        assert output.prompt_token_ids == tuple(prompt)
        assert output.token_ids == solo(model, prompt, p)
        assert output.num_pages == -(-(len(prompt) + 8) // 4)
        assert output.finish_reason is FinishReason.LENGTH
    assert engine.pages.num_free_pages == num_pages - 1


@pytest.mark.slow
def test_generate_over_an_int8_cache_follows_the_float32_one(model):
    """Quantised to 127 steps a token and head: the likeliest token of a tiny random model changes now and then."""
    config = dataclasses.replace(model.cache_config(num_pages=80, page_size=4), dtype="int8")
    params = SamplingParams(max_new_tokens=9)
    engine = Stepped(EngineCore(model, config, LIMITS))
    quantised = [o.token_ids for o in engine.generate(PROMPTS, params)]
    exact = [o.token_ids for o in make_engine(model).generate(PROMPTS, params)]
    agree = [a == b for x, y in zip(quantised, exact, strict=True) for a, b in zip(x, y, strict=True)]
    assert np.mean(agree) > 0.8
    assert engine.stats().nbytes_per_page == 2 * 2 * 2 * 4 * (8 + 4)  # a byte a value, a float32 a token and head


@pytest.mark.slow
def test_generate_with_a_model_compiled_whole_equals_one_that_compiles_itself(model):
    layers = nnx.to_pure_dict(nnx.state(model.layers))
    stacked = {name: jnp.stack([layer[name] for layer in layers.values()]) for name in layers[0]}
    params = {"embed": model.embed[...], "layers": stacked, "final_norm": model.final_norm[...]}
    whole = Llama.from_params(CONFIG, params, dtype=jnp.float32, backend="auto", layer_loop="scan")
    assert not whole.compiles_itself
    [output] = make_engine(whole).generate([PROMPTS[1]], SAMPLED)
    assert output.token_ids == solo(model, PROMPTS[1], SAMPLED)


def test_generate_with_a_stop_token_ends_there(model):
    tokens = solo(model, PROMPTS[1], SamplingParams(max_new_tokens=9))
    stop = tokens[4]
    [output] = make_engine(model).generate([PROMPTS[1]], SamplingParams(max_new_tokens=9, stop_token_ids=(stop,)))
    assert output.token_ids == tokens[: tokens.index(stop) + 1]
    assert output.finish_reason is FinishReason.STOP


def test_generate_to_the_end_of_the_context_stops_with_length(model):
    [output] = make_engine(model).generate([PROMPTS[2]], SamplingParams(max_new_tokens=1000))
    assert len(output.prompt_token_ids) + len(output.token_ids) == LIMITS.max_model_len
    assert output.finish_reason is FinishReason.LENGTH


def test_step_by_hand_yields_the_tokens_of_each_request(model):
    engine = make_engine(model)
    ids = [engine.add_request(p, SAMPLED) for p in PROMPTS[:3]]
    got: dict[int, list[int]] = {i: [] for i in ids}
    while engine.has_unfinished():
        for token in engine.step():
            got[token.request_id].append(token.token_id)
    assert [tuple(got[i]) for i in ids] == [solo(model, p, SAMPLED) for p in PROMPTS[:3]]
    assert engine.step() == []


@pytest.mark.slow
def test_generate_with_a_function_of_params_cache_and_batch(model):
    def apply(params, cache, batch):
        return nnx.merge(graph, params)(cache, batch)

    graph, params = nnx.split(Llama(CONFIG, rngs=nnx.Rngs(0)))
    [output] = make_engine(jax.tree_util.Partial(apply, params)).generate([PROMPTS[1]], SAMPLED)
    assert output.token_ids == solo(model, PROMPTS[1], SAMPLED)


@pytest.mark.parametrize(
    "params",
    [
        pytest.param(SamplingParams(max_new_tokens=24), id="greedy"),
        pytest.param(SAMPLED, id="sampled", marks=pytest.mark.slow),
    ],
)
def test_generate_with_speculation_gives_the_same_tokens_in_fewer_steps(model, params):
    prompts = [[3, 4, 5, 6] * 6, PROMPTS[1], [7] * 20]
    expected = [solo(model, p, params) for p in prompts]
    engine = make_engine(model, speculation=NgramSpeculation(min_ngram=1))
    assert [o.token_ids for o in engine.generate(prompts, params)] == expected
    stats = engine.stats()
    assert stats.num_drafts > 0
    if params.temperature == 0:
        assert stats.num_accepted_drafts > 0
    assert engine.pages.num_free_pages == 79


def test_generate_with_penalties_equals_one_by_one(model):
    params = SamplingParams(max_new_tokens=9, repetition_penalty=1.5, presence_penalty=0.5)
    expected = [solo(model, p, params) for p in PROMPTS]
    assert [o.token_ids for o in make_engine(model).generate(PROMPTS, params)] == expected
    assert expected != [solo(model, p, SamplingParams(max_new_tokens=9)) for p in PROMPTS]


def test_generate_with_swap_takes_preempted_pages_back(model):
    params = SamplingParams(max_new_tokens=20)
    prompts = [PROMPTS[1], PROMPTS[3], PROMPTS[1][::-1]]
    expected = [solo(model, p, params) for p in prompts]
    swap = SwapSpace(40)
    engine = make_engine(model, 16, swap=swap)
    assert [o.token_ids for o in engine.generate(prompts, params)] == expected
    stats = engine.stats()
    assert stats.num_swap_outs == stats.num_preemptions > 0
    assert swap.stats().num_sequences == 0
    assert engine.pages.num_free_pages == 15


def test_generate_with_swapped_pages_that_come_back_damaged_computes_them_again(model, monkeypatch):
    params = SamplingParams(max_new_tokens=20)
    prompts = [PROMPTS[1], PROMPTS[3], PROMPTS[1][::-1]]
    expected = [solo(model, p, params) for p in prompts]
    swap, cut = SwapSpace(40), []
    take = SwapSpace.take_sequence

    def take_less(self, seq_id):
        cut.append(seq_id)
        return {name: x[:, :-1] for name, x in take(self, seq_id).items()}

    monkeypatch.setattr(SwapSpace, "take_sequence", take_less)
    engine = make_engine(model, 16, swap=swap)
    assert [o.token_ids for o in engine.generate(prompts, params)] == expected
    assert cut
    assert engine.pages.num_free_pages == 15


def test_generate_of_a_shared_prefix_computes_it_once(model):
    prefix = PROMPTS[2][:24]
    prompts = [[*prefix, i, i + 1] for i in range(4)]
    params = SamplingParams(max_new_tokens=4)
    engine = make_engine(model)
    assert [o.token_ids for o in engine.generate(prompts, params)] == [solo(model, p, params) for p in prompts]
    assert engine.stats().num_hit_tokens == 3 * 24
    assert engine.stats().hit_rate == pytest.approx(72 / 104)


def test_numpy_numbers_are_taken_as_integers(model):
    limits = SchedulerConfig(max_num_seqs=np.int64(4), max_step_tokens=np.int32(8), max_model_len=np.int64(96))
    params = SamplingParams(max_new_tokens=np.int64(9), num_logprobs=np.int64(2), prompt_logprobs=np.int32(1))
    plain = SamplingParams(max_new_tokens=9, num_logprobs=2, prompt_logprobs=1)
    [ours], [expected] = (
        make_engine(model, limits=given).generate([PROMPTS[1]], p) for given, p in ((limits, params), (LIMITS, plain))
    )
    assert ours == dataclasses.replace(expected, request_id=ours.request_id)
    arguments = {"num_beams": 2, "max_new_tokens": 4}
    [found] = make_engine(model).beam_search([PROMPTS[1]], **{k: np.int64(v) for k, v in arguments.items()})
    assert found == make_engine(model).beam_search([PROMPTS[1]], **arguments)[0]


def test_engine_ends_at_the_context_of_its_model(model):
    engine = make_engine(model, limits=SchedulerConfig())
    with pytest.raises(ValueError, match="shorter than the context of 96 tokens"):
        engine.add_request([1] * 96)
