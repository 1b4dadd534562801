"""Page groups: the layers of a model by the tokens that they see, all of them or a sliding window.

A model that mixes both kinds keeps a page table for each group, all from one pool. In a group with a window the pages
that no later token sees are given back while the sequence goes on: the window has *passed* them, and their entry in the
page table is `NULL_PAGE`.

How groups map onto a `KVCache` (vLLM's scheme): a page id means one row of the stacked pools for each layer of *one*
group, so all groups have the same KV heads and head size and about as many layers, and the stack has as many rows as
the largest group has layers. The i-th layer of group g reads and writes row i, through the page table and the slots of
group g. A model of 20 windowed layers and 4 full ones is six groups of 4 layers (five with the window, one without)
over a stack of 4 rows: `group_layers`.
"""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from jaxpaged.checks import as_count
from jaxpaged.config import LayerPlace, LayerSpec, cdiv

MAX_PADDING = 1 / 8
"""Rows of groups that may belong to no layer, so that groups are fewer, as a part of the number of layers."""


@dataclasses.dataclass(frozen=True, slots=True)
class PageGroup:
    """Layers that share a page table.

    Attributes:
        name: What the group is called in the verbs that give its pages.
        sliding_window: How many tokens a token sees, itself included; None is all before it.
    """

    name: str
    sliding_window: int | None = None

    def num_passed_pages(self, num_computed: int, page_size: int) -> int:
        """Count the leading pages that token `num_computed` and those after it do not see."""
        if self.sliding_window is None:
            return 0
        return max(0, num_computed - self.sliding_window + 1) // page_size

    def passed_pages(self, num_computed: npt.NDArray[np.intp], page_size: int) -> npt.NDArray[np.intp]:
        """[len(num_computed)] Return `num_passed_pages` of many."""
        if self.sliding_window is None:
            return np.zeros_like(num_computed)
        return np.maximum(0, num_computed - (self.sliding_window - 1)) // page_size

    def max_held_pages(self, num_tokens: int, chunk: int, page_size: int) -> int:
        """Bound the pages that a sequence of `num_tokens` holds at one time, if it grows `chunk` tokens at a time.

        While a chunk is computed, the group holds the pages of the chunk and of the `sliding_window - 1` tokens before
        it. So many consecutive tokens touch at most that many pages, wherever the first of them lies in its page.
        """
        whole = cdiv(num_tokens, page_size)
        if self.sliding_window is None:
            return whole
        return min(whole, cdiv(self.sliding_window + chunk - 2, page_size) + 1)


def group_layers(layer_specs: Sequence[LayerSpec]) -> tuple[tuple[PageGroup, ...], tuple[LayerPlace, ...]]:
    """Divide the layers of a model into page groups of equal size, each of layers with the same window.

    Fewer groups are fewer page tables to make in each step. Where layers do not divide evenly, some rows of some groups
    belong to no layer, and their memory is lost: the groups are the largest that lose at most `MAX_PADDING`, and
    nothing where a group holds all pages.

    Args:
        layer_specs: The layers in their order.

    Returns:
        The groups, and the place of each layer.

    Raises:
        ValueError: There is no layer, or layers differ in their KV heads or head size, which groups of one pool cannot.
    """
    if not layer_specs:
        raise ValueError("`layer_specs` must have one for each layer; got none.")
    shape = layer_specs[0].num_kv_heads, layer_specs[0].head_dim
    for i, spec in enumerate(layer_specs):
        if (spec.num_kv_heads, spec.head_dim) != shape:
            raise ValueError(
                f"`layer_specs[{i}]` must have (num_kv_heads, head_dim) = {shape}, as the layers before it, for all "
                f"share one pool of pages; got {(spec.num_kv_heads, spec.head_dim)}."
            )
    layers_of: dict[int | None, list[int]] = {}  # by window
    for i, spec in enumerate(layer_specs):
        layers_of.setdefault(spec.sliding_window, []).append(i)
    size = _group_size({window: len(layers) for window, layers in layers_of.items()})
    groups, places = [], {}
    for window, layers in layers_of.items():
        name = "full" if window is None else f"window {window}"
        for begin in range(0, len(layers), size):
            number = f", {begin // size + 1} of {cdiv(len(layers), size)}" if len(layers) > size else ""
            places |= {layer: LayerPlace(len(groups), row) for row, layer in enumerate(layers[begin : begin + size])}
            groups.append(PageGroup(name + number, window))
    return check_groups(groups), tuple(places[i] for i in range(len(layer_specs)))


def _group_size(num_layers: Mapping[int | None, int]) -> int:
    """Return how many layers a group is to have, where each window has so many."""
    most = MAX_PADDING * sum(num_layers.values())

    def num_lost(size: int) -> int:
        return sum(-count % size for count in num_layers.values())

    sizes = range(1, max(num_layers.values()) + 1)
    return max(size for size in sizes if num_layers.get(None, 0) % size == 0 and num_lost(size) <= most)


def check_groups(groups: Sequence[PageGroup] | None) -> tuple[PageGroup, ...]:
    """Return the groups, or one with full attention where none are given. Raises by name for what is no list of them.

    Raises:
        TypeError, ValueError: `groups` is no list of `PageGroup`, or two share a name, or a window is not a count.
    """
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
    """Return the group with an int for a window that may be numpy's: traces and files write it."""
    window = as_count(group.sliding_window, "`sliding_window` of group {!r}", group.name, minimum=1)  # pyright: ignore
    return dataclasses.replace(group, sliding_window=window)


def longest_hit(groups: Sequence[PageGroup], found: Sequence[npt.NDArray[np.intp]], page_size: int) -> int:
    """Count the most leading pages after which every group has what the next token sees.

    Args:
        groups: The groups.
        found: The pages found, an array a group; 0 for one that is missing. None is missing in a group without a
            window.
        page_size: Tokens a page.
    """
    num_pages = len(found[0])
    ends = np.arange(num_pages + 1)
    agreed = np.ones(num_pages + 1, np.bool_)
    for group, page_ids in zip(groups, found, strict=True):
        last_miss = np.maximum.accumulate(np.concatenate([[-1], np.where(page_ids == 0, ends[:-1], -1)]))
        agreed &= last_miss < np.maximum(group.passed_pages(ends * page_size, page_size), last_miss.dtype.type(0))
    return int(np.flatnonzero(agreed)[-1])
