"""A prefix cache saved here and loaded elsewhere, or refused by name."""

import os
import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import pytest

import jaxpaged as jp
from jaxpaged.paging import persist
from jaxpaged.paging.page_file import PageFile, PageFileError
from jaxpaged.paging.persist import load_prefix_cache, save_prefix_cache
from jaxpaged.paging.reports import CachedPages

LAYERS, HEADS, PAGE_SIZE, DIM = 2, 2, 4, 8
DTYPES = ("float32", "bfloat16", "int8", "float8_e4m3fn")


class FakePages:
    """An allocator that only has a prefix cache. Content i has digest i and parent i - 1; 0 is the root."""

    groups = ()

    def __init__(self, contents, page_ids, *, page_size=PAGE_SIZE, num_free=8, tokens=None):
        self.page_size, self.num_free, self.tokens = page_size, num_free, tokens
        self.page_of = dict(zip(contents, page_ids, strict=True))

    def cached_pages(self):
        contents = np.array(list(self.page_of), np.uint8)
        return CachedPages(
            digests=np.repeat(contents[:, None], 16, axis=1),
            parents=np.repeat(contents[:, None] - 1, 16, axis=1).astype(np.uint8),
            page_ids=np.array(list(self.page_of.values()), np.int32),
            tokens=self.tokens,
        )

    def adopt(self, cached):
        page_ids = []
        for digest, parent in zip(cached.digests[:, 0].tolist(), cached.parents[:, 0].tolist(), strict=True):
            new = digest not in self.page_of and self.num_free > 0
            assert parent in (0, 10, 20) or parent in self.page_of, "a page without its parent"
            page_ids.append(1 + len(self.page_of) if new else 0)
            if new:
                self.page_of[digest] = page_ids[-1]
                self.num_free -= 1
        self.adopted = cached
        return np.array(page_ids, np.int32)

    def reset(self):
        self.page_of.clear()


def make_cache(dtype="float32", *, num_pages=12, scale=None, head_dim=DIM) -> jp.KVCache:
    return jp.KVCache.create(
        num_layers=LAYERS, num_pages=num_pages, page_size=PAGE_SIZE, num_kv_heads=HEADS, head_dim=head_dim,
        dtype=dtype, k_scale=scale, v_scale=scale,
    )  # fmt: skip


def filled_cache(dtype="float32", scale=None) -> jp.KVCache:
    cache = make_cache(dtype, scale=scale)
    slots = jnp.arange(PAGE_SIZE, 12 * PAGE_SIZE)
    for layer in range(LAYERS):
        k, v = np.random.default_rng(layer).standard_normal((2, len(slots), HEADS, DIM), np.float32)
        cache = cache.write(layer, jnp.asarray(k), jnp.asarray(v), slots)
    return cache


def page_bytes(cache: jp.KVCache, page_id: int) -> dict[str, bytes]:
    return {name: x.tobytes() for name, x in cache.export_pages(np.array([page_id], np.int32)).to_host().items()}


def assert_loaded(pages, cache, from_pages, from_cache, contents) -> None:
    assert sorted(pages.page_of) == sorted(contents)
    for content in contents:
        assert page_bytes(cache, pages.page_of[content]) == page_bytes(from_cache, from_pages.page_of[content])


@pytest.fixture
def path(tmp_path):
    return tmp_path / "prefixes.pages"


@pytest.fixture
def saved(path):
    """Two prefixes, 1-2-3 and 11-12. Returns the allocator and the cache they are in."""
    pages, cache = FakePages([1, 2, 11, 3, 12], [7, 3, 5, 11, 1]), filled_cache()
    assert save_prefix_cache(path, pages, cache, model="llama") == 5
    return pages, cache


def data_begin(path) -> int:
    with PageFile.open(path) as file:
        return file.nbytes - file.num_pages * file.page_nbytes


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("batch", [2, 1024])
def test_load_after_save_is_bit_equal_and_leaves_other_pages(path, monkeypatch, dtype, batch):
    monkeypatch.setattr(persist, "_BATCH_PAGES", batch)
    pages, cache = FakePages([1, 2, 11, 3, 12], [7, 3, 5, 11, 1]), filled_cache(dtype)
    save_prefix_cache(path, pages, cache, model="llama")
    elsewhere, before = FakePages([], []), filled_cache(dtype)
    after = load_prefix_cache(path, elsewhere, before, model="llama")
    assert_loaded(elsewhere, after, pages, cache, [1, 2, 3, 11, 12])
    for page_id in range(6, 12):
        assert page_bytes(after, page_id) == page_bytes(before, page_id)


