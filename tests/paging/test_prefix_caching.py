"""Prefix caching, windows, swap and promises, case by case: what the state machine cannot name."""

import dataclasses
import os
import subprocess
import sys
import threading

import numpy as np
import pytest

import jaxpaged
from jaxpaged.paging import Key, OutOfPagesError, PageAllocator, PageCopy, PageGroup
from jaxpaged.paging.digests import hash_pages, root_digest

PROMPT = list(range(100, 120))  # 5 pages of 4


def make_pages(num_pages=21, **options) -> PageAllocator:
    return PageAllocator(num_pages, 4, prefix_caching=True, **options)


def add_committed(pages, seq_id, tokens, **options):
    num_prefix = pages.add(seq_id, tokens, **options)
    pages.commit(seq_id, tokens)
    return num_prefix


# Digests


def test_digests_do_not_depend_on_the_hash_seed():
    code = (
        "import sys, types, numpy as np\n"
        "sys.modules['jaxpaged'] = types.ModuleType('jaxpaged')\n"  # without its __init__, which imports JAX
        f"sys.modules['jaxpaged'].__path__ = {list(jaxpaged.__path__)!r}\n"
        "from jaxpaged.paging import Key\n"
        "from jaxpaged.paging.digests import hash_pages, root_digest\n"
        "keys = [Key('adapter', 'x'), Key('image', b'i', 5)]\n"
        "print(hash_pages(np.arange(12, dtype=np.int32), 4, parent=root_digest(4), keys=keys).tolist())\n"
    )
    printed = {
        subprocess.run(
            [sys.executable, "-c", code],
            env=os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("0", "1", "2")
    }
    assert len(printed) == 1


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ([Key("a", "bc")], [Key("ab", "c")]),
        ([Key("n", 1)], [Key("n", "1")]),
        ([Key("n", b"1")], [Key("n", "1")]),
        ([Key("adapter", "x")], [Key("tenant", "x")]),
        ([Key("i", "x", 0)], [Key("i", "x", 1)]),
        ([Key("i", "x", 0), Key("i", "y", 0)], [Key("i", "xy", 0)]),
        ([], [Key("", "")]),
    ],
)
def test_keys_that_differ_in_any_part_never_share_a_page(one, other):
    pages = make_pages()
    add_committed(pages, "a", PROMPT, keys=one)
    assert pages.match(PROMPT, keys=one) == 16
    assert pages.match(PROMPT, keys=other) == 0


def test_keys_count_from_their_position_on_and_in_any_order():
    pages = make_pages()
    keys = [Key("image", b"1", 9), Key("image", b"2", 8)]
    add_committed(pages, "a", PROMPT, keys=keys)
    assert pages.match(PROMPT) == 8
    assert pages.match(PROMPT, keys=keys[::-1]) == 16


def test_digest_of_a_page_names_all_before_it():
    tokens = np.array([1, 2, 3, 4, 5, 6, 7, 8], np.int32)
    first, second = hash_pages(tokens, 4, parent=root_digest(4)).tolist()
    again = hash_pages(tokens[4:], 4, parent=np.array(first, "<u8").tobytes(), first_page=1)
    assert again.tolist() == [second]
    assert hash_pages(tokens[4:], 4, parent=root_digest(4)).tolist() != [second]


# Hits


