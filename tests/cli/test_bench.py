"""`jaxpaged bench`: the mix, the clock, and what is reported. The model is tiny and random."""

import json
import os
import re
import sys
import types

import numpy as np
import pytest

from jaxpaged.cli import bench, bench_report
from jaxpaged.cli.parser import make_parser
from jaxpaged.cli.workload import Arrival, Lengths, Mix
from jaxpaged.engine import EngineStats, FinishReason, NewToken, SamplingParams
from tests.cli.command import run

SHAPES = ("--max-num-seqs", "2", "--max-step-tokens", "8", "--backend", "xla")
MIX = ("--num-requests", "6", "--prompt-len", "uniform:4,12", "--output-len", "uniform:2,5")


@pytest.fixture
def bench_json(model_path, tmp_path, capfd):
    """Runs `jaxpaged bench`; returns what it prints and what it writes."""

    def bench_json(*arguments: str):
        file = tmp_path / "bench.json"
        code, out, err = run(capfd, "bench", "--model", str(model_path), *SHAPES, *MIX, "--json", str(file), *arguments)
        assert code == 0, err
        return out, json.loads(file.read_text()), err

    return bench_json


# The mix


def mix(*arguments: str) -> Mix:
    return Mix.from_flags(make_parser().parse_args(["bench", *arguments]))


@pytest.mark.parametrize(
    ("text", "low", "high", "median"),
    [("7", 7, 7, 7), ("fixed:7", 7, 7, 7), ("uniform:3,9", 3, 9, 6), ("lognormal:20,0.5", 1, 200, 20)],
)
def test_lengths_are_drawn_from_their_distribution(text, low, high, median):
    drawn = Lengths.parse(text, "--x").draw(np.random.default_rng(0), 4001, 200)
    assert low <= min(drawn)
    assert max(drawn) <= high
    assert abs(np.median(drawn) - median) <= 1
    if text.startswith("lognormal"):
        assert np.std(np.log(drawn)) == pytest.approx(0.5, abs=0.03)
    if text.startswith("uniform"):
        assert (min(drawn), max(drawn)) == (3, 9)


def test_lengths_are_cut_to_the_limit():
    for text in ("300", "uniform:250,300", "lognormal:20,3"):
        assert max(Lengths.parse(text, "--x").draw(np.random.default_rng(0), 100, 200)) == 200


def test_arrivals_are_a_poisson_process_of_the_rate_and_start_at_0():
    times = np.array(
        [a.time_s for a in mix("--num-requests", "4001", "--rate", "5", "--prompt-len", "1").arrivals(9, 99)]
    )
    gaps = np.diff(times)
    assert times[0] == 0
    assert gaps.mean() == pytest.approx(1 / 5, rel=0.05)
    assert gaps.std() == pytest.approx(1 / 5, rel=0.05)  # of an exponential distribution it equals the mean


def test_arrivals_without_a_rate_come_all_at_once():
    assert {a.time_s for a in mix().arrivals(9, 99)} == {0.0}


def test_arrivals_follow_the_seed_and_another_rate_changes_only_their_times():
    flags = ("--num-requests", "20", "--shared", "0.5", "--shared-len", "8", "--num-priorities", "3")
    first = mix(*flags).arrivals(100, 400)
    assert mix(*flags).arrivals(100, 400) == first
    assert mix(*flags, "--seed", "1").arrivals(100, 400) != first
    paced = mix(*flags, "--rate", "2").arrivals(100, 400)
    assert [a._replace(time_s=0.0) for a in paced] == first
    assert len({a.seed for a in first}) == 20


