"""Groups of layers: what windows pass is given back, and how many pages that leaves."""

import numpy as np
import pytest

from jaxpaged.config import NULL_PAGE, LayerSpec
from jaxpaged.paging import PageAllocator, PageGroup, group_layers
from tests.paging.helpers import PROMPT, add_committed, make_pages


def test_window_in_a_group_frees_passed_pages_and_needs_few_for_a_hit():
    pages = make_pages(41, groups=[PageGroup("all"), PageGroup("near", 5)])
    add_committed(pages, "a", PROMPT)
    assert pages.page_ids("a", group="near").tolist()[:4] == [0, 0, 0, 0]
    assert pages.page_ids("a", group="all").all()
    pages.append("a", 1)
    assert pages.add("b", [*PROMPT, 0]) == 20
    assert pages.page_table(["b"], group="near")[0, :4].tolist() == [0, 0, 0, 0]
    with pytest.raises(ValueError, match=r"^`group` must be one of \['all', 'near'\]; got None\.$"):
        pages.page_ids("a")
    with pytest.raises(ValueError, match=r"^`num_tokens` for sequence 'a' must be >= 20: its pages in group 'near'"):
        pages.truncate("a", 19)


def test_append_many_gives_back_what_windows_pass_also_where_forks_share_it():
    pages = PageAllocator(9, 4, groups=[PageGroup("near", 4)])
    pages.add("a", 16)
    pages.fork("a", "b")
    pages.add("c", 4 * 4)
    assert pages.num_free_pages == 0
    pages.append_many(["a", "b"], 1)
    assert pages.page_ids("a").tolist()[:3] == pages.page_ids("b").tolist()[:3] == [0, 0, 0]
    assert pages.num_free_pages == 1
    for seq_id in ("a", "b", "c"):
        pages.free(seq_id)
    assert pages.num_free_pages == 8


def test_window_of_a_numpy_integer_becomes_an_int():
    (group,) = PageAllocator(8, 4, groups=[PageGroup("near", np.int64(5))]).groups
    assert type(group.sliding_window) is int
    assert group == PageGroup("near", 5)


def grow(pages, seq_id, tokens, chunk, first=None):
    """Computes a prompt chunk by chunk; returns the most pages that were in use."""
    usable, peak = pages.num_free_pages, 0
    pages.add(seq_id, tokens, chunk=first or chunk)
    while (length := pages.seq_len(seq_id)) < len(tokens):
        peak = max(peak, usable - pages.num_free_pages)
        pages.append(seq_id, min(chunk, len(tokens) - length))
    return max(peak, usable - pages.num_free_pages)


@pytest.mark.parametrize("window", [1, 5, 8, 9])
@pytest.mark.parametrize("chunk", [1, 3, 4, 7, 40])
def test_max_pages_for_bounds_what_a_prompt_holds_chunk_by_chunk(window, chunk):
    groups = [PageGroup("all"), PageGroup("near", window), PageGroup("by", window)]
    for num_tokens in range(1, 34):
        pages = PageAllocator(200, 4, groups=groups)
        most = pages.max_pages_for(num_tokens, chunk=chunk)
        assert grow(pages, "a", list(range(num_tokens)), chunk) <= most <= pages.max_pages_for(num_tokens)


@pytest.mark.parametrize("window", [1, 5, 8, 9])
@pytest.mark.parametrize("chunk", [1, 3, 4, 7])
def test_max_pages_for_of_a_window_is_reached_from_some_start(window, chunk):
    groups = [PageGroup("near", window)]
    peaks = [grow(PageAllocator(200, 4, groups=groups), "a", list(range(60)), chunk, first) for first in range(1, 5)]
    assert max(peaks) == PageAllocator(200, 4, groups=groups).max_pages_for(60, chunk=chunk)


def test_prompt_that_is_added_by_chunks_holds_what_its_windows_see():
    """Five windowed layers to a full one, window 512, 8,000 tokens: 0.28 of the pages of full attention."""
    groups = [PageGroup("full"), *(PageGroup(f"near {i}", 512) for i in range(5))]
    pages = PageAllocator(4000, 16, groups=groups)
    tokens = list(range(8000))
    assert not pages.can_allocate(25 * 8000)
    peak = grow(pages, "a", tokens, 512)
    full = len(groups) * 8000 // 16
    assert peak <= pages.max_pages_for(8000, chunk=512) <= 0.28 * full
    pages.append("a")
    assert pages.stats().num_used_pages <= 0.23 * full


