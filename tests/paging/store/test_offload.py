"""Evictions go to a swap space and come back, and no sequence ever reads the KV of another history."""

import tempfile

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from jaxpaged.config import NULL_PAGE
from jaxpaged.paging import OutOfPagesError, PageAllocator, PageGroup
from jaxpaged.paging.store.offload import exchange_pages
from jaxpaged.paging.store.swap import SwapSpace

PAGE_SIZE = 2
PROMPT = list(range(100, 120))


class FakeBlock(dict):
    def to_host(self):
        return dict(self)

    @classmethod
    def from_host(cls, arrays):
        return cls(arrays)


class FakeCache:
    """A cache in numpy that is updated in place. The KV of a token is the hash of all tokens up to it."""

    def __init__(self, num_pages: int, page_size: int = PAGE_SIZE):
        self.pool = np.zeros((1, num_pages, page_size), np.int64)

    def export_pages(self, page_ids):
        return FakeBlock(k=self.pool[:, page_ids])

    def import_pages(self, page_ids, block):
        self.pool[:, page_ids] = block["k"]
        return self

    def write(self, slots, kv):
        self.pool.reshape(-1)[slots] = kv


def kv_of(tokens: list[int]) -> list[int]:
    return [hash(tuple(tokens[: i + 1])) for i in range(len(tokens))]


class OffloadMachine(RuleBasedStateMachine):
    """Prompts are of two kinds of tokens, so that most begin like another."""

    @initialize(num_pages=st.integers(6, 16), num_host=st.integers(1, 6), num_file=st.integers(1, 8))
    def make(self, num_pages, num_host, num_file):
        self.directory = tempfile.TemporaryDirectory()
        self.space = SwapSpace(num_host, file=self.directory.name + "/swap", num_file_pages=num_file)
        self.pages = PageAllocator(num_pages, PAGE_SIZE, prefix_caching=True, offload=True)
        self.cache = FakeCache(num_pages)
        self.tokens: dict[int, list[int]] = {}
        self.swapped: set[int] = set()
        self.next_id = 0

    def teardown(self):
        if hasattr(self, "space"):
            self.space.close()
            self.directory.cleanup()

    def compute(self, seq_id, num_cached):
        """What a step does: writes the KV of all tokens that are not cached."""
        tokens = self.tokens[seq_id]
        slots = self.pages.slot_mapping([seq_id], [len(tokens) - num_cached])
        self.cache.write(slots, kv_of(tokens)[num_cached:])
        self.pages.commit(seq_id, tokens)

    def live(self):
        return sorted(self.tokens.keys() - self.swapped)

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=12))
    def add(self, tokens):
        self.next_id += 1
        try:
            num_cached = self.pages.add(self.next_id, tokens, host=self.space)
        except OutOfPagesError:
            return
        self.tokens[self.next_id] = tokens
        self.cache, num_cached = exchange_pages(self.pages, self.space, self.cache, self.next_id, num_cached)
        self.compute(self.next_id, num_cached)

    @rule(data=st.data(), token=st.integers(0, 1))
    def append(self, data, token):
        if not self.live():
            return
        seq_id = data.draw(st.sampled_from(self.live()))
        try:
            copies = self.pages.append(seq_id, 1)
        except OutOfPagesError:
            return
        exchange_pages(self.pages, self.space, self.cache, seq_id, 0)
        for src, dst in copies:
            self.cache.pool[:, dst] = self.cache.pool[:, src]
        self.tokens[seq_id].append(token)
        self.compute(seq_id, len(self.tokens[seq_id]) - 1)

    @rule(data=st.data())
    def free(self, data):
        if self.tokens:
            seq_id = data.draw(st.sampled_from(sorted(self.tokens)))
            self.pages.free(seq_id)
            if seq_id in self.swapped:
                self.space.drop(seq_id)
            del self.tokens[seq_id]
            self.swapped.discard(seq_id)

    @rule(data=st.data())
    def swap_out(self, data):
        if not self.live():
            return
        seq_id = data.draw(st.sampled_from(self.live()))
        block = self.cache.export_pages(self.pages.page_ids(seq_id))
        try:
            self.space.put_sequence(seq_id, block.to_host())
        except OutOfPagesError:
            return
        self.pages.swap_out(seq_id)
        self.swapped.add(seq_id)

    @rule(data=st.data())
    def swap_in(self, data):
        if not self.swapped:
            return
        seq_id = data.draw(st.sampled_from(sorted(self.swapped)))
        try:
            page_ids = self.pages.swap_in(seq_id)
        except OutOfPagesError:
            return
        self.swapped.remove(seq_id)
        exchange_pages(self.pages, self.space, self.cache, seq_id, 0)
        block = self.space.take_sequence(seq_id)
        num_kept = block["k"].shape[1]
        self.cache.import_pages(page_ids[:num_kept], block)
        self.compute(seq_id, min(num_kept * PAGE_SIZE, len(self.tokens[seq_id])))

    @rule(data=st.data())
    def damage_the_file(self, data):
        if (file := self.space._store._file) is not None:
            place = data.draw(st.integers(0, file.num_pages - 1))
            file._pages[place, data.draw(st.integers(0, file.page_nbytes - 1))] ^= 1

    @invariant()
    def every_live_sequence_reads_its_own_history(self):
        for seq_id in self.live():
            page_ids = self.pages.page_ids(seq_id)
            kv = self.cache.pool[0, page_ids].ravel()[: len(self.tokens[seq_id])]
            assert kv.tolist() == kv_of(self.tokens[seq_id])


