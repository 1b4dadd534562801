"""`Engine`: what any thread may ask at the same time, and what each gets."""

import asyncio
import dataclasses
import gc
import os
import threading
import warnings
import weakref

import jax
import numpy as np
import pytest

import jaxpaged as jp
from jaxpaged.engine import FinishReason, QueueFullError, SamplingParams, SchedulerConfig
from tests.cli.command import Terminal
from tests.engine.faults import Letters, solo
from tests.engine.tiny import LIMITS, PROMPTS, make_engine, make_front

SAMPLED = SamplingParams(max_new_tokens=9, temperature=1.3, top_k=20, top_p=0.95)


@pytest.fixture
def engine(model):
    with make_front(model) as engine:
        yield engine


def test_generate_calls_on_token_in_order(model):
    seen: dict[int, list] = {0: [], 1: []}
    outputs = make_front(model).generate(PROMPTS[:2], SAMPLED, on_token=lambda t: seen[t.request_id].append(t))
    for index, output in enumerate(outputs):
        assert tuple(t.token_id for t in seen[index]) == output.token_ids
        assert [t.finish_reason for t in seen[index]] == [None] * 8 + [output.finish_reason]


def test_generate_begins_all_prompts_in_one_step_however_fast_the_thread_is(model, monkeypatch):
    engine = make_front(model)
    submit = engine._worker.submit

    def submit_and_be_overtaken(*args):
        before = engine.stats().num_steps
        submit(*args)
        while engine.stats().num_steps == before:
            pass

    monkeypatch.setattr(engine._worker, "submit", submit_and_be_overtaken)
    engine.generate([[1]] * 4, SamplingParams(max_new_tokens=3))
    assert engine.stats().num_steps == 3


def test_generate_with_one_bad_prompt_leaves_nothing_behind(model):
    engine = make_front(model)
    with pytest.raises(ValueError, match="`prompt` must hold at least one token"):
        engine.generate([PROMPTS[0], []])
    with pytest.raises(ValueError, match="`top_p` must be above 0 and at most 1; got 0"):
        engine.generate([PROMPTS[0]], SamplingParams(top_p=0))
    with pytest.raises(ValueError, match="`params` must be one, or one for each of 2 prompts; got 1"):
        engine.generate(PROMPTS[:2], [SAMPLED])
    with pytest.raises(jp.OutOfPagesError, match="`prompt` of 40 tokens with up to 56 new ones"):
        make_front(model, 10).generate([PROMPTS[2]])
    assert engine.stats().num_free_pages == 79
    engine.close()


def test_generate_interrupted_by_the_caller_gives_pages_back(model):
    engine = make_front(model)

    def interrupt(token):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        engine.generate(PROMPTS, on_token=interrupt)
    assert engine.stats().num_running == 0
    assert engine.stats().num_free_pages == 79
    assert engine.generate(PROMPTS[:1], SAMPLED)[0].token_ids == solo(model, PROMPTS[0], SAMPLED)


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
    engine = make_front(model)
    with pytest.raises(error, match=message):
        engine.add_request(prompt)
    assert engine.stats().num_waiting == 0


def test_stream_yields_the_tokens_of_its_request_as_they_come(model, engine):
    streams = [engine.stream(prompt, SAMPLED) for prompt in PROMPTS[:2]]
    got = [[], []]
    for _ in range(9):  # in turns
        for tokens, stream in zip(got, streams, strict=True):
            tokens.append(next(stream))
    assert [tuple(t.token_id for t in tokens) for tokens in got] == [solo(model, p, SAMPLED) for p in PROMPTS[:2]]
    assert got[0][-1].finish_reason is FinishReason.LENGTH
    assert list(streams[0]) == []


