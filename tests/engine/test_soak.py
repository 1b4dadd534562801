"""Thousands of requests of every kind on a tiny random model: each that survives has the tokens of its solo run."""

import collections
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxpaged.engine import EngineCore, FinishReason, NgramSpeculation, SamplingParams, SchedulerConfig
from jaxpaged.models.config import LlamaConfig
from jaxpaged.models.llama import Llama
from jaxpaged.paging.store.swap import SwapSpace
from tests.engine.tiny import Stepped

pytestmark = pytest.mark.slow

CONFIG = LlamaConfig(
    vocab_size=64,
    hidden_size=16,
    intermediate_size=32,
    num_layers=1,
    num_q_heads=2,
    num_kv_heads=1,
    head_dim=8,
    max_position=64,
    rms_norm_eps=1e-5,
)
PAGE_SIZE, NUM_PAGES = 4, 49
LIMITS = SchedulerConfig(max_num_seqs=4, max_step_tokens=16, max_model_len=64)
GREEDY = SamplingParams()
SAMPLED = SamplingParams(temperature=1.0, top_p=0.9, top_k=30)


@pytest.fixture(scope="module")
def model() -> Llama:
    """Logits far apart, so that rounding decides nothing: the head is scaled up."""
    model = Llama(dataclasses.replace(CONFIG, tie_embeddings=False), rngs=nnx.Rngs(1))
    assert model.lm_head is not None
    model.lm_head[...] = 8 * model.lm_head[...]
    return model


@pytest.fixture
def compilations():
    """Counts what XLA compiles."""
    counts: collections.Counter[str] = collections.Counter()

    def listen(event: str, duration: float, **kwargs) -> None:
        counts[event] += 1

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield lambda: counts["/jax/core/compile/backend_compile_duration"]
    jax.monitoring.unregister_event_duration_listener(listen)


def make_request(rng: np.random.Generator, prefixes: list[list[int]]) -> tuple[list[int], SamplingParams]:
    """A prompt that may begin like others, and may repeat itself."""
    prompt = list(prefixes[rng.integers(len(prefixes))]) if rng.random() < 0.6 else []
    prompt += rng.integers(0, 64, rng.integers(1, 12)).tolist()
    if rng.random() < 0.3:
        prompt += prompt[-4:] * 2
    params = GREEDY if rng.random() < 0.7 else SAMPLED
    stop = (int(rng.integers(64)),) if rng.random() < 0.3 else ()
    changes = {"max_new_tokens": int(rng.integers(1, 24)), "seed": int(rng.integers(1000)), "stop_token_ids": stop}
    return prompt, dataclasses.replace(params, **changes)


class Solo:
    """The same requests in a pool that three of them never fill, without prefix hits, three at a time to save time.

    That this gives the tokens of runs alone is another test.
    """

    def __init__(self, model: Llama):
        three = dataclasses.replace(LIMITS, max_num_seqs=3)
        self.engine = make_engine(model, three, prefix_caching=False)

    def __call__(self, requests: list) -> list[tuple[int, ...]]:
        prompts, params = zip(*requests, strict=True)
        outputs = self.engine.generate(prompts, params)
        assert self.engine.stats().num_preemptions == 0
        return [output.token_ids for output in outputs]


def make_engine(model: Llama, limits: SchedulerConfig = LIMITS, **options) -> Stepped:
    """All engines have the same shapes, so that programs are compiled once."""
    config = model.cache_config(num_pages=NUM_PAGES, page_size=PAGE_SIZE)
    return Stepped(EngineCore(model, config, limits, **options))


def test_soak_of_random_requests_equals_their_solo_runs(model, compilations, request):
    num_requests = 50_000 if request.config.getoption("--soak") else 2_000
    rng = np.random.default_rng(0)
    prefixes = [rng.integers(0, 64, n).tolist() for n in (4, 9, 16, 21)]
    requests = [make_request(rng, prefixes) for _ in range(num_requests)]
    requests = [(prompt, dataclasses.replace(params, n=int(rng.choice([1, 1, 1, 2])))) for prompt, params in requests]
    swap = SwapSpace(24)
    engine = make_engine(model, swap=swap)
    two = dataclasses.replace(LIMITS, max_num_seqs=2)  # and as many drafts
    speculating = make_engine(model, two, speculation=NgramSpeculation(num_drafts=1, min_ngram=1))
    for e in (engine, speculating):
        e.warmup([SAMPLED])
    before = compilations()
    got = {}
    got |= drive(engine, requests[: num_requests * 3 // 4], rng, first=0)
    got |= drive(speculating, requests[num_requests * 3 // 4 :], rng, first=num_requests * 3 // 4)
    assert compilations() == before
    check_survivors(Solo(model), requests, got)
    for e in (engine, speculating):
        assert e.pages.num_free_pages == NUM_PAGES - 1
        assert not e.has_unfinished()
        assert e.stats().hit_rate > 0.1
        assert e.stats().num_finished > num_requests // 5
    assert swap.stats().num_sequences == 0
    assert engine.stats().num_restored_pages > num_requests // 100
    assert engine.stats().num_preemptions > engine.stats().num_swap_outs > num_requests // 100
    assert engine.stats().num_forks > num_requests // 20
    assert speculating.stats().num_accepted_drafts > num_requests // 100
    assert len(got) > num_requests * 0.8


def drive(engine: Stepped, requests: list, rng: np.random.Generator, first: int) -> dict:
    """Lets requests arrive, and aborts some; the tokens of each that was not, by its number and sample."""
    waiting = collections.deque(enumerate(requests, first))
    place_of: dict[int, tuple[int, int]] = {}
    tokens: dict[tuple[int, int], list[int]] = {}
    reasons: dict[tuple[int, int], FinishReason] = {}
    while waiting or engine.has_unfinished():
        while waiting and engine.scheduler.num_waiting < 4:
            number, (prompt, params) = waiting.popleft()
            request_ids = engine.add_samples(prompt, params, priority=int(rng.integers(3)))
            for sample, request_id in enumerate(request_ids):
                place_of[request_id] = number, sample
                tokens[number, sample] = []
        if rng.random() < 0.02:
            engine.abort(int(rng.choice(list(place_of))))
        for token in engine.step():
            place = place_of[token.request_id]
            if token.token_id is not None:
                tokens[place].append(token.token_id)
            if token.finish_reason is not None:
                reasons[place] = token.finish_reason
                del place_of[token.request_id]
    return {place: tuple(tokens[place]) for place, reason in reasons.items() if reason is not FinishReason.ABORT}


def check_survivors(solo: Solo, requests: list, got: dict) -> None:
    places = sorted(got)
    alone = [(requests[n][0], requests[n][1].of_sample(i)) for n, i in places]
    for place, request, expected in zip(places, alone, solo(alone), strict=True):
        assert got[place] == expected, f"request {place}: {request}"


def test_solo_engine_of_three_at_a_time_equals_one_at_a_time(model):
    rng = np.random.default_rng(1)
    requests = [make_request(rng, [[1, 2, 3, 4, 5]]) for _ in range(40)]
    together, alone = Solo(model), Solo(model)
    assert together(requests) == [alone([request])[0] for request in requests]
    assert jnp.isfinite(together.engine.runner.cache.k_pages).all()
