"""`Batch`: what one step computes, as a frozen pytree of device arrays.

A batch knows shapes and positions. It knows neither the model nor how pages were chosen.
"""

import dataclasses

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
    """

    token_ids: Int[Array, "num_tokens"]
    positions: Int[Array, "num_tokens"]
    slot_mapping: Int[Array, "num_tokens"]
    page_table: Int[Array, "num_seqs max_pages"]
    seq_lens: Int[Array, "num_seqs"]
    cu_q_lens: Int[Array, "num_seqs_plus_1"] | None = None


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
    max_pages = page_table.shape[1]
    _check(seq_lens.min(initial=0) >= 0, "seq_lens", "not be negative", seq_lens, "0 marks a padding row.")
    _check(
        seq_lens.max(initial=0) <= max_pages * page_size,
        "seq_lens",
        f"be at most max_pages * page_size = {max_pages} * {page_size} = {max_pages * page_size}",
        seq_lens,
        "Widen the page table.",
    )
    q_lens = (seq_lens > 0).astype(np.int32)
    if batch.cu_q_lens is not None:
        cu_q_lens = np.asarray(batch.cu_q_lens)
        q_lens = np.diff(cu_q_lens)
        _check(
            cu_q_lens[0] == 0 and q_lens.min(initial=0) >= 0 and cu_q_lens[-1] <= len(token_ids),
            "cu_q_lens",
            f"start at 0, never fall, and end at num_tokens = {len(token_ids)} or before",
            cu_q_lens,
            "It holds the prefix sums of the new tokens of each sequence.",
        )
    _check(
        bool(np.all(q_lens <= seq_lens)),
        "seq_lens",
        f"include this step's tokens {q_lens.tolist()}",
        seq_lens,
        "Count the KV tokens after the step.",
    )
    used = np.arange(max_pages)[None, :] < -(-seq_lens // page_size)[:, None]
    live_ids = page_table[used]
    _check(
        bool(np.all((live_ids > NULL_PAGE) & (live_ids < num_pages))),
        "page_table",
        f"hold page ids from 1 to num_pages - 1 = {num_pages - 1} in the pages that a sequence uses",
        live_ids,
        f"Page {NULL_PAGE} is the null page.",
    )
    located = locate_tokens(batch.seq_lens, batch.cu_q_lens, len(token_ids))
    row, expected, live = (np.asarray(x) for x in located)
    _check(
        bool(np.all(positions[live] == expected[live])),
        "positions",
        f"continue each sequence: {expected[live].tolist()}",
        positions[live],
        "Token j of m new ones in a sequence of n stands at n - m + j.",
    )
    home = page_table[row, expected // page_size] * page_size + expected % page_size
    _check(
        bool(np.all(slots[live] == home[live])),
        "slot_mapping",
        f"name the slots of these positions in `page_table`: {home[live].tolist()}",
        slots[live],
        "Slot = page_id * page_size + offset; two sequences may not write one slot.",
    )
    _check(
        len(np.unique(slots[live])) == int(live.sum()),
        "slot_mapping",
        "be distinct",
        slots[live],
        "Two sequences write one page: copy it first (PageAllocator.append).",
    )
    padding = slots[~live]
    _check(
        bool(np.all(padding >= num_pages * page_size)) and len(np.unique(padding)) == len(padding),
        "slot_mapping",
        f"hold distinct numbers >= num_pages * page_size = {num_pages * page_size} at padding tokens",
        padding,
        "Smaller ones, negative ones too, overwrite live slots.",
    )
    if vocab_size is not None:
        _check(
            bool(np.all((token_ids[live] >= 0) & (token_ids[live] < vocab_size))),
            "token_ids",
            f"be from 0 to vocab_size - 1 = {vocab_size - 1}",
            token_ids[live],
            "Does the tokenizer belong to this model?",
        )


def _check(holds: bool, name: str, expected: str, got: np.ndarray, hint: str) -> None:
    if not holds:
        raise ValueError(f"`{name}` must {expected}; got {got.tolist()}. {hint}")
