"""A trace replays to the allocator it was written from, or says which of its lines is wrong."""

import io
import json
import operator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpaged.paging import Key, OutOfPagesError, PageAllocator, PageGroup
from jaxpaged.paging.observe.trace import (
    OPTIONAL,
    VERBS,
    TraceError,
    TraceRecorder,
    demo_trace,
    parse_trace,
    read_trace,
)
from jaxpaged.paging.records import CACHED, FREE, NULL, SHARED, USED

HEAD = '{"trace": 1, "num_pages": 9, "page_size": 4}'


def state_of(pages: PageAllocator, group: str = "all") -> dict:
    snapshot = pages.snapshot()
    cached = pages.prefix.cached_pages()
    return {
        "sequences": {i: (pages.seq_len(i), pages.page_ids(i, group=group).tolist()) for i in snapshot.seq_ids},
        "stats": pages.stats(),
        "state": snapshot.state.tolist(),
        "cached": sorted(zip(cached.digests.tolist(), cached.page_ids.tolist(), strict=True)),
    }


SEQ_IDS = st.sampled_from([0, 1, "two"])
TOKENS = st.lists(st.integers(0, 1), max_size=13)
KEYS = st.sampled_from([(), (), (Key("adapter", "a"),), (Key("image", b"\x00\xff", 3), Key("tenant", 7))])
HOSTS = st.sampled_from([None, None, "all"])
CALLS = st.one_of(
    st.tuples(st.just("add"), SEQ_IDS, TOKENS, st.fixed_dictionaries({"keys": KEYS, "host": HOSTS})),
    st.tuples(st.just("add"), SEQ_IDS, st.integers(0, 20)),
    st.tuples(st.just("commit"), SEQ_IDS, TOKENS),
    st.tuples(st.sampled_from(["append", "truncate", "reserve", "advance", "invalidate"]), SEQ_IDS, st.integers(0, 9)),
    st.tuples(st.just("append_many"), st.lists(SEQ_IDS, unique=True), st.integers(0, 3)),
    st.tuples(st.just("fork"), SEQ_IDS, SEQ_IDS),
    st.tuples(st.sampled_from(["free", "swap_out", "swap_in"]), SEQ_IDS),
    st.tuples(
        st.just("prefix.pin"),
        TOKENS,
        st.fixed_dictionaries({"keys": KEYS, "expires_at": st.sampled_from([None, 0.0, 2.5])}),
    ),
    st.tuples(st.just("prefix.unpin"), TOKENS, st.fixed_dictionaries({"keys": KEYS})),
    st.tuples(st.just("prefix.expire"), st.floats(0, 5)),
    st.tuples(st.just("prefix.reset")),
)


class HostOf:
    """Host memory with every second content."""

    def has(self, digest: bytes) -> bool:
        return digest[0] % 2 == 0


@given(calls=st.lists(CALLS, max_size=40), window=st.sampled_from([None, 6]), partial=st.booleans())
def test_replay_of_what_was_recorded_is_the_same_allocator(calls, window, partial):
    file = io.StringIO()
    pages = PageAllocator(
        14,
        4,
        prefix_caching=True,
        partial_hits=partial and window is None,
        groups=[PageGroup("all", window)],
        max_pages_per_seq=5,
    )
    recorder = TraceRecorder(pages, file)
    states = [state_of(pages)]
    for verb, *arguments in calls:
        options = arguments.pop() if arguments and isinstance(arguments[-1], dict) else {}
        if options.get("host"):
            options = options | {"host": HostOf()}
        try:
            operator.attrgetter(verb)(recorder)(*arguments, **options)
        except (ValueError, OutOfPagesError):
            continue
        states.append(state_of(pages))
    trace = parse_trace(file.getvalue().splitlines())
    assert len(trace.steps) == len(states) - 1
    for step, state in enumerate(states):
        assert state_of(trace.replay(step)) == state
    assert state_of(trace.replay()) == states[-1]


class FullHost:
    def has(self, digest: bytes) -> bool:
        return True


