"""The numbers that an engine tells of itself, by hand."""

import pytest

from jaxpaged.engine.stats import EngineStats, Program, StepTimes


def test_step_times_are_medians_of_the_last_steps_and_the_rate_is_of_all_their_tokens():
    times = StepTimes(window=3)
    assert times.summary() == {}
    times.add(100.0, 0.0, 1000)  # forgotten
    for step in ((0.25, 0.125, 4), (0.5, 0.0, 2), (1.0, 0.75, 1)):
        times.add(*step)
    assert times.summary() == {"tokens_per_s": 7 / 1.75, "step_s": 0.5, "host_s": 0.25}
    none = StepTimes()
    none.add(0.0, 0.0, 3)  # a clock that stood
    assert none.summary()["tokens_per_s"] == pytest.approx(3e9)


def test_hit_rate_is_of_all_prompt_tokens_and_0_without_any():
    assert EngineStats(num_hit_tokens=3, num_missed_tokens=1).hit_rate == 0.75
    assert EngineStats().hit_rate == 0
    assert EngineStats(num_hit_tokens=1).hit_rate == 1


def test_prometheus_text_joins_programs_of_one_shape_and_tells_kinds():
    programs = {Program(2, None, "a"): 3, Program(2, None, "b"): 4, Program(1, 8, "a"): 5}
    lines = EngineStats(programs=programs, host_s=1 / 3, num_forks=2, peak_num_pages=7).prometheus_text().splitlines()
    assert [line for line in lines if line.startswith("jaxpaged_program")] == [
        'jaxpaged_program_steps_total{kind="decode",rows="2",tokens="2"} 7',
        'jaxpaged_program_steps_total{kind="mixed",rows="1",tokens="8"} 5',
    ]
    assert lines[lines.index("# TYPE jaxpaged_num_forks_total counter") + 1] == "jaxpaged_num_forks_total 2"
    assert lines[lines.index("# TYPE jaxpaged_peak_num_pages gauge") + 1] == "jaxpaged_peak_num_pages 7"
    assert "jaxpaged_host_s 0.333333333" in lines
    assert EngineStats(programs=programs).snapshot()["programs"] == programs
