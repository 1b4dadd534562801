"""Pages of a cache as rows of bytes: what swap space and files hold. It knows neither slots nor sequences.

A block of pages is a mapping from names to arrays `[num_layers, num_pages, ...]`, as `PageBlock.to_host` returns it. A
row is one page of it: the bytes of each array in turn. Values are moved as bytes and never as numbers, so that dtypes
which numpy does not know (bfloat16, float8) and every NaN come back as they were.
"""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

Block = Mapping[str, npt.NDArray[Any]]
"""Pages by name: arrays `[num_layers, num_pages, ...]`, all with the same number of pages."""

Rows = npt.NDArray[np.uint8]
"""`[num_pages, nbytes]`: a page a row."""


@dataclasses.dataclass(frozen=True, slots=True)
class PageField:
    """One array of a page.

    Attributes:
        name: The name of the array in the block.
        dtype: The type of its values.
        shape: The shape of one page of it: `(num_layers, ...)`.
    """

    name: str
    dtype: np.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes a page."""
        return int(np.prod(self.shape)) * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{self.name} {self.dtype.name}{list(self.shape)}"


@dataclasses.dataclass(frozen=True, slots=True)
class PageLayout:
    """The arrays of a page, in the order of their bytes in a row."""

    fields: tuple[PageField, ...]

    @classmethod
    def of(cls, block: Block) -> "PageLayout":
        """Return the layout of a block's pages, whatever their number.

        Raises:
            TypeError: The block is no mapping of names to numpy arrays.
            ValueError: It is empty, an array has no page axis, or arrays differ in their number of pages.
        """
        num_pages_of(block)
        return cls(tuple(PageField(name, x.dtype, x.shape[:1] + x.shape[2:]) for name, x in sorted(block.items())))

    @property
    def nbytes(self) -> int:
        """Bytes a page."""
        return sum(field.nbytes for field in self.fields)

    def __str__(self) -> str:
        return ", ".join(map(str, self.fields))

    def pack(self, block: Block) -> Rows:
        """The pages of a block of this layout as rows; a fresh array."""
        every = range(num_pages_of(block))
        rows = np.empty((len(every), self.nbytes), np.uint8)
        self.copy_in(block, every, rows, every)
        return rows

    def unpack(self, rows: Rows) -> dict[str, npt.NDArray[Any]]:
        """The block whose pages these rows are: fresh arrays."""
        block, every = self.empty(len(rows)), range(len(rows))
        self.copy_out(rows, every, block, every)
        return block

    def empty(self, num_pages: int) -> dict[str, npt.NDArray[Any]]:
        """A block of so many pages, with anything in them."""
        return {x.name: np.empty((x.shape[0], num_pages, *x.shape[1:]), x.dtype) for x in self.fields}

    def copy_in(self, block: Block, pages: Iterable[int], rows: Rows, places: Iterable[int]) -> None:
        """Copy pages of a block into rows: one by one, for memory that is claimed on the way costs more than that."""
        pairs = list(zip(pages, places, strict=True))
        for field, values in zip(self.fields, self._values(rows), strict=True):
            source = block[field.name].view(values.dtype)
            for page, place in pairs:
                values[place] = source[:, page]

    def copy_out(self, rows: Rows, places: Iterable[int], block: Block, pages: Iterable[int]) -> None:
        """Copy rows into pages of a block."""
        pairs = list(zip(pages, places, strict=True))
        for field, values in zip(self.fields, self._values(rows), strict=True):
            target = block[field.name].view(values.dtype)
            for page, place in pairs:
                target[:, page] = values[place]

    def _values(self, rows: Rows) -> list[npt.NDArray[np.unsignedinteger]]:
        """View the fields in `rows`, `[num_pages, *shape]`, as unsigned integers of the width of their values."""
        views, begin = [], 0
        for field in self.fields:
            end = begin + field.nbytes
            values = rows[:, begin:end].view(f"u{field.dtype.itemsize}")
            views.append(values.reshape(len(rows), *field.shape))
            begin = end
        return views


def num_pages_of(block: Block) -> int:
    """How many pages a block has. Raises as `PageLayout.of`."""
    if not isinstance(block, Mapping):
        raise TypeError(
            f"`block` must map names to numpy arrays, as `PageBlock.to_host()` does; got {type(block).__name__}."
        )
    counts = {}
    for name, x in block.items():
        if not isinstance(x, np.ndarray):
            raise TypeError(f"`block[{name!r}]` must be a numpy array; got {type(x).__name__}.")
        if x.ndim < 2 or x.dtype.itemsize not in (1, 2, 4, 8):
            raise ValueError(
                f"`block[{name!r}]` must be (num_layers, num_pages, ...) of 1, 2, 4 or 8 bytes a value; got {x.dtype} "
                f"{x.shape}."
            )
        counts[name] = x.shape[1]
    if len(set(counts.values())) != 1:
        raise ValueError(f"`block` must have arrays with the same number of pages, one at least; got {counts}.")
    return counts.popitem()[1]
