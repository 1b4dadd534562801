"""The verbs of `PageAllocator.prefix`: pins, forgetting, and contents of another allocator."""

import copy
import dataclasses
import pickle

import numpy as np
import pytest

from jaxpaged.config import NULL_PAGE
from jaxpaged.paging import Key, OutOfPagesError, PageAllocator, PageGroup
from jaxpaged.paging.digests import as_bytes, hash_pages, root_digest
from tests.paging.helpers import PROMPT, add_committed, make_pages


def test_pinned_pages_stay_until_their_time_is_up():
    pages = make_pages(8)
    add_committed(pages, "a", PROMPT)
    assert pages.prefix.pin(PROMPT, expires_at=10.0) == 20
    pages.free("a")
    assert pages.num_free_pages == 2
    pages.prefix.expire(9.0)
    assert pages.num_free_pages == 2
    pages.prefix.expire(10.0)
    assert pages.num_free_pages == 7
    assert pages.prefix.pin(PROMPT) == 20
    pages.prefix.unpin(PROMPT)
    with pytest.raises(
        ValueError, match=r"^`token_ids` must be a prefix that is pinned; got 20 tokens that are not\.$"
    ):
        pages.prefix.unpin(PROMPT)


def test_reset_forgets_content_and_keeps_sequences():
    pages = make_pages(record_events=True)
    add_committed(pages, "a", PROMPT)
    pages.prefix.reset()
    assert pages.prefix.match([*PROMPT, 0]) == 0
    assert [event.kind for event in pages.prefix.take_events()] == ["stored"] * 5 + ["cleared"]
    pages.commit("a", PROMPT)
    assert pages.prefix.match([*PROMPT, 0]) == 20
    assert pages.prefix.take_events()[0].parent is None


def test_cached_pages_are_adopted_by_another_pool():
    pages, other = make_pages(), make_pages(4)
    add_committed(pages, "a", PROMPT)
    saved = pages.prefix.cached_pages()
    assert other.prefix.adopt(saved).tolist() == [1, 2, 3, 0, 0]
    assert other.prefix.match([*PROMPT, 0]) == 12
    assert other.prefix.adopt(saved).tolist() == [0] * 5
    assert pages.prefix.adopt(saved).tolist() == [0] * 5


def test_adopted_pages_without_tokens_are_hit_as_a_whole_only():
    pages, other = make_pages(), make_pages(partial_hits=True)
    add_committed(pages, "a", PROMPT)
    assert other.prefix.adopt(pages.prefix.cached_pages()).all()
    assert (other.prefix.match([*PROMPT, 0]), other.prefix.match([*PROMPT[:6], 0])) == (20, 4)


def test_adopt_leaves_the_pages_that_are_reserved():
    pages, other = make_pages(), make_pages(8)
    add_committed(pages, "a", PROMPT)
    other.add("b", 1)
    other.reserve("b", 15)
    assert np.count_nonzero(other.prefix.adopt(pages.prefix.cached_pages())) == 7 - 1 - 3
    assert other.prefix.match([*PROMPT, 0]) == 12
    with pytest.raises(ValueError, match=r"^`adopt` needs a prefix cache: PageAllocator\(prefix_caching=True\)\.$"):
        PageAllocator(8, 4).prefix.adopt(pages.prefix.cached_pages())


def test_prompts_without_a_full_page_hit_and_pin_nothing():
    for pages in (PageAllocator(8, 4), make_pages(8)):
        add_committed(pages, "a", PROMPT[:7])
        for tokens in ([], PROMPT[:3]):
            assert pages.prefix.match(tokens) == pages.prefix.pin(tokens) == 0
            assert pages.prefix.find(tokens).tolist() == []
        assert pages.prefix.pin(PROMPT[:7]) == (4 if pages.prefix_caching else 0)
        assert pages.prefix.pin([5] * 8) == 0
        pages.free("a")
        assert pages.num_free_pages == (6 if pages.prefix_caching else 7)