def test_replay_of_what_was_found_on_the_host_finds_it_again():
    file = io.StringIO()
    pages = PageAllocator(9, 4, prefix_caching=True)
    assert TraceRecorder(pages, file).add("a", [1, 2, 3, 4, 5, 6, 7, 8, 9], host=FullHost()) == 8
    replayed = parse_trace(file.getvalue().splitlines()).replay()
    assert [restore.page_id for restore in replayed.prefix.take_restores()] == [1, 2]
    assert state_of(replayed, "full") == state_of(pages, "full")


@pytest.mark.parametrize("partial_hits", [False, True])
def test_replay_of_adopted_pages_finds_them(partial_hits):
    source = PageAllocator(9, 4, prefix_caching=True, partial_hits=partial_hits)
    tokens = [1, 2, 3, 4, 5, 6, 7, 8]
    source.add("a", tokens)
    source.commit("a", tokens)
    file = io.StringIO()
    pages = PageAllocator(9, 4, prefix_caching=True, partial_hits=partial_hits)
    TraceRecorder(pages, file).prefix.adopt(source.prefix.cached_pages())
    replayed = parse_trace(file.getvalue().splitlines()).replay()
    for allocator in (pages, replayed):
        assert allocator.prefix.match([*tokens[:6], 0, 0]) == (6 if partial_hits else 4)


@pytest.mark.parametrize("partial_hits", [False, True])
def test_replay_of_adopting_nothing_adopts_nothing(partial_hits):
    file = io.StringIO()
    pages = PageAllocator(9, 4, prefix_caching=True, partial_hits=partial_hits)
    assert TraceRecorder(pages, file).prefix.adopt(pages.prefix.cached_pages()).tolist() == []
    assert parse_trace(file.getvalue().splitlines()).replay().stats() == pages.stats()


def test_recorder_has_the_results_and_the_rest_of_the_allocator():
    pages = TraceRecorder(PageAllocator(9, 4), io.StringIO())
    assert pages.add("a", 6) == 0
    pages.fork("a", "b")
    assert [copy.src for copy in pages.append("b", num_tokens=1)] == [2]
    assert "a" in pages
    assert "c" not in pages
    assert pages.num_free_pages == 5
    np.testing.assert_array_equal(pages.page_table(["a"]), [[1, 2]])


def test_recorder_writes_a_line_for_each_call_that_succeeded():
    file = io.StringIO()
    pages = TraceRecorder(PageAllocator(9, 4), file)
    pages.add("a", np.arange(3, dtype=np.int64))
    pages.add(seq_id=7, token_ids=np.int32(2))
    with pytest.raises(OutOfPagesError):
        pages.append("a", 100)
    pages.append("a")
    pages.append("a", 2)
    assert [json.loads(line) for line in file.getvalue().splitlines()] == [
        {
            "trace": 1, "num_pages": 9, "page_size": 4, "prefix_caching": False, "partial_hits": False,
            "groups": [["full", None]], "max_pages_per_seq": None,
        },
        {"verb": "add", "seq_id": "a", "token_ids": [0, 1, 2]},
        {"verb": "add", "seq_id": 7, "token_ids": 2},
        {"verb": "append", "seq_id": "a", "num_tokens": 1},
        {"verb": "append", "seq_id": "a", "num_tokens": 2},
    ]  # fmt: skip


def test_recorder_refuses_an_id_that_a_trace_cannot_hold_and_changes_nothing():
    file = io.StringIO()
    pages = PageAllocator(9, 4)
    with pytest.raises(TypeError, match=r"^`seq_id` must be of numbers and strings to be in a trace; got tuple\.$"):
        TraceRecorder(pages, file).add((1, 2), 3)
    assert pages.stats().num_sequences == 0
    assert file.getvalue().count("\n") == 1