def test_add_by_chunks_hits_all_that_is_cached_and_adds_a_chunk_behind_it():
    pages = make_pages(60, groups=[PageGroup("all"), PageGroup("near", 5)])
    add_committed(pages, "a", PROMPT)
    prompt = [*PROMPT, *range(30)]
    assert pages.can_allocate(prompt, chunk=6)
    assert pages.add("b", prompt, chunk=6) == 20
    assert pages.seq_len("b") == 26
    assert pages.page_ids("b", group="near").tolist()[:4] == [NULL_PAGE] * 4
    with pytest.raises(ValueError, match=r"^`chunk` must be an integer >= 1; got 0\.$"):
        pages.add("c", prompt, chunk=0)
    assert "c" not in pages


def test_can_allocate_counts_the_pages_of_all_groups():
    pages = PageAllocator(7, 4, groups=[PageGroup("all"), PageGroup("near", 5)])
    assert pages.can_allocate(12)
    assert not pages.can_allocate(13)
    assert pages.can_allocate(100, chunk=12)
    assert not pages.can_allocate(100, chunk=13)


def specs(*windows):
    return [LayerSpec(num_kv_heads=2, head_dim=8, sliding_window=window) for window in windows]


@pytest.mark.parametrize(
    ("windows", "sizes"),
    [
        ([None] * 4, {"full": 4}),
        ([512] * 3, {"window 512": 3}),
        ([512] * 5 + [None], {f"window 512, {i + 1} of 5": 1 for i in range(5)} | {"full": 1}),
        (([None] + [9] * 5) * 4, {"full": 4} | {f"window 9, {i + 1} of 5": 4 for i in range(5)}),
        ([7, 9] * 8, {"window 7": 8, "window 9": 8}),
        # Gemma 3 with 26 layers: 28 rows, of which 2 are nobody's.
        ([9] * 22 + [None] * 4, {f"window 9, {i + 1} of 6": 4 for i in range(5)} | {"window 9, 6 of 6": 2, "full": 4}),
        ([9] * 8 + [7] * 7, {"window 9": 8, "window 7": 7}),
        # Five would lose one row of nine, but one that holds all pages.
        (
            [9] * 5 + [None] * 4,
            {"window 9, 1 of 3": 2, "window 9, 2 of 3": 2, "window 9, 3 of 3": 1, "full, 1 of 2": 2, "full, 2 of 2": 2},
        ),
        ([9] * 4 + [None] * 2, {"window 9, 1 of 2": 2, "window 9, 2 of 2": 2, "full": 2}),
    ],
)
def test_group_layers_makes_groups_of_equal_size_that_lose_little(windows, sizes):
    groups, places = group_layers(specs(*windows))
    assert [group.name for group in groups] == list(sizes)
    assert [groups[place.group].sliding_window for place in places] == list(windows)
    for number, size in enumerate(sizes.values()):
        assert [place.row for place in places if place.group == number] == list(range(size))
    num_rows = len(groups) * max(sizes.values())
    assert num_rows - len(windows) <= len(windows) / 8


def test_group_layers_refuses_layers_that_cannot_share_a_pool():
    with pytest.raises(ValueError, match=r"^`layer_specs` must have one for each layer; got none\.$"):
        group_layers([])
    others = [LayerSpec(num_kv_heads=2, head_dim=16), LayerSpec(num_kv_heads=1, head_dim=8)]
    for other in others:
        got = rf"got \({other.num_kv_heads}, {other.head_dim}\)\.$"
        with pytest.raises(ValueError, match=rf"^`layer_specs\[2\]` must have .* = \(2, 8\).*; {got}"):
            group_layers([*specs(None, 5), other])
    with pytest.raises(ValueError, match=r"^`sliding_window` of group 'window 0' must be an integer >= 1; got 0\.$"):
        group_layers(specs(0))


@pytest.mark.parametrize("verb", ["append", "append_many"])
def test_append_of_tokens_that_are_not_all_computed_keeps_what_they_see(verb):
    pages = PageAllocator(20, 4, groups=[PageGroup("near", 5)])
    pages.add("a", 16)
    arguments = ("a", 4) if verb == "append" else (["a"], [4])
    computed = 10 if verb == "append" else [10]
    getattr(pages, verb)(*arguments, num_computed=computed)
    assert pages.page_ids("a").tolist().count(0) == 1  # token 10 sees 6 to 10
    assert pages.num_held_pages("a") == 4
    assert pages.can_truncate("a", 8)
    assert not pages.can_truncate("a", 7)
    with pytest.raises(ValueError, match=r"^`num_computed`.* must be .*20, the length of sequence 'a'; got 21\.$"):
        getattr(pages, verb)(*arguments, num_computed=21 if verb == "append" else [21])
    assert pages.seq_len("a") == 20
