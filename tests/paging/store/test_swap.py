"""SwapSpace: sequences stay, prefixes give way, and nothing comes back other than it went."""

import os

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpaged.paging import OutOfPagesError
from jaxpaged.paging.store.swap import SwapSpace
from tests.paging.store.blocks import DTYPES, assert_same_bits, make_block, some_pages


def digests(*numbers: int) -> list[bytes]:
    return [bytes([number] * 16) for number in numbers]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "swap.pages"


@pytest.fixture
def space(path):
    """Three pages in memory, four in the file."""
    with SwapSpace(3, file=path, num_file_pages=4) as space:
        yield space


@given(dtype=st.sampled_from(sorted(DTYPES)), scales=st.booleans(), num_host=st.integers(0, 5), seed=st.integers(0, 99))
def test_take_after_put_is_bit_equal_in_memory_and_in_the_file(tmp_path_factory, dtype, scales, num_host, seed):
    block = make_block(5, dtype, scales=scales, seed=seed)
    file = tmp_path_factory.mktemp("swap") / "swap.pages"
    with SwapSpace(num_host, file=file, num_file_pages=6) as space:
        space.put_sequence("a", block)
        assert space.stats().num_used_host_pages == num_host
        assert_same_bits(space.take_sequence("a"), block)
        space.put_pages(digests(1, 2, 3, 4, 5), block)
        got, found = space.get_pages(digests(1, 2, 3, 4, 5))
        assert found.all()
        assert_same_bits(got, block)


def test_put_sequence_fills_memory_first_and_then_the_file(space):
    space.put_sequence("a", make_block(2))
    assert space.stats().num_used_file_pages == 0
    space.put_sequence("b", make_block(3, seed=1))
    stats = space.stats()
    assert (stats.num_used_host_pages, stats.num_used_file_pages) == (3, 2)
    assert (stats.num_sequences, stats.num_sequence_pages, stats.num_prefix_pages) == (2, 5, 0)
    assert stats.nbytes == 5 * stats.page_nbytes == sum(x.nbytes for x in make_block(5).values())
    space.drop("a")
    space.put_sequence("c", make_block(1))
    assert space.stats().num_used_file_pages == 2
    assert_same_bits(space.take_sequence("b"), make_block(3, seed=1))


def test_put_sequence_of_no_pages_comes_back_with_none(space):
    space.put_sequence("a", make_block(0))
    assert "a" in space
    assert_same_bits(space.take_sequence("a"), make_block(0))
    assert "a" not in space


def test_put_of_too_many_pages_raises_with_numbers_and_changes_nothing(space):
    space.put_sequence("a", make_block(4, seed=1))
    space.put_pages(digests(1, 2), make_block(2, seed=2))
    before = space.stats()
    with pytest.raises(OutOfPagesError, match=r"^swapping out sequence 'b' needs 4 pages; 3 are free\.") as refused:
        space.put_sequence("b", make_block(4))
    assert (refused.value.needed, refused.value.free) == (4, 3)
    with pytest.raises(OutOfPagesError, match=r"^keeping evicted pages needs 3 pages; 2 are free\."):
        space.put_pages(digests(1, 3, 4, 5), make_block(4))
    assert space.stats() == before
    assert "b" not in space
    assert space.get_pages(digests(1, 2))[1].all()
    assert_same_bits(space.take_sequence("a"), make_block(4, seed=1))


def test_prefix_pages_give_way_to_sequences_the_least_recently_used_first(space):
    space.put_pages(digests(1, 2, 3, 4, 5, 6), make_block(6))
    space.get_pages(digests(2, 1))  # a chain from its head, which stays the longest
    assert space.num_free_pages == 7
    space.put_sequence("a", make_block(4))
    assert [space.has(digest) for digest in digests(1, 2, 3, 4, 5, 6)] == [True, True, False, False, False, True]
    assert space.stats().num_evicted_pages == 3
    space.put_sequence("b", make_block(2, seed=4))
    assert [space.has(digest) for digest in digests(1, 2, 6)] == [False, True, False]
    assert_same_bits(space.get_pages(digests(2))[0], some_pages(make_block(6), [1]))


def test_prefix_pages_give_way_to_newer_ones_but_not_within_a_call(space):
    space.put_pages(digests(*range(7)), make_block(7))
    space.put_pages(digests(0, 7), some_pages(make_block(8), [0, 7]))
    assert [space.has(digest) for digest in digests(*range(8))] == [True, False, *[True] * 6]


