"""Ctrl-C at any line of the engine: nothing is lost, nothing hangs, no page leaks."""

import gc
import linecache
import signal
import sys
import threading

import pytest

from jaxpaged.engine import FinishReason, SamplingParams
from jaxpaged.engine.interrupts import Interrupts
from jaxpaged.paging.swap import SwapSpace
from tests.engine.tiny import PROMPTS, make_engine

SAMPLED = SamplingParams(max_new_tokens=12, temperature=1.3)
STRIDE = 397
pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def sigint():
    """Python's own handler, also where a shell has started pytest with SIGINT ignored, as it does with `&`."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


class InterruptAt:
    """Sends SIGINT before the nth line that is run in a folder.

    Not before these: a trace comes to them once more on the way out, where Python looks at no signal, and what `step`
    has taken in hand to return is the caller's.
    """

    SPARED = ("with self._lock", "return told")

    def __init__(self, n: int, folder: str = "jaxpaged/engine"):
        self.num_left = n
        self.folder = folder

    def __enter__(self):
        sys.settrace(self._trace)
        return self

    def __exit__(self, *_):
        sys.settrace(None)

    def _trace(self, frame, event, arg):
        name = frame.f_code.co_filename
        if self.folder not in name:
            return None
        if event == "line" and not any(text in linecache.getline(name, frame.f_lineno) for text in self.SPARED):
            self.num_left -= 1
            if self.num_left == 0:
                sys.settrace(None)
                signal.raise_signal(signal.SIGINT)
        return self._trace


def every_place(run, stride: int = STRIDE, folder: str = "jaxpaged/engine") -> int:
    """Calls `run(interrupt)`, which tells whether it was interrupted, for one place after another; how many were."""
    for n in range(1, 10**6, stride):
        interrupt = InterruptAt(n, folder)
        assert run(interrupt) == (interrupt.num_left <= 0)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        if interrupt.num_left > 0:
            return n // stride
    raise AssertionError("no end")


@pytest.fixture(scope="module")
def solo(model):
    engine = make_engine(model, prefix_caching=False)
    return lambda prompt: engine.generate([prompt], SAMPLED)[0].token_ids


@pytest.mark.parametrize("folder", ["jaxpaged/engine", "jaxpaged/paging"])
def test_step_interrupted_anywhere_loses_no_token(model, solo, folder):
    """Through chunks, preemption and swap, with every step called again until nothing is left."""
    prompts = PROMPTS[1:]
    expected = [solo(prompt) for prompt in prompts]

    def run(interrupt):
        swap = SwapSpace(40)
        engine = make_engine(model, 17, swap=swap)
        tokens = {engine.add_request(prompt, SAMPLED): [] for prompt in prompts}
        interrupted = False
        with interrupt:
            is_left = True
            while is_left:
                new = []
                try:
                    new = engine.step()
                    is_left = engine.has_unfinished()
                except KeyboardInterrupt:
                    interrupted = True
                for token in new:
                    assert token.error is None
                    tokens[token.request_id].append(token.token_id)
        assert [tuple(t) for t in tokens.values()] == expected
        assert engine.pages.num_free_pages == 16
        stats = swap.stats()
        assert (stats.num_sequences, stats.num_used_host_pages) == (0, stats.num_prefix_pages)
        return interrupted

    assert every_place(run, folder=folder) > 5


def test_step_interrupted_when_all_has_ended_has_tokens_to_tell(model, monkeypatch):
    engine = make_engine(model)
    deliver = engine._deliver

    def interrupted(*args, **kwargs):
        signal.raise_signal(signal.SIGINT)
        deliver(*args, **kwargs)

    monkeypatch.setattr(engine, "_deliver", interrupted)
    request_id = engine.add_request(PROMPTS[0], SamplingParams(max_new_tokens=1))
    while not engine.stats().num_finished:
        with pytest.raises(KeyboardInterrupt):
            engine.step()
    monkeypatch.undo()
    assert engine.has_unfinished()
    assert [(t.request_id, t.finish_reason) for t in engine.step()] == [(request_id, FinishReason.LENGTH)]
    assert not engine.has_unfinished()


def test_generate_interrupted_anywhere_leaves_nothing_behind(model, solo):
    def run(interrupt):
        engine = make_engine(model)
        interrupted = False
        try:
            with interrupt:
                engine.generate(PROMPTS[1:3], SAMPLED)
        except KeyboardInterrupt:
            interrupted = True
        assert not engine.has_unfinished()
        assert engine.pages.num_free_pages == 79
        assert engine.generate(PROMPTS[1:2], SAMPLED)[0].token_ids == solo(PROMPTS[1])
        return interrupted

    assert every_place(run) > 3


def test_reset_interrupted_anywhere_can_be_called_again(model):
    def run(interrupt):
        swap = SwapSpace(40)
        engine = make_engine(model, 17, swap=swap)
        for prompt in PROMPTS[1:]:
            engine.add_request(prompt, SAMPLED)
        for _ in range(9):
            engine.step()
        interrupted = False
        try:
            with interrupt:
                engine.reset()
        except KeyboardInterrupt:
            interrupted = True
            engine.reset()  # it may not have begun
        stats = swap.stats()
        assert stats.num_used_host_pages == stats.num_sequences == 0
        assert not engine.has_unfinished()
        assert engine.pages.num_free_pages == 16
        return interrupted

    assert every_place(run, 13, "jaxpaged") > 5


def test_beam_search_interrupted_anywhere_gives_its_pages_back(model):
    arguments = {"num_beams": 3, "max_new_tokens": 6}
    expected = make_engine(model).beam_search(PROMPTS[:2], **arguments)

    def run(interrupt):
        engine = make_engine(model)
        interrupted = False
        try:
            with interrupt:
                engine.beam_search(PROMPTS[:2], **arguments)
        except KeyboardInterrupt:
            interrupted = True
        assert engine.pages.num_free_pages == 79
        if interrupted:
            assert [o[0].token_ids for o in engine.beam_search(PROMPTS[:2], **arguments)] == [
                o[0].token_ids for o in expected
            ]
        return interrupted

    assert every_place(run) > 3


def test_deferred_interrupts_come_at_the_end_or_where_they_are_allowed(monkeypatch):
    seen = []
    before = signal.signal(signal.SIGINT, lambda *_: seen.append(len(seen)))
    try:
        interrupts = Interrupts()
        with interrupts.allowed():  # of nothing that is deferred
            signal.raise_signal(signal.SIGINT)
        assert seen == [0]
        with interrupts.deferred(), interrupts.deferred():
            for _ in range(2):
                signal.raise_signal(signal.SIGINT)
            assert seen == [0]
            with interrupts.allowed():
                assert seen == [0, 1, 2]
                signal.raise_signal(signal.SIGINT)
                assert seen == [0, 1, 2, 3]
            signal.raise_signal(signal.SIGINT)
            assert seen == [0, 1, 2, 3]
        assert seen == [0, 1, 2, 3, 4]
        with interrupts.deferred():
            thread = threading.Thread(target=lambda: list(_nested(interrupts)))
            thread.start()
            thread.join()
            signal.raise_signal(signal.SIGINT)
            assert len(seen) == 5  # the thread has changed nothing
    finally:
        signal.signal(signal.SIGINT, before)
    assert len(seen) == 6


def interrupted_inside(interrupts, went_on):
    with interrupts.deferred():
        signal.raise_signal(signal.SIGINT)
        went_on.append(True)


def test_deferred_and_allowed_interrupted_at_any_line_give_the_handler_back():
    def run(interrupt):
        interrupts = Interrupts()
        interrupted = False
        try:
            with interrupt, interrupts.deferred(), interrupts.allowed():
                pass
        except KeyboardInterrupt:
            interrupted = True
        went_on = []
        with pytest.raises(KeyboardInterrupt):
            interrupted_inside(interrupts, went_on)
        assert went_on == [True]
        return interrupted

    assert every_place(run, 1) > 10


def test_allowed_that_was_never_left_installs_nothing_later():
    interrupts = Interrupts()
    with interrupts.deferred():
        left = interrupts.allowed()
        left.__enter__()
    del left
    gc.collect()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_deferred_leaves_a_signal_that_is_ignored_ignored():
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    interrupts = Interrupts()
    with interrupts.deferred(), interrupts.allowed():
        signal.raise_signal(signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def _nested(interrupts):
    with interrupts.deferred(), interrupts.allowed():
        yield