def test_recorder_of_an_allocator_in_use_is_refused():
    pages = PageAllocator(9, 4)
    pages.add("a", 1)
    with pytest.raises(ValueError, match="must hold nothing yet, .* got 1 sequences, 1 used pages"):
        TraceRecorder(pages, io.StringIO())


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], r'^trace must begin with a line \{"trace": 1, "num_pages": \.\.\., \.\.\.\}; it is empty\.$'),
        (["", " "], r"it is empty\.$"),
        (["{"], r"^trace, line 1 must be JSON: Expecting property name .* at column 2\.$"),
        (["[1]"], r"^trace, line 1 must be a JSON object; got \[1\]\.$"),
        (['{"num_pages": 4}'], r'^trace, line 1 must be \{"trace": 1, .*, as TraceRecorder writes it; got \{"num_p'),
        (['{"trace": 2}'], r'^trace, line 1 must be \{"trace": 1, .*; got \{"trace": 2\}\.$'),
        (
            ['{"trace": 1, "num_pages": 4}'],
            r"^trace, line 1 must have num_pages, page_size, and may .*; got num_pages\.",
        ),
        (
            [HEAD, '{"verb": "prefix.reset", "hard": 1}'],
            r"^trace, line 2: prefix\.reset must have nothing; got hard\.$",
        ),
        (
            [HEAD, '{"verb": "prefix.unpin", "keys": []}'],
            r"^trace, line 2: prefix\.unpin must have token_ids, and may have keys; got k",
        ),
        ([HEAD, "", "x"], r"^trace, line 3 must be JSON: Expecting value at column 1\.$"),
        ([HEAD, '{"verb": "steal"}'], r'^trace, line 2 must have a `verb` among add, append, .*; got "steal"\.$'),
        ([HEAD, '{"verb": ["add"]}'], r"^trace, line 2 must have a `verb` among add"),
        ([HEAD, '{"seq_id": 3}'], r"^trace, line 2 must have a `verb` among add, .*; got null\.$"),
        ([HEAD, '{"verb": "free"}'], r"^trace, line 2: free must have seq_id; got none\.$"),
        ([HEAD, '{"verb": "free", "seq_id": 1, "n": 2}'], r"^trace, line 2: free must have seq_id; got seq_id, n\.$"),
    ],
)
def test_parse_of_a_bad_line_names_it(lines, message):
    with pytest.raises(TraceError, match=message):
        parse_trace(lines)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (['{"trace": 1, "num_pages": 1, "page_size": 4}'], r"^trace, line 1: `num_pages`, .*must be an integer >= 2"),
        ([HEAD, '{"verb": "free", "seq_id": 1}'], r"^trace, line 2: `seq_id` must be a sequence that is here"),
        (
            [HEAD, '{"verb": "add", "seq_id": 1, "token_ids": 99}'],
            r"^trace, line 2: add of 99 tokens to sequence 1 needs",
        ),
        (
            [HEAD[:-1] + ', "groups": [[]]}'],
            r"^trace, line 1: `groups` must be as TraceRecorder writes it; got another",
        ),
        ([HEAD[:-1] + ', "groups": 5}'], r"^trace, line 1: `groups` must be as TraceRecorder writes it; got another"),
        (
            [HEAD, '{"verb": "prefix.adopt", "pages": {}}'],
            r"^trace, line 2: `pages` must be as TraceRecorder writes it; got",
        ),
        (
            [HEAD, '{"verb": "prefix.adopt", "pages": 3}'],
            r"^trace, line 2: `pages` must be as TraceRecorder writes it; got",
        ),
        (
            [HEAD, '{"verb": "prefix.adopt", "pages": {"digests": "", "parents": "", "tokens": [[9999999999]]}}'],
            r"^trace, line 2: `pages` must be as TraceRecorder writes it; got another form",
        ),
        (
            [HEAD, '{"verb": "prefix.forget", "page_ids": [99999999999999999999]}'],
            r"^trace, line 2: `page_ids` must be",
        ),
        ([HEAD, '{"verb": "prefix.forget", "page_ids": "a"}'], r"^trace, line 2: `page_ids` must have one axis; got"),
        (
            [HEAD, '{"verb": "prefix.pin", "token_ids": [1], "keys": [["a", {"hex": "xy"}, 0]]}'],
            r"^trace, line 2: `keys` must be as TraceRecorder writes it; got another form: non-hexadec",
        ),
        ([HEAD, '{"verb": "add", "seq_id": 1, "token_ids": [1], "host": 5}'], r"^trace, line 2: `host` must be as Tr"),
        ([HEAD, '{"verb": "add", "seq_id": [], "token_ids": 9}'], r"^trace, line 2: .*unhashable"),
    ],
)
def test_replay_of_a_verb_that_is_refused_names_its_line(lines, message):
    with pytest.raises(TraceError, match=message):
        parse_trace(lines).replay()


JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.integers(0, 5), st.floats(), st.text(max_size=3)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=3), inner, max_size=2)),
    max_leaves=5,
)


@given(data=st.data(), verb=st.sampled_from(sorted(VERBS)), prefix_caching=st.booleans())
def test_replay_of_any_json_runs_or_names_the_line(data, verb, prefix_caching):
    arguments = {name: data.draw(JSON) for name in VERBS[verb]}
    arguments |= {name: data.draw(JSON) for name in OPTIONAL.get(verb, ()) if data.draw(st.booleans())}
    head = json.dumps({"trace": 1, "num_pages": 9, "page_size": 2, "prefix_caching": prefix_caching})
    add = '{"verb": "add", "seq_id": 0, "token_ids": [1, 2, 3]}'
    trace = parse_trace([head, add, json.dumps({"verb": verb, **arguments})])
    error = None
    try:
        trace.replay()
    except TraceError as refused:
        error = str(refused)
    assert error is None or error.startswith("trace, line 3: ")


@pytest.mark.parametrize("step", [-1, 3])
def test_replay_of_more_steps_than_there_are_is_refused(step):
    trace = parse_trace([HEAD, *['{"verb": "add", "seq_id": %d, "token_ids": 1}' % i for i in range(2)]], "it")  # noqa: UP031
    with pytest.raises(ValueError, match=rf"^`step` must be from 0 to 2, the verbs of it; got {step}\.$"):
        trace.replay(step)


def test_read_trace_names_the_file(tmp_path):
    path = tmp_path / "pool.jsonl"
    path.write_text(HEAD + "\nx\n")
    with pytest.raises(TraceError, match=r"pool\.jsonl, line 2 must be JSON"):
        read_trace(path)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(TraceError, match=r"pool\.jsonl must be UTF-8 text; byte 0 is not\.$"):
        read_trace(path)
    path.write_text(HEAD)
    assert read_trace(path).replay().num_pages == 9


def test_demo_shows_every_state_of_a_page():
    trace = demo_trace()
    assert set(trace.replay().snapshot().state.tolist()) == {FREE, NULL, USED, SHARED, CACHED}


def test_recorder_of_keys_that_can_be_read_once_writes_and_passes_them():
    file = io.StringIO()
    pages = TraceRecorder(PageAllocator(9, 4, prefix_caching=True), file)
    pages.add("a", [1] * 9, keys=(Key("tenant", name) for name in ("x",)))
    pages.commit("a", [1] * 9)
    assert pages.prefix.match([1] * 9) == 0
    assert pages.prefix.match([1] * 9, keys=[Key("tenant", "x")]) == 8
    assert parse_trace(file.getvalue().splitlines()).replay().prefix.match([1] * 9) == 0


@pytest.mark.parametrize("verb", ["free", "swap_out"])
def test_recorder_of_an_allocator_that_held_something_is_refused(verb):
    pages = PageAllocator(9, 4, prefix_caching=True)
    pages.add("a", [1] * 9)
    pages.commit("a", [1] * 9)
    getattr(pages, verb)("a")
    with pytest.raises(ValueError, match="`pages` must hold nothing yet, as a trace begins with an empty pool; got"):
        TraceRecorder(pages, io.StringIO())


def test_replay_of_a_pool_beyond_memory_names_the_line(monkeypatch):
    def too_large(**_):
        raise MemoryError

    monkeypatch.setattr("jaxpaged.paging.observe.trace.PageAllocator", too_large)
    with pytest.raises(TraceError, match="trace, line 1: too large for the memory of this machine"):
        parse_trace([HEAD]).replay()
