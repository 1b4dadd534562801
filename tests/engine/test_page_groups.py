"""Layers with windows hold few pages, and every token is that of a run in which all layers hold all pages."""

import dataclasses

import numpy as np
import pytest
from flax import nnx

import jaxpaged as jp
from jaxpaged.config import CacheConfig
from jaxpaged.engine import Engine, EngineCore, NgramSpeculation, SamplingParams, SchedulerConfig
from jaxpaged.engine.request import RequestStatus
from jaxpaged.models.llama import Llama
from jaxpaged.paging.store.swap import SwapSpace
from tests.engine.tiny import CONFIG, LIMITS, Stepped

WINDOW, NUM_PAGES, PAGE_SIZE = 6, 400, 4
WINDOWS = (WINDOW, None, WINDOW)
PROMPTS = [[int(t) for t in np.random.default_rng(i).integers(0, 64, n)] for i, n in enumerate((3, 5, 9, 40))]
PARAMS = SamplingParams(max_new_tokens=24)


class FullTables(Llama):
    """The same model, which does not say what its layers see."""

    layer_specs = None


def make_model(kind: type[Llama], **changes) -> Llama:
    changes = {"num_layers": len(WINDOWS), "sliding_windows": WINDOWS} | changes
    return kind(dataclasses.replace(CONFIG, **changes), layer_loop="calls", rngs=nnx.Rngs(0))


@pytest.fixture(scope="module")
def model() -> Llama:
    return make_model(Llama)


@pytest.fixture(scope="module")
def full_tables() -> Llama:
    return make_model(FullTables)


@pytest.fixture(scope="module")
def expected(full_tables) -> list[tuple[int, ...]]:
    """The tokens of full tables, nothing preempted."""
    engine = make_engine(full_tables)
    assert len(engine.pages.groups) == 1
    return tokens_of(engine.generate(PROMPTS, PARAMS))


