import asyncio
import dataclasses
import itertools
import re
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxpaged as jp
from jaxpaged.engine import Engine, FinishReason, NgramSpeculation, SamplingParams, SchedulerConfig, runner
from jaxpaged.engine.plan import StepPlan
from jaxpaged.models.llama import Llama
from jaxpaged.paging import PageCopy
from jaxpaged.paging.swap import SwapSpace
from tests.cli.command import Terminal
from tests.engine.tiny import CONFIG, LIMITS, PROMPTS, make_engine

SAMPLED = SamplingParams(max_new_tokens=9, temperature=1.3, top_k=20, top_p=0.95)


def carry_out(engine, plan) -> None:
    """A step by hand, in lockstep."""
    engine.runner.move(plan)
    drawn = engine.runner.read(engine.runner.dispatch(plan))
    engine.scheduler.dispatched(plan)
    engine.scheduler.update(plan, *drawn)


def solo(model, prompt: list[int], params: SamplingParams) -> tuple[int, ...]:
    [output] = make_engine(model).generate([prompt], params)
    return output.token_ids


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


def test_generate_over_an_int8_cache_follows_the_float32_one(model):
    """Quantised to 127 steps a token and head: the likeliest token of a tiny random model changes now and then."""
    config = dataclasses.replace(model.cache_config(num_pages=80, page_size=4), dtype="int8")
    params = SamplingParams(max_new_tokens=9)
    engine = Engine(model, config, LIMITS)
    quantised = [o.token_ids for o in engine.generate(PROMPTS, params)]
    exact = [o.token_ids for o in make_engine(model).generate(PROMPTS, params)]
    agree = [a == b for x, y in zip(quantised, exact, strict=True) for a, b in zip(x, y, strict=True)]
    assert np.mean(agree) > 0.8
    assert engine.stats().nbytes_per_page == 2 * 2 * 2 * 4 * (8 + 4)  # a byte a value, a float32 a token and head


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


def test_generate_calls_on_token_in_order(model):
    seen: dict[int, list] = {0: [], 1: []}
    outputs = make_engine(model).generate(PROMPTS[:2], SAMPLED, on_token=lambda t: seen[t.request_id].append(t))
    for index, output in enumerate(outputs):
        assert tuple(t.token_id for t in seen[index]) == output.token_ids
        assert [t.finish_reason for t in seen[index]] == [None] * 8 + [output.finish_reason]


def test_step_by_hand_yields_the_tokens_of_each_request(model):
    engine = make_engine(model)
    ids = [engine.add_request(p, SAMPLED) for p in PROMPTS[:3]]
    got: dict[int, list[int]] = {i: [] for i in ids}
    while engine.has_unfinished():
        for token in engine.step():
            got[token.request_id].append(token.token_id)
    assert [tuple(got[i]) for i in ids] == [solo(model, p, SAMPLED) for p in PROMPTS[:3]]
    assert engine.step() == []


def test_generate_with_one_bad_prompt_leaves_nothing_behind(model):
    engine = make_engine(model)
    with pytest.raises(ValueError, match="`prompt` must hold at least one token"):
        engine.generate([PROMPTS[0], []])
    with pytest.raises(ValueError, match="`top_p` must be above 0 and at most 1; got 0"):
        engine.generate([PROMPTS[0]], SamplingParams(top_p=0))
    with pytest.raises(ValueError, match="`params` must be one, or one for each of 2 prompts; got 1"):
        engine.generate(PROMPTS[:2], [SAMPLED])
    with pytest.raises(jp.OutOfPagesError, match="`prompt` of 40 tokens with up to 56 new ones"):
        make_engine(model, 10).generate([PROMPTS[2]])
    assert not engine.has_unfinished()
    assert engine.pages.num_free_pages == 79


