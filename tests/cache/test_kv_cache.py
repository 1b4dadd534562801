import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxpaged as jp
from jaxpaged.cache import kv_cache
from jaxpaged.config import LayerPlace

LAYERS, PAGES, HEADS, PAGE_SIZE, DIM = 3, 6, 2, 4, 8
SLOTS = PAGES * PAGE_SIZE


def make_cache(dtype=jnp.float32, *, fill=None) -> jp.KVCache:
    cache = jp.KVCache.create(
        num_layers=LAYERS, num_pages=PAGES, page_size=PAGE_SIZE, num_kv_heads=HEADS, head_dim=DIM, dtype=dtype
    )
    return cache if fill is None else jax.tree.map(lambda x: jnp.full_like(x, fill), cache)


def random_tokens(num_tokens: int, dtype=jnp.float32, seed: int = 0):
    rng = np.random.default_rng(seed)
    return jnp.asarray(rng.standard_normal((2, num_tokens, HEADS, DIM)), dtype)


def written(cache: jp.KVCache, layer: int, k, v, slots) -> tuple[np.ndarray, np.ndarray]:
    """What `write` should leave behind, by a loop over tokens in numpy."""
    k_pages, v_pages = np.array(cache.k_pages), np.array(cache.v_pages)
    for k_token, v_token, slot in zip(np.asarray(k), np.asarray(v), slots, strict=True):
        if slot < SLOTS:
            k_pages[layer, slot // PAGE_SIZE, :, slot % PAGE_SIZE] = k_token
            v_pages[layer, slot // PAGE_SIZE, :, slot % PAGE_SIZE] = v_token
    return k_pages, v_pages


@pytest.fixture(params=["scatter", "loop"])
def either_update(request, monkeypatch):
    """Runs a test with both ways of updating, whichever this JAX and dtype would take."""
    update = getattr(kv_cache, {"scatter": "update_by_scatter", "loop": "update_in_loop"}[request.param])
    monkeypatch.setattr(kv_cache, "update_by_scatter", update)
    monkeypatch.setattr(kv_cache, "update_in_loop", update)


@pytest.mark.usefixtures("either_update")
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("layer", range(LAYERS))
def test_write_at_slots_changes_these_slots_only(dtype, layer):
    cache, (k, v) = make_cache(dtype, fill=7), random_tokens(5, dtype)
    # The last two are padding: one past the pool would be page 0 of the next layer in a flat view.
    slots = np.array([5, 23, 0, SLOTS, SLOTS + 9], np.int32)
    result = jax.jit(lambda cache, layer: cache.write(layer, k, v, slots))(cache, layer)
    k_pages, v_pages = written(cache, layer, k, v, slots)
    chex.assert_trees_all_equal(result, jp.KVCache(k_pages=k_pages, v_pages=v_pages))


def check_update_in_loop_equals_scatter():
    k, v = random_tokens(3)
    starts = jnp.array([[1, 2, 0, 3, 0], [2, PAGES, 0, 0, 0], [0, 5, 0, 1, 0]])
    windows = {"k": k[:, None, None, :, None], "v": v[:, None, None, :, None]}
    pools = {"k": random_pool(1), "v": random_pool(2)}
    expected = kv_cache.update_by_scatter(pools, starts, windows)
    chex.assert_trees_all_equal(kv_cache.update_in_loop(pools, starts, windows), expected)


def test_update_in_loop_equals_scatter():
    check_update_in_loop_equals_scatter()


def test_write_in_a_scan_over_layers_writes_each_layer():
    cache, (k, v) = make_cache(), random_tokens(2)
    slots = jnp.array([9, SLOTS], jnp.int32)

    def body(cache, layer):
        return cache.write(layer, k * (layer + 1), v, slots), None

    result, _ = jax.jit(lambda cache: jax.lax.scan(body, cache, jnp.arange(LAYERS)))(cache)
    for layer in range(LAYERS):
        np.testing.assert_array_equal(result.k_pages[layer, 2, :, 1], k[0] * (layer + 1))
    assert np.count_nonzero(result.k_pages) == LAYERS * HEADS * DIM


def test_write_casts_to_the_dtype_of_the_cache():
    k, v = random_tokens(1)
    cache = make_cache(jnp.bfloat16).write(0, k, v, jnp.array([4], jnp.int32))
    np.testing.assert_array_equal(cache.k_pages[0, 1, :, 0], k[0].astype(jnp.bfloat16))
    assert cache.dtype == jnp.bfloat16


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_write_donated_copies_no_pool(dtype):
    cache, (k, v) = make_cache(dtype), random_tokens(3, dtype)
    cache = jax.tree.map(lambda x: jnp.tile(x, (1, 50, 1, 1, 1)), cache)
    step = jax.jit(lambda c, layer, k, v, s: c.write(layer, k, v, s), donate_argnums=0)
    memory = step.lower(cache, 1, k, v, jnp.arange(3)).compile().memory_analysis()
    pool = cache.k_pages.nbytes
    assert memory.alias_size_in_bytes == 2 * pool
    assert memory.temp_size_in_bytes < pool // 8


def test_write_lowered_for_cuda_is_one_scatter_for_each_of_k_and_v():
    cache, (k, v) = make_cache(jnp.bfloat16), random_tokens(3, jnp.bfloat16)
    traced = jax.jit(lambda c, k, v, s: c.write(1, k, v, s)).trace(cache, k, v, jnp.arange(3))
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count('"stablehlo.scatter"') == 2
    assert text.count("unique_indices = true") == 2
    assert "stablehlo.while" not in text


def test_gather_returns_tokens_in_order_and_zeros_past_the_end():
    k, v = random_tokens(6)
    page_table = jnp.array([[5, 2, -99], [10**6, 10**6, 10**6]], jnp.int32)  # entries past the end are not followed
    slots = jnp.array([20, 21, 22, 23, 8, 9], jnp.int32)
    cache = make_cache(fill=np.nan).write(2, k, v, slots)
    got_k, got_v = cache.gather(2, page_table, jnp.array([6, 0]))
    chex.assert_shape((got_k, got_v), (2, 12, HEADS, DIM))
    np.testing.assert_array_equal(got_k[0, :6], k)
    np.testing.assert_array_equal(got_v[0, :6], v)
    assert not np.any(got_k[0, 6:])
    assert not np.any(got_v[1])


@pytest.mark.usefixtures("either_update")
def test_copy_pages_reads_all_sources_before_it_writes():
    cache = make_cache()
    cache = jp.KVCache(k_pages=random_pool(1), v_pages=random_pool(2))
    copied = cache.copy_pages(jnp.array([1, 2, 3]), jnp.array([2, 1, PAGES]))  # the last is dropped
    for before, after in ((cache.k_pages, copied.k_pages), (cache.v_pages, copied.v_pages)):
        np.testing.assert_array_equal(after[:, [2, 1]], before[:, [1, 2]])
        np.testing.assert_array_equal(after[:, [0, 3, 4, 5]], before[:, [0, 3, 4, 5]])


def test_copy_pages_to_others_leaves_the_sources():
    cache = jp.KVCache(k_pages=random_pool(1), v_pages=random_pool(2))
    copied = cache.copy_pages(jnp.array([1, 2]), jnp.array([4, 5]))
    for before, after in ((cache.k_pages, copied.k_pages), (cache.v_pages, copied.v_pages)):
        np.testing.assert_array_equal(after, before[:, [0, 1, 2, 3, 1, 2]])


def random_pool(seed: int):
    shape = (LAYERS, PAGES, HEADS, PAGE_SIZE, DIM)
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_export_then_import_elsewhere_is_bit_equal(dtype):
    source = jp.KVCache(k_pages=random_pool(1).astype(dtype), v_pages=random_pool(2).astype(dtype))
    block = source.export_pages(jnp.array([4, 1]))
    target = make_cache(dtype).import_pages(jnp.array([2, 5]), block)
    chex.assert_trees_all_equal(target.export_pages(jnp.array([2, 5])), block)
    assert not np.any(target.k_pages[:, [0, 1, 3, 4]])


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"num_layers": 0}, ValueError, "`num_layers` must be an integer >= 1; got 0"),
        ({"page_size": 0}, ValueError, "`page_size` must be an integer >= 1; got 0"),
        ({"num_kv_heads": 0}, ValueError, "`num_kv_heads` must be an integer >= 1; got 0"),
        ({"head_dim": 0}, ValueError, "`head_dim` must be an integer >= 1; got 0"),
        ({"num_pages": 1}, ValueError, "`num_pages`, the null page included, must be an integer >= 2; got 1"),
        ({"num_pages": 4.0}, TypeError, r"`num_pages`, .*, must be an integer >= 2; got 4\.0 \(float\)"),
        ({"head_dim": True}, TypeError, "`head_dim` must be an integer >= 1; got True"),
        (
            {"dtype": jnp.int32},
            ValueError,
            "`dtype` must be one of float32, bfloat16, float16, int8, float8_e4m3fn, float8_e5m2; got int32",
        ),
        (
            {"dtype": "foo"},
            ValueError,
            "`dtype` must be one of float32, bfloat16, float16, int8, float8_e4m3fn, float8_e5m2; got 'foo'",
        ),
    ],
)
def test_create_with_a_bad_argument_names_it(change, error, message):
    good = {"num_layers": 1, "num_pages": 4, "page_size": 4, "num_kv_heads": 1, "head_dim": 8}
    with pytest.raises(error, match=message):
        jp.KVCache.create(**{**good, **change})


