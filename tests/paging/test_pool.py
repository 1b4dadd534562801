"""PagePool: the free stack and the reference counts."""

import pickle
import threading

import numpy as np
import pytest

from jaxpaged.config import NULL_PAGE
from jaxpaged.paging import OutOfPagesError, PagePool


def state_of(pool: PagePool):
    return pool.num_free_pages, [pool.ref_count(page_id) for page_id in range(pool.num_pages)]


def test_allocate_whole_pool_hands_out_each_page_once_and_never_the_null_page():
    pool = PagePool(9)
    page_ids = pool.allocate(8)
    assert sorted(page_ids.tolist()) == list(range(1, 9))
    assert NULL_PAGE not in page_ids
    assert pool.num_free_pages == 0
    assert pool.num_pages == 9


def test_allocate_after_release_returns_the_same_pages_in_the_same_order():
    pool = PagePool(20)
    pool.allocate(3)
    page_ids = pool.allocate(5)
    pool.release(page_ids)
    np.testing.assert_array_equal(pool.allocate(5), page_ids)


def test_release_is_last_in_first_out():
    pool = PagePool(20)
    first, second = pool.allocate(2), pool.allocate(2)
    pool.release(first)
    pool.release(second)
    assert pool.allocate(4).tolist() == [*second.tolist(), *first.tolist()]


def test_allocate_result_is_not_a_view_of_the_stack():
    pool = PagePool(6)
    page_ids = pool.allocate(2)
    page_ids[:] = 5
    assert pool.allocate(3).tolist() == [3, 4, 5]


def test_allocate_too_many_raises_with_numbers_and_changes_nothing():
    pool = PagePool(6)
    pool.allocate(3)
    before = state_of(pool)
    with pytest.raises(
        OutOfPagesError,
        match=r"^Allocation needs 3 pages; 2 are free\. Free a sequence, or enlarge the pool \(`num_pages`\)\.$",
    ) as refused:
        pool.allocate(3)
    assert (refused.value.needed, refused.value.free) == (3, 2)
    assert state_of(pool) == before


def test_out_of_pages_error_is_a_runtime_error_and_survives_pickling():
    error = pickle.loads(pickle.dumps(OutOfPagesError(5, 2, "This")))
    assert isinstance(error, RuntimeError)
    assert (error.needed, error.free, str(error)) == (
        5,
        2,
        "This needs 5 pages; 2 are free. Free a sequence, or enlarge the pool (`num_pages`).",
    )


def test_retain_makes_a_page_survive_one_release():
    pool = PagePool(6)
    page_ids = pool.allocate(3)
    pool.retain(page_ids[:2])
    assert pool.num_shared_pages() == 2
    pool.release(page_ids)
    assert [pool.ref_count(page_id) for page_id in page_ids] == [1, 1, 0]
    assert pool.num_shared_pages() == 0
    assert pool.num_free_pages == 3
    pool.release(page_ids[:2])
    assert pool.num_free_pages == 5


def test_release_of_no_pages_changes_nothing():
    pool = PagePool(6)
    pool.release([])
    pool.retain(np.zeros(0, np.int32))
    assert pool.num_free_pages == 5


@pytest.mark.parametrize("verb", ["retain", "release"])
@pytest.mark.parametrize(
    ("page_ids", "named"),
    [
        ([2, 4], "4, which nobody references"),
        ([2, NULL_PAGE], "0, which nobody references"),
        ([-1, 2], "-1, which nobody references"),
        ([-4], "-4, which nobody references"),
        ([6], "6, which nobody references"),
        ([2**40], "1099511627776, which nobody references"),
        ([1, 3, 1], "1, which is given twice"),
    ],
)
def test_release_of_a_page_that_is_not_owned_once_raises_with_its_id_and_changes_nothing(verb, page_ids, named):
    pool = PagePool(6)
    pool.allocate(3)
    before = state_of(pool)
    expected = (
        f"`page_ids` of {verb} must be referenced pages among the 5 pages of this pool, each given once; got {named}."
    )
    with pytest.raises(ValueError, match=f"^{expected}$"):
        getattr(pool, verb)(page_ids)
    assert state_of(pool) == before
    assert pool.allocate(2).tolist() == [4, 5]


def test_release_of_a_negative_id_does_not_reach_the_page_that_it_would_index():
    pool = PagePool(4)
    pool.allocate(3)
    with pytest.raises(ValueError, match="got -2, which nobody references"):
        pool.release([-2])
    assert pool.num_free_pages == 0


def test_release_of_floats_raises_type_error():
    pool = PagePool(4)
    pool.allocate(3)
    with pytest.raises(TypeError, match=r"^`page_ids` of release must be integers; got float64\.$"):
        pool.release([1.5])


def test_release_of_one_number_raises_value_error():
    pool = PagePool(4)
    pool.allocate(3)
    with pytest.raises(ValueError, match=r"^`page_ids` of release must have one axis; got shape \(\)\.$"):
        pool.release(1)
    assert pool.num_free_pages == 0


@pytest.mark.parametrize("verb", ["allocate", "retain", "release"])
def test_call_from_a_second_thread_inside_a_verb_raises(verb):
    pool, inside, done = PagePool(8), threading.Event(), threading.Event()

    class Slow:
        def __index__(self):
            inside.set()
            done.wait(10)
            return 2

    first = threading.Thread(target=pool.allocate, args=[Slow()])
    first.start()
    inside.wait(10)
    try:
        with pytest.raises(RuntimeError, match=rf"^`{verb}` was called while another thread was inside the page"):
            getattr(pool, verb)(1)
    finally:
        done.set()
        first.join()
    assert pool.num_free_pages == 5


