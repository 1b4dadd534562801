"""DigestTable against a dictionary, with digests of which many fall into one bucket."""

import numpy as np

from jaxpaged.paging.digest_table import DigestTable

NUM_PAGES = 40


def test_table_finds_what_a_dictionary_finds():
    rng, table = np.random.default_rng(0), DigestTable(NUM_PAGES)
    # Two words each of which two digests may share, and never both.
    contents = np.stack(np.meshgrid([0, 1, 2, 64, 2**63 + 2], range(1, 21)), axis=-1).reshape(-1, 2).astype(np.uint64)
    page_of: dict[int, int] = {}  # by place among the contents
    for step in range(60):
        if step % 3 < 2:
            free = rng.permutation(np.setdiff1d(np.arange(1, NUM_PAGES), [*page_of.values()]))
            unused = rng.permutation(np.setdiff1d(np.arange(len(contents)), [*page_of]))
            count = int(rng.integers(0, len(free) + 1))
            table.insert(free[:count], contents[unused[:count]], contents[unused[:count] - 1])
            page_of |= dict(zip(unused[:count].tolist(), free[:count].tolist(), strict=True))
        elif page_of:
            leaving = rng.permutation([*page_of])[: rng.integers(1, len(page_of) + 1)].tolist()
            table.remove(np.array([page_of.pop(i) for i in leaving]))
        asked = rng.permutation(len(contents))
        assert table.find(contents[asked]).tolist() == [page_of.get(i, 0) for i in asked.tolist()]
        for i, page_id in page_of.items():
            assert table.parents[page_id].tolist() == contents[i - 1].tolist()
    table.clear()
    assert not table.find(contents).any()
