"""The verbs of a step, for many sequences at once: each is a pass of numpy, without a Python loop over them."""

from collections.abc import Hashable, Sequence
from typing import SupportsIndex

import numpy as np
import numpy.typing as npt

from jaxpaged.checks import as_count
from jaxpaged.config import NULL_PAGE, cdiv
from jaxpaged.paging.groups import PageGroup
from jaxpaged.paging.lru import PageIds
from jaxpaged.paging.owner import verb
from jaxpaged.paging.pool import OutOfPagesError
from jaxpaged.paging.reports import PageCopy
from jaxpaged.paging.sequences import SequenceVerbs
from jaxpaged.paging.tables import Rows, SequenceTable, ragged_arange

_MAX_TOKENS = 2**31
"""No sequence gets so long: slots are int32."""
_NO_PAGES = np.zeros(0, np.intp)


class BatchVerbs(SequenceVerbs):
    """`append_many`, and the arrays of a step."""

    __slots__ = ()

    @verb
    def append_many(
        self, seq_ids: Sequence[Hashable], num_tokens: SupportsIndex | Sequence[int] | npt.NDArray[np.integer] = 1
    ) -> list[PageCopy]:
        """`append` to many distinct sequences, or to none of them: one pass of numpy instead of a call each.

        Args:
            seq_ids: The sequences.
            num_tokens: Tokens of each, or one number for all.

        Raises:
            OutOfPagesError: Too few pages are free for all of them at once.
            ValueError, TypeError: As `append`, or a sequence is given twice.
        """
        if type(seq_ids) is list and len(seq_ids) == 1:  # one alone is ten times faster without arrays
            if type(num_tokens) is int:
                return self._append(seq_ids[0], num_tokens, "append_many")
            if type(num_tokens) is list and len(num_tokens) == 1:
                return self._append(seq_ids[0], num_tokens[0], "append_many")
        rows = self._rows(seq_ids)
        self._check_distinct(seq_ids, rows, "append_many")
        lengths = self._table.num_tokens[rows]
        counts = self._counts_of(seq_ids, lengths, num_tokens)
        if len(rows):
            longest = int(np.argmax(lengths + counts))
            self._check_limit(int(lengths[longest] + counts[longest]), seq_ids[longest])
        added = -(-(lengths + counts) // self._page_size) - -(-lengths // self._page_size)
        writes_last = (counts > 0) & (lengths % self._page_size > 0)
        copies_last = [self._copying_rows(table, rows, writes_last) for table in self._tables]
        needed = [added + copying for copying in copies_last]
        each = sum(needed[1:], needed[0])
        total = int(each.sum())
        passed = [(table, *self._passed_by(group, table, rows, lengths)) for group, table in self._windowed]
        dead = np.concatenate([_NO_PAGES, *(table.page_ids[at].astype(np.intp) for table, _, at in passed)])
        if len(dead):
            dead, losses = _distinct(dead)
            self._require_for_all(rows, each, total - int(np.count_nonzero(self._pool.ref_counts(dead) == losses)))
            self._pool.drop(dead, losses)
            for table, num_dead, at in passed:
                table.page_ids[at] = NULL_PAGE
                table.num_dead[rows] = num_dead
        else:
            self._require_for_all(rows, each, total)
        copies = self._grow_many(rows, self._take_array(total), needed, copies_last) if total else []
        self._table.num_tokens[rows] += counts
        if self._num_reserved:
            self._settle_many(rows, each)
            self._settle_copies()
        return copies

    @verb
    def page_table(
        self, seq_ids: Sequence[Hashable], max_pages: SupportsIndex | None = None, *, group: str | None = None
    ) -> npt.NDArray[np.int32]:
        """[len(seq_ids), max_pages] page ids, each row padded with `NULL_PAGE`; a fresh array.

        Args:
            seq_ids: The sequences, in the order of the rows.
            max_pages: Width of the table; None takes that of the longest sequence, and at least 1.
            group: Of which group; None where there is one only.

        Raises:
            ValueError, TypeError: No such sequence, or one has more pages than the table is wide.
        """
        table = self._tables[self._group(group)]
        rows = self._rows(seq_ids)
        counts = table.num_pages[rows]
        if max_pages is None:
            width = max(1, int(counts.max(initial=0)))
        else:
            width = as_count(max_pages, "`max_pages`", minimum=1)
            if counts.max(initial=0) > width:
                i = int(np.argmax(counts > width))
                raise ValueError(
                    f"`max_pages` must be >= {counts[i]}, the pages of sequence {seq_ids[i]!r} "
                    f"({self._table.num_tokens[rows[i]]} tokens); got {width}."
                )
        return table.window(rows, width, NULL_PAGE)

    @verb
    def slot_mapping(
        self,
        seq_ids: Sequence[Hashable],
        num_new_tokens: Sequence[int] | npt.NDArray[np.integer],
        *,
        group: str | None = None,
    ) -> npt.NDArray[np.int32]:
        """[sum(num_new_tokens)] slots of each sequence's last `num_new_tokens[i]` tokens; a fresh array.

        Call it after `add` or `append` made room for them. Slots are packed: all of the first sequence's, then all of
        the second's.

        Raises:
            ValueError, TypeError: No such sequence, one given twice, or a count that is negative or beyond its length.
        """
        table = self._tables[self._group(group)]
        rows = self._rows(seq_ids)
        lengths = self._table.num_tokens[rows]
        counts = self._checked_counts(seq_ids, rows, lengths, num_new_tokens)
        if counts.max(initial=0) <= 1:  # a decode step: a token or none of each sequence
            rows, positions = rows[counts > 0], lengths[counts > 0] - 1
            starts = table.starts[rows]
        else:
            positions = ragged_arange(lengths - counts, counts)
            starts = np.repeat(table.starts[rows], counts)
        page_index, offsets = np.divmod(positions, self._page_size)
        return table.page_ids[starts + page_index] * np.int32(self._page_size) + offsets.astype(np.int32)

    def _grow_many(
        self,
        rows: Rows,
        page_ids: PageIds,
        needed: list[npt.NDArray[np.intp]],
        copies_last: list[npt.NDArray[np.bool_]],
    ) -> list[PageCopy]:
        """`_grow` of many rows: each takes its pages for all groups, then the next row does."""
        owner = np.repeat(np.tile(np.arange(len(rows)), len(needed)), np.concatenate(needed))
        group = np.repeat(np.arange(len(needed)).repeat(len(rows)), np.concatenate(needed))
        order = np.lexsort((group, owner)) if len(needed) > 1 else np.arange(len(owner))
        by_group = np.empty(len(page_ids), np.intp)
        by_group[order] = page_ids  # all of the first group's pages, row by row, then the second's
        copies: list[tuple[int, PageCopy]] = []
        for table, need, copying in zip(self._tables, needed, copies_last, strict=True):
            count = int(need.sum())
            mine, by_group = by_group[:count], by_group[count:]
            first = np.cumsum(need) - need
            if copying.any():
                src, dst = table.last_pages(rows[copying]), mine[first[copying]]
                table.replace_lasts(rows[copying], dst)
                self._release_each(src)
                pairs = map(PageCopy, src.tolist(), dst.tolist())
                copies += zip(np.flatnonzero(copying).tolist(), pairs, strict=True)
                mine = np.delete(mine, first[copying])
                need = need - copying
            growing = need > 0
            table.extend_many(rows[growing], mine, need[growing])
        return [copy for _, copy in sorted(copies, key=lambda entry: entry[0])]

    def _release_each(self, page_ids: PageIds) -> None:
        """Gives back one owner of each page for each time that it is given."""
        self._pool.drop(*_distinct(page_ids))

    def _copying_rows(
        self, table: SequenceTable, rows: Rows, writes_last: npt.NDArray[np.bool_]
    ) -> npt.NDArray[np.bool_]:
        """Which rows copy their last page when they are written in turn: not the last one that still has it."""
        page_ids = table.last_pages(rows)
        kept = self._pool.kept(page_ids)
        ref_counts = self._pool.ref_counts(page_ids)
        copying = writes_last & ((ref_counts > 1) | kept)
        contested = np.flatnonzero(copying & ~kept)
        if len(contested):
            last_first = contested[::-1]
            distinct, last, counts = np.unique(page_ids[last_first], return_index=True, return_counts=True)
            alone = counts == self._pool.ref_counts(distinct)  # all other owners have copied before its turn
            copying[last_first[last[alone]]] = False
        return copying

    def _passed_by(
        self, group: PageGroup, table: SequenceTable, rows: Rows, lengths: npt.NDArray[np.intp]
    ) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]:
        """What a group's window has passed when these rows grow: how many pages of each, and where those lie that it
        had not passed before."""
        before, now = table.num_dead[rows], group.dead_pages(lengths, self._page_size)
        passing = np.flatnonzero(now > before)
        return now, ragged_arange(table.starts[rows[passing]] + before[passing], (now - before)[passing])

    def _require_for_all(self, rows: Rows, needed: npt.NDArray[np.intp], total: int) -> None:
        """Raises unless all fit: each may use its own promise, and together what is promised to nobody."""
        promised = np.minimum(needed, self._table.num_reserved[rows]).sum() if self._num_reserved else 0
        free = self.num_free_pages + int(promised)
        if total > free:
            raise OutOfPagesError(total, free, f"append_many to {len(rows)} sequences")

    def _counts_of(
        self,
        seq_ids: Sequence[Hashable],
        lengths: npt.NDArray[np.intp],
        num_tokens: SupportsIndex | Sequence[int] | npt.NDArray[np.integer],
    ) -> npt.NDArray[np.intp]:
        """[len(seq_ids)] a count for each sequence; raises as `append` for one that no pool has pages for."""
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
        too_long = lengths + counts >= _MAX_TOKENS
        if np.count_nonzero(too_long):
            i = int(np.argmax(too_long))
            length, count = int(lengths[i]), int(exact[i])
            self._check_limit(length + count, seq_ids[i])
            needed = cdiv(length + count, self._page_size) - cdiv(length, self._page_size)
            what = f"append_many of {count} tokens to sequence {seq_ids[i]!r}"
            raise OutOfPagesError(needed * len(self._tables), self.num_free_pages, what)
        return counts

    def _checked_counts(
        self,
        seq_ids: Sequence[Hashable],
        rows: Rows,
        lengths: npt.NDArray[np.intp],
        num_new_tokens: Sequence[int] | npt.NDArray[np.integer],
    ) -> npt.NDArray[np.intp]:
        counts = np.asarray(num_new_tokens)
        if counts.shape != rows.shape:
            raise ValueError(
                f"`num_new_tokens` must have one entry for each of the {len(rows)} sequences; got shape {counts.shape}."
            )
        if len(rows) and not np.issubdtype(counts.dtype, np.integer):
            raise TypeError(f"`num_new_tokens` must be integers; got {counts.dtype}.")
        wrong = (counts < 0) | (counts > lengths)
        if np.count_nonzero(wrong):
            i = int(np.argmax(wrong))
            raise ValueError(
                f"`num_new_tokens` must be in 0 .. {lengths[i]}, the length of sequence {seq_ids[i]!r}; "
                f"got {counts[i]}."
            )
        self._check_distinct(seq_ids, rows, "a slot mapping")
        return counts.astype(np.intp)


def _distinct(page_ids: PageIds) -> tuple[PageIds, npt.NDArray[np.intp]]:
    """The pages, in the order of their first places, and how often each is given."""
    distinct, first, counts = np.unique(page_ids, return_index=True, return_counts=True)
    order = np.argsort(first)
    return distinct[order], counts[order]