def test_generate_interrupted_by_the_caller_gives_pages_back(model):
    engine = make_engine(model)

    def interrupt(token):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        engine.generate(PROMPTS, on_token=interrupt)
    assert not engine.has_unfinished()
    assert engine.pages.num_free_pages == 79
    assert engine.generate(PROMPTS[:1], SAMPLED)[0].token_ids == solo(model, PROMPTS[0], SAMPLED)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"max_new_tokens": 0}, "`max_new_tokens` must be at least 1; got 0"),
        ({"temperature": -1.0}, "`temperature` must be finite and not negative; got -1.0"),
        ({"temperature": float("nan")}, "`temperature` must be finite and not negative; got nan"),
        ({"top_k": -1}, r"`top_k` must be 0 \(all tokens\) or more; got -1"),
        ({"top_p": 1.5}, "`top_p` must be above 0 and at most 1; got 1.5"),
        ({"seed": -1}, "`seed` must fit 32 bits without a sign; got -1"),
    ],
)
def test_sampling_params_out_of_range_are_named(change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(SAMPLED, **change).check()


@pytest.mark.slow
def test_generate_of_any_lengths_compiles_a_bounded_number_of_programs(model):
    """Traces, counted: bucketed shapes only, however many different batches there were."""
    traced = []

    class Counting:
        def __call__(self, cache, batch):
            traced.append((batch.token_ids.shape, batch.seq_lens.shape, batch.cu_q_lens is None))
            return model(cache, batch)

    counting = jax.tree_util.Partial(Counting())
    engine = make_engine(counting)
    rng = np.random.default_rng(0)
    for _ in range(4):
        lengths = rng.integers(1, 60, rng.integers(1, 7))
        engine.generate([[1] * n for n in lengths], SamplingParams(max_new_tokens=int(rng.integers(1, 12))))
    assert len(traced) == len(set(traced))
    assert len([shapes for shapes in traced if shapes[2]]) <= 3  # decode: 1, 2, 4 sequences
    assert len(traced) <= 3 + 3 * 6  # prompts: those times 1, 2, 4, ... 32 tokens


def test_make_batch_of_any_step_passes_the_value_check(model):
    engine = make_engine(model)
    for prompt in PROMPTS:
        engine.add_request(prompt, SamplingParams(max_new_tokens=5))
    steps = 0
    while (plan := engine.scheduler.schedule()) is not None:
        batch = engine.runner.make_batch(plan)
        jp.check_batch_values(batch, num_pages=80, page_size=4, vocab_size=CONFIG.vocab_size)
        assert batch.page_table.shape[1] == 24
        carry_out(engine, plan)
        steps += 1
    assert steps > 6


def test_run_with_page_copies_makes_them_before_it_writes(model):
    """A fork shares its parent's last page; its first token copies it, and the parent's stays as it was."""
    engine = make_engine(model)
    request_id = engine.add_request(PROMPTS[1][:6], SamplingParams(max_new_tokens=4))
    plan = engine.scheduler.schedule()
    carry_out(engine, plan)
    engine.pages.fork(request_id, "witness")
    shared = engine.pages.page_ids("witness")
    before = engine.runner.cache.export_pages(jnp.asarray(shared))
    plan = engine.scheduler.schedule()
    assert [copy.src for copy in plan.page_copies] == [shared[-1]]
    carry_out(engine, plan)
    after = engine.runner.cache.export_pages(jnp.asarray(shared))
    np.testing.assert_array_equal(before.k, after.k)
    moved = engine.pages.page_ids(request_id)[-1]
    assert moved != shared[-1]
    np.testing.assert_array_equal(engine.runner.cache.k_pages[:, moved, :, :2], before.k[:, -1, :, :2])


def test_bucket_rounds_up_to_powers_of_two():
    assert [runner.bucket(n) for n in (1, 2, 3, 4, 5, 17, 64)] == [1, 2, 4, 4, 8, 32, 64]


def test_step_that_fails_makes_its_requests_start_over_with_the_same_tokens(model, monkeypatch):
    """Once before the model has run, and once after it took the cache with it."""
    expected = [solo(model, prompt, SAMPLED) for prompt in PROMPTS[:2]]
    for fails_after in (False, True):
        engine = make_engine(model)
        run, calls = engine.runner.dispatch, []

        def failing(plan, run=run, calls=calls, fails_after=fails_after, engine=engine):
            calls.append(plan)
            if len(calls) in (1, 4):
                if fails_after:
                    engine.runner.cache.k_pages.delete()
                raise KeyboardInterrupt
            return run(plan)

        monkeypatch.setattr(engine.runner, "dispatch", failing)
        ids = [engine.add_request(prompt, SAMPLED) for prompt in PROMPTS[:2]]
        got: dict[int, list[int]] = {i: [] for i in ids}
        interrupts = 0
        while engine.has_unfinished():
            try:
                for token in engine.step():
                    got[token.request_id].append(token.token_id)
            except KeyboardInterrupt:
                interrupts += 1
        assert interrupts == 2
        assert [tuple(got[i]) for i in ids] == expected
        assert engine.pages.num_free_pages == 79


@pytest.mark.parametrize(
    ("prompt", "error", "message"),
    [
        ([1, 64], ValueError, r"`prompt_token_ids\[1\]` must be from 0 to vocab_size - 1 = 63; got 64"),
        ([-1], ValueError, r"`prompt_token_ids\[0\]` must be from 0 to vocab_size - 1 = 63; got -1"),
        ([1.5], TypeError, r"`prompt_token_ids\[0\]` must be an integer; got 1.5"),
        ("12", TypeError, r"`prompt_token_ids\[0\]` must be an integer; got '1'"),
    ],
)
def test_add_request_of_what_is_no_token_is_refused(model, prompt, error, message):
    engine = make_engine(model)
    with pytest.raises(error, match=message):
        engine.add_request(prompt)
    assert not engine.has_unfinished()


def test_generate_while_requests_are_unfinished_is_refused(model):
    engine = make_engine(model)
    engine.add_request(PROMPTS[0])
    with pytest.raises(RuntimeError, match="`generate` must have the engine to itself"):
        engine.generate(PROMPTS[:1])


def test_engine_ends_at_the_context_of_its_model(model):
    engine = make_engine(model, limits=SchedulerConfig())
    with pytest.raises(ValueError, match="shorter than the context of 96 tokens"):
        engine.add_request([1] * 96)


def test_step_without_pages_that_somebody_else_holds_says_so(model):
    engine = make_engine(model, 8)
    engine.pages.add("mine", 20)
    with pytest.raises(jp.OutOfPagesError, match="The oldest request, alone in the engine, needs 5 pages; 2 are free"):
        engine.generate([PROMPTS[1]], SamplingParams(max_new_tokens=5))
    assert engine.pages.num_free_pages == 2


def test_model_over_a_cache_of_another_shape_is_refused(model):
    config = dataclasses.replace(model.cache_config(num_pages=8), num_layers=1)
    with pytest.raises(ValueError, match=r"`cache` must have .* = \(2, 2, 8\); got \(1, 2, 8\)"):
        Engine(model, config).generate([[1]])


# Streams, aborts, errors


@pytest.fixture
def engine(model) -> Engine:
    return make_engine(model)


def test_stream_yields_the_tokens_of_its_request_as_they_come(model, engine):
    streams = [engine.stream(prompt, SAMPLED) for prompt in PROMPTS[:2]]
    got = [[], []]
    for _ in range(9):  # in turns: either drives the engine for both
        for tokens, stream in zip(got, streams, strict=True):
            tokens.append(next(stream))
    assert [tuple(t.token_id for t in tokens) for tokens in got] == [solo(model, p, SAMPLED) for p in PROMPTS[:2]]
    assert got[0][-1].finish_reason is FinishReason.LENGTH
    assert list(streams[0]) == []
    assert not engine.has_unfinished()


def test_astream_of_many_readers_equals_one_by_one(model, engine):
    async def read(prompt):
        return tuple([token.token_id async for token in engine.astream(prompt, SAMPLED)])

    async def read_all():
        return await asyncio.gather(*map(read, PROMPTS))

    assert asyncio.run(read_all()) == [solo(model, prompt, SAMPLED) for prompt in PROMPTS]
    assert not engine.has_unfinished()
    assert engine.pages.num_free_pages == 79


@pytest.mark.parametrize("how", ["close", "garbage", "with"])
def test_stream_abandoned_by_its_reader_aborts_the_request(engine, how):
    stream = engine.stream(PROMPTS[2], SAMPLED)
    next(stream)
    if how == "close":
        stream.close()
    elif how == "garbage":
        del stream
    else:
        with stream:
            next(stream)
    assert not engine.has_unfinished()
    assert engine.pages.num_free_pages == 79
    assert engine.step() == []


def test_astream_cancelled_aborts_the_request(model, engine):
    async def run():
        async def read_slowly():
            async with engine.stream(PROMPTS[1], SAMPLED) as stream:
                async for _ in stream:
                    await asyncio.sleep(0)

        task = asyncio.create_task(read_slowly())
        other = asyncio.create_task(anext(engine.stream(PROMPTS[0], SAMPLED)))
        await other
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(run())
    while engine.has_unfinished():  # what a step in its thread did not see any more
        engine.step()
    assert engine.pages.num_free_pages == 79


def test_stream_and_step_in_turn_each_get_their_own_tokens(model):
    engine = make_engine(model)
    request_id = engine.add_request(PROMPTS[1], SAMPLED)
    stream = engine.stream(PROMPTS[3], SAMPLED)
    streamed = [token.token_id for token in stream]
    tokens = []
    while engine.has_unfinished():
        tokens += engine.step()
    assert {token.request_id for token in tokens} == {request_id}
    assert tuple(token.token_id for token in tokens) == solo(model, PROMPTS[1], SAMPLED)
    assert tuple(streamed) == solo(model, PROMPTS[3], SAMPLED)


def test_add_request_while_generate_runs_is_told_by_step(model):
    engine, added = make_engine(model), []

    def add_one(token):
        if not added:
            added.append(engine.add_request(PROMPTS[3], SAMPLED))

    [output] = engine.generate([PROMPTS[1]], SAMPLED, on_token=add_one)
    assert output.token_ids == solo(model, PROMPTS[1], SAMPLED)
    tokens = []
    while engine.has_unfinished():
        tokens += engine.step()
    assert tuple(t.token_id for t in tokens if t.request_id == added[0]) == solo(model, PROMPTS[3], SAMPLED)


def test_astream_after_a_loop_that_was_closed_in_a_step(model, engine, monkeypatch):
    gate, advance = threading.Event(), engine.advance
    monkeypatch.setattr(engine, "advance", lambda: (gate.wait(), advance()))
    stream = engine.stream(PROMPTS[1], SAMPLED)

    async def begin():
        task = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0.01)
        return task

    async def read():
        return tuple([token.token_id async for token in stream])

    loop = asyncio.new_event_loop()
    task = loop.run_until_complete(begin())
    loop.close()
    gate.set()
    assert asyncio.run(read()) == solo(model, PROMPTS[1], SAMPLED)
    assert not task.done()


