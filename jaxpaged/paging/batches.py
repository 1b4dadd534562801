"""One append to many sequences: each step of it is a pass of numpy, without a Python loop over the sequences."""

from collections.abc import Hashable, Sequence
from typing import SupportsIndex

import numpy as np
import numpy.typing as npt

from jaxpaged.checks import as_count
from jaxpaged.config import NULL_PAGE, cdiv
from jaxpaged.paging.lru import PageIds
from jaxpaged.paging.pool import OutOfPagesError
from jaxpaged.paging.records import PageCopy
from jaxpaged.paging.sequences import Sequences
from jaxpaged.paging.tables import PageTable, Rows

_MAX_TOKENS = 2**31
"""No sequence gets so long: slots are int32."""
_NO_PAGES = np.zeros(0, np.intp)


class BatchAppend:
    """An append to many sequences: first its cost, then `pass_windows`, then `grow` with the pages taken for it.

    It decides as appends to one sequence after another would.

    Args:
        sequences: All sequences.
        rows: The rows that grow.
        counts: [len(rows)] tokens that each of them gets.
        num_computed: [len(rows)] tokens of each that are computed.

    Attributes:
        taken: [len(rows)] pages that each row takes.
        num_freed: Pages that are freed because windows pass them.
    """

    def __init__(
        self, sequences: Sequences, rows: Rows, counts: npt.NDArray[np.intp], num_computed: npt.NDArray[np.intp]
    ):
        self._sequences, self._rows, self._counts = sequences, rows, counts
        size, lengths = sequences.page_size, sequences.num_tokens[rows]
        added = -(-(lengths + counts) // size) - -(-lengths // size)
        writes_last = (counts > 0) & (lengths % size > 0)
        self._copies_last = [self._copying_rows(table, writes_last) for table in sequences.tables]
        self._taken_by_group = [added + copying for copying in self._copies_last]
        self.taken = sum(self._taken_by_group[1:], self._taken_by_group[0])
        self._passed = [(table, *table.newly_passed_many(rows, num_computed)) for table in sequences.windowed]
        self._passed_ids, self._num_passing, self.num_freed = _NO_PAGES, _NO_PAGES, 0
        if passed := [table.page_ids[at].astype(np.intp) for table, _, at in self._passed]:
            self._passed_ids, self._num_passing = _distinct(np.concatenate(passed))
            self.num_freed = int(np.count_nonzero(sequences.pool.ref_counts(self._passed_ids) == self._num_passing))

    def pass_windows(self) -> None:
        """Give back the pages that windows pass."""
        if len(self._passed_ids):
            self._sequences.pool.drop(self._passed_ids, self._num_passing)
        for table, num_passed, at in self._passed:
            table.page_ids[at] = NULL_PAGE
            table.num_passed[self._rows] = num_passed

    def grow(self, page_ids: PageIds) -> list[PageCopy]:
        """Hand the rows `sum(taken)` pages: each row takes those for all its groups, then the next row does."""
        copies: list[tuple[int, PageCopy]] = []
        if len(page_ids):
            parts = self._split_by_group(page_ids)
            for group, part in enumerate(parts):
                copies += self._grow_in_group(group, part)
        self._sequences.num_tokens[self._rows] += self._counts
        return [copy for _, copy in sorted(copies, key=lambda entry: entry[0])]

    def _split_by_group(self, page_ids: PageIds) -> list[PageIds]:
        """Return each group's pages, row by row."""
        by_group = self._taken_by_group
        if len(by_group) == 1:
            return [page_ids]
        counts, num_rows = np.concatenate(by_group), len(self._rows)
        owner = np.repeat(np.tile(np.arange(num_rows), len(by_group)), counts)
        group = np.repeat(np.arange(len(by_group)).repeat(num_rows), counts)
        sorted_ids = np.empty(len(page_ids), np.intp)
        sorted_ids[np.lexsort((group, owner))] = page_ids
        return np.split(sorted_ids, np.cumsum([int(taken.sum()) for taken in by_group])[:-1])

    def _grow_in_group(self, group: int, page_ids: PageIds) -> list[tuple[int, PageCopy]]:
        """Hand the rows their pages of one group. Returns the copies, each with the place of its row."""
        table, copying, counts = self._sequences.tables[group], self._copies_last[group], self._taken_by_group[group]
        rows, copies = self._rows, []
        if copying.any():
            first = np.cumsum(counts) - counts
            src, dst = table.last_pages(rows[copying]), page_ids[first[copying]]
            table.replace_lasts(rows[copying], dst)
            self._sequences.pool.drop(*_distinct(src))
            pairs = map(PageCopy, src.tolist(), dst.tolist())
            copies = list(zip(np.flatnonzero(copying).tolist(), pairs, strict=True))
            page_ids, counts = np.delete(page_ids, first[copying]), counts - copying
        growing = counts > 0
        table.extend_many(rows[growing], page_ids, counts[growing])
        return copies

    def _copying_rows(self, table: PageTable, writes_last: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
        """[len(rows)] Return which rows copy their last page, if they are written in turn.

        The last of the rows that share a page does not, where nobody else references it.
        """
        pool, page_ids = self._sequences.pool, table.last_pages(self._rows)
        indexed = pool.are_indexed(page_ids)
        copying = writes_last & ((pool.ref_counts(page_ids) > 1) | indexed)
        contested = np.flatnonzero(copying & ~indexed)
        if len(contested):
            last_first = contested[::-1]
            distinct, last, counts = np.unique(page_ids[last_first], return_index=True, return_counts=True)
            alone = counts == pool.ref_counts(distinct)  # all others that reference it have copied before its turn
            copying[last_first[last[alone]]] = False
        return copying


def counts_of(
    sequences: Sequences,
    seq_ids: Sequence[Hashable],
    rows: Rows,
    num_tokens: SupportsIndex | Sequence[int] | npt.NDArray[np.integer],
    num_free_pages: int,
) -> npt.NDArray[np.intp]:
    """[len(seq_ids)] Return how many tokens each sequence is to get.

    Raises:
        OutOfPagesError: A sequence would have more tokens than any pool has slots.
        ValueError, TypeError: `num_tokens` is neither a count nor one for each sequence, or a sequence would have more
            tokens than it may.
    """
    lengths = sequences.num_tokens[rows]
    exact = np.asarray(num_tokens)
    if exact.ndim == 0:
        count = as_count(num_tokens, "`num_tokens`")  # pyright: ignore[reportArgumentType]
        exact = np.full(len(seq_ids), count, np.intp if count < _MAX_TOKENS else object)
    if exact.shape != (len(seq_ids),):
        raise ValueError(
            f"`num_tokens` must have one entry for each of the {len(seq_ids)} sequences; got shape {exact.shape}."
        )
    if exact.dtype.kind not in "iu":  # no integers, or so large that numpy has no type for them
        entries = zip(num_tokens if exact.dtype != object else exact, seq_ids, strict=True)  # pyright: ignore
        exact = np.array([as_count(n, "`num_tokens` for sequence {!r}", i) for n, i in entries], object)
    if exact.min(initial=0) < 0:
        i = int(np.argmin(exact))
        raise ValueError(f"`num_tokens` for sequence {seq_ids[i]!r} must be an integer >= 0; got {exact[i]}.")
    counts = np.minimum(exact, _MAX_TOKENS).astype(np.intp)
    if len(rows):
        i = int(np.argmax(lengths + counts))
        length, count = int(lengths[i]), int(exact[i])
        sequences.check_limit(length + count, seq_ids[i])
        if length + count >= _MAX_TOKENS:
            needed = cdiv(length + count, sequences.page_size) - cdiv(length, sequences.page_size)
            what = f"append_many of {count} tokens to sequence {seq_ids[i]!r}"
            raise OutOfPagesError(needed * len(sequences.tables), num_free_pages, what)
    return counts


def _distinct(page_ids: PageIds) -> tuple[PageIds, npt.NDArray[np.intp]]:
    """Return the pages, in the order of their first places, and how often each is given."""
    distinct, first, counts = np.unique(page_ids, return_index=True, return_counts=True)
    order = np.argsort(first)
    return distinct[order], counts[order]