def test_arrivals_share_prefixes_and_fit_the_context():
    flags = ("--num-requests", "400", "--shared", "0.25", "--shared-len", "30", "--num-prefixes", "2")
    arrivals = mix(*flags, "--prompt-len", "uniform:1,99", "--output-len", "uniform:1,99").arrivals(1000, 64)
    shared = [a for a in arrivals if a.prefix is not None]
    assert 70 <= len(shared) <= 130
    prefixes = {a.prefix: tuple(a.prompt_token_ids[:30]) for a in shared}
    assert sorted(prefixes) == [0, 1]
    assert prefixes[0] != prefixes[1]
    assert all(tuple(a.prompt_token_ids[:30]) == prefixes[a.prefix] for a in shared)
    assert min(a.num_new_tokens for a in arrivals) == 1
    assert max(a.num_tokens for a in arrivals) == 64
    assert min(len(a.prompt_token_ids) for a in arrivals) == 1
    assert {t for a in arrivals for t in a.prompt_token_ids} <= set(range(1000))


# The clock


class FakeEngine:
    """A step takes so long, and gives one token to each of two requests at most."""

    def __init__(self, step_s: float, failing: frozenset[int] = frozenset()):
        self.now, self.step_s, self.failing = 100.0, step_s, failing
        self.left: dict[int, int] = {}
        self.pages = types.SimpleNamespace(num_pages=11, num_free_pages=6)
        self.scheduler = types.SimpleNamespace(running=[], num_waiting=0)
        self.stats = lambda: EngineStats(num_steps=0, peak_num_pages=5, nbytes_per_page=1, num_preemptions=0)
        self.priorities: list[int] = []
        self.outputs = types.SimpleNamespace(finished={})

    def apply(self, entry):
        self.priorities.append(entry.priority)
        self.left[entry.request_ids[0]] = entry.params.max_new_tokens

    @property
    def has_work(self):
        return bool(self.left)

    def step(self):
        self.now += self.step_s
        new = []
        for request_id in list(self.left)[:2]:
            if request_id in self.failing:
                del self.left[request_id]
                new.append(NewToken(request_id, None, FinishReason.ERROR, ValueError("broken")))
                continue
            self.left[request_id] -= 1
            new.append(NewToken(request_id, 1))
            if self.left[request_id] == 0:
                del self.left[request_id]
        return new

    def sleep(self, seconds):
        assert seconds > 0
        self.now += seconds


def serve(engine: FakeEngine, *due: tuple[float, int]):
    arrivals = [Arrival(t, [1, 2], n, None, i % 2, i) for i, (t, n) in enumerate(due)]
    params = [SamplingParams(max_new_tokens=n) for _, n in due]
    return bench.serve(engine, arrivals, params, clock=lambda: engine.now, sleep=engine.sleep)


def test_serve_counts_from_when_a_request_was_due_and_not_from_when_it_was_added():
    """The second is due at 1 s, in the middle of a step from 0 to 4 s: its first token comes at 8 s, 7 s late."""
    measured = serve(FakeEngine(4.0), (0.0, 2), (1.0, 1))
    assert [r.token_s for r in measured.requests] == [[4.0, 8.0], [8.0]]
    assert [r.added_s for r in measured.requests] == [0.0, 4.0]
    latencies = measured.latencies()
    assert latencies == {"time_to_first_token": [4.0, 7.0], "inter_token": [4.0], "end_to_end": [8.0, 7.0]}
    assert measured.latencies(priority=1)["time_to_first_token"] == [7.0]
    assert measured.steps[0].num_waiting == 1  # though the engine does not know of it yet
    assert measured.steps[0].num_pages == 4


def test_serve_sleeps_until_the_next_request_is_due():
    measured = serve(FakeEngine(1.0), (0.0, 1), (10.0, 1))
    assert [r.token_s for r in measured.requests] == [[1.0], [11.0]]
    assert measured.latencies()["time_to_first_token"] == [1.0, 1.0]
    assert measured.latencies()["inter_token"] == []
    assert measured.throughput() == {
        "requests_per_s": 2 / 11, "new_tokens_per_s": 2 / 11, "all_tokens_per_s": 6 / 11
    }  # fmt: skip


def test_serve_leaves_requests_that_failed_out_of_latencies_and_throughput():
    measured = serve(FakeEngine(1.0, frozenset({0})), (0.0, 3), (0.0, 2))
    assert [str(e) for e in measured.errors] == ["broken"]
    assert measured.latencies()["end_to_end"] == [2.0]
    assert measured.throughput()["requests_per_s"] == 1 / 2


