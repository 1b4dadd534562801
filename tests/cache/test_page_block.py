"""Pages to host memory and back, from the device through a swap space."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxpaged as jp
from jaxpaged.cache import kv_cache
from jaxpaged.paging import SwapSpace, exchange_pages

DTYPES = ("float32", "float16", "bfloat16", "int8", "float8_e4m3fn", "float8_e5m2")
LAYERS, PAGES, HEADS, PAGE_SIZE, DIM = 2, 7, 2, 4, 8
PAGE_IDS = np.array([5, 1, 6, 2], np.int32)


def make_cache(dtype: str, scale: float | None = None) -> jp.KVCache:
    return jp.KVCache.create(
        num_layers=LAYERS, num_pages=PAGES, page_size=PAGE_SIZE, num_kv_heads=HEADS, head_dim=DIM, dtype=dtype,
        k_scale=scale, v_scale=scale,
    )  # fmt: skip


def filled_cache(dtype: str, scale: float | None = None) -> jp.KVCache:
    cache = make_cache(dtype, scale)
    num_tokens = (PAGES - 1) * PAGE_SIZE
    for layer in range(LAYERS):
        k, v = np.random.default_rng(layer).standard_normal((2, num_tokens, HEADS, DIM), np.float32)
        cache = cache.write(layer, jnp.asarray(k), jnp.asarray(v), jnp.arange(PAGE_SIZE, PAGE_SIZE + num_tokens))
    return cache


def bits(x) -> np.ndarray:
    return np.asarray(x).view(np.uint8)


def assert_same_bits(got, expected):
    chex.assert_trees_all_equal_shapes_and_dtypes(got, expected)
    chex.assert_trees_all_equal(jax.tree.map(bits, got), jax.tree.map(bits, expected))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_host", [0, 2, 4])
def test_pages_swapped_out_and_in_elsewhere_are_bit_equal(tmp_path, dtype, num_host):
    cache = filled_cache(dtype)
    block = cache.export_pages(PAGE_IDS)
    with SwapSpace(num_host, file=tmp_path / "swap.pages", num_file_pages=4) as space:
        space.put_sequence("a", block.to_host())
        back = jp.PageBlock.from_host(space.take_sequence("a"))
    assert_same_bits(back, block)
    assert (back.k_scale is None) == (dtype in DTYPES[:3])
    elsewhere = make_cache(dtype).import_pages(np.array([1, 2, 3, 4]), back)
    assert_same_bits(elsewhere.export_pages(np.array([1, 2, 3, 4])), block)


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_exchange_pages_of_a_cache_brings_back_the_same_bits(dtype):
    pages = jp.PageAllocator(PAGES, PAGE_SIZE, prefix_caching=True, offload=True)
    cache, space = make_cache(dtype), SwapSpace(8)

    def add(seq_id, token):
        """A prompt of six pages, all of one token. Returns how many were not computed."""
        nonlocal cache
        tokens = [token] * (6 * PAGE_SIZE)
        num_cached = pages.add(seq_id, tokens, host=space)
        cache, num_cached = exchange_pages(pages, space, cache, seq_id, num_cached)
        k, v = np.random.default_rng(token).standard_normal((2, len(tokens), HEADS, DIM), np.float32)
        slots = pages.slot_mapping([seq_id], [len(tokens) - num_cached])
        for layer in range(LAYERS):
            cache = cache.write(layer, jnp.asarray(k[num_cached:]), jnp.asarray(v[num_cached:]), slots)
        pages.commit(seq_id, tokens)
        block = cache.export_pages(pages.page_ids(seq_id))
        pages.free(seq_id)
        return num_cached, block

    num_cached, block = add("a", 1)
    assert num_cached == 0
    assert add("b", 2)[0] == 0
    num_cached, again = add("a", 1)
    assert num_cached == 5 * PAGE_SIZE
    assert_same_bits(again, block)


@pytest.mark.parametrize("dtype", DTYPES)
def test_to_host_keeps_every_bit_pattern(dtype):
    """NaNs of all kinds, infinities, negative zero: a swap is no computation."""
    itemsize = jnp.dtype(dtype).itemsize
    values = np.random.default_rng(0).integers(0, 256, (LAYERS, 3, HEADS, PAGE_SIZE, DIM * itemsize), np.uint8)
    block = jp.PageBlock(k=jnp.asarray(values.view(dtype)), v=jnp.asarray(values[..., ::-1].copy().view(dtype)))
    back = jp.PageBlock.from_host(block.to_host())
    np.testing.assert_array_equal(bits(back.k), values)
    np.testing.assert_array_equal(bits(back.v), values[..., ::-1])


def test_to_host_of_fixed_scales_leaves_them_in_the_cache():
    block = filled_cache("int8", 0.1).export_pages(PAGE_IDS)
    assert sorted(block.to_host()) == ["k", "v"]
    assert_same_bits(jp.PageBlock.from_host(block.to_host()), block)


def test_to_host_goes_by_pinned_memory_where_there_is_such(monkeypatch):
    kinds = []
    device_put = jax.device_put

    def spy(x, target=None):
        kinds.append(target.memory_kind)
        return device_put(x, target)

    monkeypatch.setattr(jax, "device_put", spy)
    block = filled_cache("int8").export_pages(PAGE_IDS)
    host = block.to_host()
    assert kinds == ["pinned_host"] * 4
    monkeypatch.setattr(kv_cache, "_to_pinned_memory", lambda x: x)
    assert_same_bits(host, block.to_host())


def test_to_pinned_memory_without_such_is_the_array_itself():
    class Plain:
        kind = "device"

    class Device:
        @staticmethod
        def addressable_memories():
            return [Plain]

    class Somewhere:
        class sharding:
            device_set = (Device,)

    assert kv_cache._to_pinned_memory(Somewhere) is Somewhere


@pytest.mark.parametrize("names", [("k",), ("k", "v", "q"), ()])
def test_from_host_of_other_names_is_refused(names):
    arrays = {name: np.zeros((1, 1, 1, 1, 1)) for name in names}
    with pytest.raises(ValueError, match=r"`arrays` must have k and v, and may have k_scale and v_scale; got \["):
        jp.PageBlock.from_host(arrays)
