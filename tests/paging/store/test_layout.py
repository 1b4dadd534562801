"""Blocks to rows of bytes and back."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpaged.paging.store.layout import PageLayout, num_pages_of
from tests.paging.store.blocks import DTYPES, assert_same_bits, make_block, some_pages


@given(
    dtype=st.sampled_from(sorted(DTYPES)), num_pages=st.integers(0, 5), scales=st.booleans(), seed=st.integers(0, 99)
)
def test_unpack_after_pack_is_bit_equal(dtype, num_pages, scales, seed):
    block = make_block(num_pages, dtype, scales=scales, seed=seed)
    layout = PageLayout.of(block)
    rows = layout.pack(block)
    assert rows.shape == (num_pages, layout.nbytes)
    assert rows.nbytes == sum(x.nbytes for x in block.values())
    assert_same_bits(layout.unpack(rows), block)


def test_pack_puts_each_page_in_a_row_of_its_own():
    block = make_block(4, "bfloat16", scales=True)
    layout = PageLayout.of(block)
    rows = layout.pack(block)
    for i in range(4):
        assert_same_bits(layout.unpack(rows[i : i + 1]), some_pages(block, [i]))


def test_pack_takes_arrays_in_any_order_of_axes():
    block = make_block(3, "float16")
    turned = {name: np.asfortranarray(x) for name, x in block.items()}
    assert_same_bits(PageLayout.of(block).unpack(PageLayout.of(turned).pack(turned)), block)


def test_layout_says_what_a_page_is():
    assert str(PageLayout.of(make_block(3, "int8", scales=True))) == (
        "k int8[2, 3, 4, 5], k_scale float32[2, 3, 4], v int8[2, 3, 4, 5], v_scale float32[2, 3, 4]"
    )


@pytest.mark.parametrize(
    ("block", "error", "message"),
    [
        ([], TypeError, r"`block` must map names to numpy arrays, as `PageBlock.to_host\(\)` does; got list\."),
        ({"k": [1]}, TypeError, r"`block\['k'\]` must be a numpy array; got list\."),
        (
            {"k": np.zeros(3)},
            ValueError,
            r"`block\['k'\]` must be \(num_layers, num_pages, \.\.\.\) .*got float64 \(3,\)",
        ),
        ({"k": np.zeros((1, 2), np.complex128)}, ValueError, r"1, 2, 4 or 8 bytes a value; got complex128 \(1, 2\)\."),
        ({}, ValueError, r"with the same number of pages, one at least; got \{\}\."),
        ({"k": np.zeros((1, 2)), "v": np.zeros((1, 3))}, ValueError, r"number of pages.*got \{'k': 2, 'v': 3\}\."),
    ],
)
def test_num_pages_of_what_is_no_block_names_it(block, error, message):
    with pytest.raises(error, match=message):
        num_pages_of(block)