def test_summary_of_known_values_has_their_percentiles():
    assert bench_report.summary([float(i) for i in range(101)]) == {
        "mean": 50.0, "p50": 50.0, "p90": 90.0, "p99": 99.0, "max": 100.0
    }  # fmt: skip
    assert set(bench_report.summary([]).values()) == {None}


# The command


def test_bench_prints_a_table_and_writes_all_of_it(bench_json):
    out, record, err = bench_json("--rate", "50", "--shared", "1", "--shared-len", "32", "--num-priorities", "2")
    requests = record["requests"]
    num_new, num_prompt = sum(len(r["token_s"]) for r in requests), sum(r["num_prompt_tokens"] for r in requests)
    assert out.startswith(f"6 requests, 50 a second: {num_prompt} prompt tokens, {num_new} new, ")
    for label in ("time to first token", "  priority 0", "  priority 1", "between two tokens", "end to end"):
        assert re.search(rf"^│ {label} +│" + r" +[\d.]+ m?s │" * 5 + "$", out, re.MULTILINE), out
    assert "p50" in out
    assert "p99" in out
    assert re.search(r"^throughput +[\d.]+ requests/s, [\d.]+ new tokens/s, [\d.]+ with prompts$", out, re.MULTILINE)
    assert re.search(
        r"^compilations +\d+ programs warmed up in [\d.]+ s, 0 compilations after that$", out, re.MULTILINE
    )
    assert err == ""
    assert record["num_compilations_after_warmup"] == 0
    assert record["prefix_hit_rate"] >= 5 * 32 / (num_prompt + 6) - 0.01  # all but the first find two pages
    assert record["latency_s"]["time_to_first_token"]["p50"] == pytest.approx(
        np.median([r["token_s"][0] - r["arrival_s"] for r in requests])
    )
    assert record["throughput"]["new_tokens_per_s"] == pytest.approx(num_new / record["seconds"])
    assert all(r["arrival_s"] <= r["added_s"] < r["token_s"][0] for r in requests)
    assert max(step["num_running"] for step in record["steps"]) <= 2
    assert max(step["num_pages"] for step in record["steps"]) <= record["peak_num_pages"] <= record["num_pages"]
    assert record["settings"]["rate"] == 50
    assert list(record["latency_s_by_priority"]) == ["0", "1"]


def test_bench_generates_exactly_what_the_mix_says_and_preempts_in_a_small_pool(bench_json):
    fixed = ("--prompt-len", "12", "--output-len", "24", "--no-prefix-caching")
    _, roomy, _ = bench_json(*fixed)
    assert [len(r["token_s"]) for r in roomy["requests"]] == [24] * 6
    assert max(step["num_running"] for step in roomy["steps"]) == 2
    assert roomy["num_preemptions"] == 0
    assert roomy["prefix_hit_rate"] == 0
    out, small, _ = bench_json(*fixed, "--num-pages", "4")
    assert [len(r["token_s"]) for r in small["requests"]] == [24] * 6
    assert small["num_preemptions"] > 0
    assert small["peak_num_pages"] == 3
    assert f"preemptions      {small['num_preemptions']}\n" in out


@pytest.mark.slow
def test_bench_sampled_compiles_nothing_after_its_warm_up(bench_json):
    few = ("--max-num-seqs", "1", "--max-step-tokens", "8")
    _, record, _ = bench_json("--temperature", "0.8", "--top-p", "0.9", *few)
    assert record["num_compilations_after_warmup"] == 0


@pytest.mark.slow
def test_bench_plot_saves_a_picture(bench_json, tmp_path):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    bench_json("--plot", str(tmp_path / "bench.png"), "--output-len", "1")  # no gaps to draw
    assert (tmp_path / "bench.png").read_bytes().startswith(b"\x89PNG")


def test_bench_into_a_pipe_that_nobody_reads_writes_its_files(model_path, tmp_path, capfd, monkeypatch):
    reader, writer = os.pipe()
    os.close(reader)
    file = tmp_path / "bench.json"
    with os.fdopen(writer, "w") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        code, _, err = run(capfd, "bench", "--model", str(model_path), *SHAPES, *MIX, "--json", str(file))
    assert (code, err) == (141, "")
    assert len(json.loads(file.read_text())["requests"]) == 6