def test_write_with_bad_arguments_names_them():
    cache, (k, v) = make_cache(), random_tokens(3)
    slots = jnp.arange(3)
    with pytest.raises(ValueError, match=r"`k` must have shape .* = \(2, 2, 8\).*got \(3, 2, 8\)"):
        cache.write(0, k, v, slots[:2])
    with pytest.raises(ValueError, match=r"`v` must have shape"):
        cache.write(0, k, v[..., :4], slots)
    for bad in (np.zeros((1, 3), np.int32), np.array(0)):
        with pytest.raises(ValueError, match=r"`slot_mapping` \(num_tokens,\); got \(3, 2, 8\) and \((1, 3)?\)"):
            cache.write(0, k, v, bad)
    with pytest.raises(ValueError, match=r"`layer` must be from 0 to num_layers - 1 = 2; got 3"):
        cache.write(3, k, v, slots)
    with pytest.raises(TypeError, match=r"`slot_mapping` must be of integers; got float32"):
        cache.write(0, k, v, slots.astype(jnp.float32))
    with pytest.raises(TypeError, match=r"`slot_mapping` must be an array; got list"):
        cache.write(0, k, v, [0, 1, 2])


def test_gather_with_bad_arguments_names_them():
    cache, table, lens = make_cache(), jnp.ones((2, 3), jnp.int32), jnp.ones(2, jnp.int32)
    with pytest.raises(TypeError, match=r"`page_table` must be an array; got list"):
        cache.gather(0, [[1, 2]], lens)
    with pytest.raises(TypeError, match=r"`seq_lens` must be an array; got list"):
        cache.gather(0, table, [1, 1])
    with pytest.raises(ValueError, match=r"`page_table` must have shape .* `seq_lens` .*; got \(3,\) and \(2,\)"):
        cache.gather(0, table[0], lens)
    with pytest.raises(ValueError, match=r"got \(2, 3\) and \(1,\)"):
        cache.gather(0, table, lens[:1])
    with pytest.raises(ValueError, match=r"`layer` must be from 0 to num_layers - 1 = 2; got -1"):
        cache.gather(-1, table, lens)


