"""The work partition of the Triton kernel, computed on the device with static sizes.

Lay the KV ranges of all query tiles end to end: one stream of KV tokens. Every program takes an equal share of that
stream, across sequence boundaries, so that the longest sequence delays nobody: a program's load exceeds the mean by the
rounding of one division only. A share may begin and end inside a tile, hence at most its first and its last piece are
partial, and two slots a program hold all partial results. Only `max_splits=1` gives whole tiles to programs.

The plan follows from lengths alone: make it once a step and use it in every layer. This module knows nothing of heads,
pages or memory.

Source: Stream-K (arXiv 2301.03598), applied to the KV dimension as in Flash-Decoding.
"""

import dataclasses
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int32

from jaxpaged.batch import Batch
from jaxpaged.config import AttentionConfig, cdiv

MIN_SHARE = 16
"""KV tokens. A smaller share costs more to merge than it saves to read."""


class Tile(NamedTuple):
    """Neighbouring queries of one sequence. Arrays `[num_tiles]` in the making, scalars in a kernel."""

    seq: Array
    """Row of the page table."""
    token: Array
    """Packed row of its first query."""
    num_q: Array
    """Queries in it; 0 in the tiles that a ragged batch leaves over."""
    position: Array
    """Position of its first query in the sequence."""
    kv_begin: Array
    """First KV token that any of its queries sees."""
    kv_end: Array
    """One past the last; equal to `kv_begin` for padding."""
    stream_begin: Array
    """Where its KV range begins in the stream."""
    num_old: Array
    """KV tokens of the sequence before this step's."""

    @property
    def stream_end(self) -> Array:
        """A range without keys has the length 1: one program owns it, and writes its zeros."""
        return self.stream_begin + jnp.maximum(1, self.kv_end - self.kv_begin)


class Share(NamedTuple):
    """What one program does. Arrays `[num_programs]` in the making, scalars in a kernel."""

    stream_begin: Array
    stream_end: Array
    tile_begin: Array
    tile_end: Array


class PlanKey(NamedTuple):
    """What must be the same in a plan and in the calls that use it, the lengths' values apart."""

    num_seqs: int
    num_tokens: int
    ragged: bool
    sliding_window: int | Literal["traced"] | None
    causal: bool

    @classmethod
    def of(cls, seq_lens, q, cu_q_lens, sliding_window, causal: bool) -> "PlanKey":
        """The key of a call: of its arrays, only the first axis matters."""
        window = "traced" if isinstance(sliding_window, jax.Array) else sliding_window
        return cls(len(seq_lens), len(q), cu_q_lens is not None, window, causal)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AttentionPlan:
    """Who attends to what, for one step and one sliding window.

    Attributes:
        tiles: One `Tile` a row.
        shares: One `Share` a row.
        block_q: Queries a tile, at most; 1 in a decode step.
        max_pieces: With a `split_size`, how many pieces a tile has at most: share `t * max_pieces + s` is piece s of
            tile t.
        made_for: Which calls it fits.
        config: The configuration that it was made with.
    """

    tiles: Int32[Array, "num_tiles 8"]
    shares: Int32[Array, "num_programs 4"]
    block_q: int = dataclasses.field(metadata={"static": True})
    max_pieces: int | None = dataclasses.field(metadata={"static": True})
    made_for: PlanKey = dataclasses.field(metadata={"static": True})
    config: AttentionConfig = dataclasses.field(metadata={"static": True})


def check_plan(plan: AttentionPlan, key: PlanKey) -> None:
    """Raises TypeError for what is no plan, ValueError for one that was made for other queries or options."""
    if not isinstance(plan, AttentionPlan):
        raise TypeError(f"`plan` must be an AttentionPlan, from make_plan, or None; got {type(plan).__name__}.")
    if plan.made_for != key:
        raise ValueError(
            f"`plan` must be made for {key}; got one for {plan.made_for}. Make one a step for each window."
        )


