"""The verbs of one live sequence: it grows, forks, shrinks and ends."""

from collections.abc import Hashable
from typing import SupportsIndex

import numpy as np
import numpy.typing as npt

from jaxpaged.checks import as_count
from jaxpaged.config import cdiv
from jaxpaged.paging.lru import PageIds
from jaxpaged.paging.owner import second_thread, verb
from jaxpaged.paging.promises import Promises
from jaxpaged.paging.reports import PageCopy
from jaxpaged.paging.state import taken


class SequenceVerbs(Promises):
    """`append`, `fork`, `truncate`, `free`. Each costs O(pages touched)."""

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
        return self._append(seq_id, num_tokens, "append")

    @verb
    def advance(self, seq_id: Hashable, num_computed: SupportsIndex) -> None:
        """Tells that a sequence's first tokens are computed, and gives back the pages that no window sees now.

        For prompts computed in chunks: `append` does it by itself, for all tokens so far, and so does `commit`.

        Raises:
            ValueError, TypeError: No such sequence, or `num_computed` is not a count within its length.
        """
        row = self._row(seq_id)
        self._pass_windows(row, self._within(row, seq_id, num_computed, "`num_computed`"))
        self._settle_copies()

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
            self._promise_copies(row, parent_id)
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
        self._settle_copies()

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
    def seq_len(self, seq_id: Hashable) -> int:
        """Tokens of a sequence, also of one that is swapped out."""
        if self._swapped and seq_id in self and seq_id in self._swapped:
            return self._swapped[seq_id].num_tokens
        return self._table.num_tokens.item(self._table.row(seq_id))

    @verb
    def page_ids(self, seq_id: Hashable, *, group: str | None = None) -> npt.NDArray[np.int32]:
        """[num_pages] the pages of a sequence, in order, `NULL_PAGE` where a window has passed; a fresh array."""
        return self._tables[self._group(group)].pages(self._row(seq_id)).copy()

    def _append(self, seq_id: Hashable, num_tokens: SupportsIndex, name: str) -> list[PageCopy]:
        """`append`; errors say that `name` was called."""
        row = self._row(seq_id)
        num_tokens = as_count(num_tokens, "`num_tokens` for sequence {!r}", seq_id)
        length = self._table.num_tokens.item(row)
        self._check_limit(length + num_tokens, seq_id)
        added, freed, copies_last = self._append_cost(row, num_tokens)
        needed = added * len(self._tables) + sum(copies_last)
        free_before = self._pool.num_free_pages
        self._require(max(0, needed - freed), self._free_for(row), name, seq_id, num_tokens)
        self._pass_windows(row, length)
        copies = self._grow(row, self._take_array(needed), added, copies_last) if needed else []
        self._table.num_tokens[row] += num_tokens
        if self._num_reserved:
            self._settle(row, free_before)
            self._settle_copies()
        return copies

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
        self._settle_copies()

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