@pytest.mark.parametrize(
    ("argument", "error", "message"),
    [
        ({"priority": "high"}, TypeError, "`priority` must be an integer; got 'high'"),
        ({"priority": None}, TypeError, "`priority` must be an integer; got None"),
        ({"deadline": "5"}, TypeError, "`deadline` must be a number; got '5'"),
        ({"deadline": float("nan")}, ValueError, "`deadline` must be a time by the engine's clock; got nan"),
    ],
)
def test_add_request_with_a_bad_priority_or_deadline_is_refused(model, argument, error, message):
    engine = make_engine(model)
    for add in (engine.add_request, engine.stream, engine.add_samples):
        with pytest.raises(error, match=message):
            add(PROMPTS[0], SAMPLED, **argument)
    assert not engine.has_unfinished()
    forever = engine.add_request(PROMPTS[0], SAMPLED, priority=np.int64(-1), deadline=float("inf"))
    assert [t.request_id for t in iter_steps(engine)] == [forever] * SAMPLED.max_new_tokens


def iter_steps(engine):
    while engine.has_unfinished():
        yield from engine.step()


def test_numpy_numbers_are_taken_as_integers(model):
    limits = SchedulerConfig(max_num_seqs=np.int64(4), max_step_tokens=np.int32(16), max_model_len=np.int64(96))
    params = SamplingParams(max_new_tokens=np.int64(9), num_logprobs=np.int64(2), prompt_logprobs=np.int32(1))
    plain = SamplingParams(max_new_tokens=9, num_logprobs=2, prompt_logprobs=1)
    [ours], [expected] = (
        make_engine(model, limits=given).generate([PROMPTS[1]], p) for given, p in ((limits, params), (LIMITS, plain))
    )
    assert ours == dataclasses.replace(expected, request_id=ours.request_id)
    arguments = {"num_beams": 2, "max_new_tokens": 4}
    [found] = make_engine(model).beam_search([PROMPTS[1]], **{k: np.int64(v) for k, v in arguments.items()})
    assert found == make_engine(model).beam_search([PROMPTS[1]], **arguments)[0]


