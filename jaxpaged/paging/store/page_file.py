"""A memory-mapped file of pages, each with a tag and a checksum, so that what was not written whole is never read.

    header    magic, number of pages, bytes a page, length of the metadata, and a CRC-32 of all this and the metadata
    metadata  bytes of the owner's
    entries   for each page, 16 bytes of tag and a CRC-32 of tag and page
    pages     `[num_pages, page_nbytes]`

A writer gives each page a tag that names its content, and a reader says which tag it expects: an older content of the
same place fails the test as well as half of a new one does. A write clears the entry, then writes the page, then the
entry. The checksum finds accidents (a torn page passes with a chance of 2**-32), not forgeries. Whatever happens to the
file from outside, a page is read as it was written or counts as missed.
"""

import contextlib
import mmap
import os
import struct
import zlib
from pathlib import Path

import numpy as np
import numpy.typing as npt

from jaxpaged.paging.store.layout import Rows

TAG_NBYTES = 16
Tags = npt.NDArray[np.uint8]
"""`[num_pages, 16]`: what each page is, in bytes that are not all zero."""

_MAGIC = b"jaxpaged pages 1"
_HEADER = struct.Struct("<16sQQQ")
_CHECKSUM = struct.Struct("<I")
_METADATA_BEGIN = _HEADER.size + _CHECKSUM.size
_ENTRY = np.dtype([("tag", np.uint8, TAG_NBYTES), ("checksum", "<u4")])


class PageFileError(ValueError):
    """A file is not one of pages, or not whole enough to say what is in it."""


