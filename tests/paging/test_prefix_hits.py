"""What an `add` hits, what a `commit` shares, and what is evicted."""

import numpy as np
import pytest

from jaxpaged.paging import Key, OutOfPagesError, PageAllocator, PageCopy
from tests.paging.helpers import PROMPT, add_committed, make_pages


@pytest.mark.parametrize(("length", "hit"), [(4, 0), (5, 4), (8, 4), (9, 8), (20, 16), (21, 20), (3, 0), (0, 0)])
def test_add_hits_full_pages_and_leaves_a_token_to_compute(length, hit):
    pages = make_pages()
    add_committed(pages, "a", PROMPT)
    prompt = [*PROMPT, 7][:length]
    assert pages.prefix.match(prompt) == hit
    assert pages.add("b", prompt) == hit
    assert pages.page_ids("b")[: hit // 4].tolist() == pages.page_ids("a")[: hit // 4].tolist()


def test_add_before_the_commit_and_by_count_hits_nothing():
    pages = make_pages()
    pages.add("a", PROMPT)
    assert pages.add("b", PROMPT) == 0
    pages.commit("a", PROMPT[:9])
    assert pages.prefix.match(PROMPT) == 8
    assert pages.add("c", len(PROMPT)) == 0


def test_hits_that_nobody_references_count_against_free_pages():
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
    assert (pages.prefix.match([*PROMPT, 0]), pages.prefix.match([*other, 0])) == (8, 20)
    assert pages.stats().num_evictions == 3
    pages.add("y", [*PROMPT[:4], 0])  # in use: what is left of its chain goes, then the other's tail
    pages.add("z", 4 * 3)
    assert (pages.prefix.match([*PROMPT, 0]), pages.prefix.match([*other, 0])) == (4, 8)


def test_commit_of_content_that_another_committed_first_shares_its_pages():
    pages = make_pages()
    pages.add("a", PROMPT)
    pages.add("b", PROMPT)
    pages.fork("b", "c")
    pages.commit("a", PROMPT)
    pages.commit("b", PROMPT)
    assert pages.page_ids("c").tolist() == pages.page_ids("b").tolist() == pages.page_ids("a").tolist()
    assert pages.num_free_pages == 15


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
    assert pages.prefix.match(prompt) == 30
    assert pages.add("b", prompt) == 30
    assert pages.prefix.take_copies() == [PageCopy(2, pages.page_ids("b").item(1))]
    assert pages.prefix.take_copies() == []


def test_partial_hit_is_never_at_a_page_with_keys():
    pages = make_pages(partial_hits=True)
    for seq_id, keys in (("a", [Key("tenant", "x")]), ("b", [Key("image", b"i", 6)])):
        add_committed(pages, seq_id, PROMPT, keys=keys)
        pages.free(seq_id)
    no_token = [-(2**31)] * 5
    for verb in (
        pages.prefix.match,
        pages.prefix.explain,
        lambda tokens: pages.add("c", tokens),
        pages.can_allocate,
        pages.prefix.pin,
    ):
        for tokens in (no_token, np.array(no_token, np.int32)):
            with pytest.raises(ValueError, match=r"^`token_ids` must be in 0 \.\. 2\*\*31 - 1; got -2147483648\."):
                verb(tokens)
    # The page of "b" with its image begins as "d" goes on after page 0; the first page of "a" is the tenant's.
    assert pages.add("d", [*PROMPT[:7], 1]) == 4
    assert pages.add("e", PROMPT[:3]) == 2
    assert [copy.src for copy in pages.prefix.take_copies()] == [pages.page_ids("d").item(0)]
    assert pages.prefix.match([*PROMPT[:7], 1], keys=[Key("image", b"i", 6)]) == 4
    assert pages.prefix.match([*PROMPT[:3], 1], keys=[Key("tenant", "x")]) == 0


def test_evicted_pages_come_back_from_the_host():
    class Host(set):
        def has(self, digest):
            return digest in self

    pages, host = make_pages(8, offload=True), Host()
    add_committed(pages, "a", PROMPT)
    pages.free("a")
    pages.add("b", 28)
    host.update(digest for digest, _ in pages.prefix.take_evictions())
    pages.free("b")
    assert pages.add("c", [*PROMPT, 0], host=host) == 20
    restores = pages.prefix.take_restores()
    assert [restore.page_id for restore in restores] == pages.page_ids("c")[:5].tolist()
    assert {restore.digest for restore in restores} == host
    assert pages.invalidate("c", 8) == ["c"]
    assert pages.prefix.match([*PROMPT, 0]) == 8


def test_refused_add_counts_hits_that_nobody_references_as_pages_to_take():
    pages = make_pages(8)
    add_committed(pages, "a", PROMPT)
    pages.free("a")
    pages.add("b", 1)
    pages.reserve("b", 16)
    with pytest.raises(OutOfPagesError, match=r"^add of 20 tokens to sequence 'c' needs 5 pages; 2 are free\."):
        pages.add("c", PROMPT)


def test_page_that_was_to_be_restored_and_is_evicted_before_is_neither_exported_nor_imported():
    class Host:
        def has(self, digest):
            return True

    pages = make_pages(6, offload=True)
    assert pages.add("a", PROMPT[:9], host=Host()) == 8
    pages.free("a")  # its pages can be hit, but nobody imported them
    pages.add("b", 20)
    assert (pages.prefix.take_evictions(), pages.prefix.take_restores()) == ([], [])
    pages.free("b")
    assert pages.add("a", PROMPT[:9], host=Host()) == 8
    pages.prefix.reset()
    assert pages.prefix.take_restores() == []


@pytest.mark.parametrize("many", [False, True])
def test_append_into_a_page_that_can_be_hit_copies_it(many):
    pages = make_pages()
    add_committed(pages, "a", PROMPT)
    pages.truncate("a", 18)
    assert pages.stats().num_shared_pages == 0
    copies = pages.append_many(["a"], [1]) if many else pages.append("a", 1)
    assert copies == [PageCopy(5, 6)]
    assert pages.page_ids("a").item(4) == 6
    assert pages.prefix.match([*PROMPT, 0]) == 20