def make_engine(model: Llama, num_pages: int = NUM_PAGES, limits: SchedulerConfig = LIMITS, **options) -> Stepped:
    """Where it is to have fewer pages, a sequence that no step sees holds the rest: each size would be compiled."""
    core = EngineCore(model, model.cache_config(num_pages=NUM_PAGES, page_size=PAGE_SIZE), limits, **options)
    if num_pages < NUM_PAGES:
        core.pages.add("elsewhere", (NUM_PAGES - num_pages) // len(core.pages.groups) * PAGE_SIZE)
        assert core.pages.num_free_pages == num_pages - 1
    return Stepped(core)


def tokens_of(outputs) -> list[tuple[int, ...]]:
    return [output.token_ids for output in outputs]


def test_engine_divides_the_layers_and_their_outputs_are_those_of_full_tables(model, expected):
    engine = make_engine(model)
    assert [group.sliding_window for group in engine.pages.groups] == [WINDOW] * 2 + [None]
    assert engine.runner.cache.num_rows == 1
    assert engine.runner.cache.num_layers == 3
    for _ in range(2):  # the second time with prefix hits
        assert tokens_of(engine.generate(PROMPTS, PARAMS)) == expected
    assert engine.stats().num_hit_tokens >= 36
    assert engine.pages.num_free_pages == NUM_PAGES - 1


@pytest.mark.slow
@pytest.mark.parametrize("swap_pages", [0, 400])
def test_outputs_through_preemption_and_swap_are_those_of_full_tables(model, expected, swap_pages):
    swap = SwapSpace(swap_pages) if swap_pages else None
    engine = make_engine(model, 28, swap=swap)
    for _ in range(2):
        assert tokens_of(engine.generate(PROMPTS, PARAMS)) == expected
    stats = engine.stats()
    assert stats.num_preemptions > 0
    assert stats.num_swap_outs == (stats.num_preemptions if swap_pages else 0)
    assert (stats.num_restored_pages > 0) == bool(swap_pages)
    assert engine.pages.num_free_pages == 27


@pytest.mark.slow
def test_outputs_of_drafts_samples_and_beams_are_those_of_full_tables(model, full_tables):
    prompt = [*PROMPTS[2], *PROMPTS[2]]  # so that drafts are found
    sampled = dataclasses.replace(PARAMS, temperature=1.0, seed=3, n=3)
    results = []
    for kind in (model, full_tables):
        engine = make_engine(kind, speculation=NgramSpeculation(min_ngram=1, num_drafts=5))
        outputs = [*engine.generate([prompt], PARAMS), *engine.generate([prompt], sampled)]
        beams = engine.beam_search([PROMPTS[1]], num_beams=3, max_new_tokens=10)
        results.append((tokens_of(outputs), [beam.token_ids for beam in beams[0]]))
        assert engine.stats().num_forks > 2
        assert engine.stats().num_drafts > 0
    assert results[0] == results[1]


@pytest.mark.slow
def test_log_probabilities_are_those_of_full_tables(model, full_tables):
    params = SamplingParams(max_new_tokens=3, num_logprobs=2, prompt_logprobs=2)
    results = [make_engine(kind).generate([PROMPTS[3]], params)[0] for kind in (model, full_tables)]
    for ours, full in zip(*((*output.prompt_logprobs[1:], *output.logprobs) for output in results), strict=True):
        assert (ours.token_id, [i for i, _ in ours.top]) == (full.token_id, [i for i, _ in full.top])
        # Another program, and so sums in another order: a few units in the last place.
        assert [ours.logprob, *dict(ours.top).values()] == pytest.approx(
            [full.logprob, *dict(full.top).values()], rel=2e-6
        )


def test_request_that_fits_alone_ends_in_the_smallest_pool(model, expected):
    """One page less, and it is refused."""
    needed = make_engine(model).pages.max_pages_for(40 + 24 - 1, chunk=LIMITS.max_step_tokens)
    engine = make_engine(model, needed + 1)
    assert tokens_of(engine.generate(PROMPTS[::-1], PARAMS)) == expected[::-1]
    with pytest.raises(jp.OutOfPagesError, match=rf"^`prompt` of 40 tokens .* needs {needed} pages; {needed - 1} are"):
        Engine(model, model.cache_config(num_pages=needed, page_size=PAGE_SIZE), LIMITS).generate(PROMPTS, PARAMS)


@pytest.mark.slow
def test_one_window_for_all_layers_is_one_group_that_gives_pages_back():
    changes = {"num_layers": 2, "sliding_windows": (WINDOW, WINDOW)}
    params = dataclasses.replace(PARAMS, max_new_tokens=50)
    full = make_engine(make_model(FullTables, **changes)).generate(PROMPTS, params)
    engine = make_engine(make_model(Llama, **changes))
    assert [group.sliding_window for group in engine.pages.groups] == [WINDOW]
    assert tokens_of(engine.generate(PROMPTS, params)) == tokens_of(full)
    assert engine.stats().peak_num_pages <= 4 * engine.pages.max_pages_for(96, chunk=LIMITS.max_step_tokens)


def test_layers_that_cannot_share_a_pool_are_refused_by_name(model):
    class Declared(Llama):
        layer_specs = (*model.layer_specs[:-1], jp.LayerSpec(num_kv_heads=4, head_dim=8))

    with pytest.raises(ValueError, match=r"^`layer_specs\[2\]` must have \(num_kv_heads, head_dim\) = \(2, 8\)"):
        make_engine(make_model(Declared))
    config = CacheConfig(num_layers=2, num_pages=9, num_kv_heads=2, head_dim=8)
    with pytest.raises(ValueError, match=r"^`cache_config` must have .* = \(3, 2, 8\), as `layer_specs`"):
        EngineCore(model, config)


@pytest.mark.slow
def test_five_windowed_layers_to_a_full_one_hold_a_quarter_of_the_pages():
    """Window 512, 8,000 tokens, steps of 512: 0.28 of full attention at most, 0.23 in decode; with a hit and a swap."""
    window, page_size, num_tokens = 512, 16, 8000
    shape = {"hidden_size": 16, "num_q_heads": 2, "num_kv_heads": 1, "max_position": 8192}
    windows = (window, window, None, window, window, window)
    shape |= {"num_layers": len(windows), "sliding_windows": windows}
    limits = SchedulerConfig(max_num_seqs=1, max_step_tokens=512, max_model_len=8192)
    prompt = [int(t) for t in np.random.default_rng(5).integers(0, 64, num_tokens - 40)]
    params = SamplingParams(max_new_tokens=40)
    results, peaks = [], []
    for kind in (Llama, FullTables):
        model = make_model(kind, **shape)
        config = model.cache_config(num_pages=1600, page_size=page_size)
        engine = Stepped(EngineCore(model, config, limits, swap=SwapSpace(2000)))
        low, in_decode, outputs = engine.add_request(prompt, params, priority=1), [], []
        while engine.has_unfinished():
            outputs += engine.step()
            request = engine.scheduler.requests.get(low)
            if request is not None and request.status is RequestStatus.DECODE:
                in_decode.append(engine.pages.num_held_pages(low))
            if len(in_decode) == 20:  # one of a higher priority takes its place for a while, and hits its prefix
                in_decode.append(0)
                engine.add_request([*prompt[:4000], 1], params)
        results.append([(token.request_id, token.token_id) for token in outputs])
        peaks.append((engine.stats().peak_num_pages, max(in_decode)))
        assert engine.stats().num_swap_outs == 1
        assert engine.stats().num_hit_tokens == 4000
    assert results[0] == results[1]
    (peak, decoding), (full, _) = peaks
    print(peak, decoding, full)
    full = len(windows) * num_tokens // page_size
    assert peak <= 0.28 * full
    assert decoding <= 0.23 * full
