import dataclasses
import re

import jax.numpy as jnp
import numpy as np
import pytest

import jaxpaged as jp
from jaxpaged.cache.ragged import locate_tokens

NUM_PAGES, PAGE_SIZE = 8, 4
POOL = {"num_pages": NUM_PAGES, "page_size": PAGE_SIZE, "vocab_size": 100}


def make_batch(token_ids, positions, slot_mapping, page_table, seq_lens, cu_q_lens=None) -> jp.Batch:
    ragged = jp.Ragged(slot_mapping=slot_mapping, page_table=page_table, seq_lens=seq_lens, cu_q_lens=cu_q_lens)
    return jp.Batch(token_ids=token_ids, positions=positions, ragged=ragged)


def changed(batch: jp.Batch, **fields) -> jp.Batch:
    """The batch with other arrays, of its own or of its sequences."""
    own = {name: fields.pop(name) for name in ("token_ids", "positions") if name in fields}
    return dataclasses.replace(batch, ragged=dataclasses.replace(batch.ragged, **fields), **own)


def decode_batch() -> jp.Batch:
    """Sequences of 6 and 4 tokens and a padding row."""
    return make_batch(
        token_ids=np.array([5, 6, 0], np.int32),
        positions=np.array([5, 3, 0], np.int32),
        slot_mapping=np.array([3 * 4 + 1, 7 * 4 + 3, 32], np.int32),
        page_table=np.array([[2, 3], [7, 0], [0, 0]], np.int32),
        seq_lens=np.array([6, 4, 0], np.int32),
    )


