"""What a step's sequences say of themselves, and which of their parts are traced."""

import dataclasses

import jax
import numpy as np
import pytest

import jaxpaged as jp
from jaxpaged.cache.kv_cache import require_slots
from jaxpaged.cache.ragged import Partition, PartitionKey
from jaxpaged.config import AttentionConfig

SLOTS = np.array([[5, 6], [17, 18]])
FLAT = jp.Ragged(page_table=np.array([[1, 2, 3], [4, 5, 6]]), seq_lens=np.array([9, 1]), slot_mapping=SLOTS[0])
GROUPED = dataclasses.replace(FLAT, page_table=np.stack([FLAT.page_table, FLAT.page_table + 6]), slot_mapping=SLOTS)


def make_partition(sliding_window: int | None) -> Partition:
    return Partition(
        tiles=np.zeros((1, 11), np.int32),
        shares=np.zeros((1, 4), np.int32),
        cut_tiles=np.zeros(1, np.int32),
        block_q=1,
        part_stride=1,
        num_part_rows=1,
        made_for=PartitionKey(2, 2, ragged=False, sliding_window=sliding_window, causal=True),
        config=AttentionConfig(),
    )


@pytest.mark.parametrize(("ragged", "num_groups"), [(FLAT, 1), (GROUPED, 2)])
def test_ragged_counts_sequences_pages_and_groups(ragged, num_groups):
    assert (ragged.num_seqs, ragged.max_pages, ragged.num_groups) == (2, 3, num_groups)


@pytest.mark.parametrize("group", [0, 1, jax.numpy.int32(1)])
def test_of_group_takes_the_table_and_the_slots_of_the_group(group):
    ragged = GROUPED.of_group(group)
    np.testing.assert_array_equal(ragged.page_table, GROUPED.page_table[int(group)])
    np.testing.assert_array_equal(ragged.slot_mapping, SLOTS[int(group)])
    assert ragged.seq_lens is GROUPED.seq_lens


def test_of_group_of_one_group_is_the_same_and_of_no_slots_has_none():
    assert FLAT.of_group(0) is FLAT
    reading = dataclasses.replace(GROUPED, slot_mapping=None).of_group(1)
    assert reading.slot_mapping is None
    with pytest.raises(ValueError, match=r"^`ragged` must have a `slot_mapping`, .*; got None\.$"):
        require_slots(reading)


def test_partition_for_finds_the_one_that_was_made_for_such_calls():
    partitions = tuple(make_partition(window) for window in (None, 5))
    ragged = dataclasses.replace(FLAT, partitions=partitions)
    for partition in partitions:
        assert ragged.partition_for(partition.made_for) is partition
    assert ragged.partition_for(partitions[0].made_for._replace(causal=False)) is None
    assert FLAT.partition_for(partitions[0].made_for) is None


def test_leaves_of_a_partition_and_of_a_cache_are_their_arrays():
    """What is no array is part of the trace: another value is another program."""
    assert len(jax.tree.leaves(make_partition(None))) == 3
    places = [(0, 0), (1, 0)]
    cache = jp.KVCache.create(num_layers=2, num_pages=2, num_kv_heads=1, head_dim=8, layer_places=places)
    assert [x.shape for x in jax.tree.leaves(dataclasses.replace(cache, target="any"))] == [(1, 2, 1, 16, 8)] * 2
    assert cache.dtype == jax.numpy.bfloat16
    assert cache.target is None
