"""PageAllocator: each verb, each refusal, and the allocator numbers of the three source sketches."""

import dataclasses

import numpy as np
import pytest

from jaxpaged.config import NULL_PAGE
from jaxpaged.paging import OutOfPagesError, PageAllocator, PageCopy


def state_of(pages: PageAllocator, *seq_ids):
    sequences = {i: (pages.seq_len(i), pages.page_ids(i).tolist()) for i in seq_ids if i in pages}
    return sequences, pages.stats(), pages.num_free_pages


@pytest.fixture
def pages() -> PageAllocator:
    """10 usable pages of 4: "a" has 6 tokens in pages 1, 2 and "b" 8 tokens in pages 3, 4."""
    pages = PageAllocator(11, page_size=4)
    pages.add("a", 6)
    pages.add("b", 8)
    return pages


# Sizes


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


# add, can_allocate


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
    with pytest.raises((ValueError, TypeError), match=r"^`num_tokens` must be an integer >= 0; got "):
        pages.can_allocate(bad)


# append, num_pages_needed


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


HUGE = [2**31 - 6, 2**31, 2**62, 2**63 - 1, 2**64 - 1, 2**70]


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


# fork, copy-on-write


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


# truncate, free


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


# page_table, slot_mapping


def test_page_table_pads_with_the_null_page(pages):
    pages.add("empty", 0)
    table = pages.page_table(["b", "empty", "a"], max_pages=4)
    assert table.dtype == np.int32
    assert table.tolist() == [[3, 4, 0, 0], [0, 0, 0, 0], [1, 2, 0, 0]]


def test_page_table_without_a_width_is_as_wide_as_the_longest_sequence(pages):
    pages.append("a", 7)
    assert pages.page_table(["b", "a"]).tolist() == [[3, 4, 0, 0], [1, 2, 5, 6]]
    assert pages.page_table([]).shape == (0, 1)
    pages.truncate("a", 0)
    assert pages.page_table(["a"]).tolist() == [[NULL_PAGE]]


def test_page_table_wider_than_the_pool_is_padded(pages):
    table = pages.page_table(["b", "a"], max_pages=5000)
    assert table.shape == (2, 5000)
    assert table[:, :2].tolist() == [[3, 4], [1, 2]]
    assert not table[:, 2:].any()


def test_page_table_of_any_width_reads_an_empty_sequence_at_the_end_of_the_flat_array(pages):
    pages.add("empty", 0)
    for width in range(1, 2200):  # past the array's first length, so that one of these ends exactly there
        assert not pages.page_table(["empty"], width).any()


def test_page_table_too_narrow_raises_with_numbers(pages):
    pages.append("b", 1)
    message = r"^`max_pages` must be >= 3, the pages of sequence 'b' \(9 tokens\); got 2\.$"
    with pytest.raises(ValueError, match=message):
        pages.page_table(["a", "b"], max_pages=2)


@pytest.mark.parametrize("bad", [0, -2, True, 2.0])
def test_page_table_with_a_bad_width_raises(pages, bad):
    with pytest.raises((ValueError, TypeError), match=r"^`max_pages` must be an integer >= 1; got "):
        pages.page_table(["a"], max_pages=bad)


def test_slot_mapping_packs_the_last_tokens_of_each_sequence(pages):
    pages.free("a")
    pages.add("c", 10)  # pages 1, 2, 5
    slots = pages.slot_mapping(["c", "b"], [6, 2])
    assert slots.dtype == np.int32
    assert slots.tolist() == [8, 9, 10, 11, 20, 21, 18, 19]