def test_put_pages_given_twice_keeps_one(space):
    block = some_pages(make_block(2), [0, 1, 0])
    space.put_pages(digests(1, 2, 1), block)
    space.put_pages(digests(2), some_pages(block, [1]))
    assert space.stats().num_prefix_pages == 2
    assert_same_bits(space.get_pages(digests(1, 2, 1))[0], block)


def test_get_pages_returns_those_found_and_says_which(space):
    space.put_pages(digests(1, 2, 3), make_block(3))
    got, found = space.get_pages(digests(3, 9, 1))
    assert found.tolist() == [True, False, True]
    assert_same_bits(got, some_pages(make_block(3), [2, 0]))


def test_get_pages_of_a_space_that_never_held_a_page_finds_nothing(space):
    got, found = space.get_pages(digests(1))
    assert got == {}
    assert found.tolist() == [False]


def test_drop_pages_forgets_some_or_all(space):
    space.put_pages(digests(1, 2, 3), make_block(3))
    space.drop_pages(digests(2, 9))
    assert [space.has(digest) for digest in digests(1, 2, 3)] == [True, False, True]
    space.drop_pages()
    stats = space.stats()
    assert (stats.num_prefix_pages, stats.num_used_host_pages, space.num_free_pages) == (0, 0, 7)


def flip_byte_of_file_page(path, page: int, num_pages: int, page_nbytes: int) -> None:
    with path.open("r+b") as file:
        file.seek(path.stat().st_size - (num_pages - page) * page_nbytes)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 1]))


def test_take_sequence_with_a_damaged_page_ends_before_it(space, path):
    block = make_block(7)
    space.put_sequence("a", block)
    flip_byte_of_file_page(path, 1, 4, space.stats().page_nbytes)
    assert_same_bits(space.take_sequence("a"), some_pages(block, slice(4)))
    assert space.stats().num_lost_pages == 1
    assert space.num_free_pages == 7


def test_get_pages_with_a_damaged_page_misses_it_for_good(space, path):
    block = make_block(7)
    space.put_pages(digests(*range(7)), block)
    flip_byte_of_file_page(path, 2, 4, space.stats().page_nbytes)
    got, found = space.get_pages(digests(*range(7)))
    assert np.flatnonzero(~found).tolist() == [5]
    assert_same_bits(got, some_pages(block, [0, 1, 2, 3, 4, 6]))
    assert not space.has(digests(5)[0])
    assert space.stats().num_lost_pages == 1
    space.put_pages(digests(5), some_pages(block, [5]))
    assert space.get_pages(digests(*range(7)))[1].all()


def test_file_that_was_cut_loses_its_pages_and_takes_new_ones(space, path):
    space.put_sequence("a", make_block(6))
    os.truncate(path, 0)
    assert_same_bits(space.take_sequence("a"), make_block(6) | some_pages(make_block(6), slice(3)))
    space.put_sequence("b", make_block(7, seed=1))
    assert_same_bits(space.take_sequence("b"), make_block(7, seed=1))


def test_file_put_back_to_what_it_was_earlier_loses_its_pages(space, path):
    space.put_sequence("a", make_block(7, seed=1))
    earlier = path.read_bytes()
    space.drop("a")
    space.put_sequence("b", make_block(7, seed=2))
    path.write_bytes(earlier)
    assert_same_bits(space.take_sequence("b"), some_pages(make_block(7, seed=2), slice(3)))


def test_file_with_the_pages_of_another_space_loses_its_own(path):
    with SwapSpace(0, file=path, num_file_pages=2) as other:
        other.put_sequence("a", make_block(2, seed=1))
        theirs = path.read_bytes()
    with SwapSpace(0, file=path, num_file_pages=2) as space:
        space.put_sequence("a", make_block(2, seed=2))
        path.write_bytes(theirs)
        assert_same_bits(space.take_sequence("a"), make_block(0))


def test_two_spaces_on_one_file_both_keep_their_pages(path):
    """The second one makes a file of its own under the name; the first one's stays as long as it is open."""
    with SwapSpace(0, file=path, num_file_pages=2) as first, SwapSpace(0, file=path, num_file_pages=2) as second:
        first.put_sequence("a", make_block(2, seed=1))
        second.put_sequence("a", make_block(2, seed=2))
        assert_same_bits(first.take_sequence("a"), make_block(2, seed=1))
        assert_same_bits(second.take_sequence("a"), make_block(2, seed=2))


