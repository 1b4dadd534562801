"""Groups of layers that keep the same tokens: those that see everything, and those with a sliding window.

A model that mixes them has a page table for each group, all from one pool. A page of a windowed group that no later
token can see is dead: its entry in the table is `NULL_PAGE`.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from jaxpaged.checks import as_count


@dataclasses.dataclass(frozen=True, slots=True)
class PageGroup:
    """Layers that share a page table.

    Attributes:
        name: What the group is called in the verbs that give its pages.
        sliding_window: Tokens that a token sees, itself included; None: all before it.
    """

    name: str
    sliding_window: int | None = None

    def num_dead_pages(self, num_computed: int, page_size: int) -> int:
        """Leading pages that token number `num_computed` and those after it do not see."""
        if self.sliding_window is None:
            return 0
        return max(0, num_computed - self.sliding_window + 1) // page_size

    def dead_pages(self, num_computed: npt.NDArray[np.intp], page_size: int) -> npt.NDArray[np.intp]:
        """`num_dead_pages` of many."""
        if self.sliding_window is None:
            return np.zeros_like(num_computed)
        return np.maximum(0, num_computed - (self.sliding_window - 1)) // page_size


def check_groups(groups: Sequence[PageGroup] | None) -> tuple[PageGroup, ...]:
    """The groups; one with full attention where none are given. Raises by name for what cannot be one model's."""
    if groups is None:
        return (PageGroup("full"),)
    if not isinstance(groups, Sequence):
        raise TypeError(f"`groups` must be a list of PageGroup; got {groups!r}. Put one alone into a list, too.")
    groups = tuple(groups)
    if not groups or not all(isinstance(group, PageGroup) for group in groups):
        raise TypeError(f"`groups` must be at least one PageGroup; got {groups!r}.")
    names = [group.name for group in groups]
    if not all(isinstance(name, str) for name in names):
        raise TypeError(f"`groups` must have strings for names; got {names}.")
    if len(set(names)) < len(names):
        raise ValueError(f"`groups` must have names of their own; got {names}.")
    return tuple(group if group.sliding_window is None else _with_int_window(group) for group in groups)


def _with_int_window(group: PageGroup) -> PageGroup:
    """The same with an int for a window that may be numpy's: traces and files write it."""
    window = as_count(group.sliding_window, "`sliding_window` of group {!r}", group.name, minimum=1)  # pyright: ignore
    return dataclasses.replace(group, sliding_window=window)


def longest_hit(groups: Sequence[PageGroup], found: Sequence[npt.NDArray[np.intp]], page_size: int) -> int:
    """The most leading pages after which every group has what the next token sees.

    Args:
        groups: The groups.
        found: Of each group the pages found, 0 for one that is missing; none is missing in a group without a window.
        page_size: Tokens a page.
    """
    num_pages = len(found[0])
    ends = np.arange(num_pages + 1)
    agreed = np.ones(num_pages + 1, np.bool_)
    for group, page_ids in zip(groups, found, strict=True):
        last_miss = np.maximum.accumulate(np.concatenate([[-1], np.where(page_ids == 0, ends[:-1], -1)]))
        agreed &= last_miss < np.maximum(group.dead_pages(ends * page_size, page_size), last_miss.dtype.type(0))
    return int(np.flatnonzero(agreed)[-1])
