"""Why each page of a prompt is hit or missed, in words."""

import pytest

from jaxpaged.paging import Key, PageAllocator, PageGroup
from tests.paging.helpers import PROMPT, add_committed, make_pages


def test_explain_says_why_page_by_page():
    pages = make_pages(8)
    add_committed(pages, "a", PROMPT)
    said = pages.prefix.explain([*PROMPT[:8], 1, 2, 3, 4, 5])
    assert [page.hit for page in said] == [True, True, False, False]
    assert [page.reason for page in said] == [
        "hit: 1 reference", "hit: 1 reference", "never seen, or evicted long ago", "not full: 1 of 4 tokens",
    ]  # fmt: skip
    assert pages.prefix.explain(PROMPT)[4].reason == "holds the last token, which is always computed anew"
    assert (
        pages.prefix.explain(PROMPT, keys=[Key("adapter", "x")])[0].reason == "cached without `keys`, or under others"
    )
    pages.free("a")
    assert pages.prefix.explain(PROMPT)[0].reason == "hit: cached, nobody references it now"
    pages.add("b", 12)
    assert pages.prefix.explain([*PROMPT, 0])[4].reason == "evicted"
    assert "prefix caching is off" in PageAllocator(8).prefix.explain([1])[0].reason


@pytest.mark.parametrize("near_first", [False, True])
def test_explain_with_hybrid_groups_names_pages_that_the_windows_need(near_first):
    groups = [PageGroup("all"), PageGroup("near", 5)]
    pages = make_pages(60, groups=groups[::-1] if near_first else groups)
    pages.add("a", PROMPT)
    pages.append("a", 0)  # the window passes four pages before they are committed
    pages.commit("a", PROMPT)
    prompt = [*PROMPT, 7, 7, 7, 7, 7, 7, 7, 7, 1]
    assert pages.prefix.match(prompt) == 20
    last = pages.page_ids("a", group="near" if near_first else "all").item(4)
    said = pages.prefix.explain(prompt)
    assert [(page.hit, page.num_references) for page in said[:5]] == [(True, 1)] * 5
    assert [page.page_id for page in said[:4]] == pages.page_ids("a", group="all")[:4].tolist()
    assert said[4].page_id == last
    assert said[5].reason == f"never seen in group {'near' if near_first else 'all'!r}, or evicted long ago"
    assert said[6].reason == f"not cached in group {'near' if near_first else 'all'!r}, nor is page 5 before it"
    assert said[7].reason == "not full: 1 of 4 tokens"
    # Of a shorter prompt the window would need pages that were never there.
    assert pages.prefix.match(PROMPT[:17]) == 0
    said = pages.prefix.explain(PROMPT[:17])
    assert [page.hit for page in said] == [False] * 5
    assert said[3].reason == "never seen in group 'near', or evicted long ago"


def test_explain_of_a_windowed_group_hits_pages_that_no_token_sees():
    pages = make_pages(60, groups=[PageGroup("near", 5)])
    add_committed(pages, "a", PROMPT)
    said = pages.prefix.explain([*PROMPT, 0])
    assert [page.hit for page in said] == [True] * 5 + [False]
    assert [page.page_id for page in said[:4]] == [0] * 4
    assert said[0].reason == "hit: no token to compute sees it"
    assert said[4].reason == "hit: 1 reference"


def test_explain_names_a_partial_hit():
    pages = PageAllocator(21, 16, prefix_caching=True, partial_hits=True)
    tokens = list(range(64))
    add_committed(pages, "a", tokens)
    said = pages.prefix.explain([*tokens[:30], 7, 7, 7, 7])
    assert (said[1].hit, said[1].page_id, said[1].num_references) == (False, 2, 1)
    assert [page.reason for page in said] == [
        "hit: 1 reference", "hit in part: its first 14 tokens are copied from page 2", "not full: 2 of 16 tokens",
    ]  # fmt: skip