@pytest.mark.parametrize("page_id", [-1, PAGES])
def test_export_pages_out_of_the_pool_are_refused(page_id):
    with pytest.raises(ValueError, match=rf"`page_ids` must be from 0 to 5; got {page_id} among 2"):
        make_cache().export_pages(np.array([1, page_id]))


@pytest.mark.parametrize("page_ids", [[3, -1], [3, 0], [3, 3]], ids=["negative", "null page", "twice"])
def test_import_pages_into_pages_that_cannot_be_are_refused(page_ids):
    cache = make_cache()
    block = cache.export_pages(jnp.array([1, 2]))
    with pytest.raises(ValueError, match=rf"`page_ids` must be distinct, .*; got {page_ids[1]} among 2"):
        cache.import_pages(jnp.array(page_ids), block)
    with pytest.raises(TypeError, match="`page_ids` must be an array; got list"):
        cache.import_pages(page_ids, block)


def test_import_pages_of_another_shape_or_dtype_is_refused():
    cache = make_cache()
    block = cache.export_pages(jnp.array([1, 2]))
    with pytest.raises(ValueError, match=r"`block.k` must have shape .* = \(3, 1, 2, 4, 8\)"):
        cache.import_pages(jnp.array([1]), block)
    with pytest.raises(TypeError, match=r"`block.k` must be of the cache's dtype bfloat16; got float32"):
        make_cache(jnp.bfloat16).import_pages(jnp.array([1, 2]), block)
    with pytest.raises(ValueError, match=r"`block.v` must have shape .* = \(3, 2, 2, 4, 8\)"):
        cache.import_pages(jnp.array([1, 2]), dataclasses.replace(block, v=np.asarray(block.v)[:, :1]))
    with pytest.raises(TypeError, match=r"`block.v` must be of the cache's dtype float32; got bfloat16"):
        cache.import_pages(jnp.array([1, 2]), dataclasses.replace(block, v=np.asarray(block.v).astype(jnp.bfloat16)))


