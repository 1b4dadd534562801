"""Counts and snapshots of the pool."""

import dataclasses

import pytest

from jaxpaged.paging import PageAllocator, PageGroup
from tests.paging.helpers import PROMPT, add_committed, make_pages


def test_stats_of_pins_count_no_saving_and_of_windows_no_passed_tokens():
    pages = make_pages(20)
    add_committed(pages, "a", PROMPT)
    pages.prefix.pin(PROMPT[:8])
    pages.prefix.pin(PROMPT)
    assert (pages.stats().num_pinned_pages, pages.stats().num_saved_pages) == (0, 0)
    pages.free("a")
    stats = pages.stats()
    assert (stats.num_used_pages, stats.num_pinned_pages, stats.num_saved_pages, stats.saved_fraction) == (5, 5, 0, 0)
    pages = make_pages(20, groups=[PageGroup("all"), PageGroup("near", 3)])
    pages.add("a", 10)
    pages.append("a", 1)
    stats = pages.stats()  # near: the first two of three pages are gone
    assert (stats.num_unshared_pages, stats.num_stored_tokens, stats.occupancy) == (4, 11 + 3, 14 / 16)


def test_sharing_of_a_sequence_given_twice_raises():
    pages = make_pages(20)
    pages.add("a", 10)
    with pytest.raises(ValueError, match=r"^`seq_ids` of sharing must be distinct; got 'a' twice\.$"):
        pages.sharing(["a", "a"])


def test_sharing_counts_the_beams_given():
    pages = PageAllocator(101, 16)
    pages.add(0, 48)
    for beam in range(1, 4):
        pages.fork(0, beam)
    pages.append_many(range(4), 16)
    shared = pages.sharing(range(4))
    assert (shared.num_unshared_pages, shared.num_held_pages, shared.saved_fraction) == (16, 7, 0.5625)
    assert pages.stats().saved_bytes(1000) == 9000


def test_snapshot_shows_each_page_once():
    pages = make_pages(8)
    add_committed(pages, "a", PROMPT[:8])
    pages.fork("a", "b")
    add_committed(pages, "c", [1, 2, 3, 4, 5])
    pages.free("c")
    shot = pages.snapshot()
    assert shot.state.tolist() == [1, 3, 3, 4, 0, 0, 0, 0]
    assert shot.owner.tolist() == [-1, 0, 0, -1, -1, -1, -1, -1]
    assert shot.fill.tolist() == [0, 4, 4, 4, 0, 0, 0, 0]
    assert shot.seq_ids == ("a", "b")


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
