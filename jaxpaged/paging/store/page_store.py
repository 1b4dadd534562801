"""Where swapped pages lie: host memory, and a file behind it. It moves bytes and decides nothing.

Both are made when the first page comes, for only then is it known how large a page is.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from jaxpaged.paging.store.layout import Block, PageLayout, Rows
from jaxpaged.paging.store.page_file import PageFile, Tags

Places = npt.NDArray[np.intp]
"""Places 0 .. num_host_pages - 1 are in host memory, those from there on in the file."""


class PageStore:
    """Places for pages of one layout.

    Attributes:
        num_host_pages: Places in host memory.
        num_file_pages: Places in the file behind them.
        layout: What a page consists of; None before the first page comes.
    """

    __slots__ = ("_closed", "_file", "_path", "_rows", "_run", "_serials", "layout", "num_file_pages", "num_host_pages")

    def __init__(self, num_host_pages: int, path: str | os.PathLike | None, num_file_pages: int):
        self.num_host_pages = num_host_pages
        self.num_file_pages = num_file_pages
        self.layout: PageLayout | None = None
        self._path = None if path is None else Path(path)
        self._file: PageFile | None = None
        self._closed = False
        self._rows: Rows = np.empty((0, 0), np.uint8)
        # Each write of a page to the file has a tag of its own, so that no older page passes for it: 8 bytes of this
        # store, for another process may have used the same file, and 8 of the write's number.
        self._run = np.frombuffer(os.urandom(8), np.uint8)
        self._serials = np.zeros(num_file_pages, np.uint64)

    def prepare(self, block: Block) -> None:
        """Make memory and file for pages like these; does nothing when it has pages like these.

        Raises:
            ValueError, TypeError: It has pages of another layout, `block` is none, or the store is closed.
            OSError: The file cannot be made.
        """
        if self._closed:
            raise ValueError("This swap space is closed. Make another.")
        layout = PageLayout.of(block)
        if self.layout is not None:
            if layout != self.layout:
                raise ValueError(
                    f"`block` must have pages like the first ones of this space: {self.layout}; got {layout}."
                )
            return
        if self._path is not None:
            self._file = PageFile.create(self._path, self.num_file_pages, layout.nbytes)
        self._rows = np.empty((self.num_host_pages, layout.nbytes), np.uint8)
        self.layout = layout

    def write(self, places: Places, block: Block, pages: Sequence[int]) -> None:
        """Put some pages of a block in distinct places. Raises OSError when the file cannot take them."""
        layout, chosen, in_host = self._prepared, np.array(pages, np.intp), places < self.num_host_pages
        layout.copy_in(block, chosen[in_host], self._rows, places[in_host])
        if self._file is not None and not in_host.all():
            in_file = places[~in_host] - self.num_host_pages
            first = int(self._serials.max()) + 1
            self._serials[in_file] = np.arange(first, first + len(in_file), dtype=np.uint64)
            rows = np.empty((len(in_file), layout.nbytes), np.uint8)
            layout.copy_in(block, chosen[~in_host], rows, range(len(in_file)))
            self._file.write(in_file, self._tags(in_file), rows)

    def read(self, places: Places) -> tuple[dict[str, npt.NDArray[Any]], npt.NDArray[np.bool_]]:
        """Read the pages in these places, as a block, and which of them are as they were written; others are zeros."""
        layout, whole = self._prepared, places < self.num_host_pages
        block, in_host, elsewhere = layout.empty(len(places)), np.flatnonzero(whole), np.flatnonzero(~whole)
        layout.copy_out(self._rows, places[in_host], block, in_host)
        if self._file is not None and len(elsewhere):
            in_file = places[elsewhere] - self.num_host_pages
            rows, whole[elsewhere] = self._file.read(in_file, self._tags(in_file))
            layout.copy_out(rows, range(len(rows)), block, elsewhere)
        return block, whole

    @property
    def _prepared(self) -> PageLayout:
        assert self.layout is not None  # pages are written after `prepare`, and read after they were written
        return self.layout

    def close(self) -> None:
        """Give back the memory and removes the file. Nothing may be written or read afterwards."""
        self._closed = True
        self._rows = np.empty((0, self._rows.shape[1]), np.uint8)
        if self._file is not None:
            self._file.close()
            self._file.path.unlink(missing_ok=True)
            self._file = None

    def _tags(self, in_file: Places) -> Tags:
        serials = self._serials[in_file, None].view(np.uint8)
        return np.concatenate([np.broadcast_to(self._run, serials.shape), serials], axis=1)
