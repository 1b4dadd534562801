"""PageAllocator: each verb of a sequence, each refusal, and the numbers of the three source sketches."""

import numpy as np
import pytest

from jaxpaged.paging import OutOfPagesError, PageAllocator, PageCopy
from tests.paging.helpers import state_of


@pytest.mark.parametrize(("num_tokens", "taken"), [(0, 0), (1, 1), (4, 1), (5, 2), (40, 10)])
def test_add_takes_the_pages_that_hold_the_tokens(num_tokens, taken):
    pages = PageAllocator(11, page_size=4)
    assert pages.can_allocate(num_tokens)
    assert pages.add("a", num_tokens) == 0
    assert pages.num_free_pages == 10 - taken
    assert pages.seq_len("a") == num_tokens
    assert len(set(pages.page_ids("a").tolist())) == taken


@pytest.mark.parametrize("tokens", [[7, 8, 9], (7, 8, 9), range(3), np.array([7, 8, 9], np.int32)])
def test_add_with_token_ids_counts_them(tokens):
    pages = PageAllocator(11, page_size=2)
    pages.add("a", tokens)
    assert (pages.seq_len("a"), pages.num_free_pages) == (3, 8)


def test_add_takes_any_hashable_id():
    pages = PageAllocator(11)
    for seq_id in ["x", 3, ("r", 1), None, frozenset({2})]:
        pages.add(seq_id, 1)
        assert seq_id in pages


@pytest.mark.parametrize("has_swapped", [False, True])
@pytest.mark.parametrize(
    "verb", ["add", "append", "free", "truncate", "fork", "seq_len", "page_ids", "swap_in", "swap_out"]
)
def test_any_verb_with_an_unhashable_id_raises_by_name(pages, verb, has_swapped):
    if has_swapped:
        pages.swap_out("b")
    arguments = (1,) if verb in ("add", "truncate", "fork") else ()
    with pytest.raises(TypeError, match=r"^`seq_id` must be hashable, .*; got \[1\] \(list\), which is unhashable\.$"):
        getattr(pages, verb)([1], *arguments)
    with pytest.raises(TypeError, match=r"^`seq_id` must be hashable, .*; got \[1\] \(list\), which is unhashable\.$"):
        pages.page_table(["a", [1]])


@pytest.mark.parametrize("bad", [{"a"}, {"a": 1}.keys(), iter(["a"]), (i for i in "a"), "a", None, 5])
def test_verbs_of_many_sequences_without_a_list_raise_by_name(pages, bad):
    before = state_of(pages, "a", "b")
    for call in (pages.append_many, pages.page_table, pages.sharing, lambda ids: pages.slot_mapping(ids, [1])):
        with pytest.raises(TypeError, match=rf"^`seq_ids` must be a list of sequence ids; got {type(bad).__name__}\. "):
            call(bad)
    assert state_of(pages, "a", "b") == before


def test_add_beyond_the_free_pages_raises_with_numbers_and_changes_nothing(pages):
    assert not pages.can_allocate(25)
    before = state_of(pages, "a", "b", "c")
    message = r"^add of 25 tokens to sequence 'c' needs 7 pages; 6 are free\."
    with pytest.raises(OutOfPagesError, match=message) as refused:
        pages.add("c", 25)
    assert (refused.value.needed, refused.value.free) == (7, 6)
    assert "c" not in pages
    assert state_of(pages, "a", "b", "c") == before
    assert pages.can_allocate(24)
    pages.add("c", 24)


def test_add_of_a_live_id_raises_with_it_and_changes_nothing(pages):
    before = state_of(pages, "a", "b")
    with pytest.raises(ValueError, match=r"^`seq_id` must be new; got 'a', which is a live sequence"):
        pages.add("a", 1)
    assert state_of(pages, "a", "b") == before


