"""LruQueue against a list, in a queue so small that it is compacted all the time."""

import numpy as np
import pytest

from jaxpaged.paging.lru import LruQueue

NUM_PAGES = 150


@pytest.mark.parametrize("seed", range(2))
def test_queue_gives_back_pages_in_the_order_of_a_list(seed):
    rng = np.random.default_rng(seed)
    queue, expected = LruQueue(NUM_PAGES), []
    for _ in range(150):
        absent = rng.permutation(np.setdiff1d(np.arange(NUM_PAGES), expected))
        some = absent[: rng.integers(0, len(absent) + 1)]
        match rng.integers(4):
            case 0:
                queue.push(some)
                expected += some.tolist()
            case 1:
                queue.push_front(some[:20])
                expected = some[:20].tolist() + expected
            case 2:
                gone = rng.permutation(np.array(expected, np.intp))[: rng.integers(0, len(expected) + 1)]
                queue.discard(gone)
                expected = [page_id for page_id in expected if page_id not in set(gone.tolist())]
            case 3:
                count = int(rng.integers(0, len(expected) + 1))
                assert queue.pop(count).tolist() == expected[:count]
                expected = expected[count:]
        assert queue.page_ids().tolist() == expected
        assert queue.size == len(expected)