def ragged_batch() -> jp.Batch:
    """Three new tokens of a sequence of 6, one of a sequence of 4, and a padding token."""
    return make_batch(
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


def test_check_batch_values_of_a_batch_at_all_limits_passes():
    """The first page and the last, a table that is full, sequences all new, the first token id and the last."""
    full = make_batch(
        token_ids=np.array([0, 99, 0, 99, -1], np.int32),  # that of padding is nobody's, as its position is
        positions=np.array([4, 5, 6, 7, -1], np.int32),
        slot_mapping=np.array([28, 29, 30, 31, 35], np.int32),
        page_table=np.array([[1, 7], [0, 0]], np.int32),
        seq_lens=np.array([8, 0], np.int32),
        cu_q_lens=np.array([0, 4, 4], np.int32),
    )
    jp.check_batch_values(full, **POOL)
    new = make_batch(
        token_ids=np.array([0, 0, 0, 0, 10**6], np.int32),
        positions=np.array([0, 1, 2, 3, 0], np.int32),
        slot_mapping=np.array([4, 5, 6, 7, 28], np.int32),
        page_table=np.array([[1, 0], [7, 0]], np.int32),
        seq_lens=np.array([4, 1], np.int32),
        cu_q_lens=np.array([0, 4, 5], np.int32),
    )
    jp.check_batch_values(new, num_pages=NUM_PAGES, page_size=PAGE_SIZE)


def test_check_batch_values_leaves_unused_entries_of_a_table_alone():
    batch = decode_batch()
    jp.check_batch_values(changed(batch, page_table=replaced(batch.ragged.page_table, (1, 1), 99)), **POOL)
    shared = replaced(batch.ragged.page_table, (1, 1), 3)  # the page of another, where the row has no tokens
    jp.check_batch_values(changed(batch, page_table=shared), **POOL)


def field_of(batch: jp.Batch, name: str) -> np.ndarray:
    return getattr(batch if name in ("token_ids", "positions") else batch.ragged, name)


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
    batch = changed(batch, **{field: replaced(field_of(batch, field), index, value)})
    with pytest.raises(ValueError, match=re.escape(message)):
        jp.check_batch_values(batch, **POOL)


def test_check_batch_values_of_two_sequences_on_one_page_is_refused():
    batch = changed(
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
    batch = changed(ragged_batch(), cu_q_lens=np.array(cu_q_lens, np.int32))
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
    batch = changed(
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
        ("positions", np.zeros(3, np.bool_), "`positions` must be integers with 1 axes; got bool"),
        ("seq_lens", np.zeros((3, 1), np.int32), "`seq_lens` must be integers with 1 axes"),
        ("slot_mapping", np.zeros((1, 3), np.int32), "`slot_mapping` must be integers with 1 axes"),
        ("page_table", np.zeros(3, np.int32), "`page_table` must be integers with 2 axes"),
        ("page_table", np.zeros((1, 3, 2), np.int32), "`slot_mapping` must be integers with 2 axes"),
        ("slot_mapping", np.arange(4), r"must be as long as `token_ids`, 3, .* got 3, 4 and 3\."),
        ("seq_lens", np.zeros(2, np.int32), r"and `seq_lens` as `page_table`, 3; got 3, 3 and 2\."),
    ],
)
def test_check_batch_values_of_arrays_that_do_not_fit_is_refused(field, value, message):
    with pytest.raises(ValueError, match=message):
        jp.check_batch_values(changed(decode_batch(), **{field: value}), **POOL)


def grouped_batch() -> jp.Batch:
    """A decode step of a sequence of 14 tokens, in a group of all tokens and one with a window of 5."""
    return make_batch(
        token_ids=np.array([5, 0], np.int32),
        positions=np.array([13, 0], np.int32),
        slot_mapping=np.array([[4 * 4 + 1, 32], [6 * 4 + 1, 32]], np.int32),
        page_table=np.array([[[1, 2, 3, 4], [0] * 4], [[0, 0, 5, 6], [0] * 4]], np.int32),
        seq_lens=np.array([14, 0], np.int32),
    )


@pytest.mark.parametrize(("seq_len", "num_passed"), [(5, 0), (8, 0), (9, 1), (12, 1), (13, 2), (16, 2)])
def test_check_batch_values_lets_no_page_be_missing_that_the_window_sees(seq_len, num_passed):
    """The last token sees itself and the four before it."""

    def with_null_pages(count: int) -> jp.Batch:
        held = np.array([1, 2, 3, 4])[: -(-seq_len // 4)]
        table = np.where(np.arange(len(held)) < count, 0, held)
        last = seq_len - 1
        return make_batch(
            token_ids=np.array([5]),
            positions=np.array([last]),
            slot_mapping=np.array([[held[-1] * 4 + last % 4]]),
            page_table=table[None, None],
            seq_lens=np.array([seq_len]),
        )

    jp.check_batch_values(with_null_pages(num_passed), **POOL, sliding_windows=(5,))
    with pytest.raises(ValueError, match=rf"^`page_table\[0, 0, {num_passed}\]` must hold .*; got 0\."):
        jp.check_batch_values(with_null_pages(num_passed + 1), **POOL, sliding_windows=(5,))


GROUPS = {"sliding_windows": (None, 5), **POOL}


def test_check_batch_values_of_page_groups():
    jp.check_batch_values(grouped_batch(), **GROUPS)
    ragged = grouped_batch().ragged
    table = ragged.page_table
    two_owners = replaced(replaced(table, (1, 0, 3), 4), (0, 0, 3), 4)
    for fields, message in (
        (
            {"page_table": replaced(table, (1, 0, 2), 0)},
            r"`page_table\[1, 0, 2\]` must hold .*; got 0",
        ),
        (
            {"page_table": replaced(table, (0, 0, 0), 0)},
            r"`page_table\[0, 0, 0\]` must hold .*; got 0",
        ),
        (
            {"page_table": two_owners, "slot_mapping": replaced(ragged.slot_mapping, (1, 0), 17)},
            "lie in a page that no",
        ),
        ({"slot_mapping": replaced(ragged.slot_mapping, (1, 0), 26)}, r"`slot_mapping\[1, 0\]` must be the slot of"),
        ({"slot_mapping": replaced(ragged.slot_mapping, (0, 1), 0)}, r"`slot_mapping\[0, 1\]` must be num_pages"),
    ):
        with pytest.raises(ValueError, match=message):
            jp.check_batch_values(changed(grouped_batch(), **fields), **GROUPS)
    with pytest.raises(ValueError, match=r"must have one for each page group; got 2, 2 and 1\."):
        jp.check_batch_values(grouped_batch(), **GROUPS | {"sliding_windows": (None,)})
    with pytest.raises(ValueError, match=r"`page_table\[1, 0, 0\]` must hold page ids"):
        jp.check_batch_values(grouped_batch(), **POOL)
