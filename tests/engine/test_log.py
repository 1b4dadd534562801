"""The core is a function of its log: the same entries give the same plans and tokens, whatever else differs."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from jaxpaged.engine import EngineCore, NgramSpeculation, SamplingParams
from jaxpaged.engine.log import Add, StepRecord, read_log, replay
from jaxpaged.paging.store.swap import SwapSpace
from tests.engine.tiny import CACHE, LIMITS, PROMPTS, Stepped, make_engine, make_front

SAMPLED = SamplingParams(max_new_tokens=12, temperature=1.3)
MIX = [
    dataclasses.replace(SAMPLED, seed=1, n=2),
    SamplingParams(max_new_tokens=12, repetition_penalty=1.3),
    SamplingParams(max_new_tokens=6, num_logprobs=2, prompt_logprobs=1),
    SamplingParams(max_new_tokens=12, logit_bias={3: 2.0}, stop_token_ids=(5,), min_new_tokens=3),
]


def make_core(model, num_pages: int = 17, **options) -> EngineCore:
    options = {"swap": SwapSpace(40), "speculation": NgramSpeculation(min_ngram=1)} | options
    return EngineCore(model, dataclasses.replace(CACHE, num_pages=num_pages), LIMITS, **options)


def record(model, path, clock=lambda: 0.0) -> None:
    """Requests of every kind at once, with preemption and swap, an abort, beams and a deadline."""
    options = {"swap": SwapSpace(40), "speculation": NgramSpeculation(min_ngram=1)}
    with make_front(model, 17, clock=clock, **options) as engine:
        engine.record(path)
        handles = [h for p, params in zip(PROMPTS, MIX, strict=True) for h in engine.add_samples(p, params)]
        late = engine.add_request(PROMPTS[1], SAMPLED, deadline=clock() + 1e6)
        gone = engine.add_request(PROMPTS[2][::-1], SAMPLED, priority=1)
        next(handles[0])
        gone.abort()
        engine.beam_search([PROMPTS[1][:9]], num_beams=2, max_new_tokens=4)
        for handle in (*handles, late, gone):
            handle.result()
        engine.stats()


@pytest.fixture(scope="module")
def recorded(model, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("record") / "log"
    record(model, path)
    return path


def test_replay_of_a_record_gives_each_plan_and_token_again(model, recorded):
    header, items = read_log(recorded)
    assert header["num_swap_pages"] == 40
    num_equal, difference = replay(make_core(model), items)
    assert difference is None
    assert num_equal > 20


@pytest.mark.slow
def test_replay_names_the_first_step_that_differs(model, recorded):
    _, items = read_log(recorded)
    items = list(items)
    at = [i for i, item in enumerate(items) if isinstance(item, StepRecord) and item.token_ids][3]
    items[at] = items[at]._replace(token_ids=[99])
    step = sum(isinstance(item, StepRecord) for item in items[:at])
    num_equal, difference = replay(make_core(model), iter(items))
    assert (num_equal, difference.step, difference.recorded.token_ids) == (step, step, [99])
    _, items = read_log(recorded)
    _, difference = replay(make_core(model, num_pages=40), items)  # another pool preempts others
    assert difference is not None


SCRIPT = """
import sys
from flax import nnx
from jaxpaged.models.llama import Llama
from tests.engine.test_log import record
from tests.engine.tiny import CONFIG
start = float(sys.argv[2])
record(Llama(CONFIG, layer_loop="calls", rngs=nnx.Rngs(0)), sys.argv[1], clock=lambda: start)
"""


@pytest.mark.slow
def test_records_of_other_hash_seeds_and_clocks_replay_here(model, tmp_path):
    for seed, start in ((1, 0.0), (77, 1e9)):
        path = tmp_path / str(seed)
        environment = os.environ | {"PYTHONHASHSEED": str(seed), "PYTHONPATH": "."}
        subprocess.run([sys.executable, "-c", SCRIPT, str(path), str(start)], env=environment, check=True)
        _, items = read_log(path)
        num_equal, difference = replay(make_core(model), items)
        assert difference is None
        assert num_equal > 20


@pytest.mark.parametrize("how", [pytest.param("full", marks=pytest.mark.slow), "damaged"])
def test_replay_takes_what_the_swap_space_answered_from_the_log(model, monkeypatch, how):
    """A space that failed when it was recorded fails again where it works, at the same calls."""
    params, prompts = SamplingParams(max_new_tokens=20), [PROMPTS[1], PROMPTS[3], PROMPTS[1][::-1]]
    take = SwapSpace.take_sequence

    def full(self, seq_id, block):
        raise OSError("the disk is full")

    if how == "full":
        monkeypatch.setattr(SwapSpace, "put_sequence", full)
    else:
        cut = lambda self, seq_id: {name: x[:, :-1] for name, x in take(self, seq_id).items()}  # noqa: E731
        monkeypatch.setattr(SwapSpace, "take_sequence", cut)
    engine = Stepped(make_core(model, 16, speculation=None))
    steps: list[StepRecord] = []
    engine.core.recorder = steps.append
    adds = [Add(request_ids=(i,), prompt_token_ids=tuple(p), params=params) for i, p in enumerate(prompts)]
    for entry in adds:
        engine.core.apply(entry)
    engine.run()
    outcomes = [outcome for step in steps for outcome in step.outcomes.values()]
    assert outcomes
    assert all(outcome == "the disk is full" if how == "full" else isinstance(outcome, int) for outcome in outcomes)
    monkeypatch.undo()
    num_equal, difference = replay(make_core(model, 16, speculation=None), iter([*adds, *steps]))
    assert difference is None
    assert num_equal == len(steps)


def test_which_program_runs_does_not_depend_on_what_is_compiled(model):
    """A core that has compiled more takes the same programs for the same plans."""
    ran = []
    for warm in (False, True):
        engine = make_engine(model)
        if warm:
            engine.generate(PROMPTS[2:], dataclasses.replace(MIX[3], top_k=3, max_new_tokens=3))
        before = dict(engine.counters.programs)
        engine.generate(PROMPTS[:2], [SAMPLED, MIX[0]])
        ran.append({p: n - before.get(p, 0) for p, n in engine.counters.programs.items() if n > before.get(p, 0)})
    assert ran[0] == ran[1]


def test_record_after_the_first_request_is_refused_and_a_file_that_is_no_log_too(model, tmp_path):
    with make_front(model) as engine:
        engine.generate(PROMPTS[:1], SamplingParams(max_new_tokens=1))
        with pytest.raises(RuntimeError, match="`record` must be called once, before the first request"):
            engine.record(tmp_path / "log")
    (tmp_path / "log").write_text(json.dumps({"jaxpaged_log": 0}))
    with pytest.raises(ValueError, match="`path` must be a log of version 1"):
        read_log(tmp_path / "log")
    (tmp_path / "log").write_text('{"jaxpaged_log": 1}\n{"entry": "Abort", "request_id": 0}\n{"entry": "Ad"}')
    with pytest.raises(ValueError, match=r"line 3 of the log must be a step or an entry \(.*Abort.*\); got another"):
        list(read_log(tmp_path / "log")[1])
    (tmp_path / "log").write_text('{"jaxpaged_log": 1}\n{"entry": "Ad')
    with pytest.raises(ValueError, match="line 2 of the log must be JSON"):
        list(read_log(tmp_path / "log")[1])