@pytest.mark.parametrize("count", [-1, True, 1.0, "2", None])
def test_allocate_with_a_bad_count_raises(count):
    pool = PagePool(4)
    with pytest.raises((ValueError, TypeError), match=r"^`count` must be an integer >= 0; got "):
        pool.allocate(count)
    assert pool.num_free_pages == 3


@pytest.mark.parametrize("num_pages", [1, 0, -3, True, 2.5])
def test_pool_with_a_bad_size_raises(num_pages):
    with pytest.raises(
        (ValueError, TypeError), match="`num_pages`, the null page included, must be an integer >= 2; got"
    ):
        PagePool(num_pages)


def test_bulk_of_many_pages_keeps_count():
    pool = PagePool(10_001)
    page_ids = pool.allocate(10_000)
    pool.retain(page_ids[::2])
    shuffled = np.random.default_rng(0).permutation(page_ids)
    pool.release(shuffled)
    assert pool.num_free_pages == 5_000
    pool.release(page_ids[::2])
    assert sorted(pool.allocate(10_000).tolist()) == list(range(1, 10_001))


def test_pages_that_come_back_in_several_parts_are_all_free():
    pool = PagePool(6)
    parts = [np.array(pool.take(2), np.intp) for _ in range(2)]
    for part in parts:
        pool.drop(part)
    assert state_of(pool) == (5, [0] * 6)


@pytest.mark.parametrize("caching", [False, True])
def test_pool_keeps_count_as_a_dictionary_does(caching):
    rng, pool = np.random.default_rng(0), PagePool(16, caching=caching)
    references: dict[int, int] = {}  # of each page that has one
    indexed: set[int] = set()
    cached: list[int] = []  # the next to be evicted first

    def some(page_ids) -> np.ndarray:
        page_ids = rng.permutation(np.array(sorted(page_ids), np.intp))
        return page_ids[: rng.integers(0, len(page_ids) + 1)]

    verbs = ["allocate", "retain", "release", "put"]
    for verb in rng.choice([*verbs, "share", "mark", "unmark", "evict", "take_cached"] if caching else verbs, 250):
        count = int(rng.integers(0, pool.num_uncached_pages + 1))
        if verb == "allocate":
            references |= dict.fromkeys(pool.allocate(count).tolist(), 1)
        elif verb == "retain":
            pool.retain(chosen := some(references))
            references |= {page_id: references[page_id] + 1 for page_id in chosen.tolist()}
        elif verb == "release":
            pool.release(chosen := some(references))
            references |= {page_id: references[page_id] - 1 for page_id in chosen.tolist()}
            cached += [i for i in chosen[::-1].tolist() if not references[i] and i in indexed]
            references = {i: n for i, n in references.items() if n}
        elif verb == "put":  # back, as it came
            pool.put(pool.take(count))
        elif verb == "share":
            references |= dict.fromkeys((chosen := some(cached)).tolist(), 3)
            pool.share(chosen, 3)
            cached = [page_id for page_id in cached if page_id not in references]
        elif verb == "mark":
            pool.mark_indexed(chosen := some(references.keys() - indexed))
            indexed |= set(chosen.tolist())
        elif verb == "unmark":
            pool.unmark_indexed(chosen := some(indexed))
            indexed -= set(chosen.tolist())
            cached = [page_id for page_id in cached if page_id in indexed]
        elif verb == "evict":
            count = int(rng.integers(0, len(cached) + 1))
            assert pool.evict(count).tolist() == cached[:count]
            indexed, cached = indexed - set(cached[:count]), cached[count:]
        else:
            chosen = pool.take_cached(count).tolist()
            indexed, cached = indexed | set(chosen), chosen[::-1] + cached
        uncached = set(range(1, 16)) - references.keys() - set(cached)
        held, unheld = np.array([*references], np.intp), sorted(uncached | set(cached))
        assert [pool.ref_count(i) for i in range(16)] == [references.get(i, 0) for i in range(16)]
        assert pool.all_ref_counts().tolist() == [references.get(i, 0) for i in range(16)]
        assert sorted(pool.uncached_pages().tolist()) == sorted(uncached)
        assert (pool.num_uncached_pages, pool.num_free_pages) == (len(uncached), 15 - len(held))
        assert pool.num_shared_pages() == sum(n > 1 for n in references.values())
        assert pool.cached_pages().tolist() == cached
        assert pool.num_cached_pages == pool.num_unreferenced(np.array([*references, *cached], np.intp)) == len(cached)
        writable = [references[i] == 1 and i not in indexed for i in references]
        assert pool.are_writable(held).tolist() == [pool.is_writable(i) for i in references] == writable
        assert pool.are_indexed(np.arange(16)).tolist() == [i in indexed for i in range(16)]
        assert pool.indexed_pages().tolist() == sorted(indexed)
        for page_id in unheld[:2]:
            with pytest.raises(ValueError, match=f"got {page_id}, which nobody references"):
                pool.release([*references, page_id])
    assert pickle.loads(pickle.dumps(pool)).all_ref_counts().tolist() == pool.all_ref_counts().tolist()
