"""Commits: one page for each content, whoever computed it."""

import pytest

from jaxpaged.config import NULL_PAGE
from jaxpaged.paging import Key, PageGroup
from tests.paging.helpers import PROMPT, add_committed, make_pages


def test_commit_takes_the_pages_that_another_committed_first_and_indexes_the_rest():
    pages = make_pages()
    for seq_id in "ab":  # neither finds the other's pages
        pages.add(seq_id, PROMPT)
    pages.commit("a", PROMPT[:8])
    pages.commit("b", PROMPT)
    assert pages.page_ids("b").tolist() == [1, 2, 8, 9, 10]
    assert pages.prefix.find(PROMPT).tolist() == [1, 2, 8, 9, 10]
    assert pages.num_free_pages == 20 - 8
    pages.commit("a", PROMPT)  # goes on where it ended
    assert pages.page_ids("a").tolist() == [1, 2, 8, 9, 10]
    assert pages.num_free_pages == 20 - 5


def test_commit_of_what_is_cached_takes_its_place_and_costs_no_page():
    pages = make_pages()
    pages.add("b", PROMPT)
    add_committed(pages, "a", PROMPT[:12])
    pages.free("a")
    assert (pages.num_free_pages, pages.stats().num_cached_pages) == (15, 3)
    pages.commit("b", PROMPT)
    assert pages.page_ids("b").tolist() == pages.prefix.find(PROMPT).tolist() == [1, 2, 3, 4, 5]
    assert (pages.num_free_pages, pages.stats().num_cached_pages) == (15, 0)


def test_commit_gives_all_forks_of_a_page_the_one_that_was_committed_first():
    pages = make_pages()
    for seq_id in "ab":
        pages.add(seq_id, PROMPT)
    for seq_id in "cd":
        pages.fork("b", seq_id)
    pages.commit("a", PROMPT[:12])
    pages.commit("c", PROMPT)
    for seq_id in "bcd":
        assert pages.page_ids(seq_id).tolist() == [1, 2, 3, 9, 10]
    assert pages.num_free_pages == 20 - 7
    for seq_id in "abcd":
        pages.free(seq_id)
    assert pages.num_free_pages == 20


def test_commit_of_a_shared_page_with_other_tokens_raises_with_its_place_and_changes_nothing():
    pages = make_pages()
    pages.add("a", PROMPT)
    pages.fork("a", "b")
    pages.commit("a", PROMPT[:12])
    with pytest.raises(ValueError, match=r"^`token_ids` of sequence 'b' must be those that its page 1 was committed "):
        pages.commit("b", [*PROMPT[:5], 0, *PROMPT[6:]])
    assert pages.prefix.match([*PROMPT, 0]) == 12
    pages.commit("b", PROMPT)
    assert pages.prefix.match([*PROMPT, 0]) == 20


@pytest.mark.parametrize("step", [1, 4, 6, 9, 20])
@pytest.mark.parametrize("windows", [[None], [None, 5], [5], [2]])
def test_commit_in_steps_indexes_what_one_commit_does(windows, step):
    """A window of 2 passes the page before those of the next commit."""
    groups = [PageGroup(str(window), window) for window in windows]
    keys = [Key("image", b"i", 9)]
    pages, other = make_pages(groups=groups), make_pages(groups=groups)
    for allocator, ends in ((pages, [*range(step, 20, step), 20]), (other, [20])):
        allocator.add("a", PROMPT, keys=keys)
        for end in ends:
            allocator.commit("a", PROMPT[:end])
    for group in groups:
        found = pages.prefix.find(PROMPT, keys=keys, group=group.name).tolist()
        assert found == other.prefix.find(PROMPT, keys=keys, group=group.name).tolist()
        assert NULL_PAGE not in found


def test_invalidate_takes_no_pages_for_what_windows_have_passed_and_nobody_sees():
    pages = make_pages(groups=[PageGroup("only", 5)])
    pages.add("a", PROMPT[:16])
    pages.append("a", 4, num_computed=16)  # tokens from 12 on are seen
    pages.fork("a", "b")
    before = pages.num_free_pages
    assert before == 20 - 2
    assert pages.invalidate("a", 19) == ["a", "b"]
    assert pages.num_free_pages == before


@pytest.mark.parametrize("num_valid", [0, 3, 8, 11, 19])
@pytest.mark.parametrize("window", [None, 5, 2])
def test_commit_after_invalidate_indexes_all_pages_anew(window, num_valid):
    pages = make_pages(groups=[PageGroup("only", window)])
    add_committed(pages, "a", PROMPT)
    pages.invalidate("a", num_valid)
    pages.commit("a", PROMPT)
    assert pages.prefix.match([*PROMPT, 0]) == 20
