"""`Batch`: what one step computes, as a frozen pytree of device arrays.

A batch knows shapes and positions. It knows neither the model nor how pages were chosen.
"""

import dataclasses
from collections.abc import Sequence

import jax
import numpy as np
from jaxtyping import Array, Int

from jaxpaged.cache.ragged import Ragged, locate_tokens
from jaxpaged.config import NULL_PAGE


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """The tokens of one step, packed sequence after sequence.

    Attributes:
        token_ids: `[num_tokens]` int32, the new token of each position.
        positions: `[num_tokens]` int32, its place in its sequence, from 0.
        ragged: The sequences that they belong to: page table, lengths, slots.
    """

    token_ids: Int[Array, "num_tokens"]
    positions: Int[Array, "num_tokens"]
    ragged: Ragged


def check_batch_values(
    batch: Batch,
    *,
    num_pages: int,
    page_size: int,
    vocab_size: int | None = None,
    sliding_windows: Sequence[int | None] | None = None,
) -> None:
    """Check on the host what no trace can see: the values of a batch.

    An index out of range does not fail on a device; it reads or writes another sequence's memory. The engine builds
    batches that hold by construction; call this on one that you built yourself. Copies the batch to the host.

    Args:
        num_pages: Pages of the pool, the null page included.
        vocab_size: If given, token ids are checked too.
        sliding_windows: Of each page group, the tokens that a token sees: pages before the window of a sequence's first
            new token may be `NULL_PAGE`. None means that no group has a window.

    Raises:
        ValueError: A value is out of range, two live tokens share a slot, or lengths and tables contradict each other.
    """
    ragged = batch.ragged
    token_ids, positions, slots, page_table, seq_lens = (
        np.asarray(x)
        for x in (batch.token_ids, batch.positions, ragged.slot_mapping, ragged.page_table, ragged.seq_lens)
    )
    by_group = page_table.ndim == 3
    for name, x, ndim in (
        ("token_ids", token_ids, 1),
        ("positions", positions, 1),
        ("slot_mapping", slots, 1 + by_group),
        ("page_table", page_table, 2 + by_group),
        ("seq_lens", seq_lens, 1),
    ):
        if x.ndim != ndim or not np.issubdtype(x.dtype, np.integer):
            raise ValueError(f"`{name}` must be integers with {ndim} axes; got {x.dtype} {x.shape}.")
    num_tokens, (num_seqs, max_pages) = len(token_ids), page_table.shape[-2:]
    if not len(positions) == slots.shape[-1] == num_tokens or len(seq_lens) != num_seqs:
        raise ValueError(
            f"`positions` and `slot_mapping` must be as long as `token_ids`, {num_tokens}, and `seq_lens` as "
            f"`page_table`, {num_seqs}; got {len(positions)}, {slots.shape[-1]} and {len(seq_lens)}."
        )
    tables, slots_of = (page_table, slots) if by_group else (page_table[None], slots[None])
    windows = [None] * len(tables) if sliding_windows is None else list(sliding_windows)
    if not len(tables) == len(slots_of) == len(windows):
        raise ValueError(
            "`page_table`, `slot_mapping` and `sliding_windows` must have one for each page group; got "
            f"{len(tables)}, {len(slots_of)} and {len(windows)}."
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
    if ragged.cu_q_lens is not None:
        cu_q_lens = np.asarray(ragged.cu_q_lens)
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
    page = np.arange(max_pages)
    unused = page >= -(-seq_lens // page_size)[:, None]
    first = seq_lens - q_lens
    passed = np.stack([np.maximum(0, first - w + 1) // page_size if w else np.zeros_like(first) for w in windows])
    in_pool = (tables > NULL_PAGE) & (tables < num_pages)
    _require(
        "page_table",
        page_table,
        (unused | in_pool | ((tables == NULL_PAGE) & (page < passed[..., None]))).reshape(page_table.shape),
        f"hold page ids from 1 to num_pages - 1 = {num_pages - 1} where a sequence has tokens",
        f"Page {NULL_PAGE} is the null page; only what `sliding_windows` have passed may be it.",
    )
    row, position, live = (np.asarray(x) for x in locate_tokens(ragged.seq_lens, ragged.cu_q_lens, num_tokens))
    _require(
        "positions",
        positions,
        ~live | (positions == position),
        "continue its sequence",
        "Token j of m new ones in a sequence of n stands at n - m + j.",
    )
    home = tables[:, row, position // page_size] * page_size + position % page_size
    _require(
        "slot_mapping",
        slots,
        (~live | (slots_of == home)).reshape(slots.shape),
        "be the slot of this position in `page_table`",
        "Slot = page_id * page_size + offset.",
    )
    first_use = np.zeros(slots_of.shape, bool)
    for group, group_slots in enumerate(slots_of):
        first_use[group, np.unique(group_slots, return_index=True)[1]] = True
    _require(
        "slot_mapping",
        slots,
        first_use.reshape(slots.shape),
        "be distinct from the slots before it",
        "Where two sequences share a page, copy it first (PageAllocator.append); number padding tokens upwards.",
    )
    owners = np.bincount(tables[~unused & in_pool], minlength=num_pages)
    _require(
        "slot_mapping",
        slots,
        (~live | (owners[np.where(live, slots_of // page_size, 0)] <= 1)).reshape(slots.shape),
        "lie in a page that no other sequence holds",
        "Copy a shared page before writing to it (PageAllocator.append); page groups share none.",
    )
    _require(
        "slot_mapping",
        slots,
        (live | (slots_of >= num_pages * page_size)).reshape(slots.shape),
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
    """Raise for the first value that is not good."""
    bad = np.argwhere(~good)
    if len(bad):
        place = ", ".join(map(str, bad[0]))
        raise ValueError(f"`{name}[{place}]` must {expected}; got {values[tuple(bad[0])]}. {hint}")
