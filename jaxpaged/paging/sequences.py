"""The sequences: their names, their lengths, and the pages that each of them references in each group.

A sequence that lives has a row, the same in the page table of every group. It knows the pool, whose references it
counts, but does not ask whether pages are free: `PageAllocator` does, by what a verb will cost. It knows no contents.
"""

import dataclasses
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple, SupportsIndex

import numpy as np
import numpy.typing as npt

from jaxpaged.checks import as_count
from jaxpaged.config import NULL_PAGE, cdiv
from jaxpaged.paging.digests import TOKEN_LISTS, Key, TokenIds
from jaxpaged.paging.groups import PageGroup
from jaxpaged.paging.lru import PageIds
from jaxpaged.paging.pool import PagePool
from jaxpaged.paging.records import PageCopy
from jaxpaged.paging.tables import PageTable, Rows, ragged_arange

_MIN_ROWS = 1024


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SwappedSequence:
    """A sequence that was swapped out and holds no pages.

    Attributes:
        num_tokens: The length of the sequence.
        num_passed: Pages that the window had passed, by group.
        keys: What besides the tokens shapes its KV.
    """

    num_tokens: int
    num_passed: tuple[int, ...]
    keys: tuple[Key, ...]


class AppendCost(NamedTuple):
    """What an append does to the pool.

    Attributes:
        added: Pages that it adds to each group.
        freed: Pages that it frees because windows pass them.
        copies_last: By group, whether the last page is copied because the sequence may not write to it.
    """

    added: int
    freed: int
    copies_last: list[bool]

    @property
    def taken(self) -> int:
        """Pages that it takes, those that it frees not counted."""
        return self.added * len(self.copies_last) + sum(self.copies_last)


