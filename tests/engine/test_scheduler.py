import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxpaged as jp
from jaxpaged.engine.request import FinishReason, Request, SamplingParams
from jaxpaged.engine.scheduler import Scheduler, SchedulerConfig

PAGE_SIZE = 4


def make_scheduler(num_pages=40, **config) -> Scheduler:
    config = {"max_num_seqs": 4, "max_step_tokens": 16, "max_model_len": 64} | config
    return Scheduler(SchedulerConfig(**config), jp.PageAllocator(num_pages, PAGE_SIZE))


def make_request(request_id: int, prompt: int, new: int = 4, stop=()) -> Request:
    params = SamplingParams(max_new_tokens=new, stop_token_ids=stop)
    return Request(
        request_id=request_id, prompt_token_ids=tuple(range(prompt)), params=params, max_tokens=min(prompt + new, 64)
    )


def run(scheduler: Scheduler, token=lambda r: 7, max_steps=2000) -> list:
    """Steps until nothing is left; returns the plans. Tokens come from the request, as from a model."""
    plans = []
    while (plan := scheduler.schedule()) is not None:
        assert len(plans) < max_steps, "no progress"
        check(scheduler, plan)
        plans.append(plan)
        scheduler.update(plan, [token(r) for r in plan.requests])
    return plans


def check(scheduler: Scheduler, plan) -> None:
    assert 0 < len(plan.requests) <= scheduler.config.max_num_seqs
    assert all(n >= 1 for n in plan.num_new_tokens)
    assert plan.is_decode or sum(plan.num_new_tokens) <= scheduler.config.max_step_tokens
    for request, num_new in zip(plan.requests, plan.num_new_tokens, strict=True):
        assert scheduler.pages.seq_len(request.request_id) == request.num_computed_tokens + num_new


def test_schedule_runs_prompts_in_chunks_before_decoding():
    scheduler = make_scheduler()
    for i, prompt in enumerate((20, 5)):
        scheduler.add(make_request(i, prompt, new=2))
    plans = run(scheduler)
    steps = [[(r.request_id, n) for r, n in zip(p.requests, p.num_new_tokens, strict=True)] for p in plans]
    assert steps == [[(0, 16)], [(0, 4), (1, 5)], [(0, 1), (1, 1)]]


def test_update_with_a_stop_token_ends_the_request_and_frees_its_pages():
    scheduler = make_scheduler()
    request = make_request(0, 5, new=10, stop=(7,))
    scheduler.add(request)
    run(scheduler)
    assert request.finish_reason is FinishReason.STOP
    assert request.output_token_ids == [7]
    assert request.num_pages == 2
    assert scheduler.pages.num_free_pages == 39


def test_update_at_max_tokens_ends_with_length():
    scheduler = make_scheduler()
    request = make_request(0, 5, new=3)
    scheduler.add(request)
    run(scheduler)
    assert request.finish_reason is FinishReason.LENGTH
    assert request.output_token_ids == [7, 7, 7]


def test_schedule_out_of_pages_preempts_the_latest_and_all_finish():
    scheduler = make_scheduler(num_pages=9)  # 8 pages of 4: two requests of 4 + 20 tokens need 6 each
    requests = [make_request(i, 4, new=20) for i in range(2)]
    for request in requests:
        scheduler.add(request)
    run(scheduler, token=lambda r: 100 * r.request_id + len(r.output_token_ids))
    assert scheduler.num_preemptions > 0
    for request in requests:
        assert request.output_token_ids == [100 * request.request_id + i for i in range(20)]
    assert scheduler.pages.num_free_pages == 8
    assert scheduler.peak_num_pages == 8


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(1, 20)), min_size=1, max_size=12),
    st.integers(17, 40),
    st.integers(1, 5),
    st.integers(1, 20),
)
def test_schedule_of_any_requests_finishes_each_with_its_own_tokens(shapes, num_pages, max_num_seqs, max_step_tokens):
    scheduler = make_scheduler(num_pages, max_num_seqs=max_num_seqs, max_step_tokens=max_step_tokens)
    requests = [make_request(i, prompt, new) for i, (prompt, new) in enumerate(shapes)]
    for request in requests:
        scheduler.add(request)
    run(scheduler, token=lambda r: 100 * r.request_id + len(r.output_token_ids))
    for request, (_, new) in zip(requests, shapes, strict=True):
        assert request.output_token_ids == [100 * request.request_id + i for i in range(new)]
    assert scheduler.pages.num_free_pages == num_pages - 1
    assert not scheduler.waiting
    assert not scheduler.running


def test_add_of_a_request_that_can_never_run_fails_with_numbers():
    scheduler = make_scheduler(num_pages=5)
    with pytest.raises(ValueError, match="`prompt` must hold at least one token; got none"):
        scheduler.add(make_request(0, 0))
    with pytest.raises(ValueError, match="shorter than the context of 64 tokens.*got 64 tokens"):
        scheduler.add(make_request(0, 64))
    message = "`prompt` of 10 tokens with up to 8 new ones, in pages of 4, needs 5 pages; 4 are free"
    with pytest.raises(jp.OutOfPagesError, match=message):
        scheduler.add(make_request(0, 10, new=8))
    assert not scheduler.waiting
    scheduler.add(make_request(0, 10, new=7))  # the last token is never stored: 16 slots are enough
    assert len(run(scheduler)) == 7


def test_drop_of_a_running_or_waiting_request_frees_its_pages():
    scheduler = make_scheduler(max_num_seqs=1)
    first, second = make_request(0, 5), make_request(1, 5)
    scheduler.add(first)
    scheduler.add(second)
    scheduler.schedule()
    scheduler.drop(first)
    scheduler.drop(second)
    assert scheduler.pages.num_free_pages == 39
    assert scheduler.schedule() is None


@pytest.mark.parametrize("field", ["max_num_seqs", "max_step_tokens", "max_model_len"])
def test_scheduler_with_a_limit_of_0_names_it(field):
    with pytest.raises(ValueError, match=f"`{field}` must be an integer >= 1; got 0"):
        make_scheduler(**{field: 0})
    with pytest.raises(TypeError, match=rf"`{field}` must be an integer >= 1; got 2\.5 \(float\)"):
        make_scheduler(**{field: 2.5})


def test_request_tokens_spans_prompt_and_output():
    request = make_request(0, 3)
    request.output_token_ids += [50, 51]
    assert request.tokens(0, 5) == [0, 1, 2, 50, 51]
    assert request.tokens(2, 4) == [2, 50]
    assert request.tokens(3, 5) == [50, 51]
