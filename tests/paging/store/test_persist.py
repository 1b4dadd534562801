"""A prefix cache saved here and loaded elsewhere, or refused by name."""

import os
import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import pytest

import jaxpaged as jp
from jaxpaged.paging import PageGroup
from jaxpaged.paging.store import persist
from jaxpaged.paging.store.page_file import PageFile, PageFileError
from jaxpaged.paging.store.persist import load_prefix_cache, save_prefix_cache

LAYERS, HEADS, PAGE_SIZE, DIM = 2, 2, 4, 8
DTYPES = ("float32", "bfloat16", "int8", "float8_e4m3fn")
LONG, SHORT = list(range(100, 112)), list(range(200, 208))  # prefixes of three pages and of two
MODEL = "llama"


def make_pages(*prefixes: list[int], num_pages: int = 12, **options) -> jp.PageAllocator:
    """An allocator with nothing but these prefixes cached. Pages of them are in no order."""
    pages = jp.PageAllocator(num_pages, options.pop("page_size", PAGE_SIZE), prefix_caching=True, **options)
    for begin in range(0, max(map(len, prefixes), default=0), PAGE_SIZE):
        for i, tokens in enumerate(prefixes):
            pages.add(i, tokens[: begin + PAGE_SIZE])
            pages.commit(i, tokens[: begin + PAGE_SIZE])
            pages.free(i)
    return pages


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


def cached_tokens(pages: jp.PageAllocator, tokens: list[int]) -> int:
    return pages.prefix.match([*tokens, 0])  # the last token of a prompt never hits


