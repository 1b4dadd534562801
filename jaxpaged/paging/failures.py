"""What was lost: pages whose import failed, and all that continues them, are forgotten."""

from collections.abc import Hashable

import numpy as np
import numpy.typing as npt

from jaxpaged.paging.lru import PageIds
from jaxpaged.paging.owner import verb
from jaxpaged.paging.pool import OutOfPagesError
from jaxpaged.paging.promises import Promises
from jaxpaged.paging.tables import Rows


class FailureVerbs(Promises):
    """`invalidate` and `forget_pages`."""

    __slots__ = ()

    @verb
    def invalidate(self, seq_id: Hashable, num_valid_tokens: int) -> list[Hashable]:
        """Forgets the content of a sequence's pages after its first tokens, and of all that continues them.

        For pages whose import failed: they count as missed, nobody hits them from now on. Costs a pass over the pool.

        A sequence can be computed anew from there only where its windows still have the pages that the first token to
        compute sees. One that lacks some of them gets new pages in the place of all that its windows have passed, and
        has to be computed anew from token 0; pages that are still right are then written again with what they hold.

        Returns:
            The sequences that hold one of those pages, this one included: they have to be computed anew from there, or
            from token 0 where no entry of `page_ids` is `NULL_PAGE` now.

        Raises:
            ValueError, TypeError: No such sequence, or the count is none within its length.
            OutOfPagesError: Too few pages are free for the new ones. The contents can still be hit: `forget_pages`.
        """
        row = self._row(seq_id)
        num_valid = self._within(row, seq_id, num_valid_tokens, "`num_valid_tokens`")
        page_ids = [table.pages(row)[num_valid // self._page_size :].astype(np.intp) for table in self._tables]
        wrong, leaving = self._wrong_pages(np.concatenate(page_ids))
        rows = self._table.all_rows()
        valid = self._num_right_pages(rows, wrong) * self._page_size  # by row; past the end where all are right
        if num_valid < self._table.num_tokens.item(row):
            valid[row] = min(valid.item(row), num_valid)
        lacking = [i for i in rows.tolist() if self._lacks_pages(i, valid.item(i))]
        needed = sum(table.num_dead.item(i) for table in self._tables for i in lacking)
        if needed > self.num_free_pages:
            raise OutOfPagesError(needed, self.num_free_pages, f"invalidate of sequence {seq_id!r}")
        self._forget(wrong, leaving)
        np.minimum(self._table.num_indexed, valid // self._page_size, out=self._table.num_indexed)
        for i in lacking:
            self._restore_dead(i)
        self._settle_copies()
        holding = (valid[rows] < self._table.num_tokens[rows]).tolist()
        return [name for name, holds in zip(self._table.seq_ids(), holding, strict=True) if holds]

    @verb
    def forget_pages(self, page_ids: npt.NDArray[np.integer]) -> None:
        """Forgets the content of these pages, and of all that continues them, whoever holds them.

        For pages whose import failed where `invalidate` finds no room: free their sequences, and add them again later.
        Costs a pass over the pool.

        Raises:
            ValueError, TypeError: An id that is none of the pool's pages.
        """
        given = np.asarray(page_ids)
        if given.ndim != 1:
            raise ValueError(f"`page_ids` must have one axis; got shape {given.shape}.")
        if len(given) and given.dtype.kind not in "iu":
            raise TypeError(f"`page_ids` must be integers below 2**63; got {given.dtype}.")
        if len(given) and not 0 < given.min() <= given.max() < self._pool.num_pages:
            raise ValueError(
                f"`page_ids` must be in 1 .. {self._pool.num_pages - 1}; got {given.min()} .. {given.max()}."
            )
        wrong, leaving = self._wrong_pages(given.astype(np.intp))
        self._forget(wrong, leaving)
        right = self._num_right_pages(self._table.all_rows(), wrong)
        np.minimum(self._table.num_indexed, right, out=self._table.num_indexed)
        self._settle_copies()

    def _wrong_pages(self, page_ids: PageIds) -> tuple[npt.NDArray[np.bool_], PageIds]:
        """[num_pages] which pages are wrong when these are; and those of them that can be hit."""
        wrong = np.zeros(self._pool.num_pages, np.bool_)
        wrong[page_ids] = True
        wrong[0] = False
        leaving = np.zeros(0, np.intp) if self._cache is None else self._cache.descendants(np.flatnonzero(wrong))
        wrong[leaving] = True
        return wrong, leaving

    def _forget(self, wrong: npt.NDArray[np.bool_], leaving: PageIds) -> None:
        if self._cache is not None:
            self._cache.unpin_pages(wrong)
            self._cache.leave(leaving)

    def _num_right_pages(self, rows: Rows, wrong: npt.NDArray[np.bool_]) -> npt.NDArray[np.intp]:
        """By row the pages before the first wrong one of any group; more than any sequence has where none is wrong."""
        right = np.full(len(self._table.starts), 2**31, np.intp)
        for table in self._tables:
            places, indices, page_ids = table.entries(rows)
            hit = wrong[page_ids]
            np.minimum.at(right, rows[places[hit]], indices[hit])
        return right

    def _lacks_pages(self, row: int, num_valid: int) -> bool:
        """Whether a window has passed pages that token `num_valid` sees."""
        return any(
            table.num_dead.item(row) > group.num_dead_pages(num_valid, self._page_size)
            for group, table in zip(self._groups, self._tables, strict=True)
        )

    def _restore_dead(self, row: int) -> None:
        """Gives a row new pages, with nothing in them, in the place of those that its windows have passed."""
        self._table.num_indexed[row] = 0
        for table in self._tables:
            num_dead = table.num_dead.item(row)
            table.pages(row)[:num_dead] = self._take_array(num_dead)
            table.num_dead[row] = 0
