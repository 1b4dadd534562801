import collections

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxpaged as jp
from jaxpaged.engine.config import SchedulerConfig
from jaxpaged.engine.request import FinishReason, Request
from jaxpaged.engine.sampling.params import SamplingParams
from jaxpaged.engine.scheduler import Scheduler
from jaxpaged.engine.speculation import NgramSpeculation
from jaxpaged.paging import PageGroup
from jaxpaged.paging.store.offload import put_evicted
from jaxpaged.paging.store.swap import SwapSpace

PAGE_SIZE = 4
FAILURES = ["early", "late", "lost", "interrupted", "interrupted late"]


def make_scheduler(num_pages=40, prefix_caching=False, swap=None, speculation=None, windows=(None,), **config):
    """A scheduler over a pool with a page group for each window, and `num_pages` for each group."""
    config = {"max_num_seqs": 4, "max_step_tokens": 16, "max_model_len": 64} | config
    offload = prefix_caching and swap is not None
    groups = [PageGroup(str(i), window) for i, window in enumerate(windows)]
    num_pages = 1 + len(windows) * (num_pages - 1)
    pages = jp.PageAllocator(num_pages, PAGE_SIZE, prefix_caching=prefix_caching, offload=offload, groups=groups)
    return Scheduler(SchedulerConfig(**config), pages, swap=swap, speculation=speculation)


def make_request(request_id: int, prompt: int | list[int], new: int = 4, stop=(), **kwargs) -> Request:
    params = SamplingParams(max_new_tokens=new, stop_token_ids=stop)
    tokens = tuple(range(prompt)) if isinstance(prompt, int) else tuple(prompt)
    return Request(
        request_id=request_id,
        prompt_token_ids=tokens,
        params=params,
        max_len=min(len(tokens) + new, 64),
        **kwargs,
    )


def next_token(tokens: list[int]) -> int:
    """A model of 5 tokens: what follows depends on all tokens that are seen."""
    return sum((i + 1) * t for i, t in enumerate(tokens)) % 5


def expected_output(request: Request, window: int | None = None) -> list[int]:
    tokens = list(request.prompt_token_ids)
    while len(tokens) < request.max_len:
        tokens.append(next_token(tokens[-(window or 64) :]))
        if tokens[-1] in request.params.stop_token_ids:
            break
    return tokens[len(request.prompt_token_ids) :]


def rows_of(plan) -> list[tuple[int, int, int]]:
    """Of each row the index of its request, its first position and its tokens."""
    columns = (plan.rows.requests, plan.rows.begins, plan.rows.num_tokens)
    return list(zip(*(column.tolist() for column in columns), strict=True))