def assert_loaded(pages, cache, from_pages, from_cache, tokens: list[int], num_cached: int) -> None:
    """Of these tokens so many are cached, and their KV is what it was."""
    assert cached_tokens(pages, tokens) == num_cached
    there, here = from_pages.prefix.explain([*tokens, 0]), pages.prefix.explain([*tokens, 0])
    for i in range(num_cached // PAGE_SIZE):
        assert page_bytes(cache, here[i].page_id) == page_bytes(from_cache, there[i].page_id)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "prefixes.pages"


@pytest.fixture
def saved(path):
    """Returns the allocator and the cache that were saved."""
    pages, cache = make_pages(LONG, SHORT), filled_cache()
    assert save_prefix_cache(path, pages, cache, model=MODEL) == 5
    return pages, cache


def data_begin(path) -> int:
    with PageFile.open(path) as file:
        return file.nbytes - file.num_pages * file.page_nbytes


@pytest.mark.parametrize(
    ("batch", "dtype"),
    [(2, "float32"), (1024, "int8")]
    + [
        pytest.param(batch, dtype, marks=pytest.mark.slow)  # each compiles its own imports
        for batch in (2, 1024)
        for dtype in DTYPES
        if (batch, dtype) not in ((2, "float32"), (1024, "int8"))
    ],
)
def test_load_after_save_is_bit_equal_and_leaves_other_pages(path, monkeypatch, dtype, batch):
    monkeypatch.setattr(persist, "_BATCH_PAGES", batch)
    pages, cache = make_pages(LONG, SHORT), filled_cache(dtype)
    save_prefix_cache(path, pages, cache, model=MODEL)
    elsewhere, before = make_pages(), filled_cache(dtype)
    elsewhere.add("live", 9)
    after = load_prefix_cache(path, elsewhere, before, model=MODEL)
    assert_loaded(elsewhere, after, pages, cache, LONG, 12)
    assert_loaded(elsewhere, after, pages, cache, SHORT, 8)
    assert elsewhere.add("new", [*LONG, 5]) == 12
    taken = elsewhere.prefix.cached_pages().page_ids.tolist()
    assert len(taken) == 5
    for page_id in set(range(1, 12)) - set(taken):
        assert page_bytes(after, page_id) == page_bytes(before, page_id)


def test_load_of_partial_hits_keeps_their_tokens(path):
    save_prefix_cache(path, make_pages(LONG, partial_hits=True), filled_cache(), model=MODEL)
    elsewhere = make_pages(partial_hits=True)
    load_prefix_cache(path, elsewhere, make_cache(), model=MODEL)
    assert elsewhere.add("a", [*LONG[:6], 0, 0]) == 6
    without = make_pages()
    load_prefix_cache(path, without, make_cache(), model=MODEL)
    assert without.add("a", [*LONG[:6], 0, 0]) == 4


def test_load_skips_what_is_here_and_what_has_no_room(path, saved):
    elsewhere = make_pages(LONG[:4], num_pages=4)
    [here] = elsewhere.prefix.cached_pages().page_ids.tolist()
    before = make_cache(num_pages=4)
    after = load_prefix_cache(path, elsewhere, before, model=MODEL)
    assert elsewhere.stats().num_cached_pages == 3
    assert cached_tokens(elsewhere, LONG) + cached_tokens(elsewhere, SHORT) == 12
    assert page_bytes(after, here) == page_bytes(before, here)
    [first] = [x.page_id for x in elsewhere.prefix.explain([*SHORT, 0]) if x.hit]
    assert page_bytes(after, first) == page_bytes(saved[1], saved[0].prefix.explain([*SHORT, 0])[0].page_id)


def test_load_for_hybrid_groups_hits_in_each(path):
    groups = [PageGroup("full"), PageGroup("window", sliding_window=5)]
    pages = make_pages(LONG, groups=groups)
    save_prefix_cache(path, pages, filled_cache(), model=MODEL)
    elsewhere = make_pages(groups=groups)
    load_prefix_cache(path, elsewhere, make_cache(), model=MODEL)
    assert cached_tokens(elsewhere, LONG) == cached_tokens(pages, LONG) == 12


def test_save_of_nothing_loads_nothing(path):
    assert save_prefix_cache(path, make_pages(), make_cache(), model=MODEL) == 0
    elsewhere = make_pages()
    load_prefix_cache(path, elsewhere, make_cache(), model=MODEL)
    assert elsewhere.stats().num_cached_pages == 0


def test_load_without_prefix_caching_is_refused(path, saved):
    with pytest.raises(ValueError, match=r"needs a prefix cache: PageAllocator\(prefix_caching=True\)\."):
        load_prefix_cache(path, jp.PageAllocator(12, PAGE_SIZE), make_cache(), model=MODEL)


OTHER_PROCESS = """
import sys
from tests.paging.store.test_persist import *

elsewhere = make_pages()
cache = load_prefix_cache(sys.argv[1], elsewhere, make_cache("bfloat16"), model=MODEL)
for tokens in (LONG, SHORT):
    assert_loaded(elsewhere, cache, make_pages(LONG, SHORT), filled_cache("bfloat16"), tokens, len(tokens))
try:
    load_prefix_cache(sys.argv[1], make_pages(), make_cache("float16"), model=MODEL)
except ValueError as error:
    print(error)
"""


@pytest.mark.slow
def test_load_in_another_process_is_bit_equal_and_refuses_another_dtype(path):
    save_prefix_cache(path, make_pages(LONG, SHORT), filled_cache("bfloat16"), model=MODEL)
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
        ({"pages": make_pages(page_size=8)}, r"^page size of `pages` must be 4, for which .*; got 8\."),
    ],
)
def test_load_for_another_model_dtype_or_shape_is_refused_by_name(path, saved, change, message):
    pages = change.get("pages", make_pages())
    with pytest.raises(ValueError, match=message):
        load_prefix_cache(path, pages, change.get("cache", make_cache()), model=change.get("model", "llama"))
    assert pages.stats().num_cached_pages == 0


def test_load_for_other_groups_is_refused_by_name(path, saved):
    pages = make_pages(groups=[PageGroup("window", 8)])
    with pytest.raises(
        ValueError, match=r"^groups of `pages` must be \[\['full', None\]\], .*; got \[\['window', 8\]\]"
    ):
        load_prefix_cache(path, pages, make_cache(), model=MODEL)


def test_load_for_other_fixed_scales_is_refused(path):
    """The same byte stands for another number there."""
    save_prefix_cache(path, make_pages(SHORT), filled_cache("int8", 0.1), model=MODEL)
    elsewhere = make_pages()
    load_prefix_cache(path, elsewhere, make_cache("int8", scale=0.1), model=MODEL)
    assert cached_tokens(elsewhere, SHORT) == 8
    with pytest.raises(ValueError, match=r"^fixed scales of `cache` must be '[0-9a-f]{16}', for which"):
        load_prefix_cache(path, make_pages(), make_cache("int8", scale=0.2), model=MODEL)


def test_load_of_what_is_no_prefix_cache_says_so(path, saved):
    content = path.read_bytes()
    path.write_text("something else")
    with pytest.raises(PageFileError, match=r"must begin with b'jaxpaged pages 1'; got b'something else'"):
        load_prefix_cache(path, make_pages(), make_cache(), model=MODEL)
    path.unlink()
    PageFile.create(path, 2, 100, b"swapped pages").close()
    with pytest.raises(PageFileError, match=r"must be of a prefix cache, version 1; got version none\."):
        load_prefix_cache(path, make_pages(), make_cache(), model=MODEL)
    path.write_bytes(content[:100])
    with pytest.raises(PageFileError, match=r"it was cut|it is damaged"):
        load_prefix_cache(path, make_pages(), make_cache(), model=MODEL)


