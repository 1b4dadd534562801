"""Pages for sequences: who holds which page, and where each token goes.

The allocator decides and `KVCache` executes: it returns numpy arrays and page copies, and never sees a device. All
verbs are transactional: a call that raises has changed nothing. One owner: a call that begins while another thread is
inside one raises.

Its state lies in its parts, and here they meet: a verb asks `Sequences` what it will cost, compares that with what the
pool and the `Reservations` leave free, takes the pages from the `PrefixIndex`, which evicts cached ones where it must,
and hands them to the sequences.
"""

from collections.abc import Hashable, Iterable, Sequence
from typing import Any, SupportsIndex

import numpy as np
import numpy.typing as npt

from jaxpaged.checks import as_count
from jaxpaged.config import cdiv
from jaxpaged.paging.batches import BatchAppend, counts_of
from jaxpaged.paging.digests import TOKEN_LISTS, Key, TokenIds, as_tokens, check_keys
from jaxpaged.paging.groups import PageGroup, check_groups
from jaxpaged.paging.observe import census
from jaxpaged.paging.owner import Owner, second_thread, verb
from jaxpaged.paging.pool import OutOfPagesError, PagePool
from jaxpaged.paging.prefix_cache import PrefixCache
from jaxpaged.paging.prefix_index import PrefixIndex
from jaxpaged.paging.records import HostPages, PageCopy, PageStats, PoolSnapshot, SharingStats
from jaxpaged.paging.reservations import Reservations
from jaxpaged.paging.sequences import Sequences, count_tokens, counts_within