class Sequences:
    """Names, lengths and page tables of all sequences. Calls cost O(pages touched).

    Args:
        pool: The pool whose pages they hold.
        groups: The groups; each has a page table.
        page_size: Tokens a page.
        max_pages: Pages that a sequence may have in a group, or None.

    Attributes:
        pool, page_size, max_pages: As given.
        tables: The page table of each group.
        windowed: The page tables of groups with a window.
        row_of_seq: The row of each live sequence; changed here only.
        num_tokens: [num_rows] the length of each live sequence.
        keys: What besides the tokens shapes the KV of a row, where something does.
        swapped: The sequences that are swapped out.
    """

    __slots__ = (
        "_asked",
        "_free_rows",
        "keys",
        "max_pages",
        "num_tokens",
        "page_size",
        "pool",
        "row_of_seq",
        "swapped",
        "tables",
        "windowed",
    )

    def __init__(self, pool: PagePool, groups: Sequence[PageGroup], page_size: int, max_pages: int | None):
        self.pool = pool
        self.page_size = page_size
        self.max_pages = max_pages
        self.row_of_seq: dict[Hashable, int] = {}
        self.tables = tuple(PageTable(group, page_size, self.row_of_seq, _MIN_ROWS) for group in groups)
        self.windowed = tuple(table for table in self.tables if table.group.sliding_window is not None)
        self.num_tokens = np.zeros(_MIN_ROWS, np.intp)
        self.keys: dict[int, tuple[Key, ...]] = {}
        self.swapped: dict[Hashable, SwappedSequence] = {}
        self._free_rows = list(range(_MIN_ROWS - 1, -1, -1))
        self._asked: tuple[list[Hashable], Rows] | None = None  # a step asks for the same sequences several times

    # Names and rows

    def __len__(self) -> int:
        """Live sequences, those swapped out not counted."""
        return len(self.row_of_seq)

    def __contains__(self, seq_id: Hashable) -> bool:
        try:
            return seq_id in self.row_of_seq or seq_id in self.swapped
        except TypeError:
            raise unhashable("seq_id", seq_id) from None

    def is_swapped(self, seq_id: Hashable) -> bool:
        """Whether a sequence is swapped out."""
        return seq_id in self and seq_id in self.swapped

    def new_length(self, name: str, seq_id: Hashable, token_ids: TokenIds | SupportsIndex) -> int:
        """Return the length of a sequence that is to be made; raises as `PageAllocator.add` where it cannot be."""
        try:
            if seq_id in self.row_of_seq or seq_id in self.swapped:
                what = "a live sequence" if seq_id in self.row_of_seq else "a swapped sequence"
                raise ValueError(f"`{name}` must be new; got {seq_id!r}, which is {what}. Free it first.")
        except TypeError:
            raise unhashable("seq_id", seq_id) from None
        if type(token_ids) is int and token_ids >= 0:  # the usual case of a count
            num_tokens = token_ids
        else:
            num_tokens = count_tokens(token_ids, "`token_ids` of sequence {!r}, where it is their number,", seq_id)
        if self.max_pages is not None:
            self.check_limit(num_tokens, seq_id)
        return num_tokens

    def row(self, seq_id: Hashable) -> int:
        """Return the row of a live sequence. Raises ValueError when there is none, or it is swapped out."""
        try:
            return self.row_of_seq[seq_id]
        except KeyError:
            if seq_id in self.swapped:
                raise ValueError(f"Sequence {seq_id!r} is swapped out; swap it in first.") from None
            raise _unknown(seq_id) from None
        except TypeError:
            raise unhashable("seq_id", seq_id) from None

    def rows(self, seq_ids: Sequence[Hashable]) -> Rows:
        """Return the rows of several live sequences, in their order; not to be written to."""
        if isinstance(seq_ids, str | bytes) or not isinstance(seq_ids, Sequence | np.ndarray):
            hint = "Make a list of it: its order is that of the rows."
            raise TypeError(f"`seq_ids` must be a list of sequence ids; got {type(seq_ids).__name__}. {hint}")
        seq_ids = list(seq_ids)
        if self._asked is None or self._asked[0] != seq_ids:
            try:
                rows = np.array([self.row_of_seq[seq_id] for seq_id in seq_ids], np.intp)
            except (KeyError, TypeError):
                for seq_id in seq_ids:
                    self.row(seq_id)
                raise
            self._asked = seq_ids, rows
        return self._asked[1]

    def distinct_rows(self, seq_ids: Sequence[Hashable], verb: str) -> Rows:
        """Return the rows of several live sequences. Raises ValueError where one is given twice."""
        rows = self.rows(seq_ids)
        seen = np.zeros(len(self.num_tokens), np.bool_)
        seen[rows] = True
        if np.count_nonzero(seen) < len(rows):
            first = np.unique(rows, return_index=True)[1]
            repeated = np.setdiff1d(np.arange(len(rows)), first)[0]
            raise ValueError(f"`seq_ids` of {verb} must be distinct; got {seq_ids[repeated]!r} twice.")
        return rows

    def all_rows(self) -> Rows:
        """Return the rows of all live sequences, in the order of their making."""
        return np.fromiter(self.row_of_seq.values(), np.intp, len(self.row_of_seq))

    def table(self, group: str | None) -> PageTable:
        """Return the page table of a group, by its name; None means the only one."""
        if group is None and len(self.tables) == 1:
            return self.tables[0]
        for table in self.tables:
            if table.group.name == group:
                return table
        raise ValueError(f"`group` must be one of {[table.group.name for table in self.tables]}; got {group!r}.")

    # Lengths

    def length(self, seq_id: Hashable) -> int:
        """Return the tokens of a sequence, also of one that is swapped out."""
        if self.is_swapped(seq_id):
            return self.swapped[seq_id].num_tokens
        return self.num_tokens.item(self.row(seq_id))

    def within(self, row: int, seq_id: Hashable, count: SupportsIndex, name: str) -> int:
        """Return a count of tokens. Raises ValueError where it is beyond the sequence's length."""
        count = as_count(count, name + " for sequence {!r}", seq_id)
        length = self.num_tokens.item(row)
        if count > length:
            raise ValueError(f"{name} must be <= {length}, the length of sequence {seq_id!r}; got {count}.")
        return count

    def check_limit(self, num_tokens: int, seq_id: Hashable) -> None:
        """Raise ValueError where a sequence would outgrow its row of the page table."""
        if self.max_pages is not None and num_tokens > self.max_pages * self.page_size:
            raise ValueError(
                f"Sequence {seq_id!r} must have at most {self.max_pages * self.page_size} tokens, for "
                f"`max_pages_per_seq` is {self.max_pages} pages of {self.page_size}; got {num_tokens}."
            )

    # What changes one sequence

    def add(self, seq_id: Hashable, num_tokens: int, num_pages: int, keys: tuple[Key, ...]) -> int:
        """Give a new sequence a row, and take so many uncached pages for it in each group. Returns the row."""
        if not self._free_rows:
            self._double_rows()
        row = self._free_rows.pop()
        for table in self.tables:
            table.add(row, self.pool.take(num_pages))
        self.num_tokens[row] = num_tokens
        if keys:
            self.keys[row] = keys
        self.row_of_seq[seq_id] = row  # last: the tables read it to learn which rows they have
        return row

    def add_with(
        self, seq_id: Hashable, num_tokens: int, pages: Sequence[npt.NDArray[np.integer]], keys: tuple[Key, ...]
    ) -> int:
        """Give a new sequence a row that holds these pages, those of each group. Returns the row."""
        row = self.add(seq_id, num_tokens, 0, keys)
        for table, page_ids in zip(self.tables, pages, strict=True):
            table.extend(row, page_ids)
        return row

    def remove(self, seq_id: Hashable) -> int | None:
        """Forget a sequence and free what nobody else references of its pages.

        Returns:
            The row that it had; None for one that was swapped out.

        Raises:
            ValueError: There is no such sequence.
        """
        try:
            row = self.row_of_seq.pop(seq_id)
        except (KeyError, TypeError):
            if self.is_swapped(seq_id):
                del self.swapped[seq_id]
                return None
            raise _unknown(seq_id) from None
        self._free_rows.append(row)
        self._asked = None
        if self.keys:
            self.keys.pop(row, None)
        pool = self.pool
        for table in self.tables:
            page_ids, may_share = table.remove(row)
            if may_share or pool.caching:
                pool.drop(np.array(page_ids, np.intp))
            else:
                pool.put(page_ids)
        return row

    def _double_rows(self) -> None:
        size = len(self.num_tokens)
        self._free_rows.extend(range(2 * size - 1, size - 1, -1))
        self.num_tokens = np.concatenate([self.num_tokens, np.zeros(size, np.intp)])
        for table in self.tables:
            table.double_rows()

    def num_held_pages(self, seq_id: Hashable) -> int:
        """Count the pages that a sequence references, or did when it was swapped out."""
        if self.is_swapped(seq_id):
            swapped = self.swapped[seq_id]
            return cdiv(swapped.num_tokens, self.page_size) * len(self.tables) - sum(swapped.num_passed)
        row = self.row(seq_id)
        return sum(table.num_pages.item(row) - table.num_passed.item(row) for table in self.tables)

    def append_cost(self, row: int, num_tokens: int, num_computed: int) -> AppendCost:
        """Return what an append would do to the pool."""
        length = self.num_tokens.item(row)
        added = cdiv(length + num_tokens, self.page_size) - cdiv(length, self.page_size)
        writes_last = num_tokens > 0 and length % self.page_size > 0
        copies = [writes_last and not self.pool.is_writable(table.last_page(row)) for table in self.tables]
        freed = 0
        for table in self.windowed:
            passed = table.newly_passed(row, num_computed)
            if len(passed):
                freed += int(np.count_nonzero(self.pool.ref_counts(passed) == 1))
        return AppendCost(added, freed, copies)

    def grow(self, row: int, page_ids: PageIds, cost: AppendCost) -> list[PageCopy]:
        """Hand a row its new pages, those of each group in turn: first the copy of its last page."""
        copies = []
        for table, copying in zip(self.tables, cost.copies_last, strict=True):
            if copying:
                copies.append(PageCopy(src=table.last_page(row), dst=page_ids.item(0)))
                self.pool.drop(np.array([copies[-1].src]))
                table.replace_last(row, copies[-1].dst)
                page_ids = page_ids[1:]
            table.extend(row, page_ids[: cost.added])
            page_ids = page_ids[cost.added :]
        return copies

    def fork(self, row: int, child_id: Hashable) -> int:
        """Make a new sequence with the same tokens that references the same pages. Returns its row."""
        pages = [table.pages(row).copy() for table in self.tables]
        for table in self.tables:
            self.pool.share(table.held_pages(row))
        child = self.add_with(child_id, self.num_tokens.item(row), pages, self.keys.get(row, ()))
        for table in self.tables:
            table.num_passed[child] = table.num_passed[row]
            table.may_share[row] = table.may_share[child] = 1
        return child

    def truncate(self, row: int, num_tokens: int) -> None:
        """Keep the first tokens of a row and free what nobody else references of the pages past them."""
        num_kept = cdiv(num_tokens, self.page_size)
        for table in self.tables:
            self.pool.drop(table.held_pages(row, num_kept))
            table.num_pages[row] = num_kept
        self.num_tokens[row] = num_tokens

    def pass_windows(self, row: int, num_computed: int) -> None:
        """Give back the pages that no token from `num_computed` on sees."""
        for table in self.windowed:
            passed = table.newly_passed(row, num_computed)
            if len(passed):
                self.pool.drop(passed.astype(np.intp))
                table.let_pass(row, passed)

    def check_windows(self, row: int, seq_id: Hashable, num_tokens: int) -> None:
        """Raise ValueError where a row cut to so many tokens would need pages that are given back."""
        for table in self.windowed:
            if table.lacks_pages(row, num_tokens):
                window = table.group.sliding_window or 1
                least = table.num_passed.item(row) * self.page_size + window - 1
                raise ValueError(
                    f"`num_tokens` for sequence {seq_id!r} must be >= {least}: its pages in group "
                    f"{table.group.name!r} before the window of {window} tokens are given back; got {num_tokens}."
                )

    def swap_out(self, seq_id: Hashable) -> PageIds:
        """Take all pages of a live sequence. Returns those that it held, of each group in turn."""
        row = self.row(seq_id)
        page_ids = np.concatenate([table.held_pages(row) for table in self.tables])
        swapped = SwappedSequence(
            num_tokens=self.num_tokens.item(row),
            num_passed=tuple(table.num_passed.item(row) for table in self.tables),
            keys=self.keys.get(row, ()),
        )
        self.remove(seq_id)
        self.swapped[seq_id] = swapped
        return page_ids

    def swapped_sequence(self, seq_id: Hashable) -> SwappedSequence:
        """Return what is known of a sequence that is swapped out. Raises ValueError for one that is not."""
        if not self.is_swapped(seq_id):
            self.row(seq_id)
            raise ValueError(f"`seq_id` must be a sequence that is swapped out; got {seq_id!r}, which is not.")
        return self.swapped[seq_id]

    def swap_in(self, seq_id: Hashable, page_ids: PageIds) -> None:
        """Give a swapped sequence new pages for those that it held, of each group in turn."""
        swapped = self.swapped.pop(seq_id)
        counts = [cdiv(swapped.num_tokens, self.page_size) - passed for passed in swapped.num_passed]
        parts = np.split(page_ids, np.cumsum(counts)[:-1])
        gone = (np.zeros(passed, np.intp) for passed in swapped.num_passed)
        pages = [np.concatenate(pair) for pair in zip(gone, parts, strict=True)]
        row = self.add_with(seq_id, swapped.num_tokens, pages, swapped.keys)
        for table, passed in zip(self.tables, swapped.num_passed, strict=True):
            table.num_passed[row] = passed

    # The arrays of a step

    def page_tables(
        self, tables: Sequence[PageTable], seq_ids: Sequence[Hashable], max_pages: SupportsIndex | None
    ) -> npt.NDArray[np.int32]:
        """[len(tables), len(seq_ids), max_pages] Return `PageAllocator.page_table` of some groups."""
        rows = self.rows(seq_ids)
        counts = tables[0].num_pages[rows]  # those of all groups
        if max_pages is None:
            width = max(1, int(counts.max(initial=0)))
        else:
            width = as_count(max_pages, "`max_pages`", minimum=1)
            if counts.max(initial=0) > width:
                i = int(np.argmax(counts > width))
                raise ValueError(
                    f"`max_pages` must be >= {counts[i]}, the pages of sequence {seq_ids[i]!r} "
                    f"({self.num_tokens[rows[i]]} tokens); got {width}."
                )
        windows = [table.window(rows, width) for table in tables]
        page_ids = windows[0][None] if len(windows) == 1 else np.stack(windows)
        np.copyto(page_ids, NULL_PAGE, where=np.arange(width, dtype=np.int32) >= counts[:, None].astype(np.int32))
        return page_ids

    def slot_mapping(
        self,
        seq_ids: Sequence[Hashable],
        num_new_tokens: Sequence[int] | npt.NDArray[np.integer],
        group: str | None,
    ) -> npt.NDArray[np.int32]:
        """Return `PageAllocator.slot_mapping`."""
        table, rows = self.table(group), self.distinct_rows(seq_ids, "a slot mapping")
        lengths = self.num_tokens[rows]
        counts = counts_within(seq_ids, lengths, num_new_tokens, "`num_new_tokens`")
        if counts.max(initial=0) <= 1:  # a decode step: a token or none of each sequence
            rows, positions = rows[counts > 0], lengths[counts > 0] - 1
            starts = table.starts[rows]
        else:
            positions = ragged_arange(lengths - counts, counts)
            starts = np.repeat(table.starts[rows], counts)
        page_index, offsets = np.divmod(positions, self.page_size)
        return table.page_ids[starts + page_index] * np.int32(self.page_size) + offsets.astype(np.int32)