def test_load_keeps_tokens_where_they_were_kept(path):
    tokens = np.arange(3 * PAGE_SIZE, dtype=np.int32).reshape(3, PAGE_SIZE)
    pages = FakePages([1, 2, 3], [4, 5, 6], tokens=tokens)
    save_prefix_cache(path, pages, filled_cache(), model="llama")
    elsewhere = FakePages([], [])
    load_prefix_cache(path, elsewhere, make_cache(), model="llama")
    np.testing.assert_array_equal(elsewhere.adopted.tokens, tokens)
    assert elsewhere.adopted.tokens.dtype == np.int32


def test_load_skips_what_is_here_and_what_has_no_room(path, saved):
    elsewhere = FakePages([1], [1], num_free=2)
    before = make_cache()
    after = load_prefix_cache(path, elsewhere, before, model="llama")
    assert sorted(elsewhere.page_of) == [1, 2, 11]
    assert page_bytes(after, 1) == page_bytes(before, 1)
    assert page_bytes(after, elsewhere.page_of[2]) == page_bytes(saved[1], saved[0].page_of[2])


def test_save_of_nothing_loads_nothing(path):
    assert save_prefix_cache(path, FakePages([], []), make_cache(), model="llama") == 0
    elsewhere = FakePages([], [])
    load_prefix_cache(path, elsewhere, make_cache(), model="llama")
    assert elsewhere.page_of == {}


OTHER_PROCESS = """
import sys
from tests.paging.test_persist import *

elsewhere = FakePages([], [])
cache = load_prefix_cache(sys.argv[1], elsewhere, make_cache("bfloat16"), model="llama")
saved_pages = FakePages([1, 2, 11, 3, 12], [7, 3, 5, 11, 1])
assert_loaded(elsewhere, cache, saved_pages, filled_cache("bfloat16"), [1, 2, 3, 11, 12])
try:
    load_prefix_cache(sys.argv[1], FakePages([], []), make_cache("float16"), model="llama")
except ValueError as error:
    print(error)
"""


def test_load_in_another_process_is_bit_equal_and_refuses_another_dtype(path):
    pages = FakePages([1, 2, 11, 3, 12], [7, 3, 5, 11, 1])
    save_prefix_cache(path, pages, filled_cache("bfloat16"), model="llama")
    done = subprocess.run(
        [sys.executable, "-c", OTHER_PROCESS, path], capture_output=True, text=True, check=True
    )  # fmt: skip
    assert done.stdout.startswith("pages of `cache` must be 'k bfloat16[2, 2, 4, 8], v bfloat16[2, 2, 4, 8]', for")
    assert "; got 'k float16[2, 2, 4, 8], v float16[2, 2, 4, 8]'." in done.stdout


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": "qwen"}, r"^`model` must be 'llama', for which .*prefixes\.pages was saved; got 'qwen'\. Keys and"),
        ({"cache": make_cache("bfloat16")}, r"^pages of `cache` must be 'k float32.*; got 'k bfloat16\[2, 2, 4,"),
        (
            {"cache": make_cache(head_dim=16)},
            r"^pages of `cache` must be 'k float32\[2, 2, 4, 8\].*\[2, 2, 4, 16\]",
        ),
        ({"pages": FakePages([], [], page_size=8)}, r"^page size of `pages` must be 4, for which .*; got 8\."),
    ],
)
def test_load_for_another_model_dtype_or_shape_is_refused_by_name(path, saved, change, message):
    pages = change.get("pages", FakePages([], []))
    with pytest.raises(ValueError, match=message):
        load_prefix_cache(path, pages, change.get("cache", make_cache()), model=change.get("model", "llama"))
    assert pages.page_of == {}


def test_load_for_other_groups_is_refused_by_name(path, saved):
    pages = FakePages([], [])
    pages.groups = ("window",)
    with pytest.raises(ValueError, match=r"^groups of `pages` must be '\(\)', for which .*; got \"\('window',\)\""):
        load_prefix_cache(path, pages, make_cache(), model="llama")


def test_load_for_other_fixed_scales_is_refused(path):
    """The same byte stands for another number there."""
    save_prefix_cache(path, FakePages([1], [1]), filled_cache("int8", 0.1), model="llama")
    elsewhere = FakePages([], [])
    load_prefix_cache(path, elsewhere, make_cache("int8", scale=0.1), model="llama")
    assert list(elsewhere.page_of) == [1]
    with pytest.raises(ValueError, match=r"^fixed scales of `cache` must be '[0-9a-f]{16}', for which"):
        load_prefix_cache(path, FakePages([], []), make_cache("int8", scale=0.2), model="llama")