@pytest.mark.parametrize("bad", [-1, True, np.bool_(True), 2.0, np.float32(2), "12", b"12", {1: 2}, None])
def test_add_with_a_bad_count_raises_with_the_id(pages, bad):
    before = state_of(pages, "a", "b", "c")
    message = "^`token_ids` of sequence 'c', where it is their number, must be an integer >= 0; got "
    with pytest.raises((ValueError, TypeError), match=message):
        pages.add("c", bad)
    assert state_of(pages, "a", "b", "c") == before


def test_add_with_two_axes_of_token_ids_raises_with_the_shape(pages):
    with pytest.raises(ValueError, match=r"`token_ids` of sequence 'c' must have one axis; got shape \(2, 3\)"):
        pages.add("c", np.zeros((2, 3), np.int32))


@pytest.mark.parametrize("bad", [-1, True, 1.5])
def test_can_allocate_with_a_bad_count_raises(pages, bad):
    with pytest.raises((ValueError, TypeError), match=r"^`token_ids`, where it is their number, must be an "):
        pages.can_allocate(bad)


@pytest.mark.parametrize(
    ("num_tokens", "taken"), [(0, 0), (1, 0), (2, 0), (3, 1), (6, 1), (7, 2), (26, 6)], ids=lambda n: str(n)
)
def test_append_takes_what_num_pages_needed_says(pages, num_tokens, taken):
    assert pages.num_pages_needed("a", num_tokens) == taken
    assert pages.append("a", num_tokens) == []
    assert pages.num_free_pages == 6 - taken
    assert pages.seq_len("a") == 6 + num_tokens
    assert pages.page_ids("a")[:2].tolist() == [1, 2]
    assert pages.page_ids("b").tolist() == [3, 4]


def test_append_one_at_a_time_crosses_pages_as_one_call_does():
    one, many = PageAllocator(11, page_size=4), PageAllocator(11, page_size=4)
    for pages in (one, many):
        pages.add("a", 1)
    for _ in range(13):
        one.append("a")
    many.append("a", 13)
    np.testing.assert_array_equal(one.page_ids("a"), many.page_ids("a"))
    assert one.stats() == many.stats()


def test_append_beyond_the_free_pages_raises_with_numbers_and_changes_nothing(pages):
    before = state_of(pages, "a", "b")
    message = r"^append of 27 tokens to sequence 'a' needs 7 pages; 6 are free\."
    with pytest.raises(OutOfPagesError, match=message) as refused:
        pages.append("a", 27)
    assert (refused.value.needed, refused.value.free) == (7, 6)
    assert state_of(pages, "a", "b") == before


@pytest.mark.parametrize("verb", ["append", "num_pages_needed", "truncate"])
@pytest.mark.parametrize("bad", [-1, False, 1.0, "1", [1]])
def test_append_with_a_bad_count_raises_with_the_id(pages, verb, bad):
    before = state_of(pages, "a", "b")
    message = "^`num_tokens` for sequence 'a' must be an integer >= 0; got "
    with pytest.raises((ValueError, TypeError), match=message):
        getattr(pages, verb)("a", bad)
    assert state_of(pages, "a", "b") == before


@pytest.mark.parametrize(
    "call",
    [
        lambda pages: pages.append("z"),
        lambda pages: pages.num_pages_needed("z", 1),
        lambda pages: pages.fork("z", "c"),
        lambda pages: pages.truncate("z", 0),
        lambda pages: pages.free("z"),
        lambda pages: pages.seq_len("z"),
        lambda pages: pages.page_ids("z"),
        lambda pages: pages.page_table(["a", "z"]),
        lambda pages: pages.slot_mapping(["a", "z"], [1, 1]),
    ],
)
def test_any_verb_with_an_unknown_id_raises_with_it_and_changes_nothing(pages, call):
    before = state_of(pages, "a", "b", "c", "z")
    with pytest.raises(ValueError, match=r"^`seq_id` must be a sequence that is here .*; got 'z'\.$"):
        call(pages)
    assert state_of(pages, "a", "b", "c", "z") == before


