"""`Batch`: what one step computes, as a frozen pytree of device arrays.

A batch knows shapes and positions. It knows neither the model nor how pages were chosen.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from jaxpaged.config import NULL_PAGE


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """The tokens of one step, packed sequence after sequence.

    Attributes:
        token_ids: `[num_tokens]` int32, the new token of each position.
        positions: `[num_tokens]` int32, its place in its sequence, from 0.
        slot_mapping: `[num_tokens]` int32, `page_id * page_size + offset` where its K and V go. Padding tokens hold
            distinct numbers past the last slot of the pool, and are dropped.
        page_table: `[num_seqs, max_pages]` int32, padded with `NULL_PAGE`.
        seq_lens: `[num_seqs]` int32, KV tokens of each sequence, this step's included; 0 is a padding row.
        cu_q_lens: `[num_seqs + 1]` int32, prefix sums of the new tokens of each sequence; None where each sequence
            has one (decode). Which of the two it is, is part of the trace.
        plans: How the Triton kernel cuts this step's attention, a plan for each sliding window that the model mixes:
            `jaxpaged.plan_batch` makes them, once for all layers. A layer whose window has none makes its own.
    """

    token_ids: Int[Array, "num_tokens"]
    positions: Int[Array, "num_tokens"]
    slot_mapping: Int[Array, "num_tokens"]
    page_table: Int[Array, "num_seqs max_pages"]
    seq_lens: Int[Array, "num_seqs"]
    cu_q_lens: Int[Array, "num_seqs_plus_1"] | None = None
    plans: tuple[Any, ...] = ()  # of `ops.plan.AttentionPlan`, which stands above this module


def locate_tokens(
    seq_lens: Int[Array, "num_seqs"], cu_q_lens: Int[Array, "num_seqs_plus_1"] | None, num_tokens: int
) -> tuple[Int[Array, "num_tokens"], Int[Array, "num_tokens"], Bool[Array, "num_tokens"]]:
    """Which sequence each packed token belongs to, and where in it.

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


def check_batch_values(batch: Batch, *, num_pages: int, page_size: int, vocab_size: int | None = None) -> None:
    """Checks on the host what no trace can see: the values of a batch.

    An index out of range does not fail on a device; it reads or writes another sequence's memory. The engine builds
    batches that hold by construction; call this on one that you built yourself. Copies the batch to the host.

    Args:
        num_pages: Pages of the pool, the null page included.
        vocab_size: If given, token ids are checked too.

    Raises:
        ValueError: A value is out of range, two live tokens share a slot, or lengths and tables contradict each other.
    """
    token_ids, positions, slots, page_table, seq_lens = (
        np.asarray(x) for x in (batch.token_ids, batch.positions, batch.slot_mapping, batch.page_table, batch.seq_lens)
    )
    for name, x, ndim in (
        ("token_ids", token_ids, 1),
        ("positions", positions, 1),
        ("slot_mapping", slots, 1),
        ("page_table", page_table, 2),
        ("seq_lens", seq_lens, 1),
    ):
        if x.ndim != ndim or not np.issubdtype(x.dtype, np.integer):
            raise ValueError(f"`{name}` must be integers with {ndim} axes; got {x.dtype} {x.shape}.")
    num_tokens, max_pages = len(token_ids), page_table.shape[1]
    if not len(positions) == len(slots) == num_tokens or len(seq_lens) != len(page_table):
        raise ValueError(
            f"`positions` and `slot_mapping` must be as long as `token_ids`, {num_tokens}, and `seq_lens` as "
            f"`page_table`, {len(page_table)}; got {len(positions)}, {len(slots)} and {len(seq_lens)}."
        )
    room = max_pages * page_size
    _require(
        "seq_lens",
        seq_lens,
        (seq_lens >= 0) & (seq_lens <= room),
        f"be from 0 to max_pages * page_size = {max_pages} * {page_size} = {room}",
        "0 marks a padding row; a longer sequence needs a wider page table.",
    )
    q_lens = (seq_lens > 0).astype(np.int32)
    if batch.cu_q_lens is not None:
        cu_q_lens = np.asarray(batch.cu_q_lens)
        rising = np.diff(cu_q_lens, prepend=0) >= 0
        rising[0] = cu_q_lens[0] == 0
        _require(
            "cu_q_lens",
            cu_q_lens,
            rising & (cu_q_lens <= num_tokens),
            f"start at 0, never fall, and end at num_tokens = {num_tokens} or before",
            "It holds the prefix sums of the new tokens of each sequence.",
        )
        q_lens = np.diff(cu_q_lens)
    _require(
        "seq_lens", seq_lens, q_lens <= seq_lens, "include this step's tokens", "Count the KV tokens after the step."
    )
    unused = np.arange(max_pages)[None, :] >= -(-seq_lens // page_size)[:, None]
    _require(
        "page_table",
        page_table,
        unused | ((page_table > NULL_PAGE) & (page_table < num_pages)),
        f"hold page ids from 1 to num_pages - 1 = {num_pages - 1} where a sequence has tokens",
        f"Page {NULL_PAGE} is the null page.",
    )
    row, position, live = (np.asarray(x) for x in locate_tokens(batch.seq_lens, batch.cu_q_lens, num_tokens))
    _require(
        "positions",
        positions,
        ~live | (positions == position),
        "continue its sequence",
        "Token j of m new ones in a sequence of n stands at n - m + j.",
    )
    home = page_table[row, position // page_size] * page_size + position % page_size
    _require(
        "slot_mapping",
        slots,
        ~live | (slots == home),
        "be the slot of this position in `page_table`",
        "Slot = page_id * page_size + offset.",
    )
    first_use = np.zeros(num_tokens, bool)
    first_use[np.unique(slots, return_index=True)[1]] = True
    _require(
        "slot_mapping",
        slots,
        first_use,
        "be distinct from the slots before it",
        "Where two sequences share a page, copy it first (PageAllocator.append); number padding tokens upwards.",
    )
    owners = np.bincount(page_table[~unused], minlength=num_pages)
    _require(
        "slot_mapping",
        slots,
        ~live | (owners[np.where(live, slots // page_size, 0)] <= 1),
        "lie in a page that no other sequence holds",
        "Copy a shared page before writing to it (PageAllocator.append).",
    )
    _require(
        "slot_mapping",
        slots,
        live | (slots >= num_pages * page_size),
        f"be num_pages * page_size = {num_pages * page_size} or more at a padding token",
        "Smaller ones, negative ones too, overwrite live slots.",
    )
    if vocab_size is not None:
        _require(
            "token_ids",
            token_ids,
            ~live | ((token_ids >= 0) & (token_ids < vocab_size)),
            f"be from 0 to vocab_size - 1 = {vocab_size - 1}",
            "Does the tokenizer belong to this model?",
        )


def _require(name: str, values: np.ndarray, good: np.ndarray, expected: str, hint: str) -> None:
    """Raises for the first value that is not good."""
    bad = np.argwhere(~good)
    if len(bad):
        place = ", ".join(map(str, bad[0]))
        raise ValueError(f"`{name}[{place}]` must {expected}; got {values[tuple(bad[0])]}. {hint}")