@pytest.mark.parametrize("swap_pages", [0, 40])
def test_logits_not_finite_of_a_request_preempted_meanwhile_leave_nothing_to_hit(model, swap_pages):
    """Its pages were computed and committed before anybody knew."""
    params = good_params(model)
    limits = dataclasses.replace(LIMITS, max_num_seqs=1)
    swap = SwapSpace(swap_pages) if swap_pages else None
    engine = make_engine(Broken(model, 63, "nan"), limits=limits, swap=swap)
    prompt = [*range(12), 63]
    bad = engine.add_request(prompt, params, priority=1)
    assert engine.step() == []
    good = engine.add_request(GOOD, params)
    tokens = list(iter_steps(engine))
    assert {t.request_id: t.finish_reason for t in tokens if t.finish_reason} == {
        bad: FinishReason.ERROR,
        good: FinishReason.LENGTH,
    }
    assert engine.stats().num_preemptions == 1
    assert engine.pages.match(prompt) == 0
    assert engine.pages.num_free_pages == 79


def test_logits_not_finite_of_a_request_aborted_meanwhile_leave_nothing_to_hit(model):
    engine = make_engine(Broken(model, 63, "nan"))
    request_id = engine.add_request([*range(14), 63], good_params(model))
    engine.step()
    engine.abort(request_id)
    assert engine.pages.match([*range(14), 62]) == 12  # nobody knows yet
    [_] = engine.generate([[1, 2]], good_params(model))
    assert engine.pages.match([*range(14), 62]) == 0