class Machine:
    """Carries plans out as the runner does, on a pool of single tokens instead of keys and values.

    A slot of page group g holds token + 100 g. The next token follows from what the first group sees.
    """

    def __init__(self, scheduler: Scheduler):
        self.scheduler = scheduler
        self.windows = [group.sliding_window or 64 for group in scheduler.pages.groups]
        self.slots = np.full(scheduler.pages.num_pages * PAGE_SIZE, -1)
        self.leaving: tuple[list[bytes], dict] = ([], {})
        self.sampled: list[int] = []  # by the step before

    def pages_of(self, page_ids):
        return self.slots.reshape(-1, PAGE_SIZE)[page_ids]

    def block_of(self, page_ids):
        return {"k": self.pages_of(page_ids).reshape(1, len(page_ids), 1, PAGE_SIZE, 1).astype(np.int32)}

    def swap_out(self, plan) -> None:
        """Evicted contents reach the space one step later."""
        assert not any(self.scheduler.holdings.swap.has(e.digest) for e in plan.evictions)
        if self.leaving[0]:
            put_evicted(self.scheduler.holdings.swap, *self.leaving)
        self.leaving = ([e.digest for e in plan.evictions], self.block_of([e.page_id for e in plan.evictions]))
        for request_id, page_ids in plan.swap_outs:
            self.scheduler.holdings.swap.put_sequence(request_id, self.block_of(page_ids))

    def carry_out(self, plan) -> list[int]:
        """The tokens that follow, read from the pool: a token in a wrong slot changes them."""
        swap = self.scheduler.holdings.swap
        self.swap_out(plan)
        for src, dst in plan.page_copies:
            self.slots.reshape(-1, PAGE_SIZE)[dst] = self.pages_of(src)
        swapped = [(page_ids, swap.take_sequence(request_id)) for request_id, page_ids in plan.swap_ins]
        for page_ids, block in (*plan.restores, *swapped):
            self.slots.reshape(-1, PAGE_SIZE)[page_ids] = block["k"].reshape(len(page_ids), PAGE_SIZE)
        sampled, tokens, from_rows = [], iter(plan.token_ids.tolist()), iter(plan.from_rows.tolist())
        for request, begin, num_tokens in rows_of(plan):
            for position in range(begin, begin + num_tokens):
                token, row = next(tokens), next(from_rows)
                token = token if row < 0 else self.sampled[row]
                for group, page_ids in enumerate(plan.page_tables[:, request]):
                    slot = page_ids[position // PAGE_SIZE] * PAGE_SIZE + position % PAGE_SIZE
                    assert slot >= PAGE_SIZE  # not in the null page
                    self.slots[slot] = token + 100 * group
        for request, begin, num_tokens in rows_of(plan):
            end, tables = begin + num_tokens, plan.page_tables[:, request]
            seen = self.read(tables[0], max(0, begin - self.windows[0] + 1), end)
            for group, window in enumerate(self.windows[1:], 1):  # from its first token on, which sees the furthest
                tokens = self.read(tables[group], max(0, begin - window + 1), end)
                assert [token - 100 * group for token in tokens] == seen[-len(tokens) :]
            sampled.append(next_token(seen[-self.windows[0] :]))
        if plan.request_ids:
            self.sampled = sampled
        return sampled

    def read(self, page_ids, begin: int, end: int) -> list[int]:
        positions = np.arange(begin, end)
        return self.slots[page_ids[positions // PAGE_SIZE] * PAGE_SIZE + positions % PAGE_SIZE].tolist()


def run(scheduler: Scheduler, *, ahead=0, min_steps=0, max_steps=3000, before_step=lambda i: None, failures=()) -> list:
    """Steps until nothing is left, `ahead` steps of them scheduled before tokens are known; returns the plans.

    Args:
        failures: By step: it fails before anything was moved ("early") or after pages were swapped out ("late"), takes
            the pool with it ("lost"), or is interrupted, before that ("interrupted") or after ("interrupted late").
    """
    machine, plans, in_flight = Machine(scheduler), [], collections.deque()
    for i in range(max_steps):
        before_step(i)
        plan = scheduler.schedule(float(i))
        if plan is not None:
            check(scheduler, plan)
            plans.append(plan)
            failure = dict(failures).get(i)
            if failure in ("late", "interrupted late"):
                machine.swap_out(plan)
            if failure in ("early", "late", "lost"):
                scheduler.fail(plan, RuntimeError("a failed step"))
            if failure in ("lost", "interrupted", "interrupted late"):
                machine.slots[:] = -1
                in_flight.clear()
                scheduler.restart_all()
            if failure is not None:
                machine.leaving = ([], {})
                continue
            in_flight.append((plan, machine.carry_out(plan)))
            scheduler.dispatched(plan)
        if in_flight and (plan is None or len(in_flight) > ahead):
            scheduler.update(*in_flight.popleft())
        if i >= min_steps and plan is None and not in_flight and not scheduler.num_waiting and not scheduler.running:
            return plans
    raise AssertionError("no progress")


def check(scheduler: Scheduler, plan) -> None:
    assert len(plan.request_ids) <= scheduler.config.max_num_seqs
    assert len(scheduler.running) <= scheduler.config.max_num_seqs
    assert all(n >= 1 for n in plan.num_new_tokens)
    num_tokens = len(plan.token_ids)
    assert plan.is_decode or num_tokens <= max(scheduler.config.max_step_tokens, len(plan.request_ids))
    assert [r.order for r in scheduler.running] == sorted(r.order for r in scheduler.running)
    for request_id, end in zip(plan.request_ids, plan.begins + plan.num_new_tokens, strict=True):
        assert scheduler.pages.seq_len(request_id) >= end


def steps_of(plans) -> list:
    return [list(zip(p.request_ids, p.num_new_tokens.tolist(), strict=True)) for p in plans]


def test_schedule_decodes_first_and_fills_the_step_with_prompts():
    scheduler = make_scheduler()
    for i, prompt in enumerate((20, 5)):
        scheduler.add(make_request(i, prompt, new=2))
    assert steps_of(run(scheduler)) == [[(0, 16)], [(0, 4), (1, 5)], [(0, 1), (1, 1)]]
    for i, prompt in enumerate((3, 30)):
        scheduler.add(make_request(i + 2, prompt, new=3))
    assert steps_of(run(scheduler)) == [[(2, 3), (3, 13)], [(2, 1), (3, 15)], [(2, 1), (3, 2)], [(3, 1)], [(3, 1)]]


def test_schedule_with_priorities_runs_the_lowest_number_first():
    scheduler = make_scheduler(max_num_seqs=1)
    for i, priority in enumerate((5, 0, 5, -1)):
        scheduler.add(make_request(i, 3, new=1, priority=priority))
    assert [request_id for [(request_id, _)] in steps_of(run(scheduler))] == [3, 1, 0, 2]


def test_schedule_of_a_higher_priority_takes_the_place_of_a_running_request():
    scheduler = make_scheduler(max_num_seqs=1)
    first = make_request(0, 3, new=8, priority=1)
    scheduler.add(first)
    late = make_request(1, 3, new=2, priority=0)
    equal = make_request(2, 3, new=2, priority=1)

    def arrive(i):
        if i == 3:
            scheduler.add(late)
            scheduler.add(equal)

    ids = [entries[0][0] for entries in steps_of(run(scheduler, before_step=arrive))]
    assert ids == [0] * 3 + [1] * 2 + [0] * 5 + [2] * 2
    assert scheduler.counters.num_preemptions == 1
    assert first.output_token_ids == expected_output(first)


def test_schedule_past_a_deadline_ends_the_request_by_name():
    scheduler = make_scheduler(max_num_seqs=1)
    running, waiting, safe = (make_request(i, 3, new=20, deadline=d) for i, d in enumerate((4.0, 6.0, 100.0)))
    for request in (running, waiting, safe):
        scheduler.add(request)
    run(scheduler)
    assert [r.finish_reason for r in (running, waiting)] == [FinishReason.DEADLINE] * 2
    assert str(running.error) == "Request 0 passed its deadline by 1 s, with 5 of up to 20 new tokens."
    assert isinstance(waiting.error, TimeoutError)
    assert safe.output_token_ids == expected_output(safe)
    assert [r.request_id for r in scheduler.take_ended()] == [0, 1]
    assert scheduler.pages.num_free_pages == 39


def test_update_with_a_stop_token_ends_the_request_and_frees_its_pages():
    for ahead in (0, 1):
        scheduler = make_scheduler()
        request = make_request(0, 5, new=10)
        stop = expected_output(request)[2]
        request = make_request(0, 5, new=10, stop=(stop,))
        scheduler.add(request)
        run(scheduler, ahead=ahead)
        assert request.finish_reason is FinishReason.STOP
        assert request.output_token_ids == expected_output(request)
        assert request.num_pages == 2
        assert scheduler.pages.num_free_pages == 39


def test_update_at_max_tokens_ends_with_length():
    scheduler = make_scheduler()
    request = make_request(0, 5, new=3)
    scheduler.add(request)
    assert len(run(scheduler, ahead=1)) == 3
    assert request.finish_reason is FinishReason.LENGTH
    assert request.output_token_ids == expected_output(request)


@pytest.mark.parametrize("swap_pages", [0, 3, 100])
def test_schedule_out_of_pages_preempts_the_latest_and_all_finish(swap_pages):
    swap = SwapSpace(swap_pages) if swap_pages else None
    scheduler = make_scheduler(num_pages=9, swap=swap)  # 8 pages of 4: two requests of 4 + 20 tokens need 6 each
    requests = [make_request(i, [i, 1, 2, 3], new=20) for i in range(2)]
    for request in requests:
        scheduler.add(request)
    plans = run(scheduler)
    assert scheduler.counters.num_preemptions > 0
    assert scheduler.counters.num_swap_outs == (scheduler.counters.num_preemptions if swap_pages == 100 else 0)
    computed = sum(int(p.num_new_tokens.sum()) for p in plans)
    assert (computed == 2 * 23) == (swap_pages == 100)  # nothing is computed twice
    for request in requests:
        assert request.output_token_ids == expected_output(request)
    assert scheduler.pages.num_free_pages == 8
    assert scheduler.counters.peak_num_pages == 8
    assert swap is None or swap.stats().num_sequences == 0


def test_schedule_of_prompts_that_begin_alike_computes_the_beginning_once():
    scheduler = make_scheduler(prefix_caching=True, max_step_tokens=64)
    for i in range(4):
        scheduler.add(make_request(i, [*range(12), i], new=2))
    steps = steps_of(run(scheduler))
    assert steps[0] == [(0, 13)]
    assert steps[1] == [(0, 1), (1, 1), (2, 1), (3, 1)]
    stats = scheduler.pages.stats()
    assert (stats.num_hit_tokens, stats.num_missed_tokens) == (36, 16)


def test_schedule_of_prompts_that_begin_alike_in_chunks_computes_the_beginning_once():
    """The first takes two steps: in the second, which has tokens left, the others still wait for its last full page."""
    scheduler = make_scheduler(prefix_caching=True, max_step_tokens=11)
    for i in range(3):
        scheduler.add(make_request(i, [*range(12), i], new=1))
    scheduler.add(make_request(3, [*range(4), 9, 9], new=1))  # alike up to the page that is there by then
    steps = steps_of(run(scheduler))
    assert steps == [[(0, 11)], [(0, 2)], [(1, 1), (2, 1), (3, 2)]]
    scheduler.pages.prefix.reset()
    for i in range(4, 6):  # and where they differ after a page, no longer than for that one
        scheduler.add(make_request(i, [*range(4), *[i] * 9], new=1))
    assert steps_of(run(scheduler)) == [[(4, 11)], [(4, 2), (5, 9)]]


def test_preempted_request_finds_what_it_had_computed():
    scheduler = make_scheduler(prefix_caching=True, max_num_seqs=1)
    scheduler.add(make_request(0, 9, new=12, priority=1))
    plans = run(scheduler, before_step=lambda i: i == 5 and scheduler.add(make_request(1, 3, new=1)))
    again = [entries for entries in steps_of(plans) if entries[0][0] == 0][5]
    assert again == [(0, 2)]  # of 9 + 5 tokens three pages were full
    assert scheduler.counters.num_preemptions == 1


def test_preempted_together_only_those_are_swapped_for_whom_there_is_room():
    swap = SwapSpace(4)
    scheduler = make_scheduler(num_pages=13, swap=swap, max_step_tokens=32)
    low = [make_request(i, 9, new=6, priority=1) for i in range(2)]  # three pages each, and a fourth to come
    for request in low:
        scheduler.add(request)
    high = make_request(2, 36, new=2)
    plans = run(scheduler, before_step=lambda i: i == 2 and scheduler.add(high))
    [plan] = [plan for plan in plans if plan.swap_outs]
    assert [(out.request_id, len(out.page_ids)) for out in plan.swap_outs] == [(1, 3)]
    assert scheduler.counters.num_preemptions == 2
    assert all(r.output_token_ids == expected_output(r) for r in (*low, high))
    assert swap.stats().num_sequences == 0


@pytest.mark.parametrize("failure", FAILURES)
@pytest.mark.parametrize("ahead", [0, 1])
def test_run_goes_on_after_the_step_that_was_to_swap_out_failed(failure, ahead):
    def preempt(failures=()):
        swap = SwapSpace(8)
        scheduler = make_scheduler(num_pages=13, swap=swap, max_step_tokens=32)
        low = [make_request(i, 9, new=6, priority=1) for i in range(2)]
        for request in low:
            scheduler.add(request)
        high = make_request(2, 36, new=2)
        plans = run(scheduler, ahead=ahead, before_step=lambda i: i == 2 and scheduler.add(high), failures=failures)
        assert swap.stats().num_sequences == 0
        assert scheduler.pages.num_free_pages == 12
        return plans, low, high

    plans, *_ = preempt()
    at = next(i for i, plan in enumerate(plans) if plan.swap_outs)
    _, low, high = preempt({at: failure})
    assert [r.output_token_ids for r in low] == [expected_output(r) for r in low]
    assert high.finish_reason is (FinishReason.LENGTH if "interrupted" in failure else FinishReason.ERROR)


def test_update_with_drafts_keeps_those_that_stand():
    prompt = [1, 2, 3, 1, 2]
    scheduler = make_scheduler(speculation=NgramSpeculation(min_ngram=1))
    request = make_request(0, prompt, new=30)
    scheduler.add(request)
    plans = run(scheduler)
    assert request.output_token_ids == expected_output(request)
    assert 0 < scheduler.counters.num_accepted_drafts < scheduler.counters.num_drafts
    assert len(plans) == 30 - scheduler.counters.num_accepted_drafts
    assert scheduler.pages.num_free_pages == 39


def test_update_of_logits_that_are_not_finite_forgets_what_the_request_found_of_its_own():
    scheduler = make_scheduler(prefix_caching=True, max_num_seqs=1, max_step_tokens=8)
    bad = make_request(0, 9, priority=1)
    scheduler.add(bad)
    first = scheduler.schedule()
    scheduler.dispatched(first)
    scheduler.update(first, [0])
    scheduler.add(make_request(1, [5, 5], new=1))
    for token_id in (3, 4):  # the other one runs; then the first goes on behind its own pages
        plan = scheduler.schedule()
        scheduler.dispatched(plan)
        scheduler.update(plan, [token_id], non_finite={0} if plan.request_ids == (0,) else frozenset())
    assert scheduler.counters.num_preemptions == 1
    assert plan.num_new_tokens.tolist() == [1]
    assert bad.finish_reason is FinishReason.ERROR
    assert scheduler.pages.prefix.match(bad.prompt_token_ids) == 0


def test_update_of_logits_that_are_not_finite_ends_that_request_only():
    scheduler = make_scheduler(prefix_caching=True, max_step_tokens=32)
    good, bad = make_request(0, 9), make_request(1, [5] * 9)
    for request in (good, bad):
        scheduler.add(request)
    plan = scheduler.schedule()
    scheduler.dispatched(plan)
    scheduler.update(plan, [1, 2], {1})
    assert bad.finish_reason is FinishReason.ERROR
    assert str(bad.error) == "Request 1: the model's logits after token 9 are not finite."
    assert good.output_token_ids == [1]
    assert scheduler.running == [good]
    assert scheduler.pages.prefix.match([5] * 9) == 0  # nobody is to find its pages
    assert scheduler.pages.prefix.match(range(9)) == 8


def shapes_of(prompts):
    return st.tuples(prompts, st.integers(1, 20), st.integers(0, 2), st.booleans())


ANY = {
    "shapes": st.lists(shapes_of(st.lists(st.integers(0, 2), min_size=1, max_size=40)), min_size=1, max_size=10),
    "num_pages": st.integers(17, 40),
    "max_num_seqs": st.integers(1, 5),
    "max_step_tokens": st.integers(1, 20),
    "prefix_caching": st.booleans(),
    "swap_pages": st.sampled_from([0, 4, 100]),
    "speculation": st.sampled_from([None, NgramSpeculation(min_ngram=1)]),
    "ahead": st.integers(0, 1),
    "arrivals": st.lists(st.integers(0, 30), min_size=10, max_size=10),
    "windows": st.sampled_from([(None,), (None,), (None, 5), (None, 3, 9), (6,)]),  # the first group sees the furthest
    "aborts": st.dictionaries(st.integers(0, 9), st.integers(0, 40), max_size=3),
    "failures": st.dictionaries(st.integers(0, 40), st.sampled_from(FAILURES), max_size=3),
}
TEXTS = np.random.default_rng(0).integers(0, 3, (4, 40)).tolist()
PREFIXES = st.builds(lambda text, num_tokens: text[:num_tokens], st.sampled_from(TEXTS), st.integers(20, 40))
EVICTING = {
    "shapes": st.lists(shapes_of(PREFIXES), min_size=6, max_size=10),
    "num_pages": st.integers(17, 20),
    "max_num_seqs": st.integers(1, 2),
    "max_step_tokens": st.integers(8, 40),
    "prefix_caching": st.just(True),
    "swap_pages": st.sampled_from([12, 100]),
    "arrivals": st.lists(st.integers(0, 60), min_size=10, max_size=10),
    "failures": st.dictionaries(st.integers(0, 100), st.sampled_from(FAILURES), max_size=6),
}


@settings(deadline=None, max_examples=100)
@given(**ANY)
def test_schedule_of_any_requests_ends_each_with_its_own_tokens(**drawn):
    """Progress, whatever pool, lengths, priorities and failures; and no page is leaked or read by another."""
    run_any(**drawn)


def test_schedule_of_prompts_whose_pages_were_evicted_ends_each_with_its_own_tokens():
    num_restored = 0

    @settings(deadline=None, max_examples=100)
    @given(**ANY | EVICTING)
    def check(**drawn):
        nonlocal num_restored
        num_restored += run_any(**drawn).counters.num_restored_pages

    check()
    assert num_restored > 250


def run_any(
    *,
    shapes,
    num_pages,
    max_num_seqs,
    max_step_tokens,
    prefix_caching,
    swap_pages,
    speculation,
    ahead,
    arrivals,
    windows,
    aborts,
    failures,
) -> Scheduler:
    swap = SwapSpace(swap_pages * len(windows)) if swap_pages else None
    limits = {"max_num_seqs": max_num_seqs, "max_step_tokens": max_step_tokens}
    scheduler = make_scheduler(num_pages, prefix_caching, swap, speculation, windows, **limits)
    requests = [
        make_request(i, prompt, new, stop=(3,) if stops else (), priority=priority)
        for i, (prompt, new, priority, stops) in enumerate(shapes)
    ]

    def before_step(i):
        for request, at in zip(requests, arrivals, strict=False):
            if at == i:
                scheduler.add(request)
        here = [r for r, at in zip(requests, arrivals, strict=False) if at <= i]
        scheduler.end([r for r in here if aborts.get(r.request_id) == i], FinishReason.ABORT)

    run(scheduler, ahead=ahead, before_step=before_step, min_steps=max(arrivals) + 1, failures=failures)
    for request in requests:
        if request.finish_reason in (FinishReason.ABORT, FinishReason.ERROR):
            assert request.output_token_ids == expected_output(request, windows[0])[: len(request.output_token_ids)]
        else:
            assert request.output_token_ids == expected_output(request, windows[0])
    assert scheduler.pages.num_free_pages == len(windows) * (num_pages - 1)
    assert not scheduler.waiting
    assert not scheduler.running
    assert swap is None or swap.stats().num_sequences == 0
    return scheduler


def make_samples(first_id: int, prompt: int, news: list[int]) -> list[Request]:
    samples = [make_request(first_id + i, prompt, new) for i, new in enumerate(news)]
    for request in samples:
        request.siblings = samples
    return samples


@pytest.mark.parametrize("prompt", [1, 4, 5, 7, 8, 30])
@pytest.mark.parametrize("ahead", [0, 1])
def test_schedule_of_samples_computes_their_prompt_once(prompt, ahead):
    scheduler = make_scheduler(max_num_seqs=3)
    samples = make_samples(0, prompt, [5, 9, 1, 6])
    for request in samples:
        scheduler.add(request)
    plans = run(scheduler, ahead=ahead)
    assert [r.output_token_ids for r in samples] == [expected_output(r) for r in samples]
    # The prompt; its last token for each other sample; each new token but the last, and one that came too late.
    computed = sum(int(plan.num_new_tokens.sum()) for plan in plans)
    assert computed == prompt + 3 + sum(len(r.output_token_ids) - 1 for r in samples)
    assert scheduler.counters.num_forks == 3
    copies = [copy for plan in plans for copy in plan.page_copies]
    assert len(copies) == (3 if (prompt - 1) % PAGE_SIZE else 0)
    assert scheduler.pages.num_free_pages == 39


@settings(max_examples=60)
@given(
    st.lists(
        st.tuples(st.integers(1, 24), st.lists(st.integers(1, 12), min_size=1, max_size=4)), min_size=1, max_size=4
    ),
    st.integers(10, 30),  # the longest takes 9
    st.booleans(),
    st.sampled_from([0, 4, 20]),
    st.integers(0, 1),
    st.integers(1, 16),
    st.sampled_from([None, NgramSpeculation(min_ngram=1)]),
    st.sampled_from([(None,), (None, 5), (6,)]),
)
def test_run_of_samples_always_ends_with_the_tokens_of_each_alone(
    prompts, num_pages, prefix_caching, swap_pages, ahead, max_step_tokens, speculation, windows
):
    swap = SwapSpace(swap_pages) if swap_pages else None
    scheduler = make_scheduler(num_pages, prefix_caching, swap, speculation, windows, max_step_tokens=max_step_tokens)
    samples = [r for i, (prompt, news) in enumerate(prompts) for r in make_samples(10 * i, prompt, news)]
    for request in samples:
        scheduler.add(request)
    run(scheduler, ahead=ahead)
    assert [r.output_token_ids for r in samples] == [expected_output(r, windows[0]) for r in samples]
    assert scheduler.pages.num_free_pages == len(windows) * (num_pages - 1)
    assert swap is None or swap.stats().num_sequences == 0


def test_add_of_a_request_that_can_never_run_fails_with_numbers():
    scheduler = make_scheduler(num_pages=5)
    with pytest.raises(ValueError, match="`prompt` must hold at least one token; got none"):
        scheduler.add(make_request(0, 0))
    with pytest.raises(ValueError, match="shorter than the context of 64 tokens.*got 64 tokens"):
        scheduler.add(make_request(0, 64))
    message = "`prompt` of 10 tokens with up to 8 new ones, in pages of 4, needs 5 pages; 4 are free"
    with pytest.raises(jp.OutOfPagesError, match=message):
        scheduler.add(make_request(0, 10, new=8))
    assert not scheduler.num_waiting
    scheduler.add(make_request(0, 10, new=7))  # the last token is never stored: 16 slots are enough
    assert len(run(scheduler)) == 7


def test_end_of_a_running_or_waiting_request_frees_its_pages():
    scheduler = make_scheduler(max_num_seqs=1)
    first, second = make_request(0, 5), make_request(1, 5)
    scheduler.add(first)
    scheduler.add(second)
    plan = scheduler.schedule()
    scheduler.dispatched(plan)
    scheduler.end([first, second], FinishReason.ABORT)
    assert scheduler.pages.num_free_pages == 39
    assert scheduler.update(plan, [1]) == []
    assert scheduler.schedule() is None


@pytest.mark.parametrize("field", ["max_num_seqs", "max_step_tokens", "max_model_len", "max_num_waiting"])
def test_scheduler_with_a_limit_of_0_names_it(field):
    with pytest.raises(ValueError, match=f"`{field}` must be an integer >= 1; got 0"):
        make_scheduler(**{field: 0})
    with pytest.raises(TypeError, match=rf"`{field}` must be an integer >= 1; got 2\.5 \(float\)"):
        make_scheduler(**{field: 2.5})


def test_known_tokens_spans_prompt_and_output():
    request = make_request(0, 3)
    assert request.known_tokens().tolist() == [0, 1, 2]
    request.output_token_ids += [50, 51]
    assert request.known_tokens().tolist() == [0, 1, 2, 50, 51]
