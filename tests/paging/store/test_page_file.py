"""A page is read as it was written or counts as missed, whatever happened to the file in between."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import jaxpaged
from jaxpaged.paging.store import page_file
from jaxpaged.paging.store.page_file import PageFile, PageFileError

NUM_PAGES, NBYTES = 6, 5000


def make_rows(*seeds: int) -> np.ndarray:
    return np.stack([np.random.default_rng(seed).integers(0, 256, NBYTES, np.uint8) for seed in seeds])


def make_tags(*numbers: int) -> np.ndarray:
    return np.array([[number] * 16 for number in numbers], np.uint8).reshape(-1, 16)


def places(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.intp)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "swap.pages"


@pytest.fixture
def written(path):
    """A file with pages 0, 1 and 4."""
    with PageFile.create(path, NUM_PAGES, NBYTES, b"of a test") as file:
        file.write(places(4, 0, 1), make_tags(14, 10, 11), make_rows(4, 0, 1))
    return path


def found_pages(path) -> list[int]:
    """Which of the three pages are found; those are also what was written."""
    with PageFile.open(path) as file:
        rows, found = file.read(places(0, 1, 4), make_tags(10, 11, 14))
        expected = np.where(found[:, None], make_rows(0, 1, 4), 0)
        np.testing.assert_array_equal(rows, expected)
    return np.array([0, 1, 4])[found].tolist()


def test_read_after_write_returns_the_pages_asked_for(written):
    assert found_pages(written) == [0, 1, 4]
    with PageFile.open(written) as file:
        assert (file.num_pages, file.page_nbytes, file.metadata) == (NUM_PAGES, NBYTES, b"of a test")
        assert file.nbytes == written.stat().st_size
        rows, found = file.read(places(4, 2, 0), make_tags(14, 12, 10))
        np.testing.assert_array_equal(rows[[0, 2]], make_rows(4, 0))
        assert found.tolist() == [True, False, True]


@pytest.mark.parametrize("collide", [False, True])
def test_read_of_another_tag_finds_nothing(written, monkeypatch, collide):
    if collide:  # with the checksum of what was never written, too
        monkeypatch.setattr(page_file, "_checksum", lambda *_: 0)
        with PageFile.create(written, NUM_PAGES, NBYTES) as file:
            file.write(places(0, 1), make_tags(10, 11), make_rows(0, 1))
    with PageFile.open(written) as file:
        rows, found = file.read(places(0, 1, 5), make_tags(11, 10, 0))
    assert not found.any()
    assert not rows.any()


def test_write_again_replaces_the_page_and_its_tag(path):
    with PageFile.create(path, NUM_PAGES, NBYTES) as file:
        file.write(places(3), make_tags(1), make_rows(1))
        file.write(places(3), make_tags(2), make_rows(2))
        assert file.read(places(3, 3), make_tags(1, 2))[1].tolist() == [False, True]
        np.testing.assert_array_equal(file.read(places(3), make_tags(2))[0], make_rows(2))


@given(position=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
def test_read_of_a_file_with_a_flipped_bit_is_right_or_missed(tmp_path_factory, position, bit):
    path = tmp_path_factory.mktemp("flip") / "swap.pages"
    with PageFile.create(path, NUM_PAGES, NBYTES) as file:
        file.write(places(4, 0, 1), make_tags(14, 10, 11), make_rows(4, 0, 1))
    content = bytearray(path.read_bytes())
    content[int(position * len(content))] ^= 1 << bit
    path.write_bytes(content)
    try:
        assert len(found_pages(path)) >= 2
    except PageFileError:
        assert int(position * len(content)) < 64  # the header


@pytest.mark.parametrize("page", [0, 1, 4])
@pytest.mark.parametrize("offset", [0, NBYTES // 2, NBYTES - 1])
def test_read_of_a_page_with_a_flipped_byte_misses_that_page_only(written, page, offset):
    with written.open("r+b") as file:
        file.seek(written.stat().st_size - (NUM_PAGES - page) * NBYTES + offset)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 255]))
    assert found_pages(written) == [i for i in (0, 1, 4) if i != page]


@pytest.mark.parametrize(("num_lost", "expected"), [(1, [0, 1, 4]), (NBYTES + 1, [0, 1]), (5 * NBYTES + 1, [])])
def test_read_of_a_truncated_file_misses_what_was_cut_off(written, num_lost, expected):
    os.truncate(written, written.stat().st_size - num_lost)
    assert found_pages(written) == expected


@pytest.mark.parametrize(("size", "expected"), [(NBYTES * 2, [True, False]), (100, [False] * 2), (0, [False] * 2)])
def test_file_truncated_while_it_is_open_misses_pages_and_can_be_written_again(path, size, expected):
    with PageFile.create(path, NUM_PAGES, NBYTES) as file:
        file.write(places(0, 5), make_tags(1, 2), make_rows(1, 2))
        os.truncate(path, size)
        assert file.read(places(0, 5), make_tags(1, 2))[1].tolist() == expected
        file.write(places(2, 5), make_tags(3, 4), make_rows(3, 4))
        rows, found = file.read(places(2, 5, 5), make_tags(3, 4, 2))
    assert found.tolist() == [True, True, False]
    np.testing.assert_array_equal(rows[:2], make_rows(3, 4))


KILLED = """
import os, sys, types
import numpy as np

