"""Prefixes that were evicted from the cache come back from the swap space, and change no token."""

import dataclasses

import jax
import numpy as np
import pytest

from jaxpaged.engine import Engine, FinishReason, SamplingParams
from jaxpaged.engine.plan import StepPlan
from jaxpaged.paging import Eviction, PageCopy
from jaxpaged.paging.store.offload import PageImport
from jaxpaged.paging.store.swap import SwapSpace
from tests.engine.faults import BAD, Broken, good_params, solo
from tests.engine.tiny import LIMITS, make_engine

FIRST, SECOND = ([int(t) for t in np.random.default_rng(i).integers(0, 63, n)] for i, n in ((7, 24), (8, 29)))
PARAMS = SamplingParams(max_new_tokens=4)
NUM_PAGES = 9
"""The second takes all of them at once."""


def run(engine: Engine, *prompts: list[int]) -> list[tuple[int, ...]]:
    """One after the other."""
    return [output.token_ids for prompt in prompts for output in engine.generate([prompt], PARAMS)]


@pytest.fixture(scope="module")
def expected(model):
    return {tuple(prompt): solo(model, prompt, PARAMS) for prompt in (FIRST, SECOND)}


def check(engine: Engine, expected: dict, *prompts: list[int]) -> None:
    assert run(engine, *prompts) == [expected[tuple(prompt)] for prompt in prompts]
    assert engine.pages.num_free_pages in (NUM_PAGES - 1, engine.pages.num_pages - 1)


def test_evicted_prefixes_are_hit_as_in_a_pool_for_all(model, expected):
    swap, prompts = SwapSpace(40), [FIRST, SECOND] * 3
    small, ample = make_engine(model, NUM_PAGES, swap=swap), make_engine(model)
    for engine in (small, ample):
        check(engine, expected, *prompts)
    stats = small.stats()
    assert stats.num_hit_tokens == ample.stats().num_hit_tokens == 2 * (20 + 28)
    assert (stats.num_restored_pages, ample.stats().num_restored_pages) == (
        2 * (5 + 6),
        0,
    )  # the first page is not evicted
    assert f"jaxpaged_num_restored_pages_total {stats.num_restored_pages}\n" in stats.prometheus_text()
    assert swap.stats().num_sequences == 0


def test_evicted_prefixes_of_prompts_together_are_right(model):
    """With preemption by swap to the same space."""
    params = dataclasses.replace(PARAMS, max_new_tokens=20)
    prompts = [FIRST[i : i + 20] for i in range(3)] + [SECOND[i : i + 20] for i in range(3)]
    expected = [solo(model, prompt, params) for prompt in prompts]
    swap = SwapSpace(60)
    engine = make_engine(model, 17, swap=swap)
    for _ in range(3):
        assert [output.token_ids for output in engine.generate(prompts, params)] == expected
    stats = engine.stats()
    assert stats.num_restored_pages > 0
    assert stats.num_swap_outs > 0
    assert swap.stats().num_sequences == 0
    assert engine.pages.num_free_pages == 16


def test_evicted_pages_that_the_file_did_not_keep_whole_are_computed_again(model, expected, tmp_path):
    with SwapSpace(0, file=tmp_path / "swap", num_file_pages=40) as swap:
        engine = make_engine(model, NUM_PAGES, swap=swap)
        check(engine, expected, FIRST, SECOND, FIRST)
        assert engine.stats().num_restored_pages > 0
        swap._store._file._pages[:] ^= 255
        check(engine, expected, SECOND, FIRST)
        assert swap.stats().num_lost_pages > 0
        check(engine, expected, SECOND, FIRST)


def begin_second(engine: Engine) -> None:
    """One step, in which the pages of the first prompt leave."""
    engine.add_request(SECOND, PARAMS)
    engine.step()
    assert engine.pages.prefix.match([*FIRST, 0]) == 0