def count_tokens(token_ids: TokenIds | SupportsIndex, label: str, *names: object) -> int:
    """Return the length of a list of tokens, or the count itself; `label` is what errors call it."""
    if isinstance(token_ids, np.ndarray) and token_ids.ndim:
        if token_ids.ndim > 1:
            what = label.format(*names).split(",")[0]
            raise ValueError(f"{what} must have one axis; got shape {token_ids.shape}.")
        return len(token_ids)
    if isinstance(token_ids, list | tuple | range):
        if token_ids and isinstance(token_ids[0], TOKEN_LISTS):
            raise ValueError(f"{label.format(*names).split(',')[0]} must be one list of integers; got a list of lists.")
        return len(token_ids)
    return as_count(token_ids, label, *names)


def unhashable(name: str, seq_id: object) -> TypeError:
    """Return the refusal of a sequence id that cannot be one."""
    what = f"{seq_id!r} ({type(seq_id).__name__}), which is unhashable"
    return TypeError(f"`{name}` must be hashable, such as a number, a string or a tuple of those; got {what}.")


def _unknown(seq_id: Any) -> ValueError:
    return ValueError(f"`seq_id` must be a sequence that is here (add or fork makes one); got {seq_id!r}.")


def counts_within(
    seq_ids: Sequence[Hashable],
    lengths: npt.NDArray[np.intp],
    given: Sequence[int] | npt.NDArray[np.integer],
    name: str,
) -> npt.NDArray[np.intp]:
    """Return a count of tokens for each sequence. Raises by name for one beyond its length."""
    counts = np.asarray(given)
    if counts.shape != lengths.shape:
        raise ValueError(
            f"{name} must have one entry for each of the {len(lengths)} sequences; got shape {counts.shape}."
        )
    if len(lengths) and not np.issubdtype(counts.dtype, np.integer):
        raise TypeError(f"{name} must be integers; got {counts.dtype}.")
    wrong = (counts < 0) | (counts > lengths)
    if np.count_nonzero(wrong):
        i = int(np.argmax(wrong))
        limit = f"{lengths[i]}, the length of sequence {seq_ids[i]!r}"
        raise ValueError(f"{name} must be in 0 .. {limit}; got {counts[i]}.")
    return counts.astype(np.intp)
