import dataclasses
import re

import jax.numpy as jnp
import numpy as np
import pytest

import jaxpaged as jp
from jaxpaged.batch import locate_tokens

NUM_PAGES, PAGE_SIZE = 8, 4
POOL = {"num_pages": NUM_PAGES, "page_size": PAGE_SIZE, "vocab_size": 100}


def decode_batch() -> jp.Batch:
    """Sequences of 6 and 4 tokens and a padding row."""
    return jp.Batch(
        token_ids=np.array([5, 6, 0], np.int32),
        positions=np.array([5, 3, 0], np.int32),
        slot_mapping=np.array([3 * 4 + 1, 7 * 4 + 3, 32], np.int32),
        page_table=np.array([[2, 3], [7, 0], [0, 0]], np.int32),
        seq_lens=np.array([6, 4, 0], np.int32),
    )


def ragged_batch() -> jp.Batch:
    """Three new tokens of a sequence of 6, one of a sequence of 4, and a padding token."""
    return jp.Batch(
        token_ids=np.array([5, 6, 7, 8, 0], np.int32),
        positions=np.array([3, 4, 5, 3, 0], np.int32),
        slot_mapping=np.array([11, 12, 13, 31, 32], np.int32),
        page_table=np.array([[2, 3], [7, 0]], np.int32),
        seq_lens=np.array([6, 4], np.int32),
        cu_q_lens=np.array([0, 3, 4], np.int32),
    )


@pytest.mark.parametrize("batch", [decode_batch(), ragged_batch()], ids=["decode", "ragged"])
def test_check_batch_values_of_a_good_batch_passes(batch):
    jp.check_batch_values(batch, **POOL)


def replaced(array, index, value):
    array = array.copy()
    array[index] = value
    return array


@pytest.mark.parametrize(
    ("field", "index", "value", "message"),
    [
        ("seq_lens", 0, -1, r"`seq_lens[0]` must be from 0 to max_pages * page_size = 2 * 4 = 8; got -1"),
        ("seq_lens", 0, 9, r"`seq_lens[0]` must be from 0 to max_pages * page_size = 2 * 4 = 8; got 9"),
        ("page_table", (0, 1), 8, "`page_table[0, 1]` must hold page ids from 1 to num_pages - 1 = 7"),
        ("page_table", (0, 1), -1, "`page_table[0, 1]` must hold page ids from 1"),
        ("page_table", (1, 0), 0, "`page_table[1, 0]` must hold page ids from 1"),
        ("positions", 0, 4, "`positions[0]` must continue its sequence; got 4"),
        ("slot_mapping", 0, 12, "`slot_mapping[0]` must be the slot of this position in `page_table`; got 12"),
        (
            "slot_mapping",
            2,
            30,
            "`slot_mapping[2]` must be num_pages * page_size = 32 or more at a padding",
        ),
        ("slot_mapping", 2, 31, "`slot_mapping[2]` must be distinct from the slots before it; got 31"),
        (
            "slot_mapping",
            2,
            -1,
            "`slot_mapping[2]` must be num_pages * page_size = 32 or more at a padding",
        ),
        ("token_ids", 1, 100, "`token_ids[1]` must be from 0 to vocab_size - 1 = 99; got 100"),
        ("token_ids", 1, -1, "`token_ids[1]` must be from 0 to vocab_size - 1 = 99; got -1"),
    ],
)
def test_check_batch_values_of_a_bad_decode_batch_names_the_value(field, index, value, message):
    batch = decode_batch()
    batch = dataclasses.replace(batch, **{field: replaced(getattr(batch, field), index, value)})
    with pytest.raises(ValueError, match=re.escape(message)):
        jp.check_batch_values(batch, **POOL)


def test_check_batch_values_of_two_sequences_on_one_page_is_refused():
    batch = dataclasses.replace(
        decode_batch(),
        positions=np.array([5, 5, 0], np.int32),
        slot_mapping=np.array([13, 13, 32], np.int32),
        page_table=np.array([[2, 3], [7, 3], [0, 0]], np.int32),
        seq_lens=np.array([6, 6, 0], np.int32),
    )
    with pytest.raises(ValueError, match=r"`slot_mapping\[1\]` must be distinct.*copy it first"):
        jp.check_batch_values(batch, **POOL)


@pytest.mark.parametrize(
    ("cu_q_lens", "message"),
    [
        ([0, 3, 6], "`cu_q_lens[2]` must start at 0, never fall, and end at num_tokens = 5 or before; got 6"),
        ([0, 4, 3], "`cu_q_lens[2]` must start at 0, never fall"),
        ([1, 3, 4], "`cu_q_lens[0]` must start at 0"),
        ([0, 0, 5], "`seq_lens[1]` must include this step's tokens; got 4"),
    ],
)
def test_check_batch_values_of_bad_cu_q_lens_says_so(cu_q_lens, message):
    batch = dataclasses.replace(ragged_batch(), cu_q_lens=np.array(cu_q_lens, np.int32))
    with pytest.raises(ValueError, match=re.escape(message)):
        jp.check_batch_values(batch, **POOL)


def test_locate_tokens_of_a_ragged_batch_finds_row_and_position():
    row, position, live = locate_tokens(jnp.array([9, 0, 5]), jnp.array([0, 3, 3, 4]), 6)
    assert row.tolist() == [0, 0, 0, 2, 0, 0]
    assert position.tolist() == [6, 7, 8, 4, 0, 0]
    assert live.tolist() == [True] * 4 + [False] * 2


def test_locate_tokens_of_a_decode_batch_takes_the_last_position():
    row, position, live = locate_tokens(jnp.array([9, 0, 5]), None, 3)
    assert row.tolist() == [0, 0, 2]
    assert position.tolist() == [8, 0, 4]
    assert live.tolist() == [True, False, True]


def test_check_batch_values_of_a_page_that_another_row_reads_is_refused():
    batch = dataclasses.replace(
        decode_batch(),
        positions=np.array([5, 7, 0], np.int32),
        slot_mapping=np.array([13, 11, 32], np.int32),
        page_table=np.array([[2, 3], [7, 2], [0, 0]], np.int32),
        seq_lens=np.array([6, 8, 0], np.int32),
    )
    with pytest.raises(
        ValueError, match=r"`slot_mapping\[1\]` must lie in a page that no other sequence holds; got 11"
    ):
        jp.check_batch_values(batch, **POOL)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("positions", np.zeros(2, np.int32), "must be as long as `token_ids`, 3"),
        ("token_ids", np.zeros(3, np.float32), "`token_ids` must be integers with 1 axes; got float32"),
        ("page_table", np.zeros(3, np.int32), "`page_table` must be integers with 2 axes"),
    ],
)
def test_check_batch_values_of_arrays_that_do_not_fit_is_refused(field, value, message):
    with pytest.raises(ValueError, match=message):
        jp.check_batch_values(dataclasses.replace(decode_batch(), **{field: value}), **POOL)