TestOffloadMachine = OffloadMachine.TestCase
TestOffloadMachine.settings = settings(
    max_examples=80,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    derandomize=True,
)


def add_and_free(pages, space, cache, seq_id, tokens) -> int:
    """Returns how many tokens came out of the cache or the space."""
    num_cached = pages.add(seq_id, tokens, host=space)
    _, num_cached = exchange_pages(pages, space, cache, seq_id, num_cached)
    assert pages.prefix.match(tokens) == num_cached  # nobody hits what is not there yet
    slots = pages.slot_mapping([seq_id], [len(tokens) - num_cached])
    cache.write(slots, kv_of(tokens)[num_cached:])
    pages.commit(seq_id, tokens)
    assert cache.pool[0, pages.page_ids(seq_id)].ravel()[: len(tokens)].tolist() == kv_of(tokens)
    pages.free(seq_id)
    return num_cached


@pytest.fixture
def offload():
    """Pages for one prompt of eight tokens, and a space for two such prompts."""
    pages = PageAllocator(5, PAGE_SIZE, prefix_caching=True, offload=True)
    return pages, SwapSpace(8), FakeCache(5)


def test_exchange_pages_brings_back_what_was_evicted(offload):
    first, second = [1] * 8, [2] * 8
    assert add_and_free(*offload, "a", first) == 0
    assert add_and_free(*offload, "b", second) == 0
    assert offload[1].stats().num_prefix_pages == 4
    assert add_and_free(*offload, "a", first) == 6
    assert add_and_free(*offload, "b", second) == 6


def test_exchange_pages_reads_before_it_makes_room(offload):
    """The space is full, and the pages wanted are those that it would give up for the evicted ones."""
    pages, _, cache = offload
    space = SwapSpace(4)
    add_and_free(pages, space, cache, "a", [1] * 8)
    add_and_free(pages, space, cache, "b", [2] * 8)
    assert add_and_free(pages, space, cache, "a", [1] * 8) == 6


def test_exchange_pages_of_a_space_full_of_sequences_loses_the_evicted(offload):
    space = offload[1]
    space.put_sequence("big", {"k": np.zeros((1, 8, PAGE_SIZE), np.int64)})
    add_and_free(*offload, "a", [1] * 8)
    add_and_free(*offload, "b", [2] * 8)
    assert space.stats().num_prefix_pages == 0
    assert add_and_free(*offload, "a", [1] * 8) == 0


def test_exchange_pages_of_a_space_too_small_keeps_the_heads_of_chains(offload):
    pages, _, cache = offload
    space = SwapSpace(3)
    add_and_free(pages, space, cache, "a", [1] * 8)
    add_and_free(pages, space, cache, "b", [2] * 8)
    assert space.stats().num_prefix_pages == 3
    assert add_and_free(pages, space, cache, "a", [1] * 8) == 6


def test_exchange_pages_where_the_evicted_cannot_be_kept_brings_nothing_in_and_frees_the_sequence(offload, monkeypatch):
    pages, space, cache = offload
    add_and_free(*offload, "a", [1] * 8)
    add_and_free(*offload, "b", [2] * 8)
    space.drop_pages(
        [d.tobytes() for d in pages.prefix.cached_pages().digests]
    )  # so that those of "b" are to be written

    def fail(*_):
        raise OSError("no space left on device")

    monkeypatch.setattr(SwapSpace, "put_pages", fail)
    num_cached = pages.add("a", [1] * 8, host=space)
    assert num_cached == 6
    with pytest.raises(OSError, match="no space left"):
        exchange_pages(pages, space, cache, "a", num_cached)
    assert "a" not in pages
    assert pages.num_free_pages == 4
    assert pages.prefix.match([1] * 9) == 0


@pytest.mark.parametrize(("damaged", "expected"), [(0, 0), (1, 2), (2, 4)])
def test_exchange_pages_with_a_damaged_page_computes_from_there(tmp_path, damaged, expected):
    tokens = [1, 2, 3, 4, 5, 6, 7, 8]
    pages, cache = PageAllocator(5, PAGE_SIZE, prefix_caching=True, offload=True), FakeCache(5)
    with SwapSpace(0, file=tmp_path / "swap", num_file_pages=8) as space:
        add_and_free(pages, space, cache, "a", tokens)
        digests = [pages.prefix.cached_pages().digests[i].tobytes() for i in range(4)]
        add_and_free(pages, space, cache, "b", [9] * 8)
        space._store._file._pages[space._prefixes[digests[damaged]]] ^= 255
        assert add_and_free(pages, space, cache, "a", tokens) == expected
        assert space.stats().num_lost_pages == 1
    assert pages.prefix.match([*tokens, 0]) == 8


