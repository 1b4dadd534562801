"""Every option beside every other (tests/ops/pairwise.py), in the Triton kernel under Pallas's interpreter."""

import pytest

from tests.ops.pairwise import check_row, grid, name_of


@pytest.mark.slow
@pytest.mark.parametrize("index", range(len(grid())), ids=map(name_of, grid()))
def test_paged_attention_pairs_of_options_under_the_interpreter_equal_oracle(index):
    check_row(index, "interpret")
