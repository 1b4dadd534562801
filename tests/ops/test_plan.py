"""The plan, read back: every query's keys are attended to once, by shares of equal size."""

import dataclasses
import itertools
from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxpaged as jp
from jaxpaged.config import AttentionConfig, cdiv
from jaxpaged.ops import triton
from jaxpaged.ops.attention import attend
from jaxpaged.ops.plan import MIN_SHARE, Share, Tile, make_plan

jitted = jax.jit(make_plan, static_argnames=("num_tokens", "sliding_window", "causal", "config"))


def rows(cls, array):
    return [cls(*map(int, row)) for row in np.asarray(array)]


def pieces(plan):
    """(program, tile, first key, one past the last, has the tile's beginning, its end), as the kernel reads it."""
    tiles = rows(Tile, plan.tiles)
    for program, share in enumerate(rows(Share, plan.shares)):
        for t in range(share.tile_begin, share.tile_end):
            tile = tiles[t]
            offset = max(share.stream_begin - tile.stream_begin, 0)
            end = min(tile.kv_end, tile.kv_begin + share.stream_end - tile.stream_begin)
            yield program, t, tile.kv_begin + offset, end, offset == 0, bool(tile.stream_end <= share.stream_end)


def loads(plan):
    load = np.zeros(len(plan.shares), int)
    for program, _, begin, end, _, _ in pieces(plan):
        load[program] += max(0, end - begin)
    return load


def check_cover(plan):
    """Each tile's keys fall to pieces end to end, and two partial slots a program are enough."""
    tiles = rows(Tile, plan.tiles)
    by_tile = {t: [] for t in range(len(tiles))}
    partial = []
    for program, t, begin, end, starts, ends in pieces(plan):
        by_tile[t].append((begin, end, starts, ends))
        if not (starts and ends):
            partial.append((program, starts))
    assert len(set(partial)) == len(partial)
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


@pytest.mark.parametrize("num_programs", [16, 48, 66])
@pytest.mark.parametrize("pattern", patterns(16, 1024))
def test_make_plan_skewed_lengths_loads_within_ten_percent_of_mean(pattern, num_programs):
    lens = patterns(16, 1024)[pattern]
    plan = jitted(jnp.asarray(lens, jnp.int32), num_tokens=16, config=AttentionConfig(num_programs=num_programs))
    load = loads(plan)
    assert load.sum() == lens.sum()
    assert load.max() <= 1.10 * load.mean()


@pytest.mark.parametrize("window", [None, 1, 40])
@pytest.mark.parametrize("config", [AttentionConfig(num_programs=7), AttentionConfig(max_splits=1)])
def test_make_plan_decode_covers_each_key_once(config, window):
    rng = np.random.default_rng(1)
    for lens in ([], [1], [1000], [0, 5, 0, 300, 17, 1], rng.integers(0, 200, 40)):
        lens = np.pad(np.asarray(lens, np.int32), (0, 40 - len(lens)))
        plan = jitted(lens, num_tokens=40, sliding_window=window, config=config)
        check_cover(plan)
        for n, tile in zip(lens.tolist(), rows(Tile, plan.tiles), strict=True):
            assert (tile.kv_begin, tile.kv_end) == (max(0, n - (window or n)), n)
            assert tile.position == n - 1


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [None, 30])
def test_make_plan_ragged_gives_each_query_to_one_tile(window, causal):
    rng = np.random.default_rng(2)
    for _ in range(20):
        q_lens = rng.integers(0, 40, 6) * rng.integers(0, 2, 6)
        lens = q_lens + rng.integers(0, 300, 6)
        cu_q_lens = np.cumsum([0, *q_lens])
        plan = jitted(
            jnp.asarray(lens, jnp.int32),
            jnp.asarray(cu_q_lens, jnp.int32),
            num_tokens=240,
            sliding_window=window,
            causal=causal,
            config=AttentionConfig(num_programs=9, block_q=16),
        )
        check_cover(plan)
        seen = np.zeros(240, int)
        for tile in rows(Tile, plan.tiles):
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
@pytest.mark.parametrize("window", ["none", "static", "traced"])
@pytest.mark.parametrize("ragged", [False, True])
def test_make_plan_split_size_covers_each_key_once_at_fixed_cuts(ragged, window, causal):
    """Piece s of tile t is share t * max_pieces + s, from one multiple of the split to the next, and nobody else's."""
    rng, split, max_len = np.random.default_rng(5), 32, 300
    make = jax.jit(make_plan, static_argnames=("num_tokens", "causal", "max_len", "config"))
    config = AttentionConfig(split_size=split, block_q=8)
    for _ in range(25):
        lens = rng.integers(0, max_len + 1, 6) * rng.integers(0, 2, 6)
        q_lens = np.minimum(lens, rng.integers(0, 40, 6))
        cu_q_lens = jnp.asarray(np.cumsum([0, *q_lens]), jnp.int32) if ragged else None
        options = {} if window == "none" else {"sliding_window": int(rng.integers(1, 100))}
        if window == "traced":
            options = {"sliding_window": jnp.int32(options["sliding_window"])}
        make_ = make if window != "static" else make_plan
        num_tokens = 240 if ragged else 6
        plan = make_(
            jnp.asarray(lens, jnp.int32),
            cu_q_lens,
            num_tokens=num_tokens,
            causal=causal,
            max_len=max_len,
            config=config,
            **options,
        )
        tiles = rows(Tile, plan.tiles)
        seen = [np.zeros(max_len + 1, int) for _ in tiles]
        written = np.zeros(len(tiles), int)
        assert plan.max_pieces == cdiv(max_len, split)
        for program, t, begin, end, starts, ends in pieces(plan):
            tile, piece = tiles[t], program % plan.max_pieces
            assert t == program // plan.max_pieces
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