def test_nbytes_per_page_counts_k_and_v_of_all_layers():
    cache = make_cache(jnp.bfloat16)
    assert cache.nbytes_per_page * cache.num_pages == cache.k_pages.nbytes + cache.v_pages.nbytes
    assert (cache.num_layers, cache.num_pages, cache.num_kv_heads, cache.page_size, cache.head_dim) == (3, 6, 2, 4, 8)
    assert cache.num_slots == SLOTS


@pytest.mark.usefixtures("either_update")
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_write_and_copy_of_nothing_or_out_of_range_change_nothing(dtype):
    cache = make_cache(dtype, fill=3)
    k, v = random_tokens(3, dtype)
    none = jnp.zeros(0, jnp.int32)
    chex.assert_trees_all_equal(cache.write(0, k[:0], v[:0], none), cache)
    chex.assert_trees_all_equal(cache.copy_pages(none, none), cache)
    chex.assert_trees_all_equal(cache.write(0, k, v, jnp.array([-1, -17, SLOTS])), cache)
    with pytest.raises(TypeError, match="`page_ids` must be integers"):
        cache.import_pages(jnp.array([1.5]), cache.export_pages(jnp.array([1])))


QUANTISED = ("int8", "float8_e4m3fn", "float8_e5m2")
HALF_STEP = {"int8": (0.0, 0.5), "float8_e4m3fn": (2**-4, 2**-10), "float8_e5m2": (2**-3, 2**-17)}
"""Largest rounding error: a share of the value, and a share of the scale."""


def quantised_cache(dtype="int8", *, k_scale=None, v_scale=None) -> jp.KVCache:
    return jp.KVCache.create(
        num_layers=LAYERS,
        num_pages=PAGES,
        page_size=PAGE_SIZE,
        num_kv_heads=HEADS,
        head_dim=DIM,
        dtype=dtype,
        k_scale=k_scale,
        v_scale=v_scale,
    )