@pytest.mark.parametrize("num_steps", [0, 2])
def test_reset_forgets_what_the_swap_space_has_and_what_is_on_its_way(model, expected, num_steps):
    swap = SwapSpace(40)
    engine = make_engine(model, NUM_PAGES, swap=swap)
    check(engine, expected, FIRST)
    begin_second(engine)
    for _ in range(num_steps):
        engine.step()
    assert swap.stats().num_prefix_pages == (6 if num_steps else 0)
    engine.reset()
    check(engine, expected, FIRST)
    assert engine.stats().num_hit_tokens == 0


def test_logits_not_finite_leave_nothing_to_hit_in_the_swap_space(model, expected):
    """A prompt is preempted while nobody knows, and its pages are evicted for the one that took its place."""
    swap = SwapSpace(40)
    params = dataclasses.replace(good_params(model), max_new_tokens=4)
    limits = dataclasses.replace(LIMITS, max_num_seqs=1)
    engine = make_engine(Broken(model, 63, "nan"), NUM_PAGES, limits=limits, swap=swap)
    check(engine, expected, FIRST, SECOND)
    assert swap.stats().num_prefix_pages == 6
    bad = engine.add_request([*range(7), 63], params, priority=1)
    assert engine.step() == []
    good = engine.add_request(SECOND[::-1], params)
    tokens = engine.step()
    assert swap.stats().num_prefix_pages == 0
    while engine.has_unfinished():
        tokens += engine.step()
    ends = {token.request_id: token.finish_reason for token in tokens if token.finish_reason is not None}
    assert ends == {bad: FinishReason.ERROR, good: FinishReason.LENGTH}
    assert engine.stats().num_preemptions == 1
    assert engine.pages.add("again", [*range(7), 62], host=swap) == 0


def test_step_that_takes_the_cache_with_it_leaves_the_swap_space_as_it_was(model, expected):
    swap = SwapSpace(40)
    engine = make_engine(Broken(model, 63, "raise and lose"), NUM_PAGES, swap=swap)
    check(engine, expected, FIRST, SECOND)
    with pytest.raises(RuntimeError, match="the model is broken"):
        engine.generate([BAD], PARAMS)
    check(engine, expected, FIRST)
    assert engine.stats().num_restored_pages == 5


def test_step_whose_result_cannot_be_read_drops_what_is_on_its_way(model, expected, monkeypatch):
    swap = SwapSpace(40)
    engine = make_engine(model, NUM_PAGES, swap=swap)
    check(engine, expected, FIRST)

    def fail(_):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")

    engine.add_request([1, 2, 3], PARAMS)
    engine.step()
    monkeypatch.setattr(engine.runner, "read", fail)
    engine.add_request(SECOND[:22], PARAMS)
    engine.step()  # pages of the first prompt leave, and then the step before turns out to have failed
    assert engine.pages.stats().num_evictions > 0
    monkeypatch.undo()
    while engine.has_unfinished():
        engine.step()
    assert swap.stats().num_prefix_pages == 0


def test_prefix_that_cannot_be_read_fails_its_request_alone_and_is_not_hit(model, expected, monkeypatch):
    swap = SwapSpace(40)
    engine = make_engine(model, NUM_PAGES, swap=swap)
    check(engine, expected, FIRST, SECOND)

    def fail(*_):
        raise MemoryError("no room for the block")

    monkeypatch.setattr(SwapSpace, "get_pages", fail)
    bad, good = engine.add_request(FIRST, PARAMS), engine.add_request([1, 2, 3], PARAMS)
    tokens = []
    while engine.has_unfinished():
        tokens += engine.step()
    ends = {token.request_id: token for token in tokens if token.finish_reason is not None}
    assert isinstance(ends[bad].error, MemoryError)
    assert ends[good].finish_reason is FinishReason.LENGTH
    monkeypatch.undo()
    check(engine, expected, FIRST, SECOND)


def test_evicted_pages_that_cannot_be_kept_are_lost_with_a_warning(model, expected, tmp_path):
    swap = SwapSpace(0, file=tmp_path / "nowhere" / "swap", num_file_pages=40)
    engine = make_engine(model, NUM_PAGES, swap=swap)
    check(engine, expected, FIRST)
    with pytest.warns(RuntimeWarning, match=r"^Evicted pages are lost, for they could not be kept: FileNotFoundError"):
        check(engine, expected, SECOND)
    assert swap.stats().num_prefix_pages == 0


