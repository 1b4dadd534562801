"""The arguments of PageAllocator, and those that do not fit."""

import numpy as np
import pytest

from jaxpaged.config import NULL_PAGE
from jaxpaged.paging import PageAllocator, PageGroup


def test_allocator_properties_count_the_null_page_in_num_pages_only():
    pages = PageAllocator(101)
    assert (pages.num_pages, pages.page_size, pages.num_free_pages) == (101, 16, 100)


def test_allocator_takes_numpy_integers():
    pages = PageAllocator(np.int32(11), np.int64(4))
    pages.add("a", np.int32(6))
    pages.append("a", np.uint8(3))
    pages.truncate("a", np.int64(8))
    assert pages.seq_len("a") == 8
    assert type(pages.seq_len("a")) is int
    assert pages.page_table(["a"], np.int16(3)).tolist() == [[1, 2, NULL_PAGE]]


@pytest.mark.parametrize("bad", [0, -1, True, 16.0, "16", None])
def test_allocator_with_a_bad_page_size_raises(bad):
    with pytest.raises((ValueError, TypeError), match=r"^`page_size` must be an integer >= 1; got "):
        PageAllocator(11, bad)


@pytest.mark.parametrize("bad", [1, 0, -5, True, 11.0])
def test_allocator_with_a_bad_num_pages_raises(bad):
    with pytest.raises(
        (ValueError, TypeError), match=r"^`num_pages`, the null page included, must be an integer >= 2; "
    ):
        PageAllocator(bad)


def test_allocator_whose_slots_overflow_int32_raises():
    with pytest.raises(ValueError, match=r"must be < 2\*\*31, for slots are int32; got 134217728 x 16\."):
        PageAllocator(2**27, 16)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"offload": True}, r"^`offload` needs prefix_caching=True\.$"),
        (
            {"partial_hits": True, "prefix_caching": True, "groups": [PageGroup("w", 4)]},
            "^`partial_hits` must be False",
        ),
        (
            {"groups": PageGroup("a")},
            r"^`groups` must be a list of PageGroup; got PageGroup\(name='a', .*\)\. Put one ",
        ),
        ({"prefix_caching": "no"}, r"^`prefix_caching` must be True or False; got 'no' \(str\)\.$"),
        ({"prefix_caching": True, "offload": 1}, r"^`offload` must be True or False; got 1 \(int\)\.$"),
        ({"groups": []}, r"^`groups` must be at least one PageGroup; got \(\)\.$"),
        ({"groups": [PageGroup("a"), PageGroup(1)]}, r"^`groups` must have strings for names; got \['a', 1\]\.$"),  # pyright: ignore
        ({"groups": [PageGroup(["a"])]}, r"^`groups` must have strings for names; got \[\['a'\]\]\.$"),  # pyright: ignore
        (
            {"groups": [PageGroup("a"), PageGroup("a", 3)]},
            r"^`groups` must have names of their own; got \['a', 'a'\]\.$",
        ),
        ({"groups": [PageGroup("a", 0)]}, r"^`sliding_window` of group 'a' must be an integer >= 1; got 0\.$"),
        ({"max_pages_per_seq": 0}, r"^`max_pages_per_seq` must be an integer >= 1; got 0\.$"),
    ],
)
def test_allocator_with_options_that_do_not_fit_raises(options, message):
    with pytest.raises((ValueError, TypeError), match=message):
        PageAllocator(8, 4, **options)
