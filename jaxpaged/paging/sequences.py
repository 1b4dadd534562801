"""The verbs of a live sequence: it grows, forks, shrinks and ends, and says where its tokens lie."""

from collections.abc import Hashable, Sequence
from typing import SupportsIndex

import numpy as np
import numpy.typing as npt

from jaxpaged.checks import as_count
from jaxpaged.config import NULL_PAGE, cdiv
from jaxpaged.paging.lru import PageIds
from jaxpaged.paging.pool import OutOfPagesError
from jaxpaged.paging.reports import PageCopy
from jaxpaged.paging.state import PageState, second_thread, taken, verb
from jaxpaged.paging.tables import Rows, SequenceTable, ragged_arange

_MAX_TOKENS = 2**31
"""No sequence gets so long: slots are int32."""


class SequenceVerbs(PageState):
    """`append`, `fork`, `truncate`, `free`, and the arrays of a step. Each costs O(pages touched)."""

    __slots__ = ()

    @verb
    def num_pages_needed(self, seq_id: Hashable, num_tokens: SupportsIndex = 1) -> int:
        """How many free pages `append(seq_id, num_tokens)` would take, the copy of a shared last page included."""
        row = self._row(seq_id)
        num_tokens = as_count(num_tokens, "`num_tokens` for sequence {!r}", seq_id)
        added, freed, copies = self._append_cost(row, num_tokens)
        return max(0, added * len(self._tables) + sum(copies) - freed)

    @verb
    def append(self, seq_id: Hashable, num_tokens: SupportsIndex = 1) -> list[PageCopy]:
        """Makes room for `num_tokens` more tokens at a sequence's end.

        When the first of them falls into a page that another sequence also holds, or that can be hit, this sequence
        gets a page of its own in its place. The copies returned are to be run, in order, before anything is written,
        forked or freed. In a group with a window the tokens so far count as computed: pages that the next token does
        not see are given back.

        Raises:
            OutOfPagesError: Too few pages are free: fewer than `num_pages_needed(seq_id, num_tokens)`.
            ValueError, TypeError: No such sequence, or `num_tokens` is not a count, or beyond `max_pages_per_seq`.
        """
        row = self._row(seq_id)
        num_tokens = as_count(num_tokens, "`num_tokens` for sequence {!r}", seq_id)
        length = self._table.num_tokens.item(row)
        self._check_limit(length + num_tokens, seq_id)
        added, freed, copies_last = self._append_cost(row, num_tokens)
        needed = added * len(self._tables) + sum(copies_last)
        free_before = self._pool.num_free_pages
        self._require(max(0, needed - freed), self._free_for(row), "append", seq_id, num_tokens)
        self._pass_windows(row, length)
        copies = self._grow(row, self._take_array(needed), added, copies_last) if needed else []
        self._table.num_tokens[row] += num_tokens
        if self._num_reserved:
            self._settle(row, free_before)
        return copies

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
        passed = self._passed_by(rows, lengths)
        needed = [added + copying for copying in copies_last]
        total = int(sum(need.sum() for need in needed))
        dead, losses = _distinct(np.concatenate([table.page_ids[at] for table, _, at in passed]).astype(np.intp))
        freed = int(np.count_nonzero(self._pool.ref_counts(dead) == losses))
        self._require_for_all(rows, sum(needed, np.zeros(len(rows), np.intp)), total - freed)
        if len(dead):
            self._pool.drop(dead, losses)
        for table, num_passed, at in passed:
            table.page_ids[at] = NULL_PAGE
            table.num_dead[rows] += num_passed
        copies = self._grow_many(rows, self._take_array(total), needed, copies_last) if total else []
        self._table.num_tokens[rows] += counts
        if self._num_reserved:
            self._settle_many(rows, needed)
        return copies

    @verb
    def advance(self, seq_id: Hashable, num_computed: SupportsIndex) -> None:
        """Tells that a sequence's first tokens are computed, and gives back the pages that no window sees now.

        For prompts computed in chunks: `append` does it by itself, for all tokens so far, and so does `commit`.

        Raises:
            ValueError, TypeError: No such sequence, or `num_computed` is not a count within its length.
        """
        row = self._row(seq_id)
        self._pass_windows(row, self._within(row, seq_id, num_computed, "`num_computed`"))

    @verb
    def fork(self, parent_id: Hashable, child_id: Hashable) -> None:
        """Makes a new sequence with the same tokens, sharing all pages. Either may be freed first.

        Raises:
            ValueError: There is no such parent, it is swapped out, or the child's id is taken.
            OutOfPagesError: The parent has a reservation, which now has to cover the copy of its last page too.
        """
        row = self._row(parent_id)
        if child_id in self:
            raise taken("child_id", child_id, self)
        length = self._table.num_tokens.item(row)
        if self._table.limit.item(row) > length and length % self._page_size:
            self._reserve_copies(row, parent_id)
        for table in self._tables:
            page_ids, num_dead = table.pages(row).copy(), table.num_dead.item(row)
            self._pool.share(page_ids[num_dead:].astype(np.intp))
            table.shares[row] = 1
            table.add(child_id, page_ids, length)
            child = table.row(child_id)
            table.num_dead[child], table.shares[child] = num_dead, 1
        child = self._table.row(child_id)
        self._table.num_indexed[child] = self._table.num_indexed[row]
        if row in self._keys:
            self._keys[child] = self._keys[row]

    @verb
    def truncate(self, seq_id: Hashable, num_tokens: SupportsIndex) -> None:
        """Keeps the first `num_tokens` tokens of a sequence and gives back the pages past them.

        Raises:
            ValueError, TypeError: No such sequence, or `num_tokens` is not a count within its length, or the next token
                would see pages that a window has passed.
        """
        row = self._row(seq_id)
        num_tokens = self._within(row, seq_id, num_tokens, "`num_tokens`")
        self._check_windows(row, seq_id, num_tokens)
        free_before = self._pool.num_free_pages
        num_kept = cdiv(num_tokens, self._page_size)
        for table in self._tables:
            self._pool.drop(table.pages(row)[max(num_kept, table.num_dead.item(row)) :].astype(np.intp))
            table.num_pages[row] = num_kept
        self._table.num_tokens[row] = num_tokens
        self._table.num_indexed[row] = min(self._table.num_indexed.item(row), num_tokens // self._page_size)
        self._settle(row, free_before)

    def free(self, seq_id: Hashable) -> None:
        """Forgets a sequence. Pages that no other sequence holds are free.

        Raises:
            ValueError: No such sequence (it may have been freed already).
        """
        if self._busy:  # as in `add`
            raise second_thread("free")
        self._busy = True
        try:
            if self._swapped and seq_id in self and seq_id in self._swapped:
                del self._swapped[seq_id]
            elif self._is_simple and not self._num_reserved and not self._keys:  # `_drop`, in fewer steps
                page_ids, shares = self._table.remove(seq_id)
                if shares:
                    self._pool.drop(np.array(page_ids, np.intp))
                else:
                    self._pool.put(page_ids)
            else:
                self._drop(seq_id)
        finally:
            self._busy = False

    @verb
    def reserve(self, seq_id: Hashable, num_tokens: SupportsIndex) -> None:
        """Promises a sequence the free pages for `num_tokens` more tokens; to all others they are taken.

        Its appends use the promise up; what `truncate` gives back, up to the length reserved, is promised again. Ends
        with `free`, with `swap_out`, and with a reservation of 0. A group with a window is promised as many pages as
        one without.

        Raises:
            OutOfPagesError: Too few pages are free; an earlier promise stays.
            ValueError, TypeError: No such sequence, or `num_tokens` is not a count.
        """
        row = self._row(seq_id)
        num_tokens = as_count(num_tokens, "`num_tokens` for sequence {!r}", seq_id)
        length = self._table.num_tokens.item(row)
        self._check_limit(length + num_tokens, seq_id)
        added, _, copies = self._append_cost(row, num_tokens)
        needed = added * len(self._tables) + sum(copies)
        self._require(needed, self._free_for(row), "reserve", seq_id, num_tokens)
        self._table.limit[row] = length + num_tokens if num_tokens else 0
        self._promise(row, needed)

    def seq_len(self, seq_id: Hashable) -> int:
        """Tokens of a sequence, also of one that is swapped out."""
        if self._busy:  # as in `add`
            raise second_thread("seq_len")
        if self._swapped and seq_id in self and seq_id in self._swapped:
            return self._swapped[seq_id].num_tokens
        return self._table.num_tokens.item(self._table.row(seq_id))

    def page_ids(self, seq_id: Hashable, *, group: str | None = None) -> npt.NDArray[np.int32]:
        """[num_pages] the pages of a sequence, in order, `NULL_PAGE` where a window has passed; a fresh array."""
        if self._busy:  # as in `add`
            raise second_thread("page_ids")
        return self._tables[self._group(group)].pages(self._row(seq_id)).copy()

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

    def _grow(self, row: int, page_ids: PageIds, added: int, copies_last: list[bool]) -> list[PageCopy]:
        """Hands a row its new pages, each group's in turn: the copy of its last page first."""
        copies = []
        for table, copying in zip(self._tables, copies_last, strict=True):
            if copying:
                copies.append(PageCopy(src=table.last_page(row), dst=page_ids.item(0)))
                self._pool.drop(np.array([copies[-1].src]))
                table.replace_last(row, copies[-1].dst)
                page_ids = page_ids[1:]
            table.extend(row, page_ids[:added])
            page_ids = page_ids[added:]
        return copies

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
        self, rows: Rows, lengths: npt.NDArray[np.intp]
    ) -> list[tuple[SequenceTable, npt.NDArray[np.intp], npt.NDArray[np.intp]]]:
        """Of each group what its window leaves behind when these rows grow: pages of each row, and their places."""
        passed = []
        for group, table in zip(self._groups, self._tables, strict=True):
            num_passed, places = np.zeros_like(rows), np.zeros(0, np.intp)
            if group.sliding_window is not None:
                num_dead = table.num_dead[rows]
                num_passed = group.dead_pages(lengths, self._page_size) - num_dead
                places = ragged_arange(table.starts[rows] + num_dead, num_passed)
            passed.append((table, num_passed, places))
        return passed

    def _require_for_all(self, rows: Rows, needed: npt.NDArray[np.intp], total: int) -> None:
        """Raises unless all fit: each may use its own promise, and together what is promised to nobody."""
        promised = np.minimum(needed, self._table.num_reserved[rows]).sum() if self._num_reserved else 0
        free = self.num_free_pages + int(promised)
        if total > free:
            raise OutOfPagesError(total, free, f"append_many to {len(rows)} sequences")

    def _settle_many(self, rows: Rows, needed: list[npt.NDArray[np.intp]]) -> None:
        """`_settle` of many rows; what windows gave back is promised to nobody."""
        table = self._table
        promised = table.num_reserved[rows]
        left = np.maximum(0, promised - sum(needed, np.zeros(len(rows), np.intp)))
        # What is still to come may need fewer: a page that was shared when it was promised may be nobody else's by now.
        lengths = table.num_tokens[rows]
        ends = np.maximum(lengths, table.limit[rows])
        wanted = (-(-ends // self._page_size) - -(-lengths // self._page_size)) * len(self._tables)
        writes_last = (ends > lengths) & (lengths % self._page_size > 0)
        for each in self._tables:
            page_ids = each.last_pages(rows)
            wanted += writes_last & ((self._pool.ref_counts(page_ids) > 1) | self._pool.kept(page_ids))
        left = np.minimum(left, wanted)
        self._num_reserved += int(left.sum() - promised.sum())
        table.num_reserved[rows] = left

    def _reserve_copies(self, row: int, seq_id: Hashable) -> None:
        """Lets a promise cover the copy of a last page that a fork is about to share."""
        private = sum(self._pool.is_private(table.last_page(row)) for table in self._tables)
        promised = self._table.num_reserved.item(row)
        added, _, _ = self._append_cost(row, self._table.limit.item(row) - self._table.num_tokens.item(row))
        wanted = (added + 1) * len(self._tables)
        # A fork that ended may have left the promise for a copy behind.
        more = min(private, max(0, wanted - promised))
        if more > self.num_free_pages:
            raise OutOfPagesError(more, self.num_free_pages, f"fork of sequence {seq_id!r}, which has a reservation,")
        self._promise(row, promised + more)

    def _drop(self, seq_id: Hashable) -> None:
        """Forgets a sequence that holds pages."""
        if self._num_reserved or self._keys:
            row = self._table.row(seq_id)
            self._promise(row, 0)
            self._keys.pop(row, None)
        for table in self._tables:
            page_ids, shares = table.remove(seq_id)
            if shares or self._cache is not None:
                self._pool.drop(np.array(page_ids, np.intp))
            else:
                self._pool.put(page_ids)

    def _check_windows(self, row: int, seq_id: Hashable, num_tokens: int) -> None:
        """Raises where a sequence cut to so many tokens would need pages that are gone."""
        for group, table in zip(self._groups, self._tables, strict=True):
            num_dead = table.num_dead.item(row)
            if num_dead > group.num_dead_pages(num_tokens, self._page_size):
                least = num_dead * self._page_size + (group.sliding_window or 1) - 1
                raise ValueError(
                    f"`num_tokens` for sequence {seq_id!r} must be >= {least}: its pages in group {group.name!r} "
                    f"before the window of {group.sliding_window} tokens are given back; got {num_tokens}."
                )

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
