"""Reserved pages are kept for their sequence, and no longer than it can use them."""

import pytest

from jaxpaged.paging import OutOfPagesError, PageAllocator, PageCopy
from tests.paging.helpers import add_committed, make_pages


def test_reserve_keeps_pages_from_others_until_they_are_used():
    pages = PageAllocator(8, 4)
    pages.add("a", 4)
    pages.reserve("a", 12)
    assert (pages.num_free_pages, pages.stats().num_reserved_pages) == (3, 3)
    with pytest.raises(OutOfPagesError, match=r"^add of 16 tokens to sequence 'b' needs 4 pages; 3 are free\."):
        pages.add("b", 16)
    pages.add("b", 12)
    pages.append("a", 12)
    assert pages.num_free_pages == 0
    pages.truncate("a", 8)
    assert pages.num_free_pages == 0  # reserved again
    pages.reserve("a", 0)
    assert pages.num_free_pages == 2


def test_fork_and_free_again_and_again_reserves_one_copy_only():
    pages = PageAllocator(20, 4)
    pages.add("a", 6)
    pages.reserve("a", 1)
    for _ in range(17):
        pages.fork("a", "child")
        assert pages.stats().num_reserved_pages == 1
        pages.free("child")
        assert pages.stats().num_reserved_pages == 0
    pages.fork("a", "child")
    assert pages.append("a", 1) == [PageCopy(2, 3)]
    assert pages.stats().num_reserved_pages == 0


@pytest.mark.parametrize(
    "end",
    [
        lambda pages: pages.free("child"),
        lambda pages: pages.truncate("child", 4),
        lambda pages: pages.append("child"),
        lambda pages: pages.append_many(["child"], [1]),
        lambda pages: pages.append_many(["child", "b"], [1, 2]),
        lambda pages: pages.swap_out("child"),
    ],
)
def test_copy_that_was_reserved_is_given_back_when_a_fork_leaves_the_page(end):
    pages = PageAllocator(20, 4)
    pages.add("b", 1)
    pages.add("a", 6)
    pages.reserve("a", 4)
    pages.fork("a", "child")
    assert pages.stats().num_reserved_pages == 2
    end(pages)
    assert pages.stats().num_reserved_pages == 1
    pages.append("a", 4)
    assert pages.stats().num_reserved_pages == 0


@pytest.mark.parametrize("forget", [lambda pages: pages.prefix.reset(), lambda pages: pages.prefix.forget([1])])
def test_copy_that_was_reserved_is_given_back_when_the_content_is_forgotten(forget):
    pages = make_pages(20)
    add_committed(pages, "a", [0, 1, 2, 3])
    pages.truncate("a", 2)
    pages.reserve("a", 1)
    assert pages.stats().num_reserved_pages == 1
    forget(pages)
    assert pages.stats().num_reserved_pages == 0
    assert pages.append("a") == []


@pytest.mark.parametrize("others", [None, [], ["b"]])
@pytest.mark.parametrize("count", [1, 2])
def test_append_up_to_the_length_reserved_leaves_nothing_reserved(others, count):
    pages = PageAllocator(20, 4)
    pages.add("a", 6)
    pages.add("b", 6)
    pages.fork("a", "child")
    pages.reserve("a", 2)
    pages.free("child")
    pages.append("a", count) if others is None else pages.append_many(["a", *others], count)
    assert pages.stats().num_reserved_pages == 0


@pytest.mark.parametrize("many", [False, True])
def test_append_uses_the_reservation_up_and_then_free_pages(many):
    pages = PageAllocator(12, 4)
    pages.add("a", 4)
    pages.reserve("a", 8)
    for count, num_reserved, num_free in ((0, 2, 8), (3, 1, 8), (1, 1, 8), (12, 0, 6), (4, 0, 5)):
        pages.append_many(["a"], [count]) if many else pages.append("a", count)
        assert (pages.stats().num_reserved_pages, pages.num_free_pages) == (num_reserved, num_free)


def test_append_many_lets_each_sequence_use_its_own_reservation_only():
    pages = PageAllocator(12, 4)
    for seq_id, num_tokens in (("a", 8), ("b", 4)):
        pages.add(seq_id, 4)
        pages.reserve(seq_id, num_tokens)
    pages.add("c", 4 * 5)
    assert pages.num_free_pages == 1
    with pytest.raises(OutOfPagesError, match=r"^append_many to 2 sequences needs 4 pages; 3 are free\."):
        pages.append_many(["a", "b"], [4, 12])
    pages.append_many(["b", "a"], [8, 8])
    assert (pages.stats().num_reserved_pages, pages.num_free_pages) == (0, 0)


def test_fork_without_a_page_for_the_copy_that_is_to_be_reserved_raises_and_changes_nothing():
    pages = PageAllocator(5, 4)
    pages.add("a", 6)
    pages.reserve("a", 4)
    pages.add("b", 4)
    before = pages.stats()
    with pytest.raises(OutOfPagesError, match=r"^fork of sequence 'a', which has a reservation, needs 1 pages; 0 are "):
        pages.fork("a", "child")
    assert pages.stats() == before
    pages.reserve("a", 2)  # up to the end of its page
    pages.fork("a", "child")
    assert pages.stats().num_reserved_pages == 1
