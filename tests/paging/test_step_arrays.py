"""Page tables and slot mappings."""

import numpy as np
import pytest

from jaxpaged.config import NULL_PAGE
from jaxpaged.paging import PageAllocator


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
