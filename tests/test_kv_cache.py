import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxpaged as jp
from jaxpaged import kv_cache

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
    update = getattr(kv_cache, {"scatter": "_update_by_scatter", "loop": "_update_in_loop"}[request.param])
    monkeypatch.setattr(kv_cache, "_update_by_scatter", update)
    monkeypatch.setattr(kv_cache, "_update_in_loop", update)


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
    expected = kv_cache._update_by_scatter(pools, starts, windows)
    chex.assert_trees_all_equal(kv_cache._update_in_loop(pools, starts, windows), expected)


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