def test_astream_of_many_readers_equals_one_by_one(model, engine):
    async def read(prompt):
        return tuple([token.token_id async for token in engine.astream(prompt, SAMPLED)])

    async def read_all():
        return await asyncio.gather(*map(read, PROMPTS))

    assert asyncio.run(read_all()) == [solo(model, prompt, SAMPLED) for prompt in PROMPTS]
    assert engine.stats().num_free_pages == 79


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
    assert engine.stats().num_free_pages == 79
    assert engine.stats().num_running == 0


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
    engine = make_front(model)
    for add in (engine.add_request, engine.stream, engine.add_samples):
        with pytest.raises(error, match=message):
            add(PROMPTS[0], SAMPLED, **argument)
    forever = engine.add_request(PROMPTS[0], SAMPLED, priority=np.int64(-1), deadline=float("inf"))
    assert len(list(forever)) == SAMPLED.max_new_tokens


@pytest.mark.slow
def test_warmup_shows_a_bar_on_a_terminal_and_tells_progress(model, monkeypatch):
    limits = SchedulerConfig(max_num_seqs=1, max_step_tokens=8, max_model_len=32)
    engine, told = make_front(model, limits=limits), []
    assert engine.warmup(progress=lambda done, total: told.append((done, total))) == 2
    assert told == [(0, 2), (1, 2), (2, 2)]
    terminal = Terminal("stderr", monkeypatch)
    engine.warmup()
    monkeypatch.undo()
    assert "Compiling programs" in terminal.read()
    terminal.close()


def test_stream_with_a_stop_string_ends_before_it_whatever_tokens_cut_it(model):
    tokens = solo(model, PROMPTS[1], SAMPLED)
    text = Letters().decode(tokens)
    stop = text[3:5]
    engine = make_front(model, tokenizer=Letters())
    other = engine.stream(PROMPTS[0], SAMPLED)
    got = list(engine.stream(PROMPTS[1], dataclasses.replace(SAMPLED, stop=stop)))
    assert "".join(t.text for t in got) == text[: text.index(stop)]
    assert got[-1].finish_reason is FinishReason.STOP
    assert tuple(t.token_id for t in got) == tokens[: text.index(stop) + 2]
    assert "".join(t.text for t in other) == Letters().decode(solo(model, PROMPTS[0], SAMPLED))
    with pytest.raises(ValueError, match="`stop` needs a tokenizer"):
        make_front(model).generate(PROMPTS[:1], dataclasses.replace(SAMPLED, stop=stop))
    for include, expected in ((False, text[: text.index(stop)]), (True, text[: text.index(stop) + 2])):
        [output] = engine.generate([PROMPTS[1]], dataclasses.replace(SAMPLED, stop=stop, include_stop=include))
        assert output.text == expected
    assert make_engine(model).generate([PROMPTS[1]], SAMPLED)[0].text == ""


@pytest.mark.parametrize("how", ["add_request", "stream"])
def test_add_request_with_params_that_do_not_fit_the_model_is_refused(engine, how):
    add = getattr(engine, how)
    with pytest.raises(ValueError, match="`logit_bias` must name tokens from 0 to 63; got 64"):
        add(PROMPTS[0], dataclasses.replace(SAMPLED, logit_bias={64: 1.0}))
    with pytest.raises(ValueError, match="`n` must be 1 here; got 2"):
        add(PROMPTS[0], dataclasses.replace(SAMPLED, n=2))


