"""PageTable: what the allocator's tests cannot see, its memory and the cost of its growth."""

import numpy as np
import pytest

from jaxpaged.config import NULL_PAGE
from jaxpaged.paging import PageGroup
from jaxpaged.paging.tables import PageTable, ragged_arange


class CountingTable(PageTable):
    """Rows by name, as `Sequences` keeps them; counts how often the flat array was moved."""

    def __init__(self, num_rows: int = 1024):
        self.row_of_seq: dict = {}
        super().__init__(PageGroup("full"), 4, self.row_of_seq, num_rows)
        self.free_rows = list(range(num_rows - 1, -1, -1))
        self.num_collections = 0

    def add_seq(self, seq_id, page_ids):
        row = self.free_rows.pop()
        self.add(row, memoryview(np.array(page_ids, np.int32)))
        self.row_of_seq[seq_id] = row

    def remove_seq(self, seq_id):
        row = self.row_of_seq.pop(seq_id)
        self.free_rows.append(row)
        self.remove(row)

    def rows(self, seq_ids):
        return np.array([self.row_of_seq[seq_id] for seq_id in seq_ids])

    def _collect(self, count):
        self.num_collections += 1
        super()._collect(count)


def test_ragged_arange_joins_the_ranges():
    starts, counts = np.array([5, 0, 9, 2]), np.array([2, 0, 1, 3])
    assert ragged_arange(starts, counts).tolist() == [5, 6, 9, 2, 3, 4]
    assert ragged_arange(starts[:0], counts[:0]).tolist() == []


def test_extend_of_many_rows_in_turn_moves_the_array_a_few_times_only():
    table = CountingTable()
    for seq_id in range(200):
        table.add_seq(seq_id, np.full(50, seq_id))
    started = table.num_collections
    for _ in range(100):
        for seq_id in range(200):
            table.extend(table.row_of_seq[seq_id], np.array([seq_id]))
    assert table.num_collections - started <= 3
    for seq_id in range(200):
        assert table.pages(table.row_of_seq[seq_id]).tolist() == [seq_id] * 150


def test_add_and_remove_in_turn_keep_the_array_small():
    table = CountingTable()
    for seq_id in range(2000):
        table.add_seq(seq_id, np.arange(100))
        if seq_id >= 10:
            table.remove_seq(seq_id - 10)
    assert len(table.row_of_seq) == 10
    assert len(table.page_ids) <= 8192


def test_collection_gives_back_the_room_of_truncated_rows():
    table = CountingTable()
    table.add_seq("long", np.arange(50_000))
    table.num_pages[table.row_of_seq["long"]] = 10
    for seq_id in range(2000):
        table.add_seq(seq_id, np.arange(100))
        table.remove_seq(seq_id)
    assert len(table.page_ids) <= 8192
    assert table.pages(table.row_of_seq["long"]).tolist() == list(range(10))


def test_extend_many_keeps_rows_apart_when_a_collection_takes_their_spare_room():
    table = CountingTable()
    for seq_id in range(3):
        table.add_seq(seq_id, np.full(800 if seq_id else 100, seq_id))
    table.num_pages[table.row_of_seq[0]] = 1  # a long run that a collection cuts short
    rows, counts = table.rows([0, 1, 2]), np.array([50, 1, 1])
    table.extend_many(rows, np.repeat([0, 1, 2], counts), counts)
    assert [table.pages(row).tolist() for row in rows] == [[0] * 51, [1] * 801, [2] * 801]


def test_extend_many_in_turn_moves_the_array_a_few_times_only():
    table = CountingTable()
    for seq_id in range(200):
        table.add_seq(seq_id, np.full(50, seq_id))
    started, rows = table.num_collections, table.rows(range(200))
    for _ in range(100):
        table.extend_many(rows, np.arange(200), np.ones(200, np.intp))
    assert table.num_collections - started <= 3
    assert table.window(rows, 150).tolist() == [[seq_id] * 150 for seq_id in range(200)]


def test_window_moves_the_array_only_where_too_little_lies_behind_the_last_run():
    table = CountingTable(8)
    table.add_seq("a", [5, 6])
    row = table.rows(["a"])
    for width, num_collections in ((14, 0), (15, 1), (15, 1)):
        assert table.window(row, width)[0, :2].tolist() == [5, 6]
        assert table.num_collections == num_collections


@pytest.mark.parametrize("seed", range(2))
def test_rows_hold_what_lists_hold(seed):
    rng = np.random.default_rng(seed)
    table, expected = CountingTable(2), {}
    for step in range(200):
        ids = rng.integers(1, 1000, rng.integers(0, 9))
        live = [*expected]
        one = live[rng.integers(len(live))] if live else None
        action = rng.choice(["add", "extend", "extend_many", "truncate", "pass", "replace", "restore", "remove"])
        if action == "add":
            if not table.free_rows:
                table.free_rows = list(range(len(table.starts), 2 * len(table.starts)))
                table.double_rows()
            table.add_seq(step, ids)
            expected[step] = ids.tolist()
        elif one is None:
            continue
        elif action == "extend":
            table.extend(table.row_of_seq[one], ids)
            expected[one] += ids.tolist()
        elif action == "extend_many":
            chosen = rng.permutation(live)[: rng.integers(1, len(live) + 1)].tolist()
            counts = rng.integers(0, 5, len(chosen))
            new = np.arange(counts.sum()) + 1000
            table.extend_many(table.rows(chosen), new, counts)
            for seq_id, part in zip(chosen, np.split(new, np.cumsum(counts)[:-1]), strict=True):
                expected[seq_id] += part.tolist()
        elif action == "truncate":
            kept = int(rng.integers(table.num_passed[table.row_of_seq[one]], len(expected[one]) + 1))
            table.num_pages[table.row_of_seq[one]] = kept
            del expected[one][kept:]
        elif action == "pass":
            row = table.row_of_seq[one]
            passed = table.pages(row)[table.num_passed[row] :][:2]
            table.let_pass(row, passed)
            expected[one] = [NULL_PAGE] * table.num_passed.item(row) + expected[one][table.num_passed.item(row) :]
        elif action == "replace" and expected[one]:
            table.replace_last(table.row_of_seq[one], 3)
            expected[one][-1] = 3
        elif action == "restore":
            row = table.row_of_seq[one]
            expected[one][: table.num_passed.item(row)] = [7] * table.num_passed.item(row)
            table.restore_passed(row, np.full(table.num_passed.item(row), 7))
        elif action == "remove":
            num_passed = table.num_passed.item(table.row_of_seq[one])
            held, _ = table.remove(table.row_of_seq[one])
            assert held.tolist() == expected.pop(one)[num_passed:]
            table.remove_seq(one)
        rows = table.rows([*expected]).astype(np.intp)
        places, indices, page_ids = table.entries(rows)
        flat = [entry for i, seq in enumerate(expected.values()) for entry in ((i, j, x) for j, x in enumerate(seq))]
        assert list(zip(places.tolist(), indices.tolist(), page_ids.tolist(), strict=True)) == flat
    assert table.num_collections > 0