def test_stats_count_the_tokens_of_prompts_that_hit_and_missed():
    pages = make_pages(partial_hits=True)
    for seq_id, (tokens, num_hit) in enumerate([(PROMPT, 0), (PROMPT[:9], 8), ([*PROMPT[:6], 1, 1], 6)]):
        assert add_committed(pages, seq_id, tokens) == num_hit
    assert (pages.stats().num_hit_tokens, pages.stats().num_missed_tokens) == (14, 20 + 1 + 2)


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        (
            {"tokens": np.zeros((5, 8), np.int32)},
            ValueError,
            r"^`tokens` of `pages` must be int32 \[5, 4\], .* \[5, 8\]",
        ),
        (
            {"tokens": np.zeros((4, 4), np.int32)},
            ValueError,
            r"^`tokens` of `pages` must be int32 \[5, 4\], .* \[4, 4\]",
        ),
        ({"tokens": np.zeros((5, 4))}, ValueError, r"^`tokens` of `pages` must be int32 .*; got float64 \[5, 4\]\.$"),
        (
            {"digests": np.zeros((5, 8), np.uint8)},
            ValueError,
            r"^`digests` of `pages` must be uint8 \[5, 16\], .*\[5, 8\]",
        ),
        ({"parents": np.zeros((4, 16), np.uint8)}, ValueError, r"^`parents` of `pages` must be uint8 \[5, 16\], "),
    ],
)
def test_adopt_of_arrays_that_do_not_fit_raises_and_changes_nothing(changed, error, message):
    pages, other = make_pages(partial_hits=True), make_pages(partial_hits=True)
    add_committed(pages, "a", PROMPT)
    saved = dataclasses.replace(pages.prefix.cached_pages(), **changed)
    with pytest.raises(error, match=message):
        other.prefix.adopt(saved)
    assert other.prefix.match([*PROMPT, 0]) == 0
    assert (other.num_free_pages, other.stats().num_cached_pages) == (20, 0)
    with pytest.raises(TypeError, match=r"^`pages` must be CachedPages, as `cached_pages` gives them; got int\.$"):
        other.prefix.adopt(5)


@pytest.mark.parametrize("bad", ["x", True, 1j, float("nan"), [1.0]])
def test_pin_and_expire_with_no_time_raise_and_change_nothing(bad):
    pages = make_pages()
    add_committed(pages, "a", PROMPT)
    pages.prefix.pin(PROMPT[:8], expires_at=np.float32(5))
    pages.free("a")
    before = pages.stats()
    for name, call in (
        ("expires_at", lambda: pages.prefix.pin(PROMPT, expires_at=bad)),
        ("now", lambda: pages.prefix.expire(bad)),
    ):
        with pytest.raises((TypeError, ValueError), match=rf"^`{name}` must be a number of the caller's clock; got "):
            call()
    assert pages.stats() == before
    pages.prefix.expire(np.int64(5))
    assert pages.num_free_pages == 20


@pytest.mark.parametrize(
    ("page_ids", "error", "message"),
    [
        ([0], ValueError, r"must be in 1 \.\. 7; got 0 \.\. 0\."),
        ([1, 8], ValueError, r"must be in 1 \.\. 7; got 1 \.\. 8\."),
        ([-1], ValueError, r"must be in 1 \.\. 7; got -1 \.\. -1\."),
        (3, ValueError, r"must have one axis; got shape \(\)\."),
        ([1.0], TypeError, r"must be integers below 2\*\*63; got float64\."),
        ([2**70], TypeError, r"must be integers below 2\*\*63; got object\."),
    ],
)
def test_forget_pages_of_what_is_no_page_raises(page_ids, error, message):
    pages = make_pages(8)
    add_committed(pages, "a", PROMPT)
    with pytest.raises(error, match=f"^`page_ids` {message}$"):
        pages.prefix.forget(page_ids)
    pages.prefix.forget([])
    assert pages.prefix.match(PROMPT) == 16


def test_reset_lists_no_eviction_from_before():
    pages = make_pages(6, offload=True)
    pages.add("a", PROMPT[:9])
    pages.commit("a", PROMPT[:9])
    pages.free("a")
    pages.add("b", 20)
    pages.prefix.reset()
    assert pages.prefix.take_evictions() == []


def test_adopted_pages_are_evicted_from_their_tail():
    pages, other = make_pages(), make_pages(9)
    add_committed(pages, "a", PROMPT)
    other.prefix.adopt(pages.prefix.cached_pages())
    for seq_id, hit in enumerate([20, 20, 16, 12, 8, 4, 0]):
        if seq_id:
            other.add(seq_id, 4 if seq_id > 1 else 12)
        assert other.prefix.match([*PROMPT, 0]) == hit


def test_adopted_pages_are_evicted_before_all_others():
    pages, other = make_pages(), make_pages(9)
    add_committed(pages, "a", PROMPT)
    add_committed(other, "b", [7] * 8)
    other.free("b")
    other.prefix.adopt(pages.prefix.cached_pages())
    other.add("c", 4 * 6)
    assert (other.prefix.match([*PROMPT, 0]), other.prefix.match([7] * 9)) == (0, 8)


def test_pin_again_holds_each_page_once():
    pages = make_pages()
    add_committed(pages, "a", PROMPT)
    for _ in range(3):
        pages.prefix.pin(PROMPT)
    pages.free("a")
    pages.prefix.unpin(PROMPT)
    assert (pages.num_free_pages, pages.stats().num_used_pages) == (20, 0)


