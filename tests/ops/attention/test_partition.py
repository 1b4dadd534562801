"""The partition, read back: every query's keys are attended to once, by shares of equal size."""

import dataclasses
import itertools
from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxpaged as jp
from jaxpaged.cache.ragged import Share, Tile
from jaxpaged.config import SLOTS, AttentionConfig, cdiv, target_of
from jaxpaged.ops.attention import ATTENTION, AttentionOptions, attend, triton
from jaxpaged.ops.attention.partition import MIN_SHARE, count_programs
from jaxpaged.ops.attention.reference import paged_attention_reference
from jaxpaged.ops.dispatch import Backend
from tests.ops.attention.harness import partition_of

jitted = jax.jit(
    partition_of,
    static_argnames=("num_tokens", "sliding_window", "causal", "config", "max_pages", "page_size"),
)


def rows(cls, array):
    return [cls(*map(int, row)) for row in np.asarray(array)]


def end_of(tile):
    """Where a tile's range ends in the stream: one without keys has the length 1."""
    return tile.stream_begin + max(1, tile.kv_end - tile.kv_begin)


def pieces(partition):
    """(program, tile, first key, one past the last, has the tile's beginning, its end), as the kernel reads it."""
    tiles = rows(Tile, partition.tiles)
    for program, share in enumerate(rows(Share, partition.shares)):
        for t in range(share.tile_begin, share.tile_end):
            tile = tiles[t]
            offset = max(share.stream_begin - tile.stream_begin, 0)
            end = min(tile.kv_end, tile.kv_begin + share.stream_end - tile.stream_begin)
            yield program, t, tile.kv_begin + offset, end, offset == 0, bool(end_of(tile) <= share.stream_end)


def loads(partition):
    load = np.zeros(len(partition.shares), int)
    for program, _, begin, end, _, _ in pieces(partition):
        load[program] += max(0, end - begin)
    return load


def check_cover(partition):
    """Each tile's keys fall to pieces end to end, and each piece of a cut one has rows of its own, which are merged."""
    tiles = rows(Tile, partition.tiles)
    by_tile = {t: [] for t in range(len(tiles))}
    written = []
    for program, t, begin, end, starts, ends in pieces(partition):
        by_tile[t].append((begin, end, starts, ends))
        assert (starts and ends) == (tiles[t].num_parts == 1)
        if not (starts and ends):
            row = tiles[t].first_part + (program - tiles[t].first_share) * partition.part_stride
            written += range(row, row + tiles[t].num_q)
    assert len(set(written)) == len(written)
    cut = [t for t in np.asarray(partition.cut_tiles).tolist() if t >= 0]
    assert len(set(cut)) == len(cut)
    merged = [
        tiles[t].first_part + part * partition.part_stride + j
        for t in cut
        for part in range(tiles[t].num_parts * (tiles[t].num_parts > 1))
        for j in range(tiles[t].num_q)
    ]
    assert sorted(merged) == sorted(written)
    assert all(0 <= row < partition.num_part_rows for row in written)
    for t, found in by_tile.items():
        if tiles[t].num_q == 0:
            continue
        assert [p[2] for p in found] == [True] + [False] * (len(found) - 1)
        assert [p[3] for p in found] == [False] * (len(found) - 1) + [True]
        assert found[0][0] == tiles[t].kv_begin
        assert found[-1][1] == tiles[t].kv_end
        assert all(a[1] == b[0] for a, b in itertools.pairwise(found))
        assert all(begin < end for begin, end, *_ in found) or tiles[t].kv_begin == tiles[t].kv_end