def test_bench_of_requests_that_fail_exits_with_1(model_path, capfd, monkeypatch):
    from jaxpaged.engine.runner import Runner

    def failing(self, plan):
        raise RuntimeError("the device is gone.")

    monkeypatch.setattr(Runner, "dispatch", failing)
    code, out, err = run(capfd, "bench", "--model", str(model_path), *SHAPES, *MIX)
    assert code == 1
    assert "6 of 6 requests, not counted above" in out
    assert err == "6 requests failed, the first by: the device is gone.\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--num-requests", "0"), "`--num-requests` must be at least 1; got 0."),
        (
            ("--rate", "0"),
            "`--rate` must be finite, and at least 1e-06 requests a second; got 0.0. Without it all come at once.",
        ),
        (("--rate", "1e-12"), "`--rate` must be finite, and at least 1e-06 requests a second; got 1e-12."),
        (("--rate", "nan"), "`--rate` must be finite, and at least 1e-06 requests a second; got nan."),
        (("--rate", "inf"), "`--rate` must be finite, and at least 1e-06 requests a second; got inf."),
        (("--prompt-len", "some"), "`--prompt-len` must be N, uniform:LOW,HIGH or lognormal:MEDIAN,SIGMA; got 'some'."),
        (
            ("--prompt-len", "uniform:9,3"),
            "`--prompt-len` must be uniform:LOW,HIGH with LOW <= HIGH; got 'uniform:9,3'.",
        ),
        (("--output-len", "0"), "`--output-len` must be lengths of at least 1 token; got '0'."),
        (("--output-len", "lognormal:9"), "`--output-len` must be N, uniform:LOW,HIGH or lognormal:MEDIAN,SIGMA; got"),
        (("--shared", "1.5"), "`--shared` must be a share from 0 to 1; got 1.5."),
        (("--shared", "1", "--shared-len", "255"), "`--shared-len` must be at most 254, to leave room in the context"),
        (("--num-prefixes", "0"), "`--num-prefixes` must be at least 1; got 0."),
        (("--num-priorities", "0"), "`--num-priorities` must be at least 1; got 0."),
        (("--max-num-seqs", "0"), "`--max-num-seqs` must be at least 1; got 0."),
        (("--max-step-tokens", "0"), "`--max-step-tokens` must be at least 1; got 0."),
        (("--seed", "-1"), "`--seed` must fit 32 bits without a sign; got -1."),
        (("--top-p", "2"), "`--top-p` must be above 0 and at most 1; got 2.0."),
        (("--page-size", "0"), "`--page-size` must be at least 1; got 0."),
        (("--num-pages", "1"), "`--num-pages` must be at least 2, the null page included: the longest request has"),
        (("--json", "/no/such/f"), "`--json /no/such/f` cannot be written: No such file or directory."),
        (("--plot", "."), "`--plot .` cannot be written: Is a directory."),
        (("--profile", "/dev/null/x"), "`--profile /dev/null/x` cannot be made: Not a directory."),
        (("words",), "unrecognized arguments: words"),
    ],
)
def test_bench_refuses_in_one_line(model_path, capfd, arguments, message):
    if arguments[0] == "--plot":
        pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    code, out, err = run(capfd, "bench", "--model", str(model_path), *MIX, *arguments)
    assert (code, out) == (2, "")
    assert re.fullmatch(r"jaxpaged: error: [^\n]+\n", err)
    assert message in err


def test_bench_plot_without_matplotlib_says_what_to_install_before_it_runs(model_path, capfd, monkeypatch):
    monkeypatch.setattr(bench.importlib.util, "find_spec", lambda name: None)
    code, _, err = run(capfd, "bench", "--model", str(model_path), "--plot", "x.png")
    assert (code, err) == (2, "jaxpaged: error: `--plot` needs matplotlib: install jaxpaged[plot].\n")