def test_logits_not_finite_inside_a_prompt_end_it_there(model):
    engine = make_engine(Broken(model, 63, "nan"))
    bad = engine.add_request([*range(15), 63, *range(40)], good_params(model))
    good = engine.add_request(GOOD, good_params(model))
    ends = {token.request_id: token for token in iter_steps(engine) if token.finish_reason is not None}
    assert str(ends[bad].error) == f"Request {bad}: the model's logits inside its prompt are not finite."
    assert engine.pages.match([*range(15), 62]) == 0
    assert ends[good].finish_reason is FinishReason.LENGTH


def test_model_whose_logits_have_a_row_a_token_is_refused(model):
    def every_token(model, cache, batch):
        logits, cache = model(cache, batch)
        return jnp.zeros((len(batch.token_ids), logits.shape[1])), cache

    engine = make_engine(jax.tree_util.Partial(every_token, model))
    with pytest.raises(ValueError, match=r"logits must have shape \(num_seqs, vocab_size\), with 2 sequences here"):
        engine.generate([PROMPTS[1]], SAMPLED)


def test_generate_with_a_function_of_params_cache_and_batch(model):
    def apply(params, cache, batch):
        return nnx.merge(graph, params)(cache, batch)

    graph, params = nnx.split(Llama(CONFIG, rngs=nnx.Rngs(0)))
    [output] = make_engine(jax.tree_util.Partial(apply, params)).generate([PROMPTS[1]], SAMPLED)
    assert output.token_ids == solo(model, PROMPTS[1], SAMPLED)