def test_adopt_leaves_out_pages_whose_parents_are_not_there():
    pages, other = make_pages(), make_pages()
    add_committed(pages, "a", PROMPT)
    saved = pages.prefix.cached_pages()
    orphans = dataclasses.replace(
        saved, digests=saved.digests[2:], parents=saved.parents[2:], page_ids=saved.page_ids[2:]
    )
    assert other.prefix.adopt(orphans).tolist() == [0, 0, 0]
    assert other.stats().num_cached_pages == 0
    add_committed(other, "a", PROMPT[:8])
    assert other.prefix.adopt(orphans).all()
    assert other.prefix.match([*PROMPT, 0]) == 20


def test_pin_of_free_pages_that_are_reserved_raises_and_changes_nothing():
    pages = make_pages(8)
    add_committed(pages, "a", PROMPT)
    pages.free("a")
    pages.add("b", 1)
    pages.reserve("b", 4 * 3 + 3)
    before = pages.stats()
    with pytest.raises(OutOfPagesError, match=r"^pin of 20 tokens needs 5 pages; 3 are free\."):
        pages.prefix.pin(PROMPT)
    assert pages.stats() == before
    assert pages.prefix.pin(PROMPT[:12]) == 12
    pages.append("b", 4 * 3 + 3)


def test_invalidate_ends_the_pins_of_what_it_forgets():
    pages = make_pages()
    add_committed(pages, "a", PROMPT)
    add_committed(pages, "b", [7] * 8)
    pages.prefix.pin(PROMPT)
    pages.prefix.pin([7] * 8)
    pages.invalidate("a", 8)
    pages.free("a")
    pages.free("b")
    assert pages.num_free_pages == 20 - 2
    with pytest.raises(ValueError, match="^`token_ids` must be a prefix that is pinned"):
        pages.prefix.unpin(PROMPT)
    pages.prefix.unpin([7] * 8)


def test_find_gives_the_pages_of_a_prompt_also_behind_one_that_is_missing():
    pages = make_pages()
    add_committed(pages, "a", PROMPT, keys=[Key("salt", "x")])
    held = pages.page_ids("a").tolist()
    assert pages.prefix.find(PROMPT).tolist() == [NULL_PAGE] * 5
    found = pages.prefix.find([*PROMPT, 1], keys=[Key("salt", "x")])
    assert found.dtype == np.int32
    assert found.tolist() == held  # the last page too, whose last token an `add` would compute anew
    pages.free("a")
    pages.add("b", 4 * 16)  # evicts the tail
    assert pages.prefix.find(PROMPT, keys=[Key("salt", "x")]).tolist() == [*held[:4], NULL_PAGE]
    assert PageAllocator(9, 4).prefix.find(PROMPT).tolist() == [NULL_PAGE] * 5


def test_find_of_a_group_that_is_not_there_raises():
    pages = make_pages(groups=[PageGroup("all"), PageGroup("near", 5)])
    for group in (None, "far"):
        with pytest.raises(ValueError, match=rf"^`group` must be one of \['all', 'near'\]; got {group!r}\.$"):
            pages.prefix.find(PROMPT, group=group)


def test_router_that_follows_the_events_finds_prompts_by_their_digests():
    pages = make_pages(8, record_events=True)
    salted = [Key("salt", "x")]
    add_committed(pages, "a", PROMPT, keys=salted)
    known = {event.digest: event.parent for event in pages.prefix.take_events()}
    chain = hash_pages(np.array(PROMPT, np.int32), 4, parent=root_digest(4), keys=salted)
    assert list(known) == [as_bytes(digest) for digest in chain]
    assert list(known.values()) == [None, *list(known)[:-1]]
    pages.free("a")
    pages.add("b", 16)
    assert [event.kind for event in pages.prefix.take_events()] == ["removed", "removed"]


def test_take_of_what_nobody_records_is_empty():
    for pages in (PageAllocator(8, 4), make_pages(8)):
        add_committed(pages, "a", PROMPT)
        pages.free("a")
        pages.add("b", 28)
        for take in (pages.prefix.take_events, pages.prefix.take_evictions, pages.prefix.take_restores):
            assert (take(), take()) == ([], [])


@pytest.mark.parametrize("take", [copy.deepcopy, lambda pages: pickle.loads(pickle.dumps(pages))])
def test_snapshot_of_an_allocator_goes_on_alone(take):
    pages = make_pages(30, offload=True, record_events=True)
    add_committed(pages, "a", PROMPT)
    pages.fork("a", "b")
    pages.reserve("b", 9)
    pages.prefix.pin(PROMPT[:8])
    pages.add("c", 6)
    pages.swap_out("c")
    copied = take(pages)
    assert copied.stats() == pages.stats()
    pages.append("b", 3)
    pages.prefix.reset()
    for allocator in (copied, take(copied)):
        assert allocator.prefix.match([*PROMPT, 0]) == 20
        assert allocator.append("b", 3) == []
        assert allocator.page_ids("b").tolist() == pages.page_ids("b").tolist()
        assert len(allocator.swap_in("c")) == 2
        for seq_id in "abc":
            allocator.free(seq_id)
        assert allocator.num_free_pages == 29 - 2
