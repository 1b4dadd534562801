"""Commits: which leading pages of each sequence are final, and are indexed for others to hit.

Each content is indexed once. What was committed and then turns out lost, because an import failed, is forgotten here
too, with all that continues it.
"""

from collections.abc import Hashable

import numpy as np
import numpy.typing as npt

from jaxpaged.paging.digests import TOKEN_LISTS, Digests, TokenIds, as_bytes, as_digests, as_tokens, hash_pages
from jaxpaged.paging.lru import PageIds
from jaxpaged.paging.partial_hits import NO_TOKEN
from jaxpaged.paging.pins import Pins
from jaxpaged.paging.pool import OutOfPagesError
from jaxpaged.paging.prefix_index import PrefixIndex
from jaxpaged.paging.sequences import Sequences
from jaxpaged.paging.tables import PageTable, Rows

_LABEL = "`token_ids` of sequence {!r}"
_ALL_RIGHT = 2**31
"""More pages than any sequence has: slots are int32."""


class Commits:
    """How many leading pages of each sequence the index has seen."""

    __slots__ = ("_index", "_num_pages", "_pins", "_sequences")

    def __init__(self, sequences: Sequences, index: PrefixIndex, pins: Pins):
        self._sequences = sequences
        self._index = index
        self._pins = pins
        self._num_pages: dict[int, int] = {}  # committed pages by row, where there are some

    def set(self, row: int, num_pages: int) -> None:
        """Note that so many leading pages of a row are committed."""
        if num_pages:
            self._num_pages[row] = num_pages
        else:
            self._num_pages.pop(row, None)

    def fork(self, row: int, child: int) -> None:
        """Note that a row has the pages of another one."""
        self.set(child, self._num_pages.get(row, 0))

    def cut(self, row: int, num_pages: int) -> None:
        """Note that at most so many leading pages of a row are committed still."""
        if self._num_pages.get(row, 0) > num_pages:
            self.set(row, num_pages)

    def commit(self, row: int, seq_id: Hashable, token_ids: TokenIds) -> int:
        """Index the full pages among these first tokens of a row that are not indexed yet. Returns how many tokens.

        Raises:
            ValueError, TypeError: They are no tokens, or more than the sequence has, or a fork committed others.
        """
        num_tokens = self._checked_length(row, seq_id, token_ids)
        first, end = self._num_pages.get(row, 0), num_tokens // self._sequences.page_size
        if self._index.pool.caching and end > first:
            self._insert(row, seq_id, token_ids, first, end)
            self._num_pages[row] = end
        return num_tokens

    def clear(self) -> None:
        """Forget which pages are committed, all rows'."""
        self._num_pages.clear()

    def forget(self, lost: npt.NDArray[np.bool_]) -> None:
        """Take lost pages [num_pages] out of the index, and out of what is committed, and end their pins."""
        self._pins.unpin_pages(lost)
        indexed = self._index.pool.indexed_pages()
        self._index.remove(indexed[lost[indexed]])
        rows = self._sequences.all_rows()
        for row, num_right in zip(rows.tolist(), self.num_right_pages(rows, lost).tolist(), strict=True):
            self.cut(row, num_right)

    def invalidate(self, row: int, seq_id: Hashable, num_valid: int, num_free_pages: int) -> list[Hashable]:
        """Forget what a row's pages hold after its first `num_valid` tokens; see `PageAllocator.invalidate`."""
        sequences, tables = self._sequences, self._sequences.tables
        size = sequences.page_size
        lost = self.lost_pages(np.concatenate([table.held_pages(row, num_valid // size) for table in tables]))
        rows = sequences.all_rows()
        valid = self.num_right_pages(rows, lost) * size  # tokens by row; past the end where all are right
        if num_valid < sequences.num_tokens.item(row):
            valid[rows == row] = np.minimum(valid[rows == row], num_valid)
        by_row = zip(rows.tolist(), valid.tolist(), strict=True)
        lacking = [i for i, count in by_row if any(table.lacks_pages(i, count) for table in tables)]
        needed = sum(table.num_passed.item(i) for table in tables for i in lacking)
        if needed > num_free_pages:
            raise OutOfPagesError(needed, num_free_pages, f"invalidate of sequence {seq_id!r}")
        self.forget(lost)
        for i in lacking:
            self.set(i, 0)
            for table in tables:
                table.restore_passed(i, self._index.take(table.num_passed.item(i)))
        holding = (valid < sequences.num_tokens[rows]).tolist()
        return [name for name, holds in zip(sequences.row_of_seq, holding, strict=True) if holds]

    def lost_pages(self, page_ids: PageIds) -> npt.NDArray[np.bool_]:
        """[num_pages] Return which pages are lost when these are: these, and the indexed ones that continue them."""
        lost = np.zeros(self._index.pool.num_pages, np.bool_)
        lost[page_ids] = True
        lost[0] = False
        if self._index.pool.caching:
            lost[self._index.descendants(np.flatnonzero(lost))] = True
        return lost

    def num_right_pages(self, rows: Rows, lost: npt.NDArray[np.bool_]) -> npt.NDArray[np.intp]:
        """[len(rows)] Return the pages before the first lost one of any group; `_ALL_RIGHT` where none is lost."""
        right = np.full(len(rows), _ALL_RIGHT, np.intp)
        for table in self._sequences.tables:
            places, indices, page_ids = table.entries(rows)
            hit = lost[page_ids]
            np.minimum.at(right, places[hit], indices[hit])
        return right

    def _insert(self, row: int, seq_id: Hashable, token_ids: TokenIds, first: int, end: int) -> None:
        """Index the full pages [first, end) of a row, in all groups."""
        index, size = self._index, self._sequences.page_size
        keys = self._sequences.keys.get(row, ())
        before = self._digest_before(row, first)
        hashed_from = first if before is not None else 0  # a window has passed the page before: hash from the start
        tokens = as_tokens(token_ids[hashed_from * size : end * size], _LABEL.format(seq_id))
        parent = index.root if before is None else before
        chain = hash_pages(tokens, size, parent=parent, keys=keys, first_page=hashed_from)
        parents = np.concatenate([as_digests([parent]), chain[:-1]])
        chain, parents = chain[first - hashed_from :], parents[first - hashed_from :]
        self._check_same(row, seq_id, first, chain)
        for group, table in enumerate(self._sequences.tables):
            self._insert_in_group(group, table, row, first, chain, parents)
        if index.partial_hits is not None:  # without windows: hashed from page `first` on
            keyed = [key.position // size - first for key in keys]
            tokens = np.where(np.isin(np.arange(end - first), keyed)[:, None], NO_TOKEN, tokens.reshape(-1, size))
            page_ids = self._sequences.tables[0].pages(row)[first:end].astype(np.intp)
            index.partial_hits.insert(page_ids, parents, tokens)

    def _digest_before(self, row: int, first: int) -> bytes | None:
        """Return the digest of the page before page `first`; None if no group has that page any more."""
        if first == 0:
            return self._index.root
        for group, table in enumerate(self._sequences.tables):
            if page_id := table.pages(row).item(first - 1):
                return as_bytes(self._index.tagged(self._index.table.digests[[page_id]], group))
        return None

    def _check_same(self, row: int, seq_id: Hashable, first: int, chain: Digests) -> None:
        """Raise ValueError where a fork committed one of these pages with other tokens."""
        index = self._index
        for group, table in enumerate(self._sequences.tables):
            page_ids = table.pages(row)[first : first + len(chain)].astype(np.intp)
            differs = (index.table.digests[page_ids] != index.tagged(chain, group)).any(axis=1)
            differs &= index.pool.are_indexed(page_ids)
            if differs.any():
                page = first + int(np.argmax(differs))
                raise ValueError(
                    f"`token_ids` of sequence {seq_id!r} must be those that its page {page} was committed with by "
                    "another sequence that shares it; got others."
                )

    def _insert_in_group(
        self, group: int, table: PageTable, row: int, first: int, chain: Digests, parents: Digests
    ) -> None:
        """Index a row's pages in one group where their content is new, and settle on one page where it is not."""
        index = self._index
        entries = table.pages(row)[first : first + len(chain)]
        held = np.flatnonzero(entries)  # its window has passed the others
        mine, twins = entries[held].astype(np.intp), index.page_ids(chain[held], group)
        is_new = twins == 0
        index.insert(group, mine[is_new], chain[held[is_new]], parents[held[is_new]])
        is_double = ~is_new & (twins != mine)
        if is_double.any():
            is_cached = is_double & (index.pool.ref_counts(twins) == 0)
            index.replace(twins[is_cached], mine[is_cached])  # so that a commit never costs a page
            is_used = is_double & ~is_cached
            self._use_twins(table, row, first + held[is_used], twins[is_used])

    def _use_twins(self, table: PageTable, row: int, indices: npt.NDArray[np.intp], twins: PageIds) -> None:
        """Put pages of the same content, that others reference, in the place of a row's pages."""
        pool = self._index.pool
        mine = table.pages(row)[indices].astype(np.intp)
        shared = pool.ref_counts(mine) > 1
        for page_id, twin in zip(mine[shared].tolist(), twins[shared].tolist(), strict=True):
            self._replace_for_all(table, page_id, twin)
        table.pages(row)[indices[~shared]] = twins[~shared]
        pool.share(twins[~shared])
        pool.drop(mine[~shared])

    def _replace_for_all(self, table: PageTable, page_id: int, twin: int) -> None:
        """Give all forks that share a page another of the same content: what they share stays shared."""
        pool = self._index.pool
        references = pool.ref_count(page_id)
        table.replace_everywhere(page_id, twin)
        pool.share(np.array([twin]), references)
        pool.drop(np.array([page_id]), references)

    def _checked_length(self, row: int, seq_id: Hashable, token_ids: TokenIds) -> int:
        if not isinstance(token_ids, TOKEN_LISTS):
            raise TypeError(f"{_LABEL.format(seq_id)} must be its tokens; got {type(token_ids).__name__}.")
        length = self._sequences.num_tokens.item(row)
        if len(token_ids) > length:
            raise ValueError(f"{_LABEL.format(seq_id)} must be at most its {length} tokens; got {len(token_ids)}.")
        return len(token_ids)