def test_fork_shares_every_page_and_takes_none(pages):
    pages.fork("a", "c")
    assert pages.page_ids("c").tolist() == pages.page_ids("a").tolist() == [1, 2]
    assert pages.seq_len("c") == 6
    assert pages.num_free_pages == 6
    assert pages.stats().num_shared_pages == 2


def test_fork_to_a_live_id_raises_with_it_and_changes_nothing(pages):
    before = state_of(pages, "a", "b")
    for child_id in ["a", "b"]:
        with pytest.raises(ValueError, match=f"^`child_id` must be new; got '{child_id}', which is a live sequence"):
            pages.fork("a", child_id)
    assert state_of(pages, "a", "b") == before


def test_append_to_a_shared_partial_page_copies_it_once(pages):
    pages.fork("a", "c")
    assert pages.num_pages_needed("c", 1) == 1
    assert pages.append("c", 1) == [PageCopy(src=2, dst=5)]
    assert pages.page_ids("c").tolist() == [1, 5]
    assert pages.page_ids("a").tolist() == [1, 2]
    # Now both own their last page: neither is copied again.
    assert pages.num_pages_needed("a", 1) == pages.num_pages_needed("c", 1) == 0
    assert pages.append("a", 1) == pages.append("c", 1) == []
    assert pages.num_free_pages == 5


def test_append_by_the_parent_first_copies_too(pages):
    pages.fork("a", "c")
    assert pages.append("a", 7) == [PageCopy(src=2, dst=5)]
    assert pages.page_ids("a").tolist() == [1, 5, 6, 7]
    assert pages.page_ids("c").tolist() == [1, 2]
    assert pages.append("c", 1) == []


def test_append_after_fork_at_a_page_boundary_copies_nothing(pages):
    pages.fork("b", "c")
    assert pages.num_pages_needed("c", 1) == 1
    assert pages.append("c", 1) == []
    assert pages.page_ids("c").tolist() == [3, 4, 5]


def test_append_of_no_tokens_copies_nothing(pages):
    pages.fork("a", "c")
    assert pages.num_pages_needed("c", 0) == 0
    assert pages.append("c", 0) == []
    assert pages.stats().num_shared_pages == 2


def test_append_after_truncate_into_a_shared_full_page_copies_it(pages):
    pages.fork("b", "c")
    pages.truncate("c", 7)
    assert pages.append("c", 1) == [PageCopy(src=4, dst=5)]
    assert pages.page_ids("b").tolist() == [3, 4]


def test_append_without_a_free_page_for_the_copy_raises_and_changes_nothing(pages):
    pages.fork("a", "c")
    pages.add("d", 24)
    before = state_of(pages, "a", "b", "c", "d")
    with pytest.raises(OutOfPagesError, match="append of 1 tokens to sequence 'c' needs 1 pages; 0 are free"):
        pages.append("c", 1)
    assert state_of(pages, "a", "b", "c", "d") == before


def test_free_of_the_parent_leaves_the_child_its_pages(pages):
    pages.fork("a", "c")
    pages.free("a")
    assert pages.page_ids("c").tolist() == [1, 2]
    assert pages.num_free_pages == 6
    assert pages.append("c", 1) == []
    pages.free("c")
    assert pages.num_free_pages == 8


@pytest.mark.parametrize(("kept", "held"), [(8, 2), (5, 2), (4, 1), (1, 1), (0, 0)])
def test_truncate_keeps_the_first_tokens_and_frees_the_pages_past_them(pages, kept, held):
    pages.truncate("b", kept)
    assert pages.seq_len("b") == kept
    assert pages.page_ids("b").tolist() == [3, 4][:held]
    assert pages.num_free_pages == 6 + 2 - held


def test_truncate_beyond_the_length_raises_with_numbers_and_changes_nothing(pages):
    before = state_of(pages, "a", "b")
    with pytest.raises(ValueError, match=r"^`num_tokens` must be <= 6, the length of sequence 'a'; got 7\.$"):
        pages.truncate("a", 7)
    assert state_of(pages, "a", "b") == before