@pytest.mark.parametrize(("length", "hit"), [(4, 0), (5, 4), (8, 4), (9, 8), (20, 16), (21, 20), (3, 0), (0, 0)])
def test_add_hits_full_pages_and_leaves_a_token_to_compute(length, hit):
    pages = make_pages()
    add_committed(pages, "a", PROMPT)
    prompt = [*PROMPT, 7][:length]
    assert pages.match(prompt) == hit
    assert pages.add("b", prompt) == hit
    assert pages.page_ids("b")[: hit // 4].tolist() == pages.page_ids("a")[: hit // 4].tolist()


def test_add_before_the_commit_and_by_count_hits_nothing():
    pages = make_pages()
    pages.add("a", PROMPT)
    assert pages.add("b", PROMPT) == 0
    pages.commit("a", PROMPT[:9])
    assert pages.match(PROMPT) == 8
    assert pages.add("c", len(PROMPT)) == 0


def test_hits_that_nobody_owns_count_against_free_pages():
    pages = make_pages(8)
    add_committed(pages, "a", PROMPT)
    pages.free("a")
    assert (pages.num_free_pages, pages.stats().num_cached_pages) == (7, 5)
    longer = PROMPT + list(range(9))  # 8 pages, 5 of them cached
    assert not pages.can_allocate(longer)
    with pytest.raises(OutOfPagesError, match=r"^add of 29 tokens to sequence 'b' needs 8 pages; 7 are free\."):
        pages.add("b", longer)
    assert pages.can_allocate(longer[:28])
    assert pages.add("b", longer[:28]) == 20


def test_eviction_takes_the_least_recently_used_chain_from_its_tail():
    pages = make_pages(11)
    other = [7] * 20
    add_committed(pages, "old", PROMPT)
    add_committed(pages, "new", other)
    pages.free("old")
    pages.free("new")
    pages.add("x", 4 * 3)
    assert (pages.match([*PROMPT, 0]), pages.match([*other, 0])) == (8, 20)
    assert pages.stats().num_evictions == 3
    pages.add("y", [*PROMPT[:4], 0])  # in use: what is left of its chain goes, then the other's tail
    pages.add("z", 4 * 3)
    assert (pages.match([*PROMPT, 0]), pages.match([*other, 0])) == (4, 8)


def test_commit_of_content_that_another_committed_first_shares_its_pages():
    pages = make_pages()
    pages.add("a", PROMPT)
    pages.add("b", PROMPT)
    pages.fork("b", "c")
    pages.commit("a", PROMPT)
    pages.commit("b", PROMPT)
    assert pages.page_ids("c").tolist() == pages.page_ids("b").tolist() == pages.page_ids("a").tolist()
    assert pages.num_free_pages == 15


def test_append_after_truncate_into_a_page_that_can_be_hit_copies_it():
    pages = make_pages()
    add_committed(pages, "a", PROMPT)
    pages.truncate("a", 18)
    assert pages.append("a", 1) == [PageCopy(5, 6)]
    assert pages.match([*PROMPT, 0]) == 20


def test_commit_of_other_tokens_than_a_fork_committed_raises():
    pages = make_pages()
    pages.add("a", PROMPT)
    pages.fork("a", "b")
    pages.commit("a", PROMPT)
    with pytest.raises(ValueError, match=r"^`token_ids` of sequence 'b' must be those that its page 0 was committed"):
        pages.commit("b", [9] * 20)


@pytest.mark.parametrize(
    ("tokens", "error", "message"),
    [
        ([1] * 21, ValueError, r"^`token_ids` of sequence 'a' must be at most its 20 tokens; got 21\.$"),
        ([1.5] * 8, TypeError, r"^`token_ids` of sequence 'a' must be integers; got float64\.$"),
        ([2**31] * 8, ValueError, r"^`token_ids` of sequence 'a' must be in 0 \.\. 2\*\*31 - 1; got 2147483648\."),
        ([2**70] * 8, ValueError, rf"^`token_ids` of sequence 'a' must be in 0 \.\. 2\*\*31 - 1; got {2**70}\."),
        ([3, 2**63, -1, 3], ValueError, rf"^`token_ids` of sequence 'a' must be in 0 \.\. .*; got {2**63}\."),
        ([1, -1] * 4, ValueError, r"^`token_ids` of sequence 'a' must be in 0 \.\. 2\*\*31 - 1; got -1\. Cut padding"),
        (
            [[1], [2, 3], 4, 5],
            ValueError,
            r"^`token_ids` of sequence 'a' must be one list of integers; got a list of lists",
        ),
        (8, TypeError, r"^`token_ids` of sequence 'a' must be its tokens; got int\.$"),
    ],
)
def test_commit_of_bad_tokens_raises(tokens, error, message):
    pages = make_pages()
    pages.add("a", PROMPT)
    with pytest.raises(error, match=message):
        pages.commit("a", tokens)
    assert pages.stats().num_cached_pages == 0


def test_partial_hit_of_30_tokens_shares_16_and_copies_14():
    pages = PageAllocator(21, 16, prefix_caching=True, partial_hits=True)
    tokens = list(range(64))
    add_committed(pages, "a", tokens)
    prompt = [*tokens[:30], 7, 7, 7]
    assert pages.match(prompt) == 30
    assert pages.add("b", prompt) == 30
    assert pages.take_copies() == [PageCopy(2, pages.page_ids("b").item(1))]
    assert pages.take_copies() == []


def test_partial_hit_is_never_at_a_page_with_keys():
    pages = make_pages(partial_hits=True)
    for seq_id, keys in (("a", [Key("tenant", "x")]), ("b", [Key("image", b"i", 6)])):
        add_committed(pages, seq_id, PROMPT, keys=keys)
        pages.free(seq_id)
    no_token = [-(2**31)] * 5
    for verb in (pages.match, pages.explain, lambda tokens: pages.add("c", tokens), pages.can_allocate, pages.pin):
        for tokens in (no_token, np.array(no_token, np.int32)):
            with pytest.raises(ValueError, match=r"^`token_ids` must be in 0 \.\. 2\*\*31 - 1; got -2147483648\."):
                verb(tokens)
    # The page of "b" with its image begins as "d" goes on after page 0; the first page of "a" is the tenant's.
    assert pages.add("d", [*PROMPT[:7], 1]) == 4
    assert pages.add("e", PROMPT[:3]) == 2
    assert [copy.src for copy in pages.take_copies()] == [pages.page_ids("d").item(0)]
    assert pages.match([*PROMPT[:7], 1], keys=[Key("image", b"i", 6)]) == 4
    assert pages.match([*PROMPT[:3], 1], keys=[Key("tenant", "x")]) == 0


def test_explain_says_why_page_by_page():
    pages = make_pages(8)
    add_committed(pages, "a", PROMPT)
    said = pages.explain([*PROMPT[:8], 1, 2, 3, 4, 5])
    assert [page.hit for page in said] == [True, True, False, False]
    assert [page.reason for page in said] == [
        "hit: 1 owner", "hit: 1 owner", "never seen, or evicted long ago", "not full: 1 of 4 tokens",
    ]  # fmt: skip
    assert pages.explain(PROMPT)[4].reason == "holds the last token, which is always computed anew"
    assert pages.explain(PROMPT, keys=[Key("adapter", "x")])[0].reason == "cached without `keys`, or under others"
    pages.free("a")
    assert pages.explain(PROMPT)[0].reason == "hit: cached, nobody owns it now"
    pages.add("b", 12)
    assert pages.explain([*PROMPT, 0])[4].reason == "evicted"
    assert "prefix caching is off" in PageAllocator(8).explain([1])[0].reason


@pytest.mark.parametrize("near_first", [False, True])
def test_explain_with_hybrid_groups_names_pages_that_the_windows_need(near_first):
    groups = [PageGroup("all"), PageGroup("near", 5)]
    pages = make_pages(60, groups=groups[::-1] if near_first else groups)
    pages.add("a", PROMPT)
    pages.append("a", 0)  # the window passes four pages before they are committed
    pages.commit("a", PROMPT)
    prompt = [*PROMPT, 7, 7, 7, 7, 7, 7, 7, 7, 1]
    assert pages.match(prompt) == 20
    last = pages.page_ids("a", group="near" if near_first else "all").item(4)
    said = pages.explain(prompt)
    assert [(page.hit, page.num_owners) for page in said[:5]] == [(True, 1)] * 5
    assert [page.page_id for page in said[:4]] == pages.page_ids("a", group="all")[:4].tolist()
    assert said[4].page_id == last
    assert said[5].reason == f"never seen in group {'near' if near_first else 'all'!r}, or evicted long ago"
    assert said[6].reason == f"not cached in group {'near' if near_first else 'all'!r}, nor is page 5 before it"
    assert said[7].reason == "not full: 1 of 4 tokens"
    # Of a shorter prompt the window would need pages that were never there.
    assert pages.match(PROMPT[:17]) == 0
    said = pages.explain(PROMPT[:17])
    assert [page.hit for page in said] == [False] * 5
    assert said[3].reason == "never seen in group 'near', or evicted long ago"


def test_explain_of_a_windowed_group_hits_pages_that_no_token_sees():
    pages = make_pages(60, groups=[PageGroup("near", 5)])
    add_committed(pages, "a", PROMPT)
    said = pages.explain([*PROMPT, 0])
    assert [page.hit for page in said] == [True] * 5 + [False]
    assert [page.page_id for page in said[:4]] == [0] * 4
    assert said[0].reason == "hit: no token to compute sees it"
    assert said[4].reason == "hit: 1 owner"


def test_explain_names_a_partial_hit():
    pages = PageAllocator(21, 16, prefix_caching=True, partial_hits=True)
    tokens = list(range(64))
    add_committed(pages, "a", tokens)
    said = pages.explain([*tokens[:30], 7, 7, 7, 7])
    assert (said[1].hit, said[1].page_id, said[1].num_owners) == (False, 2, 1)
    assert [page.reason for page in said] == [
        "hit: 1 owner", "hit in part: its first 14 tokens are copied from page 2", "not full: 2 of 16 tokens",
    ]  # fmt: skip


# Pins, reset, events, saving


def test_stats_of_pins_count_no_saving_and_of_windows_no_passed_tokens():
    pages = make_pages(20)
    add_committed(pages, "a", PROMPT)
    pages.pin(PROMPT[:8])
    pages.pin(PROMPT)
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


@pytest.mark.parametrize("prefix_caching", [False, True])
def test_add_of_a_list_of_lists_raises(prefix_caching):
    pages = PageAllocator(20, 4, prefix_caching=prefix_caching)
    for tokens in ([[1, 2, 3]], [np.arange(3)], ((1,), (2, 3))):
        with pytest.raises(
            ValueError, match=r"^`token_ids` of sequence 'a' must be one list of integers; got a list of"
        ):
            pages.add("a", tokens)
        with pytest.raises(ValueError, match=r"^`num_tokens` must be one list of integers; got a list of lists\.$"):
            pages.can_allocate(tokens)
    assert "a" not in pages


def test_pinned_pages_stay_until_their_time_is_up():
    pages = make_pages(8)
    add_committed(pages, "a", PROMPT)
    assert pages.pin(PROMPT, expires_at=10.0) == 20
    pages.free("a")
    assert pages.num_free_pages == 2
    pages.expire(9.0)
    assert pages.num_free_pages == 2
    pages.expire(10.0)
    assert pages.num_free_pages == 7
    assert pages.pin(PROMPT) == 20
    pages.unpin(PROMPT)
    with pytest.raises(
        ValueError, match=r"^`token_ids` must be a prefix that is pinned; got 20 tokens that are not\.$"
    ):
        pages.unpin(PROMPT)


def test_reset_forgets_content_and_keeps_sequences():
    pages = make_pages(record_events=True)
    add_committed(pages, "a", PROMPT)
    pages.reset()
    assert pages.match([*PROMPT, 0]) == 0
    assert [event.kind for event in pages.take_events()] == ["stored"] * 5 + ["cleared"]
    pages.commit("a", PROMPT)
    assert pages.match([*PROMPT, 0]) == 20
    assert pages.take_events()[0].parent is None


def test_cached_pages_are_adopted_by_another_pool():
    pages, other = make_pages(), make_pages(4)
    add_committed(pages, "a", PROMPT)
    saved = pages.cached_pages()
    assert other.adopt(saved).tolist() == [1, 2, 3, 0, 0]
    assert other.match([*PROMPT, 0]) == 12
    assert other.adopt(saved).tolist() == [0] * 5
    assert pages.adopt(saved).tolist() == [0] * 5


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
    saved = dataclasses.replace(pages.cached_pages(), **changed)
    with pytest.raises(error, match=message):
        other.adopt(saved)
    assert other.match([*PROMPT, 0]) == 0
    assert (other.num_free_pages, other.stats().num_cached_pages) == (20, 0)
    with pytest.raises(TypeError, match=r"^`pages` must be CachedPages, as `cached_pages` gives them; got int\.$"):
        other.adopt(5)


@pytest.mark.parametrize("bad", ["x", True, 1j, float("nan"), [1.0]])
def test_pin_and_expire_with_no_time_raise_and_change_nothing(bad):
    pages = make_pages()
    add_committed(pages, "a", PROMPT)
    pages.pin(PROMPT[:8], expires_at=np.float32(5))
    pages.free("a")
    before = pages.stats()
    for name, call in (("expires_at", lambda: pages.pin(PROMPT, expires_at=bad)), ("now", lambda: pages.expire(bad))):
        with pytest.raises((TypeError, ValueError), match=rf"^`{name}` must be a number of the caller's clock; got "):
            call()
    assert pages.stats() == before
    pages.expire(np.int64(5))
    assert pages.num_free_pages == 20


def test_evicted_pages_come_back_from_the_host():
    class Host(set):
        def has(self, digest):
            return digest in self

    pages, host = make_pages(8, offload=True), Host()
    add_committed(pages, "a", PROMPT)
    pages.free("a")
    pages.add("b", 28)
    host.update(digest for digest, _ in pages.take_evictions())
    pages.free("b")
    assert pages.add("c", [*PROMPT, 0], host=host) == 20
    restores = pages.take_restores()
    assert [restore.page_id for restore in restores] == pages.page_ids("c")[:5].tolist()
    assert {restore.digest for restore in restores} == host
    assert pages.invalidate("c", 8) == ["c"]
    assert pages.match([*PROMPT, 0]) == 8


# Windows


def test_window_in_a_group_frees_dead_pages_and_needs_few_for_a_hit():
    pages = make_pages(41, groups=[PageGroup("all"), PageGroup("near", 5)])
    add_committed(pages, "a", PROMPT)
    assert pages.page_ids("a", group="near").tolist()[:4] == [0, 0, 0, 0]
    assert pages.page_ids("a", group="all").all()
    pages.append("a", 1)
    assert pages.add("b", [*PROMPT, 0]) == 20
    assert pages.page_table(["b"], group="near")[0, :4].tolist() == [0, 0, 0, 0]
    with pytest.raises(ValueError, match=r"^`group` must be one of \['all', 'near'\]; got None\.$"):
        pages.page_ids("a")
    with pytest.raises(ValueError, match=r"^`num_tokens` for sequence 'a' must be >= 20: its pages in group 'near'"):
        pages.truncate("a", 19)


# Promises, limits, swap, threads


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
    assert pages.num_free_pages == 0  # promised again
    pages.reserve("a", 0)
    assert pages.num_free_pages == 2


def test_refused_add_counts_hits_that_nobody_owns_as_pages_to_take():
    pages = make_pages(8)
    add_committed(pages, "a", PROMPT)
    pages.free("a")
    pages.add("b", 1)
    pages.reserve("b", 16)
    with pytest.raises(OutOfPagesError, match=r"^add of 20 tokens to sequence 'c' needs 5 pages; 2 are free\."):
        pages.add("c", PROMPT)


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
        pages.forget_pages(page_ids)
    pages.forget_pages([])
    assert pages.match(PROMPT) == 16


def test_page_that_was_to_be_restored_and_is_evicted_before_is_neither_exported_nor_imported():
    class Host:
        def has(self, digest):
            return True

    pages = make_pages(6, offload=True)
    assert pages.add("a", PROMPT[:9], host=Host()) == 8
    pages.free("a")  # its pages can be hit, but nobody imported them
    pages.add("b", 20)
    assert (pages.take_evictions(), pages.take_restores()) == ([], [])
    pages.free("b")
    assert pages.add("a", PROMPT[:9], host=Host()) == 8
    pages.reset()
    assert pages.take_restores() == []


def test_reset_lists_no_eviction_from_before():
    pages = make_pages(6, offload=True)
    pages.add("a", PROMPT[:9])
    pages.commit("a", PROMPT[:9])
    pages.free("a")
    pages.add("b", 20)
    pages.reset()
    assert pages.take_evictions() == []


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


def test_fork_and_free_again_and_again_promises_one_copy_only():
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
def test_copy_that_was_promised_is_given_back_when_a_fork_leaves_the_page(end):
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


@pytest.mark.parametrize("forget", [lambda pages: pages.reset(), lambda pages: pages.forget_pages([1])])
def test_copy_that_was_promised_is_given_back_when_the_content_is_forgotten(forget):
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
def test_append_up_to_the_length_reserved_leaves_nothing_promised(others, count):
    pages = PageAllocator(20, 4)
    pages.add("a", 6)
    pages.add("b", 6)
    pages.fork("a", "child")
    pages.reserve("a", 2)
    pages.free("child")
    pages.append("a", count) if others is None else pages.append_many(["a", *others], count)
    assert pages.stats().num_reserved_pages == 0


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


@pytest.mark.parametrize(
    ("verb", "arguments"),
    [
        ("add", ("b", 1)), ("append", ("a",)), ("free", ("a",)), ("explain", ([1],)), ("match", ([1],)),
        ("can_allocate", (1,)), ("num_pages_needed", ("a",)), ("page_ids", ("a",)), ("seq_len", ("a",)),
        ("sharing", (["a"],)), ("stats", ()), ("snapshot", ()), ("forget_pages", ([1],)),
    ],
)  # fmt: skip
def test_call_from_a_second_thread_inside_a_verb_raises(verb, arguments):
    pages, inside, done = PageAllocator(8, 4), threading.Event(), threading.Event()

    class Slow:
        def __index__(self):
            inside.set()
            done.wait(10)
            return 2

    pages.add("a", 1)
    first = threading.Thread(target=lambda: pages.append("a", Slow()))
    first.start()
    inside.wait(10)
    try:
        with pytest.raises(RuntimeError, match=rf"^`{verb}` was called while another thread was inside the page"):
            getattr(pages, verb)(*arguments)
    finally:
        done.set()
        first.join()
    assert pages.seq_len("a") == 3


def test_append_many_gives_back_what_windows_pass_also_where_forks_share_it():
    pages = PageAllocator(9, 4, groups=[PageGroup("near", 4)])
    pages.add("a", 16)
    pages.fork("a", "b")
    pages.add("c", 4 * 4)
    assert pages.num_free_pages == 0
    pages.append_many(["a", "b"], 1)
    assert pages.page_ids("a").tolist()[:3] == pages.page_ids("b").tolist()[:3] == [0, 0, 0]
    assert pages.num_free_pages == 1
    for seq_id in ("a", "b", "c"):
        pages.free(seq_id)
    assert pages.num_free_pages == 8


@pytest.mark.parametrize("groups", [None, [PageGroup("all"), PageGroup("near", 9), PageGroup("by", 5)]])
def test_append_many_does_what_appends_in_turn_do(groups):
    rng = np.random.default_rng(0)
    one, many = PageAllocator(2001, 4, groups=groups), PageAllocator(2001, 4, groups=groups)
    for pages in (one, many):
        for seq_id in range(40):
            pages.add(seq_id, seq_id % 9)
        for seq_id in range(10):
            pages.fork(seq_id, ("child", seq_id))
            pages.fork(seq_id, ("other", seq_id))
    seq_ids = [*range(40), *(("child", i) for i in range(10)), *(("other", i) for i in range(10))]
    for _ in range(8):
        counts = rng.integers(0, 7, len(seq_ids))
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


# What no other test would notice


def test_adopted_pages_are_evicted_from_their_tail():
    pages, other = make_pages(), make_pages(9)
    add_committed(pages, "a", PROMPT)
    other.adopt(pages.cached_pages())
    for seq_id, hit in enumerate([20, 20, 16, 12, 8, 4, 0]):
        if seq_id:
            other.add(seq_id, 4 if seq_id > 1 else 12)
        assert other.match([*PROMPT, 0]) == hit


def test_adopted_pages_are_evicted_before_all_others():
    pages, other = make_pages(), make_pages(9)
    add_committed(pages, "a", PROMPT)
    add_committed(other, "b", [7] * 8)
    other.free("b")
    other.adopt(pages.cached_pages())
    other.add("c", 4 * 6)
    assert (other.match([*PROMPT, 0]), other.match([7] * 9)) == (0, 8)


def test_pin_again_holds_each_page_once():
    pages = make_pages()
    add_committed(pages, "a", PROMPT)
    for _ in range(3):
        pages.pin(PROMPT)
    pages.free("a")
    pages.unpin(PROMPT)
    assert (pages.num_free_pages, pages.stats().num_used_pages) == (20, 0)


@pytest.mark.parametrize("position", [200, 259, 260, 263, 264, 1028])
def test_keys_far_into_a_prompt_part_it_from_their_page_on(position):
    """Prompts are hashed in parts of 64 pages and more: the pages of each part are counted from the first one."""
    tokens = list(range(1200))
    pages = make_pages(700)
    add_committed(pages, "a", tokens, keys=[Key("tenant", "x", position)])
    assert pages.match([*tokens, 0], keys=[Key("tenant", "x", position)]) == 1200
    assert pages.match([*tokens, 0], keys=[Key("tenant", "y", position)]) == position // 4 * 4
    assert pages.match([*tokens, 0]) == position // 4 * 4


@pytest.mark.parametrize("many", [False, True])
def test_append_into_a_page_that_can_be_hit_copies_it(many):
    pages = make_pages()
    add_committed(pages, "a", PROMPT)
    pages.truncate("a", 18)
    assert pages.stats().num_shared_pages == 0
    copies = pages.append_many(["a"], [1]) if many else pages.append("a", 1)
    assert copies == [PageCopy(5, 6)]
    assert pages.page_ids("a").item(4) == 6
    assert pages.match([*PROMPT, 0]) == 20


def test_adopt_leaves_out_pages_whose_parents_are_not_there():
    pages, other = make_pages(), make_pages()
    add_committed(pages, "a", PROMPT)
    saved = pages.cached_pages()
    orphans = dataclasses.replace(
        saved, digests=saved.digests[2:], parents=saved.parents[2:], page_ids=saved.page_ids[2:]
    )
    assert other.adopt(orphans).tolist() == [0, 0, 0]
    assert other.stats().num_cached_pages == 0
    add_committed(other, "a", PROMPT[:8])
    assert other.adopt(orphans).all()
    assert other.match([*PROMPT, 0]) == 20


def test_pin_of_free_pages_that_are_promised_raises_and_changes_nothing():
    pages = make_pages(8)
    add_committed(pages, "a", PROMPT)
    pages.free("a")
    pages.add("b", 1)
    pages.reserve("b", 4 * 3 + 3)
    before = pages.stats()
    with pytest.raises(OutOfPagesError, match=r"^pin of 20 tokens needs 5 pages; 3 are free\."):
        pages.pin(PROMPT)
    assert pages.stats() == before
    assert pages.pin(PROMPT[:12]) == 12
    pages.append("b", 4 * 3 + 3)


def test_fork_carries_the_keys_of_its_parent():
    pages = make_pages()
    keys = [Key("tenant", "x")]
    pages.add("a", PROMPT[:2], keys=keys)
    pages.fork("a", "b")
    pages.free("a")
    pages.append("b", 18)
    pages.commit("b", PROMPT)
    assert (pages.match([*PROMPT, 0]), pages.match([*PROMPT, 0], keys=keys)) == (0, 20)


def test_invalidate_ends_the_pins_of_what_it_forgets():
    pages = make_pages()
    add_committed(pages, "a", PROMPT)
    add_committed(pages, "b", [7] * 8)
    pages.pin(PROMPT)
    pages.pin([7] * 8)
    pages.invalidate("a", 8)
    pages.free("a")
    pages.free("b")
    assert pages.num_free_pages == 20 - 2
    with pytest.raises(ValueError, match="^`token_ids` must be a prefix that is pinned"):
        pages.unpin(PROMPT)
    pages.unpin([7] * 8)


def test_keys_of_none_raise_by_name():
    with pytest.raises(
        TypeError, match=r"^`keys` must be a list of Key; got None\. Leave it out where there are none\.$"
    ):
        make_pages().add("a", PROMPT, keys=None)


def test_window_of_a_numpy_integer_becomes_an_int():
    (group,) = PageAllocator(8, 4, groups=[PageGroup("near", np.int64(5))]).groups
    assert type(group.sliding_window) is int
    assert group == PageGroup("near", 5)