package = types.ModuleType("jaxpaged")  # without its __init__, for JAX takes seconds to import
package.__path__ = [sys.argv[3]]
sys.modules["jaxpaged"] = package
from jaxpaged.paging.store.page_file import PageFile

path, stop_at, rows = sys.argv[1], sys.argv[2], np.load(sys.argv[1] + ".npy")
file = PageFile.create(path, 6, rows.shape[1])
tags = np.repeat(np.array([[1], [2], [3], [4]], np.uint8), 16, axis=1)
file.write(np.array([0, 1]), tags[:2], rows[:2])

def killed(self, *arguments):
    if stop_at == "torn":
        places, rows = arguments
        self._pages[places, : rows.shape[1] // 2] = rows[:, : rows.shape[1] // 2]
    os._exit(9)

setattr(PageFile, "_write_entries" if stop_at == "entries" else "_write_pages", killed)
file.write(np.array([1, 2]), tags[2:], rows[2:])
"""


@pytest.mark.parametrize("stop_at", ["pages", "torn", "entries"])
def test_read_after_a_process_was_killed_in_a_write_misses_these_pages_only(path, stop_at):
    np.save(f"{path}.npy", make_rows(1, 2, 3, 4))
    package = Path(jaxpaged.__file__).parent
    done = subprocess.run([sys.executable, "-c", KILLED, path, stop_at, package], check=False)
    assert done.returncode == 9
    with PageFile.open(path) as file:
        rows, found = file.read(places(0, 1, 1, 2), make_tags(1, 2, 3, 4))
    assert found.tolist() == [True, False, False, False]
    np.testing.assert_array_equal(rows[:1], make_rows(1))


def test_open_of_what_is_no_page_file_says_so(tmp_path, written):
    other = tmp_path / "other"
    other.write_bytes(b"something else")
    with pytest.raises(PageFileError, match=r"other must begin with b'jaxpaged pages 1'; got b'something else'\.$"):
        PageFile.open(other)
    for size in (20, 45, 60, 200):
        os.truncate(written, size) if size == 200 else other.write_bytes(written.read_bytes()[:size])
        with pytest.raises(
            PageFileError, match=r"ends before its first page: it was cut\. Make it anew\.|differs from"
        ):
            PageFile.open(written if size == 200 else other)


def test_open_with_a_damaged_header_is_refused(written):
    content = bytearray(written.read_bytes())
    for position in (16, 24, 44, 50):  # number of pages, bytes a page, checksum, metadata
        damaged = bytearray(content)
        damaged[position] ^= 1
        written.write_bytes(damaged)
        with pytest.raises(PageFileError, match=r"has a header that differs from its checksum: it is damaged"):
            PageFile.open(written)


def test_create_replaces_a_page_file_but_nothing_else(tmp_path, written):
    other = tmp_path / "thesis.txt"
    other.write_text("forty years of work")
    with pytest.raises(FileExistsError, match=r"thesis\.txt is there and is not a file of pages\. Remove it"):
        PageFile.create(other, NUM_PAGES, NBYTES)
    assert other.read_text() == "forty years of work"
    with pytest.raises(FileExistsError, match=r"is not a file of pages"):
        PageFile.create(tmp_path, NUM_PAGES, NBYTES)
    with PageFile.create(written, NUM_PAGES, NBYTES) as file:
        assert not file.read(places(0, 1, 4), make_tags(10, 11, 14))[1].any()


def test_create_on_a_full_disk_raises_and_leaves_nothing(path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match="No space left on device"):
        PageFile.create(path, NUM_PAGES, NBYTES)
    assert not path.exists()


def test_create_where_disks_cannot_be_claimed_makes_the_whole_file(path, monkeypatch):
    monkeypatch.delattr(os, "posix_fallocate")
    with PageFile.create(path, NUM_PAGES, NBYTES) as file:
        assert path.stat().st_size == file.nbytes
        file.write(places(5), make_tags(1), make_rows(1))
        file.flush()
        assert file.read(places(5), make_tags(1))[1].all()