def test_truncate_then_append_restores_the_same_pages(pages):
    before = pages.page_ids("b")
    pages.truncate("b", 1)
    pages.append("b", 7)
    np.testing.assert_array_equal(pages.page_ids("b"), before)


def test_free_twice_raises_with_the_id(pages):
    pages.free("a")
    with pytest.raises(ValueError, match="got 'a'"):
        pages.free("a")
    assert "a" not in pages
    assert pages.num_free_pages == 8


def test_free_then_add_reuses_the_id_and_the_pages(pages):
    pages.free("a")
    pages.add("a", 9)
    assert pages.page_ids("a").tolist() == [1, 2, 5]


def test_sketch_a_prompt_of_18_tokens_takes_4_pages_for_two_sequences():
    pages = PageAllocator(101, page_size=16)
    for seq_id in range(2):
        pages.add(seq_id, 18)
    assert pages.stats().num_used_pages == 4
    for seq_id in range(2):
        pages.append(seq_id)
    assert pages.stats().num_used_pages == 4


def test_sketch_b_free_counts_are_89_then_94():
    pages = PageAllocator(101, page_size=16)
    pages.add("first", 45)
    pages.add("second", 128)
    assert len(pages.page_ids("first")) == 3
    assert len(pages.page_ids("second")) == 8
    assert pages.num_free_pages == 89
    pages.append("first", 96 - 45)
    assert len(pages.page_ids("first")) == 6
    pages.free("second")
    assert pages.num_free_pages == 94


@pytest.mark.parametrize("prefix_caching", [False, True])
def test_add_of_a_list_of_lists_raises(prefix_caching):
    pages = PageAllocator(20, 4, prefix_caching=prefix_caching)
    for tokens in ([[1, 2, 3]], [np.arange(3)], ((1,), (2, 3))):
        with pytest.raises(
            ValueError, match=r"^`token_ids` of sequence 'a' must be one list of integers; got a list of"
        ):
            pages.add("a", tokens)
        with pytest.raises(ValueError, match=r"^`token_ids` must be one list of integers; got a list of lists\.$"):
            pages.can_allocate(tokens)
    assert "a" not in pages


def test_growth_beyond_the_table_raises_with_numbers():
    pages = PageAllocator(20, 4, max_pages_per_seq=2)
    pages.add("a", 8)
    message = r"^Sequence 'a' must have at most 8 tokens, for `max_pages_per_seq` is 2 pages of 4; got 9\.$"
    for call in (lambda: pages.append("a"), lambda: pages.append_many(["a"]), lambda: pages.reserve("a", 1)):
        with pytest.raises(ValueError, match=message):
            call()
    assert not pages.can_allocate(9)


def test_swapped_sequence_keeps_its_length_and_refuses_other_verbs():
    pages = PageAllocator(8, 4)
    pages.add("a", 6)
    assert pages.swap_out("a").tolist() == [1, 2]
    assert (pages.seq_len("a"), pages.num_free_pages, "a" in pages) == (6, 7, True)
    for call in (
        lambda: pages.append("a"),
        lambda: pages.append_many(["a"]),
        lambda: pages.fork("a", "b"),
        lambda: pages.truncate("a", 1),
        lambda: pages.swap_out("a"),
        lambda: pages.page_table(["a"]),
        lambda: pages.slot_mapping(["a"], [1]),
        lambda: pages.reserve("a", 1),
        lambda: pages.commit("a", []),
    ):
        with pytest.raises(ValueError, match=r"^Sequence 'a' is swapped out; swap it in first\.$"):
            call()
    with pytest.raises(ValueError, match=r"^`seq_id` must be new; got 'a', which is a swapped sequence\. Free it"):
        pages.add("a", 1)
    assert len(pages.swap_in("a")) == 2
    with pytest.raises(ValueError, match=r"^`seq_id` must be a sequence that is swapped out; got 'a', which is not\.$"):
        pages.swap_in("a")
    pages.swap_out("a")
    pages.free("a")
    assert "a" not in pages
