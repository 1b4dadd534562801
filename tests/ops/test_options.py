"""Every option beside every other (tests/ops/pairwise.py), in the reference and in XLA, against the float64 oracle."""

import pytest

from tests.ops.pairwise import all_pairs, check_row, grid, name_of, pairs


def test_grid_covers_every_pair_of_values():
    assert set().union(*map(pairs, grid())) >= all_pairs()
    assert len(grid()) < 90


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["reference", "xla"])
@pytest.mark.parametrize("index", range(len(grid())), ids=map(name_of, grid()))
def test_paged_attention_pairs_of_options_equal_oracle(index, backend):
    check_row(index, backend)
