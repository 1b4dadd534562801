"""Rows are reused and sequences are swapped: each keeps what is its own."""

import pytest

from jaxpaged.config import NULL_PAGE
from jaxpaged.paging import Key, OutOfPagesError, PageAllocator, PageGroup
from tests.paging.helpers import PROMPT, add_committed, make_pages

SALTED = [Key("tenant", "x")]


def test_sequence_comes_back_with_its_keys_and_without_what_its_windows_passed():
    pages = make_pages(13, groups=[PageGroup("all"), PageGroup("near", 4)])
    add_committed(pages, "a", PROMPT[:9], keys=SALTED)
    held = [*pages.page_ids("a", group="all").tolist(), *pages.page_ids("a", group="near")[1:].tolist()]
    assert pages.swap_out("a").tolist() == held
    assert (pages.seq_len("a"), pages.num_free_pages) == (9, 12)
    pages.add("b", 4 * 4)
    with pytest.raises(OutOfPagesError, match=r"^swap_in of 9 tokens to sequence 'a' needs 5 pages; 4 are free\."):
        pages.swap_in("a")
    pages.free("b")
    page_ids = pages.swap_in("a").tolist()
    assert pages.page_ids("a", group="all").tolist() == page_ids[:3]
    assert pages.page_ids("a", group="near").tolist() == [NULL_PAGE, *page_ids[3:]]
    assert pages.num_free_pages == 12 - 5
    pages.prefix.reset()
    pages.commit("a", PROMPT[:9])
    assert (pages.prefix.match(PROMPT[:9], keys=SALTED), pages.prefix.match(PROMPT[:9])) == (8, 0)


def test_names_that_are_given_again_mean_the_new_sequences():
    pages = PageAllocator(11, 4)
    for num_tokens in (4, 8):
        pages.add("a", num_tokens)
        pages.add("b", num_tokens + 8)
        assert [sum(row > 0) for row in pages.page_table(["a", "b"], 4)] == [num_tokens // 4, num_tokens // 4 + 2]
        pages.free("a")
        pages.free("b")  # so that each gets the other's row


def test_keys_of_a_sequence_end_with_it():
    pages = make_pages()
    pages.add("a", PROMPT, keys=SALTED)
    pages.free("a")
    add_committed(pages, "b", PROMPT)
    assert (pages.prefix.match(PROMPT), pages.prefix.match(PROMPT, keys=SALTED)) == (16, 0)