def test_make_plan_split_size_cuts_a_sequence_alike_in_any_batch():
    def cuts(lens, row):
        config = AttentionConfig(split_size=64)
        plan = make_plan(jnp.asarray(lens, jnp.int32), num_tokens=len(lens), max_len=1024, config=config)
        return [(begin, end) for _, t, begin, end, *_ in pieces(plan) if t == row]

    assert cuts([500], 0) == cuts([3, 0, 1024, 500, 77], 3) == [(i, min(i + 64, 500)) for i in range(0, 500, 64)]


def test_make_plan_split_size_of_a_length_beyond_the_table_keeps_its_last_piece():
    config = AttentionConfig(split_size=16)
    plan = make_plan(jnp.array([100], jnp.int32), num_tokens=1, max_len=32, config=config)
    assert [(begin, end) for _, _, begin, end, *_ in pieces(plan)] == [(0, 16), (16, 100)]


def test_make_plan_split_size_without_max_len_raises():
    message = r"`max_len` must be given with a `split_size`; got None\. Pass max_pages \* page_size"
    with pytest.raises(ValueError, match=message):
        make_plan(jnp.zeros(2, jnp.int32), num_tokens=2, config=AttentionConfig(split_size=16))


def test_make_plan_traced_window_equals_the_static():
    lens = jnp.array([0, 5, 300, 2000], jnp.int32)
    for window in (1, 128, 5000):
        static = make_plan(lens, num_tokens=4, sliding_window=window)
        traced = jax.jit(lambda lens, w: make_plan(lens, num_tokens=4, sliding_window=w))(lens, jnp.int32(window))
        chex.assert_trees_all_equal((static.tiles, static.shares), (traced.tiles, traced.shares))
        assert (static.made_for.sliding_window, traced.made_for.sliding_window) == (window, "traced")


def test_make_plan_window_reads_no_more_in_a_longer_context():
    work = [
        loads(make_plan(jnp.full(8, n, jnp.int32), num_tokens=8, sliding_window=window)).sum()
        for n in (128, 1024, 16384)
        for window in (128, jnp.int32(128))
    ]
    assert work == [8 * 128] * 6


def test_make_plan_short_batch_makes_no_share_below_the_minimum():
    plan = jitted(jnp.full(4, 20, jnp.int32), num_tokens=4, config=AttentionConfig(num_programs=64))
    assert np.count_nonzero(loads(plan)) == cdiv(80, MIN_SHARE)


def test_make_plan_max_splits_one_gives_each_tile_to_one_program():
    plan = jitted(jnp.array([3, 0, 5000], jnp.int32), num_tokens=3, config=AttentionConfig(max_splits=1))
    assert loads(plan).tolist() == [3, 0, 5000]


def test_make_plan_new_lengths_reuse_the_trace():
    @jax.jit
    @chex.assert_max_traces(n=1)
    def plan(lens):
        return make_plan(lens, num_tokens=4)

    for lens in ([1, 2, 3, 4], [0, 0, 0, 0], [4000, 1, 0, 7]):
        made = plan(jnp.array(lens, jnp.int32))
        chex.assert_shape([made.tiles, made.shares], [(4, 8), (AttentionConfig().num_programs, 4)])
        chex.assert_type([made.tiles, made.shares], jnp.int32)
    assert jax.tree.structure(made) == jax.tree.structure(plan(jnp.zeros(4, jnp.int32)))


def test_make_plan_decode_with_more_tokens_than_sequences_raises():
    with pytest.raises(ValueError, match=r"`num_tokens` must be num_seqs = 2 in a decode step; got 3\. Pass cu_q_lens"):
        make_plan(jnp.zeros(2, jnp.int32), num_tokens=3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
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
    return jp.Batch(
        token_ids=arrays[0], positions=arrays[1], slot_mapping=arrays[2], page_table=table, seq_lens=lens
    ), cache


@pytest.mark.parametrize("window", [None, pytest.param(3, marks=pytest.mark.slow)])
def test_plan_batch_serves_the_layers_of_each_window_and_others_make_their_own(window, monkeypatch):
    batch, cache = batch_of_three()
    q = jax.random.normal(jax.random.key(1), (3, 2, 16))
    run = partial(attend, q, cache, layer=1, backend="interpret")
    expected = [run(batch, sliding_window=w) for w in (window, 5)]
    planned = jax.jit(partial(jp.plan_batch, sliding_windows=(None, 3)))(batch)
    assert [plan.made_for.sliding_window for plan in planned.plans] == [None, 3]
    chex.assert_trees_all_equal(run(planned, sliding_window=5), expected[1])
    chex.assert_trees_all_equal(dataclasses.replace(planned, plans=()), batch)

    def refuse(*_, **__):
        raise AssertionError("a plan was made")

    monkeypatch.setattr(triton, "make_plan", refuse)
    chex.assert_trees_all_equal(run(planned, sliding_window=window), expected[0])
    for other in (5, jnp.int32(3)):
        with pytest.raises(AssertionError, match="a plan was made"):
            run(planned, sliding_window=other)
