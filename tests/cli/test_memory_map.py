"""`jaxpaged memory-map`: pictures of a recorded run, in text and as PNG."""

import re
import sys
from pathlib import Path

import pytest

from jaxpaged.paging import PageAllocator
from jaxpaged.paging.observe.trace import TraceRecorder
from tests.cli.command import run

HEAD = '{"trace": 1, "num_pages": 9, "page_size": 4}\n'


@pytest.fixture
def trace(tmp_path) -> Path:
    """Two sequences that share a page."""
    path = tmp_path / "pool.jsonl"
    with path.open("w") as file:
        pages = TraceRecorder(PageAllocator(12, 4), file)
        pages.add("x", 7)
        pages.fork("x", "y")
        pages.append("y")
    return path


def test_memory_map_of_a_trace_draws_it_after_its_last_verb(capfd, trace):
    code, out, err = run(capfd, "memory-map", str(trace))
    assert (code, err) == (0, "")
    assert out.splitlines() == [
        f"{trace}, after 3 of 3 verbs",
        "       0  #Aab········",
        "a x   b y   capital: shared   · free   # null",
        "12 pages of 4 tokens: 3 used (1 of them shared), 8 free, 1 null. Fragmentation: 8.3% of the used slots are "
        "empty. Sharing saves 1 of 4 pages (25%).",
    ]


def test_memory_map_at_a_step_draws_it_after_so_many_verbs(capfd, trace):
    _, out, _ = run(capfd, "memory-map", str(trace), "--step", "2")
    assert out.splitlines()[:2] == [f"{trace}, after 2 of 3 verbs", "       0  #AA·········"]
    _, out, _ = run(capfd, "memory-map", str(trace), "--step", "0")
    assert out.splitlines()[1] == "       0  #···········"


def test_memory_map_without_a_trace_draws_a_demo_and_says_so(capfd):
    code, out, err = run(capfd, "memory-map")
    assert (code, err) == (0, "")
    assert out.startswith("A built-in demo workload, after ")
    assert "of them shared" in out


def test_memory_map_png_draws_a_picture_too(capfd, trace, tmp_path):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    path = tmp_path / "pool.png"
    code, out, err = run(capfd, "memory-map", str(trace), "--png", str(path))
    assert (code, err) == (0, "")
    assert path.read_bytes().startswith(b"\x89PNG")
    assert "12 pages of 4 tokens" in out
    code, out, err = run(capfd, "memory-map", "--png", str(tmp_path / "nowhere" / "pool.png"))
    assert (code, out) == (2, "")
    assert re.fullmatch(r"jaxpaged: error: `--png [^\n]+pool\.png` cannot be written: No such file[^\n]+\n", err)


def test_memory_map_png_without_matplotlib_says_what_to_install(capfd, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setitem(sys.modules, "matplotlib.backends.backend_agg", None)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    code, out, err = run(capfd, "memory-map", "--png", "pool.png")
    assert (code, out) == (2, "")
    assert re.fullmatch(r"jaxpaged: error: `--png` needs matplotlib[\w.]*: install jaxpaged\[plot\]\.\n", err)


@pytest.mark.parametrize(
    ("content", "arguments", "message"),
    [
        ("{", (), r"[^\n]+bad\.jsonl, line 1 must be JSON: Expecting property name[^\n]+ at column 2\."),
        (
            HEAD + '{"verb": "steal"}',
            (),
            r"[^\n]+bad\.jsonl, line 2 must have a `verb` among add, [^\n]+; got \"steal\"\.",
        ),
        (
            HEAD + '{"verb": "free", "seq_id": 1}',
            (),
            r"[^\n]+bad\.jsonl, line 2: `seq_id` must be a sequence that is here.*",
        ),
        (HEAD, ("--step", "1"), r"`--step` must be from 0 to 0, the verbs of [^\n]+bad\.jsonl; got 1\."),
        ("", (), r"[^\n]+bad\.jsonl must begin with a line [^\n]+; it is empty\."),
        (None, (), r"TRACE `[^\n]+bad\.jsonl` cannot be read: No such file or directory\."),
    ],
)
def test_memory_map_refuses_a_bad_trace_in_one_line(capfd, tmp_path, content, arguments, message):
    path = tmp_path / "bad.jsonl"
    if content is not None:
        path.write_text(content)
    code, out, err = run(capfd, "memory-map", str(path), *arguments)
    assert (code, out) == (2, "")
    assert re.fullmatch(rf"jaxpaged: error: {message}\n", err)
