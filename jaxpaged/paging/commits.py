"""`commit`: pages whose content is final become findable, each content once."""

from collections.abc import Hashable

import numpy as np
import numpy.typing as npt

from jaxpaged.paging.cache import PrefixCache
from jaxpaged.paging.continuations import NO_TOKEN
from jaxpaged.paging.digests import TOKEN_LISTS, Digests, TokenIds, as_bytes, as_digests, as_tokens, hash_pages
from jaxpaged.paging.lru import PageIds
from jaxpaged.paging.owner import verb
from jaxpaged.paging.promises import Promises
from jaxpaged.paging.tables import SequenceTable

_LABEL = "`token_ids` of sequence {!r}"


class CommitVerbs(Promises):
    """`commit`."""

    __slots__ = ()

    @verb
    def commit(self, seq_id: Hashable, token_ids: TokenIds) -> None:
        """Tells that the K and V of these tokens are written, or that the step which writes them is dispatched.

        From then on others hit the full pages among them. Costs O(new pages): what was committed before is not read.
        Where another sequence committed the same content first, its page takes the place of this one's, which is free:
        make page tables after the commit, not before. Gives back the pages that no window sees any more.

        Args:
            seq_id: A sequence.
            token_ids: All of its tokens that are final, from the first one on; never draft tokens.

        Raises:
            ValueError, TypeError: No such sequence, or more tokens than it has, or a page was committed with others.
        """
        row = self._row(seq_id)
        num_tokens = self._checked_length(row, seq_id, token_ids)
        first, end = self._table.num_indexed.item(row), num_tokens // self._page_size
        if self._cache is not None and end > first:
            self._enter_pages(self._cache, row, seq_id, token_ids, first, end)
            self._table.num_indexed[row] = end
        if self._windowed:
            self._pass_windows(row, num_tokens)
        if self._covers_copy:
            self._settle_copies()

    def _enter_pages(
        self, cache: PrefixCache, row: int, seq_id: Hashable, token_ids: TokenIds, first: int, end: int
    ) -> None:
        """Makes the full pages [first, end) of a row findable, in all groups."""
        keys = self._keys.get(row, ())
        before = self._chain_before(cache, row, first)
        hashed_from = first if before is not None else 0  # a window has passed the page before: hash from the start
        tokens = as_tokens(token_ids[hashed_from * self._page_size : end * self._page_size], _LABEL.format(seq_id))
        parent = cache.root if before is None else before
        chain = hash_pages(tokens, self._page_size, parent=parent, keys=keys, first_page=hashed_from)
        parents = np.concatenate([as_digests([parent]), chain[:-1]])
        chain, parents = chain[first - hashed_from :], parents[first - hashed_from :]
        tokens = tokens[(first - hashed_from) * self._page_size :].reshape(-1, self._page_size)
        self._check_not_another(cache, row, seq_id, first, chain)
        for group in range(len(self._groups)):
            self._enter_group(cache, group, row, first, chain, parents)
        if cache.continuations is not None:
            keyed = [key.position // self._page_size - first for key in keys]
            tokens = np.where(np.isin(np.arange(end - first), keyed)[:, None], NO_TOKEN, tokens)
            cache.continuations.enter(self._table.pages(row)[first:end].astype(np.intp), parents, tokens)

    def _chain_before(self, cache: PrefixCache, row: int, first: int) -> bytes | None:
        """The digest of the page before page `first`; None if no group has that page any more."""
        if first == 0:
            return cache.root
        for group, table in enumerate(self._tables):
            if page_id := table.pages(row).item(first - 1):
                return as_bytes(cache.tagged(cache.index.digests[[page_id]], group))
        return None

    def _check_not_another(self, cache: PrefixCache, row: int, seq_id: Hashable, first: int, chain: Digests) -> None:
        """Raises where a fork committed one of these pages with other tokens."""
        for group, table in enumerate(self._tables):
            page_ids = table.pages(row)[first : first + len(chain)].astype(np.intp)
            differs = (cache.index.digests[page_ids] != cache.tagged(chain, group)).any(axis=1)
            differs &= self._pool.kept(page_ids)
            if differs.any():
                index = first + int(np.argmax(differs))
                raise ValueError(
                    f"`token_ids` of sequence {seq_id!r} must be those that its page {index} was committed with by "
                    "another sequence that shares it; got others."
                )

    def _enter_group(
        self, cache: PrefixCache, group: int, row: int, first: int, chain: Digests, parents: Digests
    ) -> None:
        """Enters a row's pages in one group where their content is new, and settles on one page where it is not."""
        entries = self._tables[group].pages(row)[first : first + len(chain)]
        held = np.flatnonzero(entries)  # its window has passed the others
        mine, twins = entries[held].astype(np.intp), cache.index.find(cache.tagged(chain[held], group))
        is_new = twins == 0
        cache.enter(group, mine[is_new], chain[held[is_new]], parents[held[is_new]])
        is_double = ~is_new & (twins != mine)
        if is_double.any():
            is_idle = is_double & (self._pool.ref_counts(twins) == 0)
            cache.replace(twins[is_idle], mine[is_idle])  # so that a commit never costs a page
            self._use_twins(group, row, first + held[is_double & ~is_idle], twins[is_double & ~is_idle])

    def _use_twins(self, group: int, row: int, indices: npt.NDArray[np.intp], twins: PageIds) -> None:
        """Puts pages of the same content, that others own, in the place of a row's pages."""
        table = self._tables[group]
        mine = table.pages(row)[indices].astype(np.intp)
        shared = self._pool.ref_counts(mine) > 1
        for page_id, twin in zip(mine[shared].tolist(), twins[shared].tolist(), strict=True):
            self._replace_for_all(table, page_id, twin)
        table.pages(row)[indices[~shared]] = twins[~shared]
        self._pool.share(twins[~shared])
        self._pool.drop(mine[~shared])

    def _replace_for_all(self, table: SequenceTable, page_id: int, twin: int) -> None:
        """Gives all forks that share a page another of the same content: what they share stays shared."""
        owners = self._pool.ref_count(page_id)
        table.replace_everywhere(page_id, twin)
        self._pool.share(np.array([twin]), owners)
        self._pool.drop(np.array([page_id]), owners)

    def _checked_length(self, row: int, seq_id: Hashable, token_ids: TokenIds) -> int:
        if not isinstance(token_ids, TOKEN_LISTS):
            raise TypeError(f"{_LABEL.format(seq_id)} must be its tokens; got {type(token_ids).__name__}.")
        length = self._table.num_tokens.item(row)
        if len(token_ids) > length:
            raise ValueError(f"{_LABEL.format(seq_id)} must be at most its {length} tokens; got {len(token_ids)}.")
        return len(token_ids)
