"""Single steps: what a plan becomes on the device, and when."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxpaged as jp
from jaxpaged.engine import SamplingParams, runner
from jaxpaged.engine.plan import StepPlan, SwapIn, SwapOut
from jaxpaged.paging import PageCopy
from jaxpaged.paging.store.swap import SwapSpace
from tests.engine.tiny import CONFIG, PROMPTS, make_engine

SAMPLED = SamplingParams(max_new_tokens=9, temperature=1.3, top_k=20, top_p=0.95)


def carry_out(engine, plan) -> None:
    """A step by hand, in lockstep."""
    engine.runner.move(plan)
    result = engine.runner.read(engine.runner.dispatch(plan))
    engine.scheduler.dispatched(plan)
    engine.scheduler.update(plan, result.token_ids)


def test_make_batch_of_any_step_passes_the_value_check(model):
    engine = make_engine(model)
    for prompt in PROMPTS:
        engine.add_request(prompt, SamplingParams(max_new_tokens=5))
    steps = 0
    while (plan := engine.scheduler.schedule()) is not None:
        batch = engine.runner.make_batch(plan)
        jp.check_batch_values(batch, num_pages=80, page_size=4, vocab_size=CONFIG.vocab_size)
        assert batch.ragged.page_table.shape[1] == 24
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


@pytest.mark.slow
def test_generate_of_any_lengths_compiles_a_bounded_number_of_programs(model):
    """Traces, counted: bucketed shapes only, however many different batches there were."""
    traced = []

    class Counting:
        def __call__(self, cache, batch):
            traced.append((batch.token_ids.shape, batch.ragged.seq_lens.shape, batch.ragged.cu_q_lens is None))
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


def test_run_with_copies_that_follow_one_another_makes_them_in_order(model):
    """Of a page into a second, and of that one into a third, with the second then written anew."""
    engine = make_engine(model)
    [output] = engine.generate([PROMPTS[1]], SAMPLED)
    assert output.num_pages > 2
    cache = engine.runner.cache
    before = cache.export_pages(jnp.arange(10))
    copies = tuple(itertools.starmap(PageCopy, ((1, 7), (7, 8), (2, 7))))
    plan = StepPlan(page_copies=copies)
    cache, _ = engine.runner.mover.move(cache, plan)
    after = cache.export_pages(jnp.arange(10))
    for page, source in {7: 2, 8: 1, 1: 1, 2: 2}.items():
        np.testing.assert_array_equal(after.k[:, page], before.k[:, source])


def test_swapped_pages_move_some_at_a_time_and_come_back_to_other_places(model):
    """More pages than one program takes, out and in."""
    engine = make_engine(model, swap=SwapSpace(40))
    engine.generate([PROMPTS[2]], SamplingParams(max_new_tokens=50))
    mover, cache, pages = engine.runner.mover, engine.runner.cache, np.arange(1, 21, dtype=np.int32)
    before = cache.export_pages(jnp.asarray(pages))
    assert np.all(np.any(np.asarray(before.k) != 0, axis=(0, 2, 3, 4)))
    cache, lost = mover.move(cache, StepPlan(swap_outs=(SwapOut(7, pages),)))
    assert lost == []
    assert mover.swap.stats().num_sequences == 1
    cache, lost = mover.move(cache, StepPlan(swap_ins=(SwapIn(7, pages + 30),)))
    assert lost == []
    after = cache.export_pages(jnp.asarray(pages + 30))
    np.testing.assert_array_equal(after.k, before.k)
    np.testing.assert_array_equal(after.v, before.v)


def test_restore_cache_leaves_one_that_is_whole_and_replaces_one_that_is_lost(model):
    runner = make_engine(model).runner
    whole = runner.cache
    assert not runner.restore_cache(is_lost=False)
    assert runner.cache is whole
    assert runner.restore_cache(is_lost=True)
    assert runner.cache is not whole
    runner.cache.v_pages.delete()
    assert runner.restore_cache(is_lost=False)
    assert not runner.cache.v_pages.is_deleted()


def test_step_starts_before_the_one_before_is_read_and_uploads_once(model, monkeypatch):
    engine, log = make_engine(model), []
    dispatch, read, put = engine.runner.dispatch, engine.runner.read, jax.device_put
    monkeypatch.setattr(engine.runner, "dispatch", lambda plan: (log.append("dispatch"), dispatch(plan))[1])
    monkeypatch.setattr(engine.runner, "read", lambda in_flight: (log.append("read"), read(in_flight))[1])

    def upload(x):
        if isinstance(x, np.ndarray):  # this model, which runs layer by layer, puts a list of their numbers besides
            log.append("upload")
        return put(x)

    monkeypatch.setattr(jax, "device_put", upload)
    engine.generate(PROMPTS[3:], SamplingParams(max_new_tokens=4))
    begun = ["dispatch", "upload"]
    assert log == [*begun, *begun, "read", *begun, "read", *begun, "read", "read"]


def test_stats_as_prometheus_text_names_counters_and_gauges(model):
    engine = make_engine(model)
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