class PageFile:
    """The pages of one file. Make one with `create` or `open`.

    Attributes:
        path: Where the file is.
        num_pages: Places for pages, numbered from 0.
        page_nbytes: Bytes a page.
        metadata: The owner's bytes, as they were given to `create`.
    """

    __slots__ = ("_data_begin", "_entries", "_file", "_map", "_pages", "metadata", "num_pages", "page_nbytes", "path")

    def __init__(self, path: Path, num_pages: int, page_nbytes: int, metadata: bytes, *, writable: bool):
        self.path, self.num_pages, self.page_nbytes, self.metadata = path, num_pages, page_nbytes, metadata
        entries_begin = _aligned(_METADATA_BEGIN + len(metadata), 64)
        self._data_begin = _aligned(entries_begin + num_pages * _ENTRY.itemsize, mmap.PAGESIZE)
        with contextlib.ExitStack() as opened:
            self._file = opened.enter_context(path.open("r+b" if writable else "rb"))
            if writable:
                self._fill_up()
            # A file that was cut cannot be mapped whole, and its missing end is never touched.
            length = min(self.nbytes, os.fstat(self._file.fileno()).st_size)
            if length < self._data_begin:
                raise _cut(path)
            access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ
            self._map = mmap.mmap(self._file.fileno(), length, access=access)
            opened.pop_all()
        self._entries = np.frombuffer(self._map, _ENTRY, num_pages, entries_begin)
        num_whole = (length - self._data_begin) // max(1, page_nbytes)
        data = np.frombuffer(self._map, np.uint8, num_whole * page_nbytes, self._data_begin)
        self._pages = data.reshape(num_whole, page_nbytes)

    @classmethod
    def create(cls, path: str | os.PathLike, num_pages: int, page_nbytes: int, metadata: bytes = b"") -> "PageFile":
        """A new file with no page in it. Its whole length is claimed from the disk at once.

        Raises:
            FileExistsError: There is a file that is not one of pages. One of pages is replaced.
            OSError: The file cannot be made, or the disk has no room for it; nothing is left of it then.
        """
        path = Path(path)
        check_replaceable(path)
        header = _HEADER.pack(_MAGIC, num_pages, page_nbytes, len(metadata))
        header += _CHECKSUM.pack(zlib.crc32(metadata, zlib.crc32(header)))
        # A new file in the place of an old one, whose owner may still have it mapped.
        path.unlink(missing_ok=True)
        try:
            path.write_bytes(header + metadata)
            return cls(path, num_pages, page_nbytes, metadata, writable=True)
        except OSError:
            path.unlink(missing_ok=True)
            raise

    @classmethod
    def open(cls, path: str | os.PathLike) -> "PageFile":
        """An existing file, to be read.

        Raises:
            PageFileError: It is not a file of pages, or its header or metadata are damaged.
            OSError: It cannot be read.
        """
        path = Path(path)
        with path.open("rb") as file:
            header, checksum = file.read(_HEADER.size), file.read(_CHECKSUM.size)
            if not header.startswith(_MAGIC):
                raise PageFileError(f"{path} must begin with {_MAGIC!r}; got {header[: len(_MAGIC)]!r}.")
            if len(checksum) < _CHECKSUM.size:
                raise _cut(path)
            _, num_pages, page_nbytes, metadata_nbytes = _HEADER.unpack(header)
            if metadata_nbytes > os.fstat(file.fileno()).st_size:
                raise _cut(path)
            metadata = file.read(metadata_nbytes)
        if _CHECKSUM.pack(zlib.crc32(metadata, zlib.crc32(header))) != checksum:
            raise PageFileError(f"{path} has a header that differs from its checksum: it is damaged. Make it anew.")
        return cls(path, num_pages, page_nbytes, metadata, writable=False)

    @property
    def nbytes(self) -> int:
        """Length of the file, as it should be."""
        return self._data_begin + self.num_pages * self.page_nbytes

    def write(self, places: npt.NDArray[np.intp], tags: Tags, rows: Rows) -> None:
        """Put pages in distinct places. Interrupted, it leaves each of them as written whole or as missed.

        Raises:
            OSError: The file was cut since, and the disk has no room to make it whole.
        """
        self._fill_up()
        self._entries[places] = np.zeros((), _ENTRY)
        checksums = [_checksum(tag, row) for tag, row in zip(tags, rows, strict=True)]
        self._write_pages(places, rows)
        entries = np.empty(len(places), _ENTRY)
        entries["tag"], entries["checksum"] = tags, checksums
        self._write_entries(places, entries)

    def read(self, places: npt.NDArray[np.intp], tags: Tags) -> tuple[Rows, npt.NDArray[np.bool_]]:
        """The pages in these places, and which of them are what their tags say; the other rows are zeros."""
        rows = np.zeros((len(places), self.page_nbytes), np.uint8)
        # Past the end of a file, a map does not fail: it kills the process.
        size = os.fstat(self._file.fileno()).st_size
        found = (self._data_begin + (places + 1) * self.page_nbytes <= size) & (places < len(self._pages))
        if size < self._data_begin:
            return rows, found
        entries = self._entries[places]
        found &= (entries["tag"] == tags).all(axis=1) & tags.any(axis=1)
        for i in np.flatnonzero(found):
            rows[i] = self._pages[places[i]]  # checked and returned are the same bytes, whoever writes meanwhile
            found[i] = _checksum(tags[i], rows[i]) == entries["checksum"][i]
            if not found[i]:
                rows[i] = 0
        return rows, found

    def flush(self) -> None:
        """Wait until all that was written is on the disk."""
        self._map.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Let go of the file, which stays. No verb may be called after it."""
        del self._entries, self._pages  # a map with views of it cannot be closed
        self._map.close()
        self._file.close()

    def __enter__(self) -> "PageFile":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _fill_up(self) -> None:
        """Make the file as long as it should be: a write to a map past its end, or on a full disk, kills."""
        descriptor = self._file.fileno()
        if os.fstat(descriptor).st_size >= self.nbytes:
            return
        with contextlib.suppress(AttributeError):  # not on every system: there the file has holes
            os.posix_fallocate(descriptor, 0, self.nbytes)
        if os.fstat(descriptor).st_size < self.nbytes:
            os.ftruncate(descriptor, self.nbytes)

    # Apart, so that a test can stop between the two.
    def _write_pages(self, places: npt.NDArray[np.intp], rows: Rows) -> None:
        self._pages[places] = rows

    def _write_entries(self, places: npt.NDArray[np.intp], entries: npt.NDArray) -> None:
        self._entries[places] = entries


def _cut(path: Path) -> PageFileError:
    return PageFileError(f"{path} ends before its first page: it was cut. Make it anew.")


def _checksum(tag: npt.NDArray[np.uint8], row: npt.NDArray[np.uint8]) -> int:
    return zlib.crc32(row, zlib.crc32(tag))


def check_replaceable(path: Path) -> None:
    """Raise FileExistsError where there is something else than a file of pages or an empty one."""
    if not path.exists():
        return
    start = b"a directory"
    if path.is_file():
        with path.open("rb") as file:
            start = file.read(len(_MAGIC))
    if start not in (_MAGIC, b""):
        raise FileExistsError(f"{path} is there and is not a file of pages. Remove it, or name another.")


def _aligned(nbytes: int, alignment: int) -> int:
    return -(-nbytes // alignment) * alignment