def test_everything_at_once_from_many_threads_gives_each_its_own(model, engine):
    """`generate`, `stream`, `add_request` and `beam_search` share steps; none waits for another to end."""
    beams = make_engine(model).beam_search(PROMPTS[1:3], num_beams=2, max_new_tokens=6)
    expected = [solo(model, prompt, SAMPLED) for prompt in PROMPTS]
    got = {}

    def run(name, call):
        got[name] = call()

    async def read():
        return [token.token_id async for token in engine.astream(PROMPTS[2], SAMPLED)]

    calls = {
        "generate": lambda: [o.token_ids for o in engine.generate(PROMPTS, SAMPLED)],
        "stream": lambda: [t.token_id for t in engine.stream(PROMPTS[1], SAMPLED)],
        "astream": lambda: asyncio.run(read()),
        "result": lambda: engine.add_request(PROMPTS[3], SAMPLED).result().token_ids,
        "beams": lambda: engine.beam_search(PROMPTS[1:3], num_beams=2, max_new_tokens=6),
    }
    threads = [threading.Thread(target=run, args=item) for item in calls.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert got["generate"] == expected
    assert got["stream"] == list(expected[1])
    assert got["astream"] == list(expected[2])
    assert got["result"] == expected[3]
    assert [[b.token_ids for b in found] for found in got["beams"]] == [[b.token_ids for b in x] for x in beams]
    assert engine.stats().num_free_pages == 79


def test_engine_dropped_without_close_frees_its_pool_and_its_thread(model):
    engine = make_front(model)
    engine.generate(PROMPTS[:1], SamplingParams(max_new_tokens=2))
    cache, thread = weakref.ref(engine._worker.core.runner.cache.k_pages), engine._worker._thread
    del engine
    gc.collect()
    thread.join()
    gc.collect()
    assert cache() is None


def test_close_ends_requests_by_name_and_refuses_new_ones(model):
    engine = make_front(model)
    stream = engine.stream(PROMPTS[2], SamplingParams(max_new_tokens=50))
    next(stream)
    engine.close()
    with pytest.raises(RuntimeError, match="The engine was closed before this request ended"):
        stream.result()
    with pytest.raises(RuntimeError, match="The engine is closed"):
        engine.add_request(PROMPTS[0])
    engine.close()


def test_add_beyond_max_num_waiting_is_refused_by_name(model):
    """While the thread is kept busy by a call, requests wait in its queue."""
    engine, gate = make_front(model, limits=dataclasses.replace(LIMITS, max_num_waiting=2)), threading.Event()
    asking = threading.Thread(target=lambda: engine._worker.ask(gate.wait))
    asking.start()
    handles = [engine.add_request(PROMPTS[0], SAMPLED) for _ in range(2)]
    with pytest.raises(QueueFullError, match="2 requests are waiting, 1 are to come, and `max_num_waiting` is 2"):
        engine.add_request(PROMPTS[0], SAMPLED)
    gate.set()
    assert {handle.result().token_ids for handle in handles} == {solo(model, PROMPTS[0], SAMPLED)}
    asking.join()
    engine.close()


def test_contexts_in_force_at_the_constructor_apply_in_the_thread(model):
    [device] = jax.devices()[:1]
    with jax.default_device(device), jax.default_matmul_precision("highest"):
        engine = make_front(model)
    read = lambda: (jax.config.jax_default_device, jax.config.jax_default_matmul_precision)  # noqa: E731
    assert engine._worker.ask(read) == (device, "highest")
    assert read() != (device, "highest")
    engine.close()


def test_cache_salt_keeps_prefixes_of_tenants_apart_and_events_tell_a_router(model):
    engine = make_front(model, record_events=True)
    params = SamplingParams(max_new_tokens=2)
    outputs = [engine.add_request(PROMPTS[2], params, cache_salt=salt).result() for salt in ("a", "b", "a", None)]
    assert [o.num_cached_tokens for o in outputs] == [0, 0, 36, 0]
    assert len({o.token_ids for o in outputs}) == 1
    assert {event.kind for event in engine.take_events()} == {"stored"}
    with pytest.raises(ValueError, match="`record_events` must be True"):
        make_front(model).take_events()
    engine.close()


def test_generate_in_a_forked_process_raises_by_name(model, engine):
    engine.generate(PROMPTS[:1], SamplingParams(max_new_tokens=1))
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python and JAX warn of forks beside threads
        pid = os.fork()
    if pid == 0:
        said = b""
        for call in (engine.generate, engine.stats, lambda *_: engine.close()):
            try:
                call([[1]]) if call == engine.generate else call()
            except RuntimeError as error:
                said += str(error)[:40].encode() + b"\n"
        os.write(writer, said)
        os._exit(0)
    os.waitpid(pid, 0)
    os.close(writer)
    with os.fdopen(reader) as answer:
        assert answer.read() == "An engine works in the process that made\n" * 3