def filled(cache: jp.KVCache) -> jp.KVCache:
    """Pages 1 and up written, in all layers."""
    for layer in range(LAYERS):
        k, v = random_tokens(SLOTS - PAGE_SIZE, seed=3 + layer)
        cache = cache.write(layer, k, v, jnp.arange(PAGE_SIZE, SLOTS))
    return cache


@pytest.mark.usefixtures("either_update")
@pytest.mark.parametrize("dtype", QUANTISED)
@pytest.mark.parametrize("scale", [None, 0.02, "head", "layer"])
def test_write_then_gather_of_a_quantised_cache_is_within_half_a_step(dtype, scale):
    largest = {"int8": 127, "float8_e4m3fn": 448, "float8_e5m2": 57344}[dtype]
    sizes = np.random.default_rng(1).uniform(5, 6, (2, LAYERS, HEADS)).astype(np.float32) / largest
    fixed = {None: (None, None), 0.02: (5 / largest, 6 / largest), "head": sizes[:, 0], "layer": sizes}[scale]
    cache = quantised_cache(dtype, k_scale=fixed[0], v_scale=fixed[1])
    k, v = random_tokens(6)
    k = k.at[0].set(0)  # a token of zeros
    slots = jnp.array([20, 21, 22, 23, 8, SLOTS + 3], jnp.int32)  # the last is padding
    cache = jax.jit(lambda c, layer: c.write(layer, k, v, slots))(cache, 2)
    assert cache.dtype == jnp.dtype(dtype)
    got_k, got_v = cache.gather(2, jnp.array([[5, 2]], jnp.int32), jnp.array([5]))
    for got, x, given in ((got_k, k, fixed[0]), (got_v, v, fixed[1])):
        assert got.dtype == jnp.float32
        x = np.asarray(x)[:5]
        step = np.abs(x).max(-1) / largest if given is None else np.broadcast_to(given, (LAYERS, HEADS))[2]
        share, floor = HALF_STEP[dtype]
        allowed = (share * np.abs(x) + floor * np.broadcast_to(step, x.shape[:2])[..., None]) * (1 + 1e-3)
        np.testing.assert_array_less(np.abs(got[0, :5] - x), allowed + 1e-30)
        if given is None:  # a measured scale gives the largest value back
            top = np.abs(x).argmax(-1)[..., None]
            got_top = np.take_along_axis(np.asarray(got[0, :5]), top, -1)
            np.testing.assert_allclose(got_top, np.take_along_axis(x, top, -1), rtol=2e-7)
    np.testing.assert_array_equal(got_k[0, 0], 0)
    assert not np.any(got_k[0, 5:])
    untouched = np.delete(np.asarray(cache.k_pages.astype(jnp.float32)), 2, axis=0)
    assert not np.any(untouched)
    if scale is None:
        assert np.count_nonzero(cache.v_scale) == 5 * HEADS


@pytest.mark.parametrize("dtype", QUANTISED)
def test_write_beyond_a_fixed_scale_stores_the_largest_number(dtype):
    cache = quantised_cache(dtype, k_scale=1e-9, v_scale=1e-9)
    k, v = random_tokens(1)
    got_k, _ = cache.write(0, k, v, jnp.array([4], jnp.int32)).gather(0, jnp.array([[1]], jnp.int32), jnp.array([1]))
    largest = {"int8": 127, "float8_e4m3fn": 448, "float8_e5m2": 57344}[dtype]
    np.testing.assert_allclose(got_k[0, 0], np.sign(k[0]) * largest * 1e-9, rtol=1e-6)


