"""SequenceTable: what the allocator's tests cannot see, its memory and the cost of its growth."""

import numpy as np

from jaxpaged.paging.tables import SequenceTable, ragged_arange


class CountingTable(SequenceTable):
    """Counts how often the flat array was moved."""

    __slots__ = ("num_collections",)

    def __init__(self):
        super().__init__()
        self.num_collections = 0

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
        table.add(seq_id, np.full(50, seq_id), num_tokens=0)
    started = table.num_collections
    for _ in range(100):
        for seq_id in range(200):
            table.extend(table.row(seq_id), np.array([seq_id]))
    assert table.num_collections - started <= 3
    for seq_id in range(200):
        assert table.pages(table.row(seq_id)).tolist() == [seq_id] * 150


def test_add_and_remove_in_turn_keep_the_array_small():
    table = SequenceTable()
    for seq_id in range(2000):
        table.add(seq_id, np.arange(100), num_tokens=0)
        if seq_id >= 10:
            table.remove(seq_id - 10)
    assert len(table) == 10
    assert len(table.page_ids) <= 8192


def test_collection_gives_back_the_room_of_truncated_rows():
    table = SequenceTable()
    table.add("long", np.arange(50_000), num_tokens=0)
    table.num_pages[table.row("long")] = 10
    for seq_id in range(2000):
        table.add(seq_id, np.arange(100), num_tokens=0)
        table.remove(seq_id)
    assert len(table.page_ids) <= 8192
    assert table.pages(table.row("long")).tolist() == list(range(10))


def test_extend_many_keeps_rows_apart_when_a_collection_takes_their_spare_room():
    table = SequenceTable()
    for seq_id in range(3):
        table.add(seq_id, np.full(800 if seq_id else 100, seq_id), num_tokens=0)
    table.num_pages[table.row(0)] = 1  # a long run that a collection cuts short
    rows, counts = table.rows([0, 1, 2]), np.array([50, 1, 1])
    table.extend_many(rows, np.repeat([0, 1, 2], counts), counts)
    assert [table.pages(row).tolist() for row in rows] == [[0] * 51, [1] * 801, [2] * 801]