@pytest.mark.parametrize("after", range(6))
def test_abort_at_any_step_frees_pages_and_leaves_the_others(model, engine, after):
    ids = [engine.add_request(prompt, SAMPLED) for prompt in PROMPTS]
    got: dict[int, list[int]] = {i: [] for i in ids}
    steps = 0
    while engine.has_unfinished():
        if steps == after:
            engine.abort(ids[1])
            engine.abort(ids[1])
            engine.abort(999)
        for token in engine.step():
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


class Broken:
    """A model that fails, or whose logits are not finite, when it sees one token id."""

    def __init__(self, model: Llama, token_id: int, how: str):
        self.model, self.token_id, self.how = model, token_id, how
        self.compiles_itself, self.vocab_size, self.max_position = True, 64, 96

    def __call__(self, cache, batch):
        logits, new_cache = self.model(cache, batch)
        hit = np.asarray(batch.token_ids) == self.token_id
        if hit.any() and self.how == "raise":
            raise RuntimeError("the model is broken")
        if hit.any() and self.how == "raise and lose":
            new_cache.k_pages.delete()
            raise RuntimeError("the model is broken")
        if self.how == "nan":
            ends = np.arange(len(hit)) if batch.cu_q_lens is None else np.asarray(batch.cu_q_lens)[1:] - 1
            logits = jnp.where(hit[ends][:, None], jnp.nan, logits)
        return logits, new_cache


BAD, GOOD = [9, 9, 63], [5, 7, 5, 7, 2]


def good_params(model) -> SamplingParams:
    """Eight tokens, the broken one not among them."""
    return SamplingParams(max_new_tokens=8, logit_bias={63: float("-inf")})


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
    assert engine.pages.match(PROMPTS[2][::-1]) == 0  # what the lost cache held cannot be hit
    [after] = engine.generate([PROMPTS[3]], SAMPLED)
    assert after.token_ids == solo(model, PROMPTS[3], SAMPLED)


def test_step_interrupted_while_it_waits_loses_nothing(model, monkeypatch):
    engine = make_engine(model)
    read, calls = engine.runner.read, []

    def interrupted(in_flight):
        calls.append(in_flight)
        if len(calls) in (1, 4):
            raise KeyboardInterrupt
        return read(in_flight)

    monkeypatch.setattr(engine.runner, "read", interrupted)
    request_id = engine.add_request(PROMPTS[1], SAMPLED)
    tokens = []
    while engine.has_unfinished():
        try:
            tokens += engine.step()
        except KeyboardInterrupt:
            assert engine.has_unfinished()
    assert {t.request_id for t in tokens} == {request_id}
    assert tuple(t.token_id for t in tokens) == solo(model, PROMPTS[1], SAMPLED)


def test_generate_where_every_prompt_fails_raises_the_cause(model):
    engine = make_engine(Broken(model, 63, "raise"))
    with pytest.raises(RuntimeError, match="the model is broken"):
        engine.generate([BAD], good_params(model))


# Features that must not change a token


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


