"""Which pages begin like a prompt goes on."""

import numpy as np
import pytest

from jaxpaged.paging.partial_hits import PartialHits

PARENT, OTHER, SAME_BUCKET = (np.array([words], np.uint64) for words in ([5, 1], [6, 1], [5 + 2**32, 1]))


def zeros(count: int) -> np.ndarray:
    return np.zeros((count, 4), np.int32)


def test_recent_keeps_the_last_eight_pages_the_newest_first():
    hits = PartialHits(20, 4)
    for page_id in range(1, 11):
        hits.insert(np.array([page_id]), PARENT, zeros(1))
    assert hits.recent(PARENT).tolist() == [10, 9, 8, 7, 6, 5, 4, 3]
    assert hits.recent(OTHER).tolist() == []
    hits.insert(np.array([11, 12, 13, 14]), np.concatenate([OTHER, PARENT, SAME_BUCKET, OTHER]), zeros(4))
    assert hits.recent(PARENT).tolist() == [13, 12, 10, 9, 8, 7, 6, 5]
    assert hits.recent(OTHER).tolist() == [14, 11]


@pytest.mark.parametrize("num_tokens", [0, 1, 3, 4, 7])
@pytest.mark.parametrize("num_pages", [0, 1, 6])
def test_closest_is_the_page_with_the_longest_common_prefix(num_pages, num_tokens):
    rng = np.random.default_rng(0)
    hits, parents = PartialHits(20, 4), np.repeat(PARENT, 19, axis=0)
    for _ in range(20):
        hits.insert(np.arange(1, 20), parents, rng.integers(0, 2, (19, 4), np.int32))
        page_ids, tokens = rng.permutation(np.arange(1, 20))[:num_pages], rng.integers(0, 2, num_tokens, np.int32)
        common = [np.cumprod(hits.tokens[i][: len(tokens)] == tokens[:4]).sum() for i in page_ids]
        page_id, length = hits.closest(page_ids, tokens)
        assert length == max(common, default=0)
        assert page_id == (page_ids[common.index(length)] if length else 0)
