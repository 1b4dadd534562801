"""`Ragged`: the sequences of one step, packed one after another: who attends to what, and where new K and V go.

`Partition` is the cut of that work into equal shares. It is defined here, because a step carries it, and made in
`jaxpaged.ops.attention.partition`. Nothing here knows a model, a head or a kernel.
"""

import dataclasses
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, Int32

from jaxpaged.config import AttentionConfig


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
    num_parts: Array
    """Shares that its KV range is spread over. One of 1 is finished by the program that owns it."""
    first_share: Array
    """The share in which its KV range begins."""
    first_part: Array
    """Row of the partial results where those of its first part begin; part i begins `i * part_stride` behind it."""


class Share(NamedTuple):
    """What one program does. Arrays `[num_shares]` in the making, scalars in a kernel."""

    stream_begin: Array
    stream_end: Array
    tile_begin: Array
    tile_end: Array


class PartitionKey(NamedTuple):
    """What must be the same in a partition and in the calls that use it, the lengths' values apart."""

    num_seqs: int
    num_tokens: int
    ragged: bool
    sliding_window: int | Literal["traced"] | None
    causal: bool


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Partition:
    """The cut of one step's attention, for one sliding window: which program reads which KV tokens for which queries.

    Attributes:
        tiles: One `Tile` a row.
        shares: One `Share` a row.
        cut_tiles: The tiles that were cut, whose parts have to be merged, each once; -1 where there is none. A tile
            of fewer than two parts may stand here too.
        block_q: Queries a tile, at most; 1 in a decode step.
        part_stride: Rows of partial results from one part of a tile to its next.
        num_part_rows: Rows of partial results in all.
        made_for: The calls that it fits.
        config: The configuration that it was made with.
    """

    tiles: Int32[Array, "num_tiles 11"]
    shares: Int32[Array, "num_shares 4"]
    cut_tiles: Int32[Array, "num_cuts"]
    block_q: int = dataclasses.field(metadata={"static": True})
    part_stride: int = dataclasses.field(metadata={"static": True})
    num_part_rows: int = dataclasses.field(metadata={"static": True})
    made_for: PartitionKey = dataclasses.field(metadata={"static": True})
    config: AttentionConfig = dataclasses.field(metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Ragged:
    """The sequences of one step, packed: what a write and attention need of it, the same in all layers.

    Attributes:
        page_table: `[num_seqs, max_pages]` int32, padded with `NULL_PAGE`. Where the layers of the model are in several
            page groups, one for each: `[num_groups, num_seqs, max_pages]`, with `NULL_PAGE` where a window has passed.
        seq_lens: `[num_seqs]` int32, KV tokens of each sequence, this step's included; 0 is a padding row.
        slot_mapping: `[num_tokens]` int32, `page_id * page_size + offset` where K and V of each token go. Padding
            tokens hold distinct numbers past the last slot of the pool, and are dropped. None where nothing is written.
            With several page groups `[num_groups, num_tokens]`.
        cu_q_lens: `[num_seqs + 1]` int32, prefix sums of the new tokens of each sequence; None where each sequence
            has one (decode). Which of the two it is, is part of the trace.
        tree_mask: `[num_tokens, max_q_len]` bool, which of its sequence's new tokens each token sees, itself included:
            its ancestors in a tree of drafts. None: all before it.
        partitions: Cuts of this step's attention, one for each sliding window that the model mixes:
            `jaxpaged.partition_batch` makes them, once for all layers. A layer whose window has none makes its own.
    """

    page_table: Int[Array, "*num_groups num_seqs max_pages"]
    seq_lens: Int[Array, "num_seqs"]
    slot_mapping: Int[Array, "*num_groups num_tokens"] | None = None
    cu_q_lens: Int[Array, "num_seqs_plus_1"] | None = None
    tree_mask: Bool[Array, "num_tokens max_q_len"] | None = None
    partitions: tuple[Partition, ...] = ()

    @property
    def num_seqs(self) -> int:
        """Sequences, padding rows included."""
        return self.seq_lens.shape[0]

    @property
    def max_pages(self) -> int:
        """Pages that a sequence may have: the width of the page table."""
        return self.page_table.shape[-1]

    @property
    def num_groups(self) -> int:
        """Page groups that it has a page table for."""
        return self.page_table.shape[0] if self.page_table.ndim == 3 else 1

    def of_group(self, group: int | Int[Array, ""]) -> "Ragged":
        """Return the sequences as the layers of one page group see them: with its page table and its slots alone."""
        if self.page_table.ndim != 3:
            return self
        table, slots = jax.tree.map(
            lambda x: jnp.asarray(x)[group] if isinstance(group, jax.Array) else x[group],  # numpy takes no tracer
            (self.page_table, self.slot_mapping),
        )
        return dataclasses.replace(self, page_table=table, slot_mapping=slots)

    def partition_for(self, key: PartitionKey) -> Partition | None:
        """Return the partition that was made for such calls, or None."""
        return next((partition for partition in self.partitions if partition.made_for == key), None)


def locate_tokens(
    seq_lens: Int[Array, "num_seqs"], cu_q_lens: Int[Array, "num_seqs_plus_1"] | None, num_tokens: int
) -> tuple[Int[Array, "num_tokens"], Int[Array, "num_tokens"], Bool[Array, "num_tokens"]]:
    """Return which sequence each packed token belongs to, and where in it.

    Token j of a sequence with m new and n KV tokens stands at position `n - m + j`.

    Returns:
        Row in the page table, position, and whether the token is live. Padding gets row 0 and position 0.
    """
    token = jnp.arange(num_tokens, dtype=jnp.int32)
    if cu_q_lens is None:
        live = seq_lens > 0
        return jnp.where(live, token, 0), jnp.where(live, seq_lens - 1, 0), live
    row = jnp.searchsorted(cu_q_lens, token, side="right").astype(jnp.int32) - 1
    live = row < seq_lens.shape[0]
    row = jnp.where(live, row, 0)
    position = seq_lens[row] - cu_q_lens[row + 1] + token
    return row, jnp.where(live, position, 0), live