def test_write_to_a_file_that_fails_keeps_nothing(space, path, monkeypatch):
    space.put_sequence("a", make_block(1))
    os.truncate(path, 0)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match="No space left on device"):
        space.put_sequence("b", make_block(6))
    assert "b" not in space
    assert space.num_free_pages == 6
    assert_same_bits(space.take_sequence("a"), make_block(1))


def test_close_removes_the_file_and_refuses_more(path):
    space = SwapSpace(1, file=path, num_file_pages=1)
    space.put_sequence("a", make_block(2))
    assert path.exists()
    space.close()
    assert not path.exists()
    assert space.num_free_pages == 2
    for put in (lambda: space.put_sequence("b", make_block(1)), lambda: space.put_pages(digests(1), make_block(1))):
        with pytest.raises(ValueError, match=r"^This swap space is closed\. Make another\.$"):
            put()
    assert space.get_pages(digests(1))[1].tolist() == [False]


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"num_pages": -1}, ValueError, r"`num_pages`, those in host memory, must be an integer >= 0; got -1"),
        ({"num_pages": 1.5}, TypeError, r"`num_pages`, those in host memory, must be an integer >= 0; got 1\.5"),
        ({"num_pages": 0}, ValueError, r"`num_pages` must be at least 1 where there is no file; got 0\."),
        ({"num_pages": 1, "file": "x"}, ValueError, r"must be given both or neither; got 'x' and 0\."),
        ({"num_pages": 1, "num_file_pages": 2}, ValueError, r"must be given both or neither; got None and 2\."),
        ({"num_pages": 1, "file": "x", "num_file_pages": -2}, ValueError, r"`num_file_pages` must be .* got -2"),
    ],
)
def test_space_with_a_bad_argument_names_it(arguments, error, message):
    with pytest.raises(error, match=message):
        SwapSpace(**arguments)


def test_misuse_is_refused_by_name(space):
    space.put_sequence("a", make_block(2, "int8", scales=True))
    before = space.stats()
    for call, error, message in (
        (
            lambda: space.put_sequence("a", make_block(1)),
            ValueError,
            r"`seq_id` must be .* not here; got 'a'\. Take or",
        ),
        (lambda: space.take_sequence("b"), ValueError, r"`seq_id` must be a sequence that is here .*; got 'b'\."),
        (lambda: space.drop("b"), ValueError, r"`seq_id` must be a sequence that is here .*; got 'b'\."),
        (
            lambda: space.put_sequence("b", make_block(1)),
            ValueError,
            r"like the first ones of this space: k int8\[2.*flo",
        ),
        (lambda: space.put_pages(digests(1), make_block(1)), ValueError, r"like the first ones of this space: k int8"),
        (lambda: space.put_pages(digests(1), make_block(2)), ValueError, r"`digests` must be 2, one for each .* got 1"),
        (lambda: space.put_pages(["a"], make_block(1)), TypeError, r"`digests` must be bytes objects; got str\."),
        (lambda: space.get_pages(b"abc"), TypeError, r"`digests` must be a list of bytes objects; got one bytes"),
        (lambda: space.put_sequence("b", [1]), TypeError, r"`block` must map names to numpy arrays"),
    ):
        with pytest.raises(error, match=message):
            call()
        assert space.stats() == before


def test_a_second_thread_inside_is_refused(space):
    space._owner.busy = True  # as while another thread is inside
    for verb, arguments in {
        "put_sequence": ("a", {}),
        "take_sequence": ("a",),
        "put_pages": ([], {}),
        "get_pages": ([],),
        "drop": ("a",),
        "drop_pages": (),
        "stats": (),
        "close": (),
    }.items():
        with pytest.raises(RuntimeError, match=f"`{verb}` was called while another thread was inside"):
            getattr(space, verb)(*arguments)
    space._owner.busy = False


def test_sequence_id_that_cannot_be_one_raises(space):
    for call in (lambda: space.put_sequence([1], make_block(1)), lambda: space.drop([1]), lambda: [1] in space):
        with pytest.raises(TypeError, match=r"^`seq_id` must be hashable, such as a number, a string or a tuple of"):
            call()