class PageAllocator:
    """Hands pages to sequences, shares them between forks and prefixes, and says in which slot each token lies.

    A sequence of n tokens holds `ceil(n / page_size)` pages of each group; token t lies in slot
    `page_ids[t // page_size] * page_size + t % page_size`. Sequence ids are any hashable values. Verbs cost
    O(pages touched), whatever the size of the pool. `copy.deepcopy` and `pickle` take a snapshot of all that it knows;
    the keys and values lie elsewhere.

    Args:
        num_pages: Pages of the pool, the null page included: the same number as `KVCache`'s.
        page_size: Tokens a page.
        prefix_caching: Full pages that were committed keep their content until they are needed for another, and an
            `add` of tokens that begin alike shares them.
        partial_hits: A prompt that parts from a cached page inside it gets a copy of that page (see
            `PrefixCache.take_copies`). Keeps the tokens: 4 bytes a token and 32 a page more.
        groups: Layers with page tables of their own (see `groups`); None is one group that sees all tokens.
        max_pages_per_seq: The width of the page tables that sequences have to fit in, or None.
        offload: List evicted contents in `PrefixCache.take_evictions`, so that they can be kept elsewhere.
        record_events: List what became and ceased to be cached in `PrefixCache.take_events`.

    Raises:
        ValueError, TypeError: An argument out of range, or one that needs `prefix_caching` without it.

    Attributes:
        prefix: The prefix cache: what can be hit, pinned, forgotten, and what must be moved for it.
    """

    __slots__ = ("_index", "_owner", "_pool", "_reservations", "_sequences", "prefix")

    def __init__(
        self,
        num_pages: SupportsIndex,
        page_size: SupportsIndex = 16,
        *,
        prefix_caching: bool = False,
        partial_hits: bool = False,
        groups: Sequence[PageGroup] | None = None,
        max_pages_per_seq: SupportsIndex | None = None,
        offload: bool = False,
        record_events: bool = False,
    ):
        page_size = as_count(page_size, "`page_size`", minimum=1)
        num_pages = as_count(num_pages, "`num_pages`, the null page included,", minimum=2)
        if num_pages * page_size >= 2**31:
            raise ValueError(
                f"`num_pages` x `page_size` must be < 2**31, for slots are int32; got {num_pages} x {page_size}."
            )
        options = {"partial_hits": partial_hits, "offload": offload, "record_events": record_events}
        for name, on in {"prefix_caching": prefix_caching, **options}.items():
            if not isinstance(on, bool | np.bool_):
                raise TypeError(f"`{name}` must be True or False; got {on!r} ({type(on).__name__}).")
        if not prefix_caching and (without := [name for name, on in options.items() if on]):
            raise ValueError(f"`{without[0]}` needs prefix_caching=True.")
        groups = check_groups(groups)
        if partial_hits and (len(groups) > 1 or any(group.sliding_window is not None for group in groups)):
            raise ValueError("`partial_hits` must be False where a group has a window or there are several groups.")
        if max_pages_per_seq is not None:
            max_pages_per_seq = as_count(max_pages_per_seq, "`max_pages_per_seq`", minimum=1)
        self._owner = Owner()
        self._pool = PagePool(num_pages, caching=bool(prefix_caching))
        self._sequences = Sequences(self._pool, groups, page_size, max_pages_per_seq)
        self._reservations = Reservations(self._sequences, self._pool)
        self._index = PrefixIndex(self._pool, page_size, groups, **options)
        self.prefix = PrefixCache(self._owner, self._sequences, self._reservations, self._index)

    # What it is, and what is free

    @property
    def num_pages(self) -> int:
        """Pages of the pool, the null page included."""
        return self._pool.num_pages

    @property
    def page_size(self) -> int:
        """Tokens a page."""
        return self._sequences.page_size

    @property
    def prefix_caching(self) -> bool:
        """Whether contents can be hit."""
        return self._pool.caching

    @property
    def groups(self) -> tuple[PageGroup, ...]:
        """The groups, in order."""
        return self._index.groups

    @property
    def options(self) -> dict[str, Any]:
        """The arguments that make an empty allocator which decides alike."""
        return {
            "num_pages": self.num_pages,
            "page_size": self.page_size,
            "prefix_caching": self.prefix_caching,
            "partial_hits": self._index.partial_hits is not None,
            "groups": self.groups,
            "max_pages_per_seq": self._sequences.max_pages,
        }

    @property
    def num_free_pages(self) -> int:
        """Pages that can be handed out now: free, and reserved for no sequence. Cached pages are free."""
        return self._pool.num_free_pages - self._reservations.num_pages

    def __contains__(self, seq_id: Hashable) -> bool:
        """Whether there is a sequence of this name, live or swapped out."""
        return seq_id in self._sequences

    def max_pages_for(self, num_tokens: SupportsIndex, *, chunk: SupportsIndex | None = None) -> int:
        """Return the most pages that a sequence of so many tokens holds at one time, those of all groups together.

        Args:
            num_tokens: The length that the sequence reaches.
            chunk: The most tokens that it is given at a time (`add(chunk=...)`, `append`); None is all at once. A group
                with a window then holds what the window and a chunk cover; without one it makes no difference.
        """
        count = as_count(num_tokens, "`num_tokens`")
        chunk = count if chunk is None else as_count(chunk, "`chunk`", minimum=1)
        return sum(group.max_held_pages(count, chunk, self.page_size) for group in self.groups)

    @verb
    def can_allocate(
        self,
        token_ids: TokenIds | SupportsIndex,
        *,
        keys: Iterable[Key] = (),
        host: HostPages | None = None,
        chunk: SupportsIndex | None = None,
    ) -> bool:
        """Whether an `add` with these arguments would find its pages now, those of all groups."""
        count, keys = count_tokens(token_ids, "`token_ids`, where it is their number,"), check_keys(keys)
        max_pages = self._sequences.max_pages
        if max_pages is not None and count > max_pages * self.page_size:
            return False
        if self._pool.caching and count and isinstance(token_ids, TOKEN_LISTS):
            prompt = self.prefix.look_up(as_tokens(token_ids), keys, host)
            length = count if chunk is None else _first_length(count, prompt.num_hit_tokens, chunk)
            return self.prefix.cost(prompt, length) <= self.num_free_pages
        length = count if chunk is None else _first_length(count, 0, chunk)
        return cdiv(length, self.page_size) * len(self.groups) <= self.num_free_pages

    @verb
    def num_pages_needed(
        self, seq_id: Hashable, num_tokens: SupportsIndex = 1, *, num_computed: SupportsIndex | None = None
    ) -> int:
        """Count the free pages that `append` with these arguments would take, copies of shared last pages included."""
        row = self._sequences.row(seq_id)
        num_tokens = as_count(num_tokens, "`num_tokens` for sequence {!r}", seq_id)
        cost = self._sequences.append_cost(row, num_tokens, self._num_computed(row, seq_id, num_computed))
        return max(0, cost.taken - cost.freed)

    @verb
    def num_held_pages(self, seq_id: Hashable) -> int:
        """Count the pages of all groups that a sequence references, or that `swap_in` would take for it."""
        return self._sequences.num_held_pages(seq_id)

    @verb
    def can_truncate(self, seq_id: Hashable, num_tokens: SupportsIndex) -> bool:
        """Whether `truncate` would accept so many tokens: no window has passed what the next token then sees."""
        row = self._sequences.row(seq_id)
        num_tokens = self._sequences.within(row, seq_id, num_tokens, "`num_tokens`")
        return not any(table.lacks_pages(row, num_tokens) for table in self._sequences.windowed)

    # The verbs of a sequence's life

    def add(
        self,
        seq_id: Hashable,
        token_ids: TokenIds | SupportsIndex,
        *,
        keys: Iterable[Key] = (),
        host: HostPages | None = None,
        chunk: SupportsIndex | None = None,
    ) -> int:
        """Give a new sequence the pages for its tokens: those of others, as far as it begins alike, and new ones.

        Args:
            seq_id: A name that no live or swapped sequence has.
            token_ids: The tokens, or how many they are: a number hits nothing.
            keys: What besides the tokens shapes their KV. They stay with the sequence.
            host: Where evicted pages may be found that are missing here; see `PrefixCache.take_restores`.
            chunk: Add only so many tokens after those that hit: the sequence then has fewer tokens than are given, and
                `append` makes room for the others. None adds all. With groups that have a window, a prompt that is
                added chunk by chunk holds fewer pages.

        Returns:
            How many of the tokens are in the cache already: fewer than all, for the last one's logits are wanted.

        Raises:
            OutOfPagesError: Too few pages are free.
            ValueError, TypeError: The id is taken, or the tokens are not one list, or their number is not a count, or
                beyond `max_pages_per_seq`.
        """
        owner, pool, sequences = self._owner, self._pool, self._sequences
        if owner.busy:  # `verb` written out: to pass its arguments on takes it as long as all the rest
            raise second_thread("add")
        owner.busy = True
        try:
            num_tokens = sequences.new_length("seq_id", seq_id, token_ids)
            checked_keys = check_keys(keys) if keys != () else ()
            if pool.caching and num_tokens and isinstance(token_ids, TOKEN_LISTS):
                return self._add_found(seq_id, as_tokens(token_ids), checked_keys, host, chunk)
            if chunk is not None:
                num_tokens = _first_length(num_tokens, 0, chunk)
            num_pages = -(-num_tokens // sequences.page_size)
            needed = num_pages * len(sequences.tables)
            if needed > pool.num_uncached_pages - self._reservations.num_pages:
                self._require(needed, self.num_free_pages, "add", seq_id, num_tokens)
                self._index.make_room(needed)
            sequences.add(seq_id, num_tokens, num_pages, checked_keys)
            return 0
        finally:
            owner.busy = False

    @verb
    def append(
        self, seq_id: Hashable, num_tokens: SupportsIndex = 1, *, num_computed: SupportsIndex | None = None
    ) -> list[PageCopy]:
        """Make room for `num_tokens` more tokens at a sequence's end.

        When the first of them falls into a page that another sequence also holds, or that can be hit, this sequence
        gets a page of its own in its place. The copies returned are to be run, in order, before anything is written,
        forked or freed. In a group with a window the pages that the next token to compute does not see are given back.

        Args:
            seq_id: A sequence.
            num_tokens: The tokens to make room for.
            num_computed: How many of its tokens so far are computed; None is all. Only windows ask.

        Raises:
            OutOfPagesError: Too few pages are free: fewer than `num_pages_needed` with the same arguments.
            ValueError, TypeError: No such sequence, or a number is not a count, or the length is beyond
                `max_pages_per_seq`, or `num_computed` beyond the length.
        """
        row = self._sequences.row(seq_id)
        num_tokens = as_count(num_tokens, "`num_tokens` for sequence {!r}", seq_id)
        computed = self._num_computed(row, seq_id, num_computed)
        self._sequences.check_limit(self._sequences.num_tokens.item(row) + num_tokens, seq_id)
        cost = self._sequences.append_cost(row, num_tokens, computed)
        free_before = self._pool.num_free_pages
        self._require(max(0, cost.taken - cost.freed), self._free_for(row), "append", seq_id, num_tokens)
        self._sequences.pass_windows(row, computed)
        copies = self._sequences.grow(row, self._index.take(cost.taken), cost) if cost.taken else []
        self._sequences.num_tokens[row] += num_tokens
        self._settle(row, free_before)
        return copies

    @verb
    def append_many(
        self,
        seq_ids: Sequence[Hashable],
        num_tokens: SupportsIndex | Sequence[int] | npt.NDArray[np.integer] = 1,
        *,
        num_computed: Sequence[int] | npt.NDArray[np.integer] | None = None,
    ) -> list[PageCopy]:
        """Do `append` for many distinct sequences, or for none of them: one pass of numpy instead of a call each.

        Args:
            seq_ids: The sequences.
            num_tokens: The tokens of each, or one number for all.
            num_computed: How many tokens of each are computed; None is all that they have.

        Raises:
            OutOfPagesError: Too few pages are free for all of them at once.
            ValueError, TypeError: As `append`, or a sequence is given twice.
        """
        rows = self._sequences.distinct_rows(seq_ids, "append_many")
        counts = counts_of(self._sequences, seq_ids, rows, num_tokens, self.num_free_pages)
        computed = self._sequences.num_tokens[rows]
        if num_computed is not None:
            computed = counts_within(seq_ids, computed, num_computed, "`num_computed`")
        batch = BatchAppend(self._sequences, rows, counts, computed)
        total, free = int(batch.taken.sum()), self.num_free_pages
        if self._reservations.num_pages:  # each may use its own, and together what is reserved for nobody
            free += int(np.minimum(batch.taken, self._reservations.among(rows)).sum())
        if total - batch.num_freed > free:
            raise OutOfPagesError(total - batch.num_freed, free, f"append_many to {len(rows)} sequences")
        batch.pass_windows()
        copies = batch.grow(self._index.take(total))
        if self._reservations.num_pages:
            self._reservations.settle_many(rows, batch.taken)
        self._reservations.settle_copies()
        return copies

    @verb
    def advance(self, seq_id: Hashable, num_computed: SupportsIndex) -> None:
        """Note that a sequence's first tokens are computed, and give back the pages that no window sees now.

        For prompts computed in chunks: `append` does it by itself, for all tokens so far, and so does `commit`.

        Raises:
            ValueError, TypeError: No such sequence, or `num_computed` is not a count within its length.
        """
        row = self._sequences.row(seq_id)
        self._sequences.pass_windows(row, self._sequences.within(row, seq_id, num_computed, "`num_computed`"))
        self._reservations.settle_copies()

    @verb
    def commit(self, seq_id: Hashable, token_ids: TokenIds) -> None:
        """Note that the K and V of these tokens are written, or that the step which writes them is dispatched.

        From then on others hit the full pages among them. Costs O(new pages): what was committed before is not read.
        Where another sequence committed the same content first, its page takes the place of this one's, which is free:
        make page tables after the commit, not before. Gives back the pages that no window sees any more.

        Args:
            seq_id: A sequence.
            token_ids: All of its tokens that are final, from the first one on; never draft tokens.

        Raises:
            ValueError, TypeError: No such sequence, or more tokens than it has, or a page was committed with others.
        """
        row = self._sequences.row(seq_id)
        num_tokens = self.prefix.commits.commit(row, seq_id, token_ids)
        self._sequences.pass_windows(row, num_tokens)
        self._reservations.settle_copies()

    @verb
    def fork(self, parent_id: Hashable, child_id: Hashable) -> None:
        """Make a new sequence with the same tokens, sharing all pages. Either may be freed first.

        Raises:
            ValueError: There is no such parent, it is swapped out, or the child's id is taken.
            OutOfPagesError: The parent has a reservation, which now has to cover the copy of its last page too.
        """
        row = self._sequences.row(parent_id)
        length = self._sequences.new_length("child_id", child_id, self._sequences.num_tokens.item(row))
        if self._reservations.length.get(row, 0) > length and length % self.page_size:
            more = sum(self._pool.is_writable(table.last_page(row)) for table in self._sequences.tables)
            if more > self.num_free_pages:
                what = f"fork of sequence {parent_id!r}, which has a reservation,"
                raise OutOfPagesError(more, self.num_free_pages, what)
            self._reservations.add_copies(row, more)
        child = self._sequences.fork(row, child_id)
        self.prefix.commits.fork(row, child)

    @verb
    def truncate(self, seq_id: Hashable, num_tokens: SupportsIndex) -> None:
        """Keep the first `num_tokens` tokens of a sequence and give back the pages past them.

        Raises:
            ValueError, TypeError: No such sequence, or `num_tokens` is not a count within its length, or the next token
                would see pages that a window has passed.
        """
        row = self._sequences.row(seq_id)
        num_tokens = self._sequences.within(row, seq_id, num_tokens, "`num_tokens`")
        self._sequences.check_windows(row, seq_id, num_tokens)
        free_before = self._pool.num_free_pages
        self._sequences.truncate(row, num_tokens)
        self.prefix.commits.cut(row, num_tokens // self.page_size)
        self._settle(row, free_before)

    def free(self, seq_id: Hashable) -> None:
        """Forget a sequence. Pages that no other sequence holds are free.

        Raises:
            ValueError: No such sequence (it may have been freed already).
        """
        owner = self._owner
        if owner.busy:  # as in `add`
            raise second_thread("free")
        owner.busy = True
        try:
            row = self._sequences.remove(seq_id)
            if row is not None and (self._pool.caching or self._reservations.length):
                self._end(row)
        finally:
            owner.busy = False

    @verb
    def reserve(self, seq_id: Hashable, num_tokens: SupportsIndex) -> None:
        """Reserve the free pages that a sequence needs for `num_tokens` more tokens; to all others they are taken.

        Its appends use the reservation up; what `truncate` gives back, up to the length reserved, is reserved again.
        Ends with `free`, with `swap_out`, and with a reservation of 0. A group with a window is given as many pages as
        one without.

        Raises:
            OutOfPagesError: Too few pages are free; an earlier reservation stays.
            ValueError, TypeError: No such sequence, or `num_tokens` is not a count.
        """
        row = self._sequences.row(seq_id)
        num_tokens = as_count(num_tokens, "`num_tokens` for sequence {!r}", seq_id)
        length = self._sequences.num_tokens.item(row)
        self._sequences.check_limit(length + num_tokens, seq_id)
        cost = self._sequences.append_cost(row, num_tokens, length)
        self._require(cost.taken, self._free_for(row), "reserve", seq_id, num_tokens)
        if num_tokens:
            self._reservations.make(row, length + num_tokens, cost.taken, any(cost.copies_last))
        else:
            self._reservations.end(row)

    @verb
    def swap_out(self, seq_id: Hashable) -> npt.NDArray[np.int32]:
        """Take a sequence's pages from it. It keeps its name and its length, and can only be swapped in or freed.

        Returns:
            The pages to export before anything else is written: those that it held, of each group in turn.

        Raises:
            ValueError: No such sequence, or it is swapped out already.
        """
        row = self._sequences.row(seq_id)
        page_ids = self._sequences.swap_out(seq_id)
        self._end(row)
        return page_ids.astype(np.int32)

    @verb
    def swap_in(self, seq_id: Hashable) -> npt.NDArray[np.int32]:
        """Give a swapped sequence as many new pages as it held.

        Returns:
            The pages to import, in the order in which `swap_out` gave them. They are nobody else's: commit all tokens
            anew to share them.

        Raises:
            OutOfPagesError: Too few pages are free.
            ValueError: It is not swapped out.
        """
        swapped = self._sequences.swapped_sequence(seq_id)
        needed = self._sequences.num_held_pages(seq_id)
        self._require(needed, self.num_free_pages, "swap_in", seq_id, swapped.num_tokens)
        page_ids = self._index.take(needed)
        self._sequences.swap_in(seq_id, page_ids)
        return page_ids.astype(np.int32)

    @verb
    def invalidate(self, seq_id: Hashable, num_valid_tokens: int) -> list[Hashable]:
        """Forget the content of a sequence's pages after its first tokens, and of all that continues them.

        For pages whose import failed: they count as missed, nobody hits them from now on. Costs a pass over the pool.

        A sequence can be computed anew from there only where its windows still have the pages that the first token to
        compute sees. One that lacks some of them gets new pages in the place of all that its windows have passed, and
        has to be computed anew from token 0; pages that are still right are then written again with what they hold.

        Returns:
            The sequences that hold one of those pages, this one included: they have to be computed anew from there, or
            from token 0 where no entry of `page_ids` is `NULL_PAGE` now.

        Raises:
            ValueError, TypeError: No such sequence, or the count is none within its length.
            OutOfPagesError: Too few pages are free for the new ones. The contents can still be hit: see
                `PrefixCache.forget`.
        """
        row = self._sequences.row(seq_id)
        num_valid = self._sequences.within(row, seq_id, num_valid_tokens, "`num_valid_tokens`")
        affected = self.prefix.commits.invalidate(row, seq_id, num_valid, self.num_free_pages)
        self._reservations.settle_copies()
        return affected

    # The arrays of a step

    @verb
    def seq_len(self, seq_id: Hashable) -> int:
        """Return the tokens of a sequence, also of one that is swapped out."""
        return self._sequences.length(seq_id)

    @verb
    def page_ids(self, seq_id: Hashable, *, group: str | None = None) -> npt.NDArray[np.int32]:
        """[num_pages] Return a sequence's pages, in order, `NULL_PAGE` where a window has passed; a fresh array."""
        row = self._sequences.row(seq_id)
        return self._sequences.table(group).pages(row).copy()

    @verb
    def page_table(
        self, seq_ids: Sequence[Hashable], max_pages: SupportsIndex | None = None, *, group: str | None = None
    ) -> npt.NDArray[np.int32]:
        """[len(seq_ids), max_pages] Return page ids, each row padded with `NULL_PAGE`; a fresh array.

        Args:
            seq_ids: The sequences, in the order of the rows.
            max_pages: Width of the table; None takes that of the longest sequence, and at least 1.
            group: Whose pages; None where there is one group only.

        Raises:
            ValueError, TypeError: No such sequence, or one has more pages than the table is wide.
        """
        return self._sequences.page_tables([self._sequences.table(group)], seq_ids, max_pages)[0]

    @verb
    def page_tables(self, seq_ids: Sequence[Hashable], max_pages: SupportsIndex) -> npt.NDArray[np.int32]:
        """[num_groups, len(seq_ids), max_pages] Return `page_table` of each group; a fresh array.

        Raises:
            ValueError, TypeError: As `page_table`.
        """
        return self._sequences.page_tables(self._sequences.tables, seq_ids, max_pages)

    @verb
    def slot_mapping(
        self,
        seq_ids: Sequence[Hashable],
        num_new_tokens: Sequence[int] | npt.NDArray[np.integer],
        *,
        group: str | None = None,
    ) -> npt.NDArray[np.int32]:
        """[sum(num_new_tokens)] Return the slots of each sequence's last `num_new_tokens[i]` tokens; a fresh array.

        Call it after `add` or `append` made room for them. Slots are packed: all of the first sequence's, then all of
        the second's.

        Raises:
            ValueError, TypeError: No such sequence, one given twice, or a count that is negative or beyond its length.
        """
        return self._sequences.slot_mapping(seq_ids, num_new_tokens, group)

    # What observers ask

    @verb
    def stats(self) -> PageStats:
        """Count pages, sequences and tokens. Costs a pass over the pool."""
        return census.count_pages(self._sequences, self._reservations, self.prefix)

    @verb
    def sharing(self, seq_ids: Sequence[Hashable]) -> SharingStats:
        """Count what some sequences hold together, and would without sharing: the beams of a search, for example.

        Raises:
            ValueError, TypeError: No such sequence, or one is given twice.
        """
        return census.count_shared(self._sequences, self._sequences.distinct_rows(seq_ids, "sharing"))

    @verb
    def snapshot(self) -> PoolSnapshot:
        """Return who holds what, page by page, in arrays of their own: for pictures. Costs a pass over the pool."""
        return census.take_snapshot(self._sequences)

    # Helpers of the verbs

    def _add_found(
        self,
        seq_id: Hashable,
        tokens: npt.NDArray[np.int32],
        keys: tuple[Key, ...],
        host: HostPages | None,
        chunk: SupportsIndex | None,
    ) -> int:
        """Add a sequence with what its tokens hit, be it nothing. Returns how many tokens that are."""
        prompt = self.prefix.look_up(tokens, keys, host)
        num_tokens = len(tokens) if chunk is None else _first_length(len(tokens), prompt.num_hit_tokens, chunk)
        self._require(self.prefix.cost(prompt, num_tokens), self.num_free_pages, "add", seq_id, num_tokens)
        self.prefix.add(seq_id, prompt, num_tokens)
        return prompt.num_hit_tokens

    def _num_computed(self, row: int, seq_id: Hashable, num_computed: SupportsIndex | None) -> int:
        """Return a count of computed tokens, which is all of a row's where none is given."""
        if num_computed is None:
            return self._sequences.num_tokens.item(row)
        return self._sequences.within(row, seq_id, num_computed, "`num_computed`")

    def _require(self, needed: int, free: int, verb: str, seq_id: Hashable, num_tokens: int) -> None:
        if needed > free:
            raise OutOfPagesError(needed, free, f"{verb} of {num_tokens} tokens to sequence {seq_id!r}")

    def _free_for(self, row: int) -> int:
        """Return the free pages that this sequence may take: those reserved for it, and those for nobody."""
        return self.num_free_pages + self._reservations.of(row)

    def _settle(self, row: int, free_before: int) -> None:
        """Bring reservations up to date after a row took pages or gave some back."""
        if self._reservations.length:
            self._reservations.settle(row, free_before)
            self._reservations.settle_copies()

    def _end(self, row: int) -> None:
        """Forget what the parts know of a row that no sequence has any more."""
        self.prefix.commits.set(row, 0)
        if self._reservations.length:
            self._reservations.end(row)
            self._reservations.settle_copies()


def _first_length(num_tokens: int, num_hit: int, chunk: SupportsIndex) -> int:
    """Return the length of a new sequence that gets only `chunk` tokens after those that hit."""
    return min(num_tokens, num_hit + as_count(chunk, "`chunk`", minimum=1))
