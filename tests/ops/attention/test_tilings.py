"""The table of tiles: what Triton can compile, what an L4 can hold, and a row for every call."""

import itertools

import jax
import jax.numpy as jnp
import pytest

import jaxpaged as jp
from jaxpaged.ops.attention.tilings import TILINGS, choose_tiling, find_tiling
from tests.ops.attention.harness import partition_of, three_values

HEAD_DIMS = (1, 16, 48, 64, 65, 80, 128, 129, 200, 256)
CALLS = [*itertools.product((1, 8, 16, 17, 32, 33, 64, 200), HEAD_DIMS, (1, 2, 4), (False, True))]


def test_find_tiling_of_every_call_holds_its_rows_and_its_head():
    for rows, head_dim, itemsize, high_register_pressure in CALLS:
        found = find_tiling(rows, head_dim, itemsize, high_register_pressure)
        assert found.rows >= min(rows, 32 if itemsize == 4 else 64)
        assert (found.width >= head_dim, found.itemsize) == (True, itemsize)
        assert found.is_masked in (None, head_dim not in (1, 16, 64, 128, 256))
        assert found.high_register_pressure in (None, high_register_pressure)


def test_find_tiling_takes_each_row_of_the_table():
    assert {find_tiling(*call) for call in CALLS} == set(TILINGS)


@pytest.mark.parametrize("tiling", TILINGS, ids=str)
def test_tiling_is_what_triton_compiles_and_an_l4_holds(tiling):
    assert all(size >= 16 and size.bit_count() == 1 for size in (tiling.rows, tiling.width, tiling.block_k))
    assert tiling.num_warps in (4, 8)
    assert tiling.num_stages in (3, 5, 7)  # two a K/V tile in flight, and one
    in_flight = (tiling.num_stages - 1) // 2
    assert in_flight * 2 * tiling.block_k * tiling.width * tiling.itemsize <= 99 * 1024


def test_choose_tiling_takes_the_sizes_that_a_configuration_gives():
    q = jax.ShapeDtypeStruct((2, 4, 64), jnp.float32)
    pages = jax.ShapeDtypeStruct((1, 2, 2, 16, 64), jnp.float32)
    page_table, seq_lens = jnp.zeros((2, 1), jnp.int32), jnp.zeros(2, jnp.int32)
    partition = partition_of(seq_lens, num_tokens=2)

    def chosen(**sizes):
        config = jp.AttentionConfig(**sizes)
        return choose_tiling(*three_values(q, pages, pages, page_table, seq_lens, layer=0, config=config), partition)

    found = find_tiling(2, 64, 4, False)
    assert chosen() == found
    for sizes in ({"block_k": 16}, {"num_warps": 2}, {"num_stages": 2}):
        assert chosen(**sizes) == found._replace(**sizes)