def test_run_with_copies_that_follow_one_another_makes_them_in_order(model):
    """Of a page into a second, and of that one into a third, with the second then written anew."""
    engine = make_engine(model)
    [output] = engine.generate([PROMPTS[1]], SAMPLED)
    assert output.num_pages > 2
    cache = engine.runner.cache
    before = cache.export_pages(jnp.arange(10))
    copies = tuple(itertools.starmap(PageCopy, ((1, 7), (7, 8), (2, 7))))
    plan = StepPlan(requests=(), num_new_tokens=(), samples=(), page_copies=copies)
    cache, _ = engine.runner.mover.move(cache, plan)
    after = cache.export_pages(jnp.arange(10))
    for page, source in {7: 2, 8: 1, 1: 1, 2: 2}.items():
        np.testing.assert_array_equal(after.k[:, page], before.k[:, source])


def test_warmup_shows_a_bar_on_a_terminal_and_tells_progress(model, monkeypatch):
    limits = SchedulerConfig(max_num_seqs=1, max_step_tokens=8, max_model_len=32)
    engine, told = make_engine(model, limits=limits), []
    assert engine.warmup(progress=lambda done, total: told.append((done, total))) == 2
    assert told == [(0, 2), (1, 2), (2, 2)]
    terminal = Terminal("stderr", monkeypatch)
    engine.warmup()
    monkeypatch.undo()
    assert "Compiling programs" in terminal.read()
    terminal.close()


def test_step_starts_before_the_one_before_is_read_and_uploads_once(model, monkeypatch):
    engine, log = make_engine(model), []
    dispatch, read, put = engine.runner.dispatch, engine.runner.read, jax.device_put
    monkeypatch.setattr(engine.runner, "dispatch", lambda plan: (log.append("dispatch"), dispatch(plan))[1])
    monkeypatch.setattr(engine.runner, "read", lambda in_flight: (log.append("read"), read(in_flight))[1])
    monkeypatch.setattr(jax, "device_put", lambda x: (log.append("upload"), put(x))[1])
    engine.generate(PROMPTS[3:], SamplingParams(max_new_tokens=4))
    begun = ["dispatch", "upload"]
    assert log == [*begun, *begun, "read", *begun, "read", *begun, "read", "read"]
    log.clear()  # what follows from a history that only the host has, waits for it
    engine.generate(PROMPTS[:1], SamplingParams(max_new_tokens=3, presence_penalty=1.0))
    assert log == [*begun, "read"] * 3


def test_stats_as_prometheus_text_names_counters_and_gauges(model, engine):
    engine.generate(PROMPTS[:2], SamplingParams(max_new_tokens=3))
    engine.generate(PROMPTS[:2], SamplingParams(max_new_tokens=3, temperature=1.0))  # other programs of the same shape
    stats = engine.stats()
    assert stats.num_finished == 4
    assert stats.num_tokens == 12
    assert sum(stats.programs.values()) == stats.num_steps
    assert len(stats.programs) <= 2 * stats.max_programs
    text = stats.prometheus_text()
    assert "# TYPE jaxpaged_num_steps_total counter\n" in text
    assert "jaxpaged_num_finished_total 4\n" in text
    assert "# TYPE jaxpaged_num_running gauge\njaxpaged_num_running 0\n" in text
    assert 'jaxpaged_program_steps_total{kind="decode",rows="2",tokens="2"}' in text
    series = [line.split()[0] for line in text.splitlines() if not line.startswith("#")]
    assert len(series) == len(set(series))
    many = dataclasses.replace(stats, num_tokens=12_345_678_901, step_s=0.125).prometheus_text()
    assert "jaxpaged_num_tokens_total 12345678901\n" in many
    assert "jaxpaged_step_s 0.125\n" in many


class Letters:
    """A tokenizer of 64 characters."""

    def decode(self, token_ids, skip_special_tokens: bool = True) -> str:
        return "".join(chr(48 + t) for t in token_ids)


class Failing(Letters):
    """Fails at one token."""

    def __init__(self, token: int):
        self.token = token

    def decode(self, token_ids, skip_special_tokens: bool = True) -> str:
        if self.token in token_ids:
            raise RuntimeError(f"no text for {self.token}")
        return super().decode(token_ids)


