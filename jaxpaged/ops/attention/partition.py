"""The work partition of the Triton kernel, computed on the device with static sizes.

Lay the KV ranges of all query tiles end to end: one stream of KV tokens. Every program takes an equal share of that
stream, across sequence boundaries, so that the longest sequence delays nobody: a program's load exceeds the mean by the
rounding of one division only. A share may begin and end inside a tile. A tile that lies in several shares is computed
in as many parts, which a second kernel merges; with `max_splits=1` shares are whole tiles, and nothing is merged.

The protocol between this module and the kernels is in `Tile`, `Share` and `Partition`: which keys of which tiles a
program reads, and in which rows of the partial results each part lies. Another way to cut needs no other kernel.

The partition follows from lengths, head counts and configuration alone: make it once a step and use it in every layer.
How many programs there are follows from the size of the GPU that `AttentionConfig.target` names, as each KV head, and
each block of query rows of one, runs them all.

Source: Stream-K (arXiv 2301.03598), applied to the KV dimension as in Flash-Decoding.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int32

from jaxpaged.cache.batch import Batch
from jaxpaged.cache.kv_cache import KVCache
from jaxpaged.cache.ragged import Partition, PartitionKey, Ragged, Share, Tile
from jaxpaged.config import DEFAULT_TARGET, SLOTS, AttentionConfig, cdiv
from jaxpaged.ops.attention.options import AttentionOptions

MIN_SHARE = 16
"""KV tokens. A smaller share costs more to merge than it saves to read."""

MAX_ROWS = 64
"""Query rows that a program holds at most. More rows of a KV head are several blocks, each with programs of its own."""


def partition_batch(
    batch: Batch,
    cache: KVCache,
    *,
    num_q_heads: int,
    sliding_windows: tuple[int | None, ...] = (None,),
    config: AttentionConfig | None = None,
) -> Batch:
    """Return the batch with a partition for each of a model's static windows: once a step, inside `jit`, before the
    layers.

    Args:
        cache: The cache that is attended to, or a shard of it: its KV heads share the programs of one GPU.
        num_q_heads: Query heads over those KV heads.
        sliding_windows: Those of the model's layers, each once; None is attention to all keys.
        config: Of all of them.
    """
    partitions = tuple(
        make_partition(
            batch.ragged,
            AttentionOptions(sliding_window=window, config=(config or AttentionConfig()).for_target(cache.target)),
            num_tokens=batch.token_ids.shape[0],
            num_q_heads=num_q_heads,
            num_kv_heads=cache.num_kv_heads,
            page_size=cache.page_size,
        )
        for window in sliding_windows
    )
    return dataclasses.replace(batch, ragged=dataclasses.replace(batch.ragged, partitions=partitions))


def key_of(ragged: Ragged, options: AttentionOptions, num_tokens: int) -> PartitionKey:
    """Return what a partition for such a call is made for."""
    window = options.static_window if options.traced_window is None else "traced"
    return PartitionKey(ragged.num_seqs, num_tokens, ragged.cu_q_lens is not None, window, options.causal)


def check_partition(partition: Partition, key: PartitionKey) -> None:
    """Raise TypeError for what is no partition, ValueError for one that was made for other queries or options."""
    if not isinstance(partition, Partition):
        raise TypeError(
            f"`partition` must be a Partition, from make_partition, or None; got {type(partition).__name__}."
        )
    if partition.made_for != key:
        raise ValueError(
            f"`partition` must be made for {key}; got one for {partition.made_for}. Make one a step for each window."
        )


def count_programs(config: AttentionConfig, block_q: int, num_q_heads: int, num_kv_heads: int) -> int:
    """Count the programs that share the stream, for each KV head and block of rows.

    Together they are as many as the target runs at once.

    A float32 tile has half the rows of others, so that its blocks run in two waves.
    """
    if config.num_programs is not None:
        return config.num_programs
    row_blocks = cdiv(block_q * (num_q_heads // num_kv_heads), MAX_ROWS)
    return max(1, SLOTS[config.target or DEFAULT_TARGET] // (num_kv_heads * row_blocks))


def make_partition(
    ragged: Ragged,
    options: AttentionOptions | None = None,
    *,
    num_tokens: int,
    num_q_heads: int,
    num_kv_heads: int,
    page_size: int,
) -> Partition:
    """Cut a step's attention into equal shares.

    Query j of a sequence with m queries and n KV tokens stands at position p = n - m + j and sees keys
    `max(0, p - sliding_window + 1) .. p`, or all n when not causal.

    Args:
        ragged: The sequences of the step. Of its page table, only the width matters.
        options: Window, causality and configuration; None for the defaults.
        num_tokens: Packed query rows, padding included.
        num_q_heads: Query heads over the KV heads of this device.
        num_kv_heads: KV heads of this device.
        page_size: Token slots a page.

    Returns:
        A `Partition` whose array sizes depend on static arguments only, so that it can be made inside `jax.jit`.

    Raises:
        ValueError: A decode step whose `num_tokens` is not its number of sequences.
    """
    options = options or AttentionOptions()
    config = options.config or AttentionConfig()
    if ragged.cu_q_lens is None and num_tokens != ragged.num_seqs:
        raise ValueError(
            f"`num_tokens` must be num_seqs = {ragged.num_seqs} in a decode step; got {num_tokens}. "
            "Pass cu_q_lens if sequences have several query tokens."
        )
    block_q = 1 if ragged.cu_q_lens is None else config.block_q
    queries = _queries(jnp.asarray(ragged.seq_lens), ragged.cu_q_lens, num_tokens, block_q)
    kv_end = jnp.minimum(queries.kv_len, queries.position + queries.num_q) if options.causal else queries.kv_len
    kv_end = jnp.where(queries.num_q > 0, jnp.maximum(kv_end, 0), 0)
    window = queries.kv_len if options.sliding_window is None else options.sliding_window
    kv_begin = jnp.clip(queries.position - window + 1, 0, kv_end)  # an int32 window is at least 1: this cannot wrap
    # A range without keys has the length 1: one program owns it, and writes its zeros.
    weight = jnp.where(queries.num_q > 0, jnp.maximum(1, kv_end - kv_begin), 0)
    stream_end = jnp.cumsum(weight, dtype=jnp.int32)
    ranges = _Ranges(kv_begin, kv_end, stream_end - weight, stream_end)

    if config.max_splits == 1:
        cut = _whole_tiles(ranges)
    elif config.split_size is not None:
        cut = _fixed_cuts(ranges, queries.token, num_tokens, config.split_size, ragged.max_pages * page_size)
    else:
        cut = _equal_shares(ranges, block_q, count_programs(config, block_q, num_q_heads, num_kv_heads))
    tiles = Tile(
        seq=queries.seq,
        token=queries.token,
        num_q=queries.num_q,
        position=queries.position,
        kv_begin=kv_begin,
        kv_end=kv_end,
        stream_begin=ranges.stream_begin,
        num_old=queries.num_old,
        num_parts=cut.num_parts,
        first_share=cut.first_share,
        first_part=cut.first_part,
    )
    return Partition(
        tiles=jnp.stack(tiles, axis=1),
        shares=jnp.stack(cut.shares, axis=1),
        cut_tiles=cut.cut_tiles,
        block_q=block_q,
        part_stride=cut.part_stride,
        num_part_rows=cut.num_part_rows,
        made_for=key_of(ragged, options, num_tokens),
        config=config,
    )


class _Queries(NamedTuple):
    """Of each tile, `[num_tiles]`: the fields of `Tile` that say which queries it holds, and the sequence's length."""

    seq: Array
    token: Array
    num_q: Array
    position: Array
    num_old: Array
    kv_len: Array