def test_load_of_another_version_is_refused_by_its_number(path, monkeypatch):
    monkeypatch.setattr(persist, "VERSION", 2)
    save_prefix_cache(path, make_pages(SHORT), filled_cache(), model=MODEL)
    monkeypatch.undo()
    with pytest.raises(PageFileError, match=r"must be of a prefix cache, version 1; got version 2\."):
        load_prefix_cache(path, make_pages(), make_cache(), model=MODEL)


@pytest.mark.parametrize("page", range(5))
@pytest.mark.parametrize("batch", [pytest.param(2, marks=pytest.mark.slow), 1024])
def test_load_with_a_damaged_page_misses_it_and_what_follows_only(path, saved, monkeypatch, batch, page):
    monkeypatch.setattr(persist, "_BATCH_PAGES", batch)
    damaged = saved[0].prefix.cached_pages().page_ids[page]
    begin = data_begin(path)
    content = bytearray(path.read_bytes())
    content[begin + page * (len(content) - begin) // 5 + 17] ^= 4
    path.write_bytes(content)
    elsewhere = make_pages()
    cache = load_prefix_cache(path, elsewhere, make_cache(), model=MODEL)
    for tokens in (LONG, SHORT):
        page_ids = [page.page_id for page in saved[0].prefix.explain(tokens)]
        expected = page_ids.index(damaged) * PAGE_SIZE if damaged in page_ids else len(tokens)
        assert_loaded(elsewhere, cache, *saved, tokens, expected)


def test_load_of_a_truncated_file_takes_the_pages_that_are_left(path, saved):
    os.truncate(path, data_begin(path) + 2 * saved[1].nbytes_per_page + 1)
    elsewhere = make_pages()
    cache = load_prefix_cache(path, elsewhere, make_cache(), model=MODEL)
    for tokens in (LONG, SHORT):  # parents come first
        assert_loaded(elsewhere, cache, *saved, tokens, PAGE_SIZE)


def test_load_that_fails_half_way_leaves_nothing_to_be_hit(path, saved, monkeypatch):
    def fail(*_):
        raise MemoryError

    monkeypatch.setattr(jp.KVCache, "import_pages", fail)
    elsewhere = make_pages([1, 2, 3, 4])
    with pytest.raises(MemoryError):
        load_prefix_cache(path, elsewhere, make_cache(), model=MODEL)
    assert elsewhere.stats().num_cached_pages == 0
    assert elsewhere.num_free_pages == 11


def test_save_that_fails_leaves_the_old_file_and_nothing_else(path, saved, monkeypatch):
    before = path.read_bytes()

    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(PageFile, "flush", fail)
    with pytest.raises(OSError, match="No space left on device"):
        save_prefix_cache(path, make_pages(SHORT), filled_cache(), model=MODEL)
    assert path.read_bytes() == before
    assert os.listdir(path.parent) == [path.name]


def test_save_leaves_the_old_file_to_whoever_reads_it(path, saved):
    with PageFile.open(path) as reader:
        save_prefix_cache(path, make_pages(SHORT), make_cache(), model="qwen")
        _, found = reader.read(np.arange(5), saved[0].prefix.cached_pages().digests)
    assert found.all()


def test_save_replaces_a_page_file_and_nothing_else(path, saved, tmp_path):
    save_prefix_cache(path, make_pages(SHORT), filled_cache(), model="qwen")
    elsewhere = make_pages()
    load_prefix_cache(path, elsewhere, make_cache(), model="qwen")
    assert cached_tokens(elsewhere, SHORT) == 8
    other = tmp_path / "thesis.txt"
    other.write_text("forty years of work")
    with pytest.raises(FileExistsError, match=r"thesis\.txt is there and is not a file of pages"):
        save_prefix_cache(other, make_pages(SHORT), filled_cache(), model="qwen")
    assert other.read_text() == "forty years of work"


@pytest.mark.parametrize(("model", "error"), [("", ValueError), (None, TypeError)])
def test_save_without_a_model_is_refused(path, model, error):
    with pytest.raises(error, match=r"^`model` must be .*the name of model and weights; got"):
        save_prefix_cache(path, make_pages(SHORT), filled_cache(), model=model)
    assert not path.exists()