def test_exchange_pages_with_hybrid_groups_computes_from_the_first_page_lost_in_any(tmp_path):
    groups = [PageGroup("full"), PageGroup("window", 3)]
    tokens = [1, 2, 3, 4, 5, 6, 7, 8, 9]
    pages, cache = PageAllocator(11, PAGE_SIZE, prefix_caching=True, offload=True, groups=groups), FakeCache(11)
    with SwapSpace(0, file=tmp_path / "swap", num_file_pages=30) as space:

        def add(seq_id, tokens):
            num_cached = pages.add(seq_id, tokens, host=space)
            _, num_cached = exchange_pages(pages, space, cache, seq_id, num_cached)
            pages.commit(seq_id, tokens)
            pages.free(seq_id)
            return num_cached

        assert add("a", tokens) == 0
        assert add("b", [0] * 9) == 0
        assert add("a", tokens) == 8
        assert add("b", [0] * 9) == 8
        space._store._file._pages[:] ^= 255
        assert add("a", tokens) < 8


@pytest.fixture
def lost_page(tmp_path):
    """A hybrid model whose prompt of 20 tokens is all in the file, where page 3 of the full group is damaged."""
    groups = [PageGroup("full"), PageGroup("near", 5)]
    pages = PageAllocator(20, 4, prefix_caching=True, offload=True, groups=groups)
    cache = FakeCache(20, 4)
    with SwapSpace(0, file=tmp_path / "swap", num_file_pages=40) as space:
        pages.add("a", PROMPT)
        pages.commit("a", PROMPT)
        digest = pages.prefix.cached_pages().digests[
            pages.prefix.cached_pages().page_ids == pages.page_ids("a", group="full")[3]
        ]
        pages.free("a")
        pages.add("b", [99] * 36)
        exchange_pages(pages, space, cache, "b", 0)
        pages.free("b")
        space._store._file._pages[space._prefixes[digest.tobytes()]] ^= 255
        yield pages, space, cache


def test_exchange_pages_whose_window_has_passed_the_lost_page_computes_from_token_0(lost_page):
    pages, space, cache = lost_page
    prompt = [*PROMPT, 7]
    assert pages.add("c", prompt, host=space) == 20
    assert NULL_PAGE in pages.page_ids("c", group="near")
    cache, num_cached = exchange_pages(pages, space, cache, "c", 20)
    assert (num_cached, space.stats().num_lost_pages) == (0, 1)
    for group in pages.groups:
        assert NULL_PAGE not in pages.page_ids("c", group=group.name)
        assert pages.slot_mapping(["c"], [21], group=group.name).min() >= 4
    assert pages.prefix.match(prompt) == 0
    pages.commit("c", prompt)
    assert pages.prefix.match(prompt) == 20
    pages.free("c")
    assert pages.num_free_pages == 19


def test_exchange_pages_without_room_for_the_window_frees_the_sequence_and_nobody_hits_the_lost_page(lost_page):
    pages, space, cache = lost_page
    pages.add("big", 4 * 6)  # 12 pages; "c" takes the other 7
    free = pages.num_free_pages
    assert pages.add("c", PROMPT[:17], host=space) == 16
    with pytest.raises(OutOfPagesError, match=r"^invalidate of sequence 'c' needs \d pages; 0 are free\."):
        exchange_pages(pages, space, cache, "c", 16)
    assert "c" not in pages
    assert pages.num_free_pages == free
    assert pages.prefix.match([*PROMPT, 7]) == 0
    assert [page.page_id for page in pages.prefix.explain(PROMPT[:16])] == [
        0
    ] * 4  # others were found, but not imported
    assert pages.prefix.take_evictions() == []


def test_invalidate_without_room_for_the_window_changes_nothing():
    pages = PageAllocator(11, 4, prefix_caching=True, groups=[PageGroup("full"), PageGroup("near", 5)])
    pages.add("a", PROMPT)
    pages.commit("a", PROMPT)
    pages.append("a", 0)
    pages.add("b", 4 * 2)
    before = pages.stats(), pages.page_ids("a", group="near").tolist(), pages.prefix.match([*PROMPT, 7])
    with pytest.raises(OutOfPagesError, match=r"^invalidate of sequence 'a' needs 4 pages; 0 are free\."):
        pages.invalidate("a", 8)
    assert (pages.stats(), pages.page_ids("a", group="near").tolist(), pages.prefix.match([*PROMPT, 7])) == before
    pages.free("b")
    assert pages.invalidate("a", 8) == ["a"]
    assert pages.page_ids("a", group="near").all()