def test_load_of_what_is_no_prefix_cache_says_so(path, saved):
    content = path.read_bytes()
    path.write_text("something else")
    with pytest.raises(PageFileError, match=r"must begin with b'jaxpaged pages 1'; got b'something else'"):
        load_prefix_cache(path, FakePages([], []), make_cache(), model="llama")
    path.unlink()
    PageFile.create(path, 2, 100, b"swapped pages").close()
    with pytest.raises(PageFileError, match=r"must be of a prefix cache, version 1; got version none\."):
        load_prefix_cache(path, FakePages([], []), make_cache(), model="llama")
    path.write_bytes(content[:100])
    with pytest.raises(PageFileError, match=r"it was cut|it is damaged"):
        load_prefix_cache(path, FakePages([], []), make_cache(), model="llama")


def test_load_of_another_version_is_refused_by_its_number(path, monkeypatch):
    monkeypatch.setattr(persist, "VERSION", 2)
    save_prefix_cache(path, FakePages([1], [1]), filled_cache(), model="llama")
    monkeypatch.undo()
    with pytest.raises(PageFileError, match=r"must be of a prefix cache, version 1; got version 2\."):
        load_prefix_cache(path, FakePages([], []), make_cache(), model="llama")


@pytest.mark.parametrize(("page", "expected"), [(0, [11, 12]), (1, [1, 11, 12]), (2, [1, 2, 3]), (4, [1, 2, 3, 11])])
@pytest.mark.parametrize("batch", [2, 1024])
def test_load_with_a_damaged_page_misses_it_and_its_children_only(path, saved, monkeypatch, batch, page, expected):
    monkeypatch.setattr(persist, "_BATCH_PAGES", batch)
    begin = data_begin(path)
    content = bytearray(path.read_bytes())
    content[begin + page * (len(content) - begin) // 5 + 17] ^= 4
    path.write_bytes(content)
    elsewhere = FakePages([], [])
    cache = load_prefix_cache(path, elsewhere, make_cache(), model="llama")
    assert_loaded(elsewhere, cache, *saved, expected)


def test_load_of_a_truncated_file_takes_the_pages_that_are_left(path, saved):
    os.truncate(path, data_begin(path) + 2 * saved[1].nbytes_per_page + 1)
    elsewhere = FakePages([], [])
    cache = load_prefix_cache(path, elsewhere, make_cache(), model="llama")
    assert_loaded(elsewhere, cache, *saved, [1, 2])


def test_load_that_fails_half_way_leaves_nothing_to_be_hit(path, saved, monkeypatch):
    def fail(*_):
        raise MemoryError

    monkeypatch.setattr(jp.KVCache, "import_pages", fail)
    elsewhere = FakePages([9], [9])
    with pytest.raises(MemoryError):
        load_prefix_cache(path, elsewhere, make_cache(), model="llama")
    assert elsewhere.page_of == {}


def test_save_that_fails_leaves_the_old_file_and_nothing_else(path, saved, monkeypatch):
    before = path.read_bytes()

    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(PageFile, "flush", fail)
    with pytest.raises(OSError, match="No space left on device"):
        save_prefix_cache(path, FakePages([1], [1]), filled_cache(), model="llama")
    assert path.read_bytes() == before
    assert os.listdir(path.parent) == [path.name]


def test_save_replaces_a_page_file_and_nothing_else(path, saved, tmp_path):
    save_prefix_cache(path, FakePages([1], [1]), filled_cache(), model="qwen")
    elsewhere = FakePages([], [])
    load_prefix_cache(path, elsewhere, make_cache(), model="qwen")
    assert list(elsewhere.page_of) == [1]
    other = tmp_path / "thesis.txt"
    other.write_text("forty years of work")
    with pytest.raises(FileExistsError, match=r"thesis\.txt is there and is not a file of pages"):
        save_prefix_cache(other, FakePages([1], [1]), filled_cache(), model="qwen")
    assert other.read_text() == "forty years of work"


@pytest.mark.parametrize(("model", "error"), [("", ValueError), (None, TypeError)])
def test_save_without_a_model_is_refused(path, model, error):
    with pytest.raises(error, match=r"^`model` must be .*the name of model and weights; got"):
        save_prefix_cache(path, FakePages([1], [1]), filled_cache(), model=model)
    assert not path.exists()