def patterns(batch, length):
    rng = np.random.default_rng(0)
    few = batch // 8
    return {
        "constant": np.full(batch, length),
        "uniform": rng.integers(length // 2, length + 1, batch),
        "zipf": np.maximum(1, length // np.arange(1, batch + 1)),
        "few_long": np.r_[np.full(few, 8192), rng.integers(length // 16, length // 8 + 1, batch - few)],
        "bimodal": np.where(np.arange(batch) % 2, length, length // 8),
        "one_long": np.r_[32768, np.full(batch - 1, 16)],
        "with_padding": np.r_[np.zeros(batch // 2, int), np.full(batch - batch // 2, length)],
    }


@pytest.mark.parametrize("num_programs", [*(pytest.param(n, marks=pytest.mark.slow) for n in (16, 66)), 48])
@pytest.mark.parametrize("pattern", patterns(16, 1024))
def test_make_partition_skewed_lengths_loads_within_ten_percent_of_mean(pattern, num_programs):
    lens = patterns(16, 1024)[pattern]
    partition = jitted(jnp.asarray(lens, jnp.int32), num_tokens=16, config=AttentionConfig(num_programs=num_programs))
    load = loads(partition)
    assert load.sum() == lens.sum()
    assert load.max() <= 1.10 * load.mean()


@pytest.mark.parametrize("window", [None, 1, 40])
@pytest.mark.parametrize("config", [AttentionConfig(num_programs=7), AttentionConfig(max_splits=1)])
def test_make_partition_decode_covers_each_key_once(config, window):
    rng = np.random.default_rng(1)
    for lens in ([], [1], [1000], [0, 5, 0, 300, 17, 1], rng.integers(0, 200, 40)):
        lens = np.pad(np.asarray(lens, np.int32), (0, 40 - len(lens)))
        partition = jitted(lens, num_tokens=40, sliding_window=window, config=config)
        check_cover(partition)
        for n, tile in zip(lens.tolist(), rows(Tile, partition.tiles), strict=True):
            assert (tile.kv_begin, tile.kv_end) == (max(0, n - (window or n)), n)
            assert tile.position == n - 1


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [None, 30])
def test_make_partition_ragged_gives_each_query_to_one_tile(window, causal):
    rng = np.random.default_rng(2)
    for _ in range(20):
        q_lens = rng.integers(0, 40, 6) * rng.integers(0, 2, 6)
        lens = q_lens + rng.integers(0, 300, 6)
        cu_q_lens = np.cumsum([0, *q_lens])
        partition = jitted(
            jnp.asarray(lens, jnp.int32),
            jnp.asarray(cu_q_lens, jnp.int32),
            num_tokens=240,
            sliding_window=window,
            causal=causal,
            config=AttentionConfig(num_programs=9, block_q=16),
        )
        check_cover(partition)
        seen = np.zeros(240, int)
        for tile in rows(Tile, partition.tiles):
            for j in range(tile.num_q):
                token = tile.token + j
                seen[token] += 1
                assert cu_q_lens[tile.seq] <= token < np.append(cu_q_lens, 240)[tile.seq + 1]
                if tile.seq == 6:
                    assert tile.kv_begin == tile.kv_end
                    continue
                n = lens[tile.seq]
                position = n - q_lens[tile.seq] + token - cu_q_lens[tile.seq]
                assert tile.position + j == position
                assert tile.kv_begin <= max(0, position - (window or n) + 1)
                assert tile.kv_end >= (position + 1 if causal else n)
            if window is not None and tile.num_q and tile.seq < 6:  # and no key that none of its queries sees
                assert tile.kv_begin == max(0, tile.position - window + 1)
        np.testing.assert_array_equal(seen, 1)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", ["static", *(pytest.param(x, marks=pytest.mark.slow) for x in ("none", "traced"))])
@pytest.mark.parametrize("ragged", [False, True])
def test_make_partition_split_size_covers_each_key_once_at_fixed_cuts(ragged, window, causal):
    """Piece s of tile t is share t * max_pieces + s, from one multiple of the split to the next, and nobody else's."""
    rng, split, max_len = np.random.default_rng(5), 32, 300
    traced = jax.jit(partition_of, static_argnames=("num_tokens", "causal", "config", "max_pages", "page_size"))
    config = AttentionConfig(split_size=split, block_q=8)
    for _ in range(6 if window == "static" else 25):  # each static window is traced anew
        lens = rng.integers(0, max_len + 1, 6) * rng.integers(0, 2, 6)
        q_lens = np.minimum(lens, rng.integers(0, 40, 6))
        cu_q_lens = jnp.asarray(np.cumsum([0, *q_lens]), jnp.int32) if ragged else None
        options = {} if window == "none" else {"sliding_window": int(rng.integers(1, 100))}
        if window == "traced":
            options = {"sliding_window": jnp.int32(options["sliding_window"])}
        make = traced if window != "static" else partition_of
        num_tokens = 240 if ragged else 6
        partition = make(
            jnp.asarray(lens, jnp.int32),
            cu_q_lens,
            num_tokens=num_tokens,
            causal=causal,
            max_pages=max_len,
            page_size=1,
            config=config,
            **options,
        )
        tiles = rows(Tile, partition.tiles)
        seen = [np.zeros(max_len + 1, int) for _ in tiles]
        written = np.zeros(len(tiles), int)
        max_pieces = cdiv(max_len, split)
        assert len(partition.shares) == max_pieces * len(tiles)
        check_cover(partition)
        for program, t, begin, end, starts, ends in pieces(partition):
            tile, piece = tiles[t], program % max_pieces
            assert t == program // max_pieces
            written[t] += 1
            if tile.kv_begin == tile.kv_end:
                assert (starts, ends) == (True, True)
                continue
            assert begin == max(tile.kv_begin, piece * split)
            assert end == min(tile.kv_end, (piece + 1) * split)
            assert (starts, ends) == (begin == tile.kv_begin, end == tile.kv_end)
            seen[t][begin:end] += 1
        for tile, found, count in zip(tiles, seen, written, strict=True):
            live = np.zeros(max_len + 1, int)
            live[tile.kv_begin : tile.kv_end] = 1
            np.testing.assert_array_equal(found, live)
            assert count >= (tile.num_q > 0)  # whoever has no key is written too
        assert sum(tile.num_q for tile in tiles) == num_tokens


@pytest.mark.slow
def test_make_partition_split_size_cuts_a_sequence_alike_in_any_batch():
    def cuts(lens, row):
        config = AttentionConfig(split_size=64)
        lens = jnp.asarray(lens, jnp.int32)
        partition = partition_of(lens, num_tokens=len(lens), max_pages=1024, page_size=1, config=config)
        return [(begin, end) for _, t, begin, end, *_ in pieces(partition) if t == row]

    assert cuts([500], 0) == cuts([3, 0, 1024, 500, 77], 3) == [(i, min(i + 64, 500)) for i in range(0, 500, 64)]


def test_make_partition_split_size_of_a_length_beyond_the_table_keeps_its_last_piece():
    config = AttentionConfig(split_size=16)
    partition = partition_of(jnp.array([100], jnp.int32), num_tokens=1, max_pages=2, page_size=16, config=config)
    assert [(begin, end) for _, _, begin, end, *_ in pieces(partition)] == [(0, 16), (16, 100)]


@pytest.mark.slow
def test_make_partition_traced_window_equals_the_static():
    lens = jnp.array([0, 5, 300, 2000], jnp.int32)
    for window in (1, 128, 5000):
        static = partition_of(lens, num_tokens=4, sliding_window=window)
        traced = jax.jit(lambda lens, w: partition_of(lens, num_tokens=4, sliding_window=w))(lens, jnp.int32(window))
        chex.assert_trees_all_equal((static.tiles, static.shares), (traced.tiles, traced.shares))
        assert (static.made_for.sliding_window, traced.made_for.sliding_window) == (window, "traced")


def test_make_partition_window_reads_no_more_in_a_longer_context():
    work = [
        loads(partition_of(jnp.full(8, n, jnp.int32), num_tokens=8, sliding_window=window)).sum()
        for n in (128, 1024, 16384)
        for window in (128, jnp.int32(128))
    ]
    assert work == [8 * 128] * 6


def test_make_partition_short_batch_makes_no_share_below_the_minimum():
    partition = jitted(jnp.full(4, 20, jnp.int32), num_tokens=4, config=AttentionConfig(num_programs=64))
    assert np.count_nonzero(loads(partition)) == cdiv(80, MIN_SHARE)


def test_make_partition_max_splits_one_gives_each_tile_to_one_program():
    partition = jitted(jnp.array([3, 0, 5000], jnp.int32), num_tokens=3, config=AttentionConfig(max_splits=1))
    assert loads(partition).tolist() == [3, 0, 5000]


def test_make_partition_new_lengths_reuse_the_trace():
    @jax.jit
    @chex.assert_max_traces(n=1)
    def partition(lens):
        return partition_of(lens, num_tokens=4)

    for lens in ([1, 2, 3, 4], [0, 0, 0, 0], [4000, 1, 0, 7]):
        made = partition(jnp.array(lens, jnp.int32))
        chex.assert_shape([made.tiles, made.shares, made.cut_tiles], [(4, 11), (49, 4), (49,)])
        chex.assert_type([made.tiles, made.shares, made.cut_tiles], jnp.int32)
    assert jax.tree.structure(made) == jax.tree.structure(partition(jnp.zeros(4, jnp.int32)))


def test_make_partition_decode_with_more_tokens_than_sequences_raises():
    with pytest.raises(ValueError, match=r"`num_tokens` must be num_seqs = 2 in a decode step; got 3\. Pass cu_q_lens"):
        partition_of(jnp.zeros(2, jnp.int32), num_tokens=3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"target": "tpu"}, r"`target` must be one of a100, l4, h100, h200, b200; got 'tpu'\."),
        ({"num_programs": 0}, r"`num_programs` must be at least 1; got 0\."),
        ({"block_k": 8}, r"`block_k` must be at least 16; got 8\."),
        ({"block_k": 48}, r"`block_k` must be a power of two; got 48\."),
        ({"split_size": 8}, r"`split_size` must be at least 16; got 8\."),
        ({"split_size": 16, "max_splits": 1}, r"`split_size` must be None with `max_splits=1`; got 16\."),
        ({"max_splits": 2}, r"`max_splits` must be None \(cut anywhere\) or 1 \(never\); got 2\."),
    ],
)
def test_attention_config_impossible_size_raises(options, message):
    with pytest.raises(ValueError, match=message):
        AttentionConfig(**options)


def batch_of_three() -> tuple[jp.Batch, jp.KVCache]:
    cache = jp.KVCache.create(num_layers=2, num_pages=8, page_size=4, num_kv_heads=1, head_dim=16, dtype="float32")
    cache = jax.tree.map(lambda x: jax.random.normal(jax.random.key(x.size), x.shape), cache)
    arrays = np.zeros((3, 3), np.int32)
    table, lens = jnp.array([[3, 1], [5, 0], [0, 0]], jnp.int32), jnp.array([7, 2, 0], jnp.int32)
    ragged = jp.Ragged(page_table=table, seq_lens=lens, slot_mapping=arrays[2])
    return jp.Batch(token_ids=arrays[0], positions=arrays[1], ragged=ragged), cache


@pytest.mark.slow
@pytest.mark.parametrize("window", [None, 3])
def test_partition_batch_serves_the_layers_of_each_window_and_others_make_their_own(window, monkeypatch):
    batch, cache = batch_of_three()
    q = jax.random.normal(jax.random.key(1), (3, 2, 16))

    def run(batch, sliding_window):
        options = AttentionOptions(sliding_window=sliding_window)
        return attend(q, cache.layer(1), batch.ragged, options, backend="interpret")

    expected = [run(batch, w) for w in (window, 5)]
    cut = jax.jit(partial(jp.partition_batch, num_q_heads=2, sliding_windows=(None, 3)))(batch, cache)
    assert [partition.made_for.sliding_window for partition in cut.ragged.partitions] == [None, 3]
    chex.assert_trees_all_equal(run(cut, 5), expected[1])
    uncut = dataclasses.replace(cut, ragged=dataclasses.replace(cut.ragged, partitions=()))
    chex.assert_trees_all_equal(uncut, batch)

    def refuse(*_, **__):
        raise AssertionError("a partition was made")

    monkeypatch.setattr(triton, "make_partition", refuse)
    chex.assert_trees_all_equal(run(cut, window), expected[0])
    for other in (5, jnp.int32(3)):
        with pytest.raises(AssertionError, match="a partition was made"):
            run(cut, other)


def test_partition_batch_takes_the_programs_of_the_cache_and_the_target():
    batch, cache = batch_of_three()
    config = AttentionConfig(target="a100")
    cut = jp.partition_batch(batch, cache, num_q_heads=2, config=config)
    assert len(cut.ragged.partitions[0].shares) == SLOTS["a100"]
    # What the batch was cut by is what attention goes by, whoever computes it.
    assert cut.ragged.partitions[0].config == config


def test_partition_without_a_target_is_cut_for_the_device_of_the_cache(monkeypatch):
    batch, cache = batch_of_three()
    cache = dataclasses.replace(cache, target="l4")
    for config, target in ((None, "l4"), (AttentionConfig(block_q=4), "l4"), (AttentionConfig(target="b200"), "b200")):
        cut = jp.partition_batch(batch, cache, num_q_heads=2, config=config)
        assert len(cut.ragged.partitions[0].shares) == SLOTS[target]
    seen = []

    def look(q, view, ragged, options):
        seen.append(options.config.target)
        return paged_attention_reference(q, view, ragged, options)

    monkeypatch.setitem(ATTENTION._backends, "look", Backend("look", look))
    attend(jnp.zeros((3, 2, 16)), cache.layer(0), batch.ragged, backend="look")
    assert seen == ["l4"]


@pytest.mark.parametrize(
    ("num_q_heads", "num_kv_heads", "block_q", "expected"),
    [
        (32, 8, 1, 49),
        (32, 8, 16, 49),
        (8, 1, 1, 396),
        (71, 1, 1, 198),
        (8, 1, 16, 198),
        (9, 3, 1, 132),
        (512, 512, 1, 1),
    ],
)
def test_count_programs_fills_the_target_once(num_q_heads, num_kv_heads, block_q, expected):
    assert count_programs(AttentionConfig(), block_q, num_q_heads, num_kv_heads) == expected


def test_count_programs_of_one_kv_head_leaves_no_sm_of_an_h200_idle():
    programs = count_programs(AttentionConfig(target="h200"), 1, 8, 1)
    assert programs >= 132
    partition = partition_of(jnp.full(4, 9000, jnp.int32), num_tokens=4, num_q_heads=8, num_kv_heads=1)
    assert np.count_nonzero(loads(partition)) >= 132


def test_count_programs_that_are_given_are_taken():
    assert count_programs(AttentionConfig(num_programs=7), 1, 8, 1) == 7


@pytest.mark.parametrize(
    ("device_kind", "target"),
    [
        ("NVIDIA H200", "h200"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA L4", "l4"),
        ("NVIDIA L40S", "h200"),  # not in the table, and no L4
        ("cpu", "h200"),
    ],
)
def test_target_of_a_device_kind_is_its_word_in_the_table(device_kind, target):
    assert target_of(device_kind) == target