def plan_batch(
    batch: Batch, *, sliding_windows: tuple[int | None, ...] = (None,), config: AttentionConfig | None = None
) -> Batch:
    """The batch with a plan for each of a model's static windows in it: once a step, inside `jit`, before the layers.

    Args:
        sliding_windows: Those of the model's layers, each once; None is attention to all keys.
        config: Of all of them.
    """
    plans = tuple(
        make_plan(
            batch.seq_lens,
            batch.cu_q_lens,
            num_tokens=batch.token_ids.shape[0],
            sliding_window=window,
            config=config,
        )
        for window in sliding_windows
    )
    return dataclasses.replace(batch, plans=plans)


def find_plan(plans: tuple[AttentionPlan, ...], key: PlanKey) -> AttentionPlan | None:
    """The plan that was made for such calls. None for a traced window: its value is not in the key."""
    if key.sliding_window == "traced":
        return None
    return next((plan for plan in plans if plan.made_for == key), None)


def make_plan(
    seq_lens: Int32[Array, " num_seqs"],
    cu_q_lens: Int32[Array, " num_seqs_plus_one"] | None = None,
    *,
    num_tokens: int,
    sliding_window: int | Int32[Array, ""] | None = None,
    causal: bool = True,
    max_len: int | None = None,
    config: AttentionConfig | None = None,
) -> AttentionPlan:
    """Cuts a step's attention into equal shares.

    Query j of a sequence with m queries and n KV tokens stands at position p = n - m + j and sees keys
    `max(0, p - sliding_window + 1) .. p`, or all n when not causal.

    Args:
        seq_lens: KV tokens of each sequence, this step's included; 0 for a padding row.
        cu_q_lens: Prefix sums of the sequences' query counts; None in a decode step, one query a sequence.
        num_tokens: Packed query rows, padding included.
        sliding_window: Tokens a query sees, itself included; None for all. An int, or an int32 scalar array.
        max_len: KV tokens that a sequence may have: the width of the page table in tokens. Needed with a `split_size`.
        causal: Whether a query sees only keys up to its own position.
        config: Number of programs and tile sizes; None for the defaults.

    Returns:
        An `AttentionPlan` whose array sizes depend on static arguments only, so that it can be made inside `jax.jit`.

    Raises:
        ValueError: A decode step whose `num_tokens` is not its number of sequences; a `split_size` without `max_len`.
    """
    config = config or AttentionConfig()
    if config.split_size is not None and max_len is None:
        raise ValueError("`max_len` must be given with a `split_size`; got None. Pass max_pages * page_size.")
    num_seqs = seq_lens.shape[0]
    if cu_q_lens is None and num_tokens != num_seqs:
        raise ValueError(
            f"`num_tokens` must be num_seqs = {num_seqs} in a decode step; got {num_tokens}. "
            "Pass cu_q_lens if sequences have several query tokens."
        )
    block_q = 1 if cu_q_lens is None else config.block_q
    if cu_q_lens is None:
        seq = token = jnp.arange(num_seqs, dtype=jnp.int32)
        num_q = jnp.ones_like(seq)
        position = seq_lens - 1
        kv_len, num_old = seq_lens, position
    else:
        seq, token, num_q, position, kv_len, num_old = _ragged_tiles(seq_lens, cu_q_lens, num_tokens, block_q)

    kv_end = jnp.minimum(kv_len, position + num_q) if causal else kv_len
    kv_end = jnp.where(num_q > 0, jnp.maximum(kv_end, 0), 0)
    window = kv_len if sliding_window is None else sliding_window
    kv_begin = jnp.clip(position - window + 1, 0, kv_end)  # an int32 window is at least 1: this cannot wrap
    weight = jnp.where(num_q > 0, jnp.maximum(1, kv_end - kv_begin), 0)
    stream_end = jnp.cumsum(weight, dtype=jnp.int32)
    stream_begin = stream_end - weight
    tiles = Tile(seq, token, num_q, position, kv_begin, kv_end, stream_begin, num_old)

    max_pieces = None
    if config.max_splits == 1:
        tile = jnp.arange(seq.shape[0], dtype=jnp.int32)
        shares = Share(stream_begin, stream_end, tile, tile + 1)
    elif config.split_size is not None and max_len is not None:
        max_pieces = cdiv(max_len, config.split_size)
        shares = _fixed_shares(tiles, config.split_size, max_pieces)
    else:
        total = stream_end[-1]
        size = jnp.maximum(MIN_SHARE, (total + config.num_programs - 1) // config.num_programs)
        begin = jnp.minimum(jnp.arange(config.num_programs, dtype=jnp.int32) * size, total)
        end = jnp.minimum(begin + size, total)
        shares = Share(
            begin,
            end,
            jnp.sum(stream_end[None, :] <= begin[:, None], axis=1, dtype=jnp.int32),
            jnp.sum(stream_begin[None, :] < end[:, None], axis=1, dtype=jnp.int32),
        )
    return AttentionPlan(
        tiles=jnp.stack(tiles, axis=1),
        shares=jnp.stack(shares, axis=1),
        block_q=block_q,
        max_pieces=max_pieces,
        made_for=PlanKey.of(seq_lens, range(num_tokens), cu_q_lens, sliding_window, causal),
        config=config,
    )


def _fixed_shares(tiles: Tile, split_size: int, max_pieces: int) -> Share:
    """Every tile cut at multiples of `split_size` of its sequence: `max_pieces` shares a tile, most of them empty."""
    piece = jnp.arange(max_pieces, dtype=jnp.int32)
    begin = jnp.maximum(tiles.kv_begin[:, None], piece * split_size)
    # The last takes whatever is left: lengths may claim more than a table holds.
    end = jnp.where(piece == max_pieces - 1, jnp.iinfo(jnp.int32).max, (piece + 1) * split_size)
    end = jnp.minimum(tiles.kv_end[:, None], end)
    # A tile without keys is one piece, for somebody has to write its zeros.
    alone = (tiles.kv_begin == tiles.kv_end)[:, None] & (piece == 0)
    live = (begin < end) | alone
    begin, end = jnp.where(alone, 0, begin), jnp.where(alone, 1, end)
    origin = jnp.where(alone, 0, tiles.kv_begin[:, None])
    tile = jnp.broadcast_to(jnp.arange(len(tiles.seq), dtype=jnp.int32)[:, None], live.shape)
    stream_begin = tiles.stream_begin[:, None] - origin
    share = Share(stream_begin + begin, stream_begin + end, tile, tile + live)
    return jax.tree.map(jnp.ravel, share)


def _ragged_tiles(seq_lens: Array, cu_q_lens: Array, num_tokens: int, block_q: int) -> tuple[Array, ...]:
    """Cuts every sequence's queries into tiles; a last sequence without keys owns the padding tokens.

    Returns `seq`, `token`, `num_q`, `position`, the sequence's KV length and what of it is old, `[num_tiles]` each.
    """
    num_seqs = seq_lens.shape[0]
    q_lens = jnp.append(cu_q_lens[1:], num_tokens) - cu_q_lens
    kv_lens = jnp.append(seq_lens, 0)
    tiles = (q_lens + block_q - 1) // block_q
    tile_end = jnp.cumsum(tiles, dtype=jnp.int32)

    tile = jnp.arange(num_tokens // block_q + num_seqs + 1, dtype=jnp.int32)
    seq = jnp.sum(tile_end[None, :] <= tile[:, None], axis=1, dtype=jnp.int32)
    seq = jnp.minimum(seq, num_seqs)
    begin = (tile - (tile_end - tiles)[seq]) * block_q
    num_q = jnp.clip(q_lens[seq] - begin, 0, block_q)
    num_old = kv_lens[seq] - q_lens[seq]
    return seq, cu_q_lens[seq] + begin, num_q, num_old + begin, kv_lens[seq], num_old