def test_slot_mapping_of_whole_sequences_follows_the_page_table(pages):
    pages.append("a", 20)
    for seq_id in ["a", "b"]:
        t = np.arange(pages.seq_len(seq_id))
        expected = pages.page_table([seq_id])[0, t // 4] * 4 + t % 4
        np.testing.assert_array_equal(pages.slot_mapping([seq_id], [len(t)]), expected)


def test_slot_mapping_of_no_tokens_is_empty(pages):
    assert pages.slot_mapping([], []).shape == (0,)
    assert pages.slot_mapping(["a", "b"], np.zeros(2, np.int64)).shape == (0,)
    assert pages.slot_mapping(["a", "b"], [0, 1]).tolist() == [19]


def test_slot_mapping_with_a_count_out_of_range_raises_with_the_id(pages):
    for bad in (9, -1):
        message = rf"^`num_new_tokens` must be in 0 \.\. 8, the length of sequence 'b'; got {bad}\.$"
        with pytest.raises(ValueError, match=message):
            pages.slot_mapping(["a", "b"], [1, bad])


@pytest.mark.parametrize("bad", [[1.0, 1.0], [True, True], ["1", "1"]])
def test_slot_mapping_with_counts_that_are_not_integers_raises(pages, bad):
    with pytest.raises(TypeError, match=r"^`num_new_tokens` must be integers; got "):
        pages.slot_mapping(["a", "b"], bad)


def test_slot_mapping_with_another_number_of_counts_raises(pages):
    for bad, shape in [([1], r"\(1,\)"), (1, r"\(\)"), ([[1, 1]], r"\(1, 2\)")]:
        message = rf"^`num_new_tokens` must have one entry for each of the 2 sequences; got shape {shape}\.$"
        with pytest.raises(ValueError, match=message):
            pages.slot_mapping(["a", "b"], bad)


def test_slot_mapping_with_a_sequence_twice_raises_with_its_id(pages):
    with pytest.raises(ValueError, match=r"^`seq_ids` of a slot mapping must be distinct; got 'b' twice"):
        pages.slot_mapping(["a", "b", "b"], [1, 1, 1])


def test_arrays_returned_are_fresh(pages):
    # The CPU backend may alias a numpy buffer handed to jit.
    for make in (
        lambda: pages.page_ids("a"),
        lambda: pages.page_table(["a", "b"]),
        lambda: pages.slot_mapping(["a", "b"], [6, 8]),
    ):
        first = make()
        kept = first.copy()
        first[...] = 9
        np.testing.assert_array_equal(make(), kept)


# Many sequences: the flat array grows and is collected


def test_many_sequences_growing_in_turn_keep_their_own_pages():
    rng = np.random.default_rng(0)
    pages = PageAllocator(40_001, page_size=1)
    held: dict[int, list[int]] = {}
    for step in range(6000):
        seq_id = int(rng.integers(1500))
        if seq_id not in pages:
            pages.add(seq_id, int(rng.integers(12)))
        elif step % 7 == 0:
            pages.free(seq_id)
            del held[seq_id]
            continue
        else:
            pages.append(seq_id, int(rng.integers(1, 6)))
        new = pages.page_ids(seq_id).tolist()
        assert new[: len(held.get(seq_id, []))] == held.get(seq_id, [])
        held[seq_id] = new
    table = pages.page_table(list(held))
    for row, page_ids in zip(table.tolist(), held.values(), strict=True):
        assert row == page_ids + [NULL_PAGE] * (len(row) - len(page_ids))
    every = [page_id for page_ids in held.values() for page_id in page_ids]
    assert len(set(every)) == len(every) == pages.stats().num_used_pages


# The three source sketches


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


def test_sketch_b_four_beams_take_7_pages_instead_of_16():
    pages = PageAllocator(101, page_size=16)
    pages.add("beam 0", 48)
    for beam in range(1, 4):
        pages.fork("beam 0", f"beam {beam}")
    for beam in range(4):
        assert pages.append(f"beam {beam}", 16) == []
    stats = pages.stats()
    assert dataclasses.asdict(stats) == {
        "num_usable_pages": 100,
        "num_used_pages": 7,
        "num_shared_pages": 3,
        "num_unshared_pages": 16,
        "num_sequences": 4,
        "num_tokens": 256,
        "page_size": 16,
        "num_cached_pages": 0,
        "num_reserved_pages": 0,
        "num_swapped_sequences": 0,
        "num_hit_tokens": 0,
        "num_missed_tokens": 0,
        "num_evictions": 0,
        "num_pinned_pages": 0,
        "num_stored_tokens": 256,
    }
    assert (stats.num_free_pages, stats.num_saved_pages) == (93, 9)
    assert stats.saved_fraction == 0.5625
    assert stats.utilisation == 0.07
    assert stats.occupancy == 1.0


def test_stats_of_an_empty_allocator_divides_by_nothing():
    stats = PageAllocator(11).stats()
    assert (stats.num_used_pages, stats.saved_fraction, stats.occupancy, stats.utilisation) == (0, 0.0, 0.0, 0.0)


def test_stats_occupancy_counts_the_ends_of_last_pages(pages):
    assert pages.stats().occupancy == (6 + 8) / 16
    with pytest.raises(dataclasses.FrozenInstanceError):
        pages.stats().num_tokens = 3  # pyright: ignore[reportAttributeAccessIssue]