@pytest.mark.parametrize("dtype", QUANTISED)
def test_write_in_a_scan_over_layers_writes_the_scales_of_each_layer(dtype):
    cache, (k, v) = quantised_cache(dtype), random_tokens(2)
    slots = jnp.array([9, SLOTS], jnp.int32)

    def body(cache, layer):
        return cache.write(layer, k * (layer + 1.0), v, slots), None

    result, _ = jax.jit(lambda cache: jax.lax.scan(body, cache, jnp.arange(LAYERS)))(cache)
    largest = np.abs(k[0]).max(-1)
    for layer in range(LAYERS):
        np.testing.assert_allclose(result.k_scale[layer, 2, :, 1] / result.k_scale[0, 2, :, 1], layer + 1, rtol=1e-6)
        stored = np.abs(result.k_pages[layer, 2, :, 1].astype(jnp.float32)).max(-1) * result.k_scale[layer, 2, :, 1]
        np.testing.assert_allclose(stored, largest * (layer + 1), rtol=1e-6)
    assert np.count_nonzero(result.k_scale) == LAYERS * HEADS


@pytest.mark.usefixtures("either_update")
@pytest.mark.parametrize("dtype", QUANTISED)
def test_export_import_and_copy_take_the_scales_along_bit_for_bit(dtype):
    cache = filled(quantised_cache(dtype))
    block = cache.export_pages(jnp.arange(1, PAGES))
    assert np.all(np.asarray(block.k_scale) > 0)
    for name in ("k_scale", "v_scale"):
        np.testing.assert_array_equal(getattr(block, name), getattr(cache, name)[:, 1:])
    target = quantised_cache(dtype).import_pages(jnp.arange(1, PAGES), block)
    chex.assert_trees_all_equal(target.export_pages(jnp.arange(1, PAGES)), block)
    copied = target.copy_pages(jnp.array([1, 2, 3]), jnp.array([2, 1, PAGES]))  # the last is dropped
    before, after = target.export_pages(jnp.array([2, 1, 3, 4, 5])), copied.export_pages(jnp.array([1, 2, 3, 4, 5]))
    chex.assert_trees_all_equal(after, before)
    assert not np.any(copied.k_scale[:, 0])


def test_import_pages_of_a_block_with_other_scales_is_refused():
    by_token, fixed = quantised_cache(), quantised_cache(k_scale=0.1, v_scale=0.1)
    ids = jnp.array([1, 2])
    with pytest.raises(TypeError, match=r"`block.k_scale` must be given, as the cache holds a scale .*; got None"):
        by_token.import_pages(ids, fixed.export_pages(ids))
    with pytest.raises(TypeError, match=r"`block.k_scale` must be None, as the cache does not hold .*; got an array"):
        fixed.import_pages(ids, by_token.export_pages(ids))
    with pytest.raises(TypeError, match=r"`block.v_scale` must be given, .*; got None"):
        by_token.import_pages(ids, dataclasses.replace(by_token.export_pages(ids), v_scale=None))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dtype": "bfloat16"}, r"`k_scale` must be None for bfloat16; got one\. Only one-byte dtypes have scales"),
        ({"v_scale": None}, r"`k_scale` and `v_scale` must be given both or neither; got one of them"),
        ({"k_scale": 0.0}, r"`k_scale` must be finite and above 0; got 0\.0"),
        ({"v_scale": [0.1, -1.0]}, r"`v_scale` must be finite and above 0; got \[0\.1, -1\.0\]"),
        ({"v_scale": np.inf}, r"`v_scale` must be finite and above 0; got inf"),
        ({"k_scale": np.nan}, r"`k_scale` must be finite and above 0; got nan"),
        (
            {"k_scale": np.ones(3)},
            r"`k_scale` must be a number, \(num_kv_heads,\) = \(2,\) or .* = \(1, 2\); got \(3,\)",
        ),
        (
            {"num_pages": 2**18, "page_size": 64, "head_dim": 128},
            r"`num_pages` must be at most 131071 or at least 262145",
        ),
    ],
)
def test_create_of_a_quantised_cache_with_a_bad_argument_names_it(change, message):
    """The last would be 4 GiB a pool: it is refused before anything is allocated."""
    good = {"num_layers": 1, "num_pages": 4, "num_kv_heads": 2, "head_dim": 8, "dtype": "int8"}
    with pytest.raises(ValueError, match=message):
        jp.KVCache.create(**{**good, "k_scale": 0.1, "v_scale": 0.1, **change})