def test_generate_with_a_tokenizer_that_fails_ends_that_request_with_the_cause(model):
    expected = [solo(model, prompt, SAMPLED) for prompt in PROMPTS]
    token = next(t for t in expected[1] if sum(t in tokens for tokens in expected) == 1)
    engine = make_engine(model, tokenizer=Failing(token))
    outputs = engine.generate(PROMPTS, SAMPLED)
    assert [o.finish_reason for o in outputs].count(FinishReason.ERROR) == 1
    assert str(outputs[1].error) == f"no text for {token}"
    assert outputs[1].token_ids == expected[1][: expected[1].index(token) + 1]
    for i in (0, 2, 3):
        assert outputs[i].token_ids == expected[i]
        assert outputs[i].text == Letters().decode(expected[i])
    assert engine.pages.num_free_pages == 79


def test_stream_with_a_stop_string_ends_before_it_whatever_tokens_cut_it(model):
    tokens = solo(model, PROMPTS[1], SAMPLED)
    text = Letters().decode(tokens)
    stop = text[3:5]
    engine = make_engine(model, tokenizer=Letters())
    other = engine.stream(PROMPTS[0], SAMPLED)
    got = list(engine.stream(PROMPTS[1], dataclasses.replace(SAMPLED, stop=stop)))
    assert "".join(t.text for t in got) == text[: text.index(stop)]
    assert got[-1].finish_reason is FinishReason.STOP
    assert tuple(t.token_id for t in got) == tokens[: text.index(stop) + 2]
    assert "".join(t.text for t in other) == Letters().decode(solo(model, PROMPTS[0], SAMPLED))
    with pytest.raises(ValueError, match="`stop` needs a tokenizer"):
        make_engine(model).generate(PROMPTS[:1], dataclasses.replace(SAMPLED, stop=stop))
    for include, expected in ((False, text[: text.index(stop)]), (True, text[: text.index(stop) + 2])):
        [output] = engine.generate([PROMPTS[1]], dataclasses.replace(SAMPLED, stop=stop, include_stop=include))
        assert output.text == expected
    assert make_engine(model).generate([PROMPTS[1]], SAMPLED)[0].text == ""


class FewLetters(Letters):
    """Knows half of the model's tokens."""

    def decode(self, token_ids, skip_special_tokens: bool = True) -> str:
        if max(token_ids) >= 32:
            raise IndexError("no such token")
        return super().decode(token_ids)


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


def test_abort_hands_out_the_text_that_was_held_back(model):
    tokens = solo(model, PROMPTS[1], SAMPLED)
    text = Letters().decode(tokens)
    engine = make_engine(model, tokenizer=Letters())
    stop = text[1:4] + "~"  # begins, and never ends
    request_id = engine.add_request(PROMPTS[1], dataclasses.replace(SAMPLED, stop=stop))
    got = []
    while len(got) < 4:
        got += engine.step()
    assert "".join(t.text for t in got) == text[0]
    engine.abort(request_id)
    assert engine.step() == []
    stream = engine.stream(PROMPTS[1], dataclasses.replace(SAMPLED, stop=stop), deadline=float("inf"))
    got = [next(stream) for _ in range(4)]
    engine.abort(stream.request_id)
    got += list(stream)
    assert got[-1].finish_reason is FinishReason.ABORT
    assert "".join(t.text for t in got) == text[: sum(t.token_id is not None for t in got)]


@pytest.mark.parametrize("how", ["add_request", "stream"])
def test_add_request_with_params_that_do_not_fit_the_model_is_refused(engine, how):
    add = getattr(engine, how)
    with pytest.raises(ValueError, match="`logit_bias` must name tokens from 0 to 63; got 64"):
        add(PROMPTS[0], dataclasses.replace(SAMPLED, logit_bias={64: 1.0}))
    with pytest.raises(ValueError, match="`n` must be 1 here; got 2"):
        add(PROMPTS[0], dataclasses.replace(SAMPLED, n=2))
    assert not engine.has_unfinished()