class _Ranges(NamedTuple):
    """Of each tile, `[num_tiles]`: its keys, and where they lie in the stream."""

    kv_begin: Array
    kv_end: Array
    stream_begin: Array
    stream_end: Array


class _Cut(NamedTuple):
    """A way to cut the stream: `Tile`, `Share` and `Partition` say what each of these is."""

    shares: Share
    num_parts: Array
    first_share: Array
    first_part: Array
    cut_tiles: Array
    part_stride: int
    num_part_rows: int


def _whole_tiles(ranges: _Ranges) -> _Cut:
    tile = _count(ranges.kv_begin.shape[0])
    none = jnp.zeros_like(tile)
    shares = Share(ranges.stream_begin, ranges.stream_end, tile, tile + 1)
    return _Cut(shares, none + 1, tile, none, none[:0], part_stride=0, num_part_rows=0)


def _equal_shares(ranges: _Ranges, block_q: int, num_programs: int) -> _Cut:
    """Shares of one size, but for the last ones.

    A tile from share f to share l puts its parts into places 2 f to f + l. The next tile that is cut begins in share l
    or later, at place 2 l, which is behind them: two places a share are enough, and nobody has to count parts.
    """
    total = ranges.stream_end[-1]
    size = jnp.maximum(MIN_SHARE, (total + num_programs - 1) // num_programs)
    share = _count(num_programs)
    begin = jnp.minimum(share * size, total)
    end = jnp.minimum(begin + size, total)
    tile_begin = jnp.sum(ranges.stream_end[None, :] <= begin[:, None], axis=1, dtype=jnp.int32)
    tile_end = jnp.sum(ranges.stream_begin[None, :] < end[:, None], axis=1, dtype=jnp.int32)
    first_share = ranges.stream_begin // size
    num_parts = jnp.maximum(ranges.stream_end - 1, ranges.stream_begin) // size - first_share + 1
    # A tile that is cut is the last that begins in some share: looking there finds each of them once.
    begins_here = (begin[:, None] <= ranges.stream_begin[None, :]) & (ranges.stream_begin[None, :] < end[:, None])
    last = jnp.max(jnp.where(begins_here, _count(ranges.stream_begin.shape[0])[None, :], -1), axis=1)
    return _Cut(
        Share(begin, end, tile_begin, tile_end),
        num_parts,
        first_share,
        first_part=2 * first_share * block_q,
        cut_tiles=last,
        part_stride=block_q,
        num_part_rows=2 * num_programs * block_q,
    )


def _fixed_cuts(ranges: _Ranges, token: Array, num_tokens: int, split_size: int, max_len: int) -> _Cut:
    """Return every tile cut at multiples of `split_size` of its sequence: `max_pieces` shares a tile, most of them
    empty.

    Part s of a tile lies where its queries lie among all queries, in the s-th of `max_pieces` such arrays.
    """
    kv_begin, kv_end = ranges.kv_begin, ranges.kv_end
    max_pieces, num_tiles = cdiv(max_len, split_size), kv_begin.shape[0]
    piece, tile = _count(max_pieces), _count(num_tiles)
    begin = jnp.maximum(kv_begin[:, None], (piece * split_size)[None, :])
    # The last takes whatever is left: lengths may claim more than a table holds.
    end = jnp.where(piece == max_pieces - 1, jnp.iinfo(jnp.int32).max, (piece + 1) * split_size)
    end = jnp.minimum(kv_end[:, None], end[None, :])
    # A tile without keys is one piece, for somebody has to write its zeros.
    alone = (kv_begin == kv_end)[:, None] & (piece == 0)[None, :]
    live = (begin < end) | alone
    begin, end = jnp.where(alone, 0, begin), jnp.where(alone, 1, end)
    origin = jnp.where(alone, 0, kv_begin[:, None])
    of_tile = jnp.broadcast_to(tile[:, None], live.shape)
    stream_begin = ranges.stream_begin[:, None] - origin
    shares = Share(stream_begin + begin, stream_begin + end, of_tile, of_tile + live.astype(jnp.int32))
    first_piece = jnp.where(kv_begin == kv_end, 0, jnp.minimum(kv_begin // split_size, max_pieces - 1))
    return _Cut(
        jax.tree.map(jnp.ravel, shares),
        num_parts=jnp.sum(live, axis=1, dtype=jnp.int32),
        first_share=tile * max_pieces + first_piece,
        first_part=first_piece * num_tokens + token,
        cut_tiles=tile,
        part_stride=num_tokens,
        num_part_rows=max_pieces * num_tokens,
    )


def _queries(
    seq_lens: Array, cu_q_lens: Int32[Array, "num_seqs_plus_1"] | None, num_tokens: int, block_q: int
) -> _Queries:
    """Cut every sequence's queries into tiles; a last sequence without keys owns the padding tokens."""
    num_seqs = seq_lens.shape[0]
    if cu_q_lens is None:
        seq = _count(num_seqs)
        return _Queries(seq, seq, jnp.ones_like(seq), seq_lens - 1, seq_lens - 1, seq_lens)
    cu_q_lens = jnp.asarray(cu_q_lens)
    q_lens = jnp.append(cu_q_lens[1:], jnp.int32(num_tokens)) - cu_q_lens
    kv_lens = jnp.append(seq_lens, jnp.int32(0))
    tiles = (q_lens + block_q - 1) // block_q
    tile_end = jnp.cumsum(tiles, dtype=jnp.int32)

    tile = _count(num_tokens // block_q + num_seqs + 1)
    seq = jnp.sum(tile_end[None, :] <= tile[:, None], axis=1, dtype=jnp.int32)
    seq = jnp.minimum(seq, num_seqs)
    begin = (tile - (tile_end - tiles)[seq]) * block_q
    num_q = jnp.clip(q_lens[seq] - begin, 0, block_q)
    num_old = kv_lens[seq] - q_lens[seq]
    return _Queries(seq, cu_q_lens[seq] + begin, num_q, num_old + begin, num_old, kv_lens[seq])


def _count(num: int) -> Int32[Array, "num"]:
    return jnp.arange(num, dtype=jnp.int32)
