"""`append_many` does what appends in turn do, or refuses all of them."""

import re

import numpy as np
import pytest

from jaxpaged.config import NULL_PAGE
from jaxpaged.paging import OutOfPagesError, PageAllocator, PageCopy, PageGroup
from tests.paging.helpers import state_of

HUGE = [2**31 - 6, 2**31, 2**62, 2**63 - 1, 2**64 - 1, 2**70]


def test_append_many_of_one_sequence_is_as_append():
    one, many = PageAllocator(4, 4, max_pages_per_seq=3), PageAllocator(4, 4, max_pages_per_seq=3)
    for pages in (one, many):
        pages.add("a", 6)
        pages.fork("a", "child")
    assert one.append("a", 2) == many.append_many(["a"], [2]) == [PageCopy(2, 3)]
    assert one.page_ids("a").tolist() == many.page_ids("a").tolist()
    for counts in (1, [1], np.array([1])):
        with pytest.raises(OutOfPagesError, match=r"^append_many .* needs 1 pages; 0 are free\."):
            many.append_many(["a"], counts)
    for counts in (5, [5], np.array([5])):
        with pytest.raises(ValueError, match=r"^Sequence 'a' must have at most 12 tokens, .* got 13\.$"):
            many.append_many(["a"], counts)
    with pytest.raises(ValueError, match=r"^`num_tokens` for sequence 'a' must be an integer >= 0; got -1\.$"):
        many.append_many(["a"], [-1])
    assert many.seq_len("a") == 8


@pytest.mark.parametrize("counts", [[], [1, 2], [[1]]])
def test_append_many_with_another_number_of_counts_raises_with_their_shape(pages, counts):
    shape = re.escape(str(np.shape(counts)))
    with pytest.raises(ValueError, match=rf"^`num_tokens` must have one entry .* 1 sequences; got shape {shape}\.$"):
        pages.append_many(["a"], counts)


@pytest.mark.parametrize("counts", [0, 3, []])
def test_append_many_to_no_sequence_does_nothing(pages, counts):
    before = state_of(pages, "a", "b")
    assert pages.append_many([], counts) == []
    assert state_of(pages, "a", "b") == before


@pytest.mark.parametrize("prefix_caching", [False, True])
@pytest.mark.parametrize("groups", [None, [PageGroup("all"), PageGroup("near", 9), PageGroup("by", 5)]])
def test_append_many_does_what_appends_in_turn_do(groups, prefix_caching):
    rng = np.random.default_rng(0)
    one, many = (PageAllocator(5001, 4, prefix_caching=prefix_caching, groups=groups) for _ in range(2))
    seq_ids = list(range(30))
    for pages in (one, many):
        for seq_id in seq_ids:
            pages.add(seq_id, seq_id % 9)
    for step in range(8):
        families = [seq_ids[i] for i in rng.permutation(len(seq_ids))[:8]]  # of three, who share their last page
        seq_ids += [(name, step, i) for i in families for name in ("child", "other")]
        for pages in (one, many):
            for seq_id in families:
                if prefix_caching and groups is None:  # the next token goes into a page that can be hit
                    pages.commit(seq_id, range(pages.seq_len(seq_id) // 2))
                    pages.truncate(seq_id, max(0, pages.seq_len(seq_id) // 2 - 1))
                pages.fork(seq_id, ("child", step, seq_id))
                pages.fork(seq_id, ("other", step, seq_id))
        counts = rng.integers(0, 5, len(seq_ids))
        copies = [copy for seq_id, n in zip(seq_ids, counts, strict=True) for copy in one.append(seq_id, int(n))]
        many_copies = many.append_many(seq_ids, counts)
        assert len(many_copies) == len(copies)
        for group in one.groups:
            tables = [pages.page_table(seq_ids, group=group.name) for pages in (many, one)]
            np.testing.assert_array_equal(tables[0] > 0, tables[1] > 0)
            if groups is None:  # where windows give pages back, they are taken in another order
                assert many_copies == copies
                np.testing.assert_array_equal(*tables)
    assert many.stats() == one.stats()


@pytest.mark.parametrize("many", [False, True])
def test_append_takes_the_page_that_its_window_passes(many):
    pages = PageAllocator(3, 4, groups=[PageGroup("near", 4)])
    pages.add("a", 8)
    for _ in range(3):
        pages.append_many(["a"], [1]) if many else pages.append("a", 1)
        assert (np.count_nonzero(pages.page_ids("a")), pages.num_free_pages) == (2, 0)


def test_append_many_takes_the_pages_that_windows_pass_once_nobody_holds_them():
    pages = PageAllocator(4, 4, groups=[PageGroup("near", 4)])
    pages.add("a", 8)
    pages.fork("a", "b")
    with pytest.raises(OutOfPagesError, match=r"^append_many to 1 sequences needs 2 pages; 1 are free\."):
        pages.append_many(["a"], [5])
    pages.append_many(["a", "b"], [1, 1])  # two pages: the free one, and the first one, which both have passed
    assert pages.num_free_pages == 0
    assert pages.page_table(["a", "b"]).tolist() == [[NULL_PAGE, 2, 1], [NULL_PAGE, 2, 3]]


@pytest.mark.parametrize("count", HUGE)
@pytest.mark.parametrize("form", ["number", "list", "among others", "array"])
def test_append_many_of_more_tokens_than_any_pool_holds_raises_as_append_and_changes_nothing(pages, count, form):
    before = state_of(pages, "a", "b")
    counts = {"number": count, "list": [1, count], "among others": [count, -0], "array": np.array([count, count])}[form]
    with pytest.raises(OutOfPagesError, match=rf"^append_many of {count} tokens to sequence '[ab]' needs") as refused:
        pages.append_many(["a", "b"], counts)
    length = pages.seq_len(refused.value.what[-2])
    assert (refused.value.needed, refused.value.free) == (-(-(length + count) // 4) - 2, 6)
    assert state_of(pages, "a", "b") == before


def test_append_many_beyond_the_width_of_the_table_raises_by_name():
    pages = PageAllocator(11, 4, max_pages_per_seq=3)
    pages.add("a", 1)
    with pytest.raises(ValueError, match=rf"^Sequence 'a' must have at most 12 tokens.*; got {2**70 + 1}\.$"):
        pages.append_many(["a"], [2**70])


@pytest.mark.parametrize("bad", [-1, True, 1.0, "1", -(2**70)])
def test_append_many_with_a_bad_count_raises_with_the_id(pages, bad):
    before = state_of(pages, "a", "b")
    with pytest.raises(
        (ValueError, TypeError), match="^`num_tokens` for sequence '[ab]' must be an integer >= 0; got "
    ):
        pages.append_many(["a", "b"], [bad, bad] if bad is True else [1, bad])
    assert state_of(pages, "a", "b") == before