def test_step_that_fails_before_pages_came_back_lets_nobody_hit_them(model, expected, monkeypatch):
    engine = make_engine(model, NUM_PAGES, swap=SwapSpace(40))
    check(engine, expected, FIRST, SECOND)
    move = engine.runner.mover.move

    def fail(cache, plan):
        if plan.restores:
            raise RuntimeError("before anything moved")
        return move(cache, plan)

    monkeypatch.setattr(engine.runner.mover, "move", fail)
    with pytest.raises(RuntimeError, match="before anything moved"):
        engine.generate([FIRST], PARAMS)
    monkeypatch.undo()
    check(engine, expected, FIRST)


def test_pages_that_have_left_are_not_kept_again(model, expected):
    swap = SwapSpace(40)
    engine = make_engine(model, NUM_PAGES, swap=swap)
    check(engine, expected, FIRST, SECOND)
    swap.drop_pages()
    num_evictions = engine.pages.stats().num_evictions
    run(engine, [1, 2, 3])
    assert swap.stats().num_prefix_pages == engine.pages.stats().num_evictions - num_evictions < 6


def test_move_exports_before_it_copies_and_imports_after(model):
    engine = make_engine(model, swap=SwapSpace(40))
    run(engine, FIRST)  # pages 1 to 6 and on
    mover, cache = engine.runner.mover, engine.runner.cache
    before = cache.export_pages(np.arange(9)).to_host()
    block = {name: x[:, [3]] for name, x in before.items()}
    plan = StepPlan(
        evictions=tuple(Eviction(bytes([i]) * 16, i) for i in (1, 2)),
        page_copies=(PageCopy(2, 1), PageCopy(4, 5)),
        restores=(
            PageImport(np.array([2, 5], np.int32), {name: np.repeat(x, 2, axis=1) for name, x in block.items()}),
        ),
    )
    cache, _ = mover.move(cache, plan)
    mover.keep_leaving()
    kept, found = mover.swap.get_pages([bytes([i]) * 16 for i in (1, 2)])
    assert found.all()
    after = cache.export_pages(np.arange(9)).to_host()
    for name, x in before.items():
        np.testing.assert_array_equal(kept[name], x[:, 1:3])
        np.testing.assert_array_equal(after[name][:, 1:6], x[:, [2, 3, 3, 4, 3]])


def test_hundreds_of_pages_leave_in_one_step(model):
    engine = make_engine(model, 400, dataclasses.replace(LIMITS, max_num_seqs=1), swap=SwapSpace(300))
    cache = engine.runner.cache
    evictions = tuple(Eviction(i.to_bytes(16, "big"), i) for i in range(1, 280))
    plan = StepPlan(evictions=evictions)
    engine.runner.mover.move(cache, plan)
    engine.runner.mover.keep_leaving()
    assert engine.runner.mover.swap.stats().num_prefix_pages == 279


def test_evictions_are_those_that_the_space_has_room_for(model, expected):
    engine = make_engine(model, NUM_PAGES, swap=SwapSpace(2))
    check(engine, expected, FIRST)
    plans, move = [], engine.runner.mover.move
    engine.runner.mover.move = lambda cache, plan: plans.append(plan) or move(cache, plan)
    check(engine, expected, SECOND)
    assert max(len(plan.evictions) for plan in plans) == 2
    plain = make_engine(model, NUM_PAGES)
    check(plain, expected, FIRST, SECOND)
    assert plain.pages.stats().num_evictions > 0
    assert plain.pages.prefix.take_evictions() == []


def test_beam_search_lets_what_it_evicts_come_back(model, expected):
    swap = SwapSpace(40)
    engine = make_engine(model, NUM_PAGES, swap=swap)
    check(engine, expected, FIRST)
    engine.beam_search([SECOND[:24]], num_beams=2, max_new_tokens=2)
    assert engine.pages.prefix.match([*FIRST, 0]) == 0
    check(engine, expected, FIRST)
    assert engine.stats().num_restored_pages > 0