@pytest.mark.parametrize("num_values", [2**31 - 2**14, 2**31, 2**32, 2**32 + 2**14])
@pytest.mark.parametrize("dtype", ["int8", "float8_e5m2", "bfloat16"])
def test_create_refuses_one_byte_pools_that_a_gpu_cannot_index(num_values, dtype):
    shape = (1, num_values // 2**14, 2, 64, 128)
    if dtype == "bfloat16" or not 2**31 <= num_values <= 2**32:
        kv_cache._check_pool_size(shape, dtype)
        return
    with pytest.raises(ValueError, match=rf"a pool of {dtype} with 2\*\*31 to 2\*\*32 values; got {shape[1]}"):
        kv_cache._check_pool_size(shape, dtype)


@pytest.mark.parametrize("dtype", QUANTISED)
@pytest.mark.parametrize("scale", [None, 0.1])
def test_nbytes_per_page_counts_the_scales_of_each_token(dtype, scale):
    cache = quantised_cache(dtype, k_scale=scale, v_scale=scale)
    held = [x for x in jax.tree.leaves(cache) if x.ndim > 2]
    assert cache.nbytes_per_page * cache.num_pages == sum(x.nbytes for x in held)


# Of fp8, XLA on a CPU copies the bytes of a pool around a scatter: two pools of temporary memory at most. (By way of
# float16 it was four; an update in a loop needs none, and seconds.)
@pytest.mark.parametrize(("dtype", "pools_copied"), [("int8", 0), ("float8_e4m3fn", 2), ("float8_e5m2", 2)])
@pytest.mark.parametrize("scale", [None, 0.1])
def test_write_donated_of_a_quantised_cache_copies_no_pool_of_int8(dtype, pools_copied, scale):
    shape = {"num_layers": LAYERS, "num_pages": 300, "num_kv_heads": HEADS, "head_dim": 64}
    cache, k = jp.KVCache.create(**shape, dtype=dtype, k_scale=scale, v_scale=scale), jnp.ones((3, HEADS, 64))
    step = jax.jit(lambda c, layer, k, s: c.write(layer, k, k, s), donate_argnums=0)
    compiled = step.lower(cache, 1, k, jnp.arange(3)).compile()
    memory, pool = compiled.memory_analysis(), cache.k_pages.nbytes
    assert memory.alias_size_in_bytes == sum(x.nbytes for x in jax.tree.leaves(cache))
    assert memory.temp_size_in_bytes < (pools_copied + 1 / 8) * pool
    assert f"f16[{LAYERS},300" not in compiled.as_text()


@pytest.mark.parametrize("dtype", QUANTISED)
@pytest.mark.parametrize("cu_q_lens", [None, np.array([0, 1, 2, 3], np.int32)], ids=["decode", "ragged"])
def test_paged_attention_by_xla_reads_a_quantised_pool_in_place(dtype, cu_q_lens):
    cache = jp.KVCache.create(num_layers=2, num_pages=2000, num_kv_heads=2, head_dim=64, dtype=dtype)

    def attend(q, c, table, lens):
        scales = {"k_scale": c.k_scale, "v_scale": c.v_scale}
        return jp.paged_attention(
            q, c.k_pages, c.v_pages, table, lens, layer=1, cu_q_lens=cu_q_lens, **scales, backend="xla"
        )

    arguments = jnp.ones((3, 4, 64)), cache, jnp.ones((3, 64), jnp.int32), jnp.full(3, 300, jnp.int32)
    memory = jax.jit(attend).lower(*arguments).compile().memory_analysis()
    assert memory.temp_size_in_bytes < cache.k_pages.nbytes // 8


@pytest.mark.parametrize("dtype", QUANTISED)
def test_write_of_a_quantised_cache_lowered_for_cuda_scatters_the_pools_themselves(dtype):
    cache, (k, v) = quantised_cache(dtype), random_tokens(3)
    traced = jax.jit(lambda c, k, v, s: c.write(1, k, v, s)).trace(cache, k, v, jnp.arange(3))
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count('"stablehlo.scatter"') == 4  # K, V and their scales
    assert "bitcast_convert" not in text
    assert "stablehlo.while" not in text


PLACES = [LayerPlace(*place) for place in ((0, 0), (1, 0), (0, 1), (1, 1), (2, 1))]


def make_grouped(**options) -> jp.KVCache:
    shape = {"num_pages": PAGES, "page_size": PAGE_SIZE, "num_kv_heads": HEADS, "head_dim": DIM, "dtype": jnp.float32}
    return jp.KVCache.create(**{"num_layers": len(PLACES), "layer_places": PLACES} | shape | options)


@pytest.mark.parametrize("is_traced", [False, True])
def test_layer_of_a_page_group_writes_to_its_row_at_the_slots_of_its_group(is_traced):
    cache = make_grouped()
    assert (cache.num_layers, cache.num_rows, cache.num_groups) == (5, 2, 3)
    assert cache.nbytes_per_page == 2 * 2 * HEADS * PAGE_SIZE * DIM * 4
    slots = np.array([[4, 9], [12, 17], [20, 5]], np.int32)  # of each group
    tables = (slots // PAGE_SIZE)[:, :, None]
    ragged = jp.Ragged(page_table=tables, seq_lens=np.ones(2, np.int32), slot_mapping=slots)
    expected = np.zeros((2, 2, PAGES, HEADS, PAGE_SIZE, DIM), np.float32)

    def write(cache, layer, k, v):
        return cache.layer(layer).write(k, v, ragged).cache

    for layer, (group, row) in enumerate(PLACES):
        k, v = random_tokens(2, seed=layer)
        cache = (jax.jit(write) if is_traced else write)(cache, layer, k, v)
        for token, slot in enumerate(slots[group]):
            expected[:, row, slot // PAGE_SIZE, :, slot % PAGE_SIZE] = k[token], v[token]
        gathered, _ = cache.gather(layer, tables[group], np.full(2, PAGE_SIZE, np.int32))
        for token, slot in enumerate(slots[group]):
            np.testing.assert_array_equal(gathered[token, slot % PAGE_SIZE], k[token])
    np.testing.assert_array_equal(cache.k_pages, expected[0])
    np.testing.assert_array_equal(cache.v_pages, expected[1])
    block = cache.export_pages(np.array([3, 1]))
    assert block.k.shape[:2] == (2, 2)
    chex.assert_trees_all_equal(cache.import_pages(np.array([3, 1]), block), cache)


def test_layer_places_that_cannot_be_are_refused_by_name():
    for places in (PLACES[:4], [*PLACES[:4], PLACES[0]], [*PLACES[:4], (-1, 0)]):
        with pytest.raises(ValueError, match=r"^`layer_places` must be a distinct \(group, row\) >= 0 for each of "):
            make_grouped(layer_places=places)
    with pytest.raises(ValueError, match=r"^`k_scale` must be a number or \(num_kv_heads,\) = \(2,\) with "):
        make_grouped(dtype="int8", k_scale=np.ones((5, HEADS)), v_scale=np.ones((5, HEADS)))
    one_table = jp.Ragged(page_table=np.ones((2, 1), np.int32), seq_lens=np.ones(2, np.int32))
    with pytest.raises(ValueError, match=r"^`page_table` must have shape .* of which this has 3; got \(2, 1\)\.$"):
        make_grouped().layer(0).ragged(one_table)


def test_layer_places_in_order_are_a_cache_of_one_group():
    places = [LayerPlace(0, i) for i in range(5)]
    assert make_grouped(layer_places=places).layer_places is None
