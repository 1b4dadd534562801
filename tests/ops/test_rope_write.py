"""`rope_and_write` against a float64 oracle and against the two steps that it joins; its IR, checked; its machine code.

A rotation is two products and a sum in float32, which a compiler may contract: an ulp of the larger product, and where
that tips a rounding, one step of the dtype that follows. `assert_one_step_apart` allows that and no more.
"""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

import jaxpaged as jp
from jaxpaged.aot import compile_for
from jaxpaged.ops import triton
from jaxpaged.ops.rope import apply_rope, rope_and_write, rope_angles, rope_frequencies
from jaxpaged.quantize import is_quantized
from tests.test_aot import needs_plugin

LAYERS, PAGES, FILL = 3, 7, 3
DTYPES = ("float32", "bfloat16", "float16", "int8", "float8_e4m3fn", "float8_e5m2")
QUANTIZED = DTYPES[3:]
HALF_STEP = {"int8": 0.0, "float8_e4m3fn": 2**-4, "float8_e5m2": 2**-3}  # of a value; besides, half of int8's step of 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Inputs:
    """A cache full of `FILL`, and what to write: every token but the last four, which are padding of each kind."""

    cache: jp.KVCache
    qkv: jax.Array
    positions: np.ndarray
    slots: np.ndarray

    @property
    def num_live(self) -> int:
        return len(self.slots) - 4

    def arguments(self) -> tuple:
        half = self.cache.head_dim // 2
        cos, sin = rope_angles(jnp.asarray(self.positions), rope_frequencies(2 * half, theta=1e4))
        return self.qkv, cos, sin, jnp.asarray(self.slots)


def make_inputs(
    dtype="float32", *, qkv_dtype=None, q_heads=4, kv_heads=2, head_dim=16, page_size=4, scale=None, live=3
) -> Inputs:
    rng = np.random.default_rng(head_dim + page_size)
    scales = {"k_scale": scale, "v_scale": None if scale is None else 2 * np.asarray(scale)}
    cache = jp.KVCache.create(
        num_layers=LAYERS,
        num_pages=PAGES,
        page_size=page_size,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        dtype=dtype,
        **scales,
    )
    cache = jax.tree.map(lambda x: x if x.ndim == 2 else jnp.full_like(x, FILL), cache)
    num_slots = cache.num_slots
    qkv = rng.standard_normal((live + 4, q_heads + 2 * kv_heads, head_dim))
    qkv_dtype = qkv_dtype or ("bfloat16" if is_quantized(dtype) else dtype)
    # The last slot of the pool, where -1 would wrap to, has an owner; and -1 comes after it.
    owned = [num_slots - 1, *rng.permutation(np.arange(1, num_slots - 1))[: live - 1]]
    slots = [*owned, -1, num_slots, 2**31 - 1, -(2**31)]
    return Inputs(
        cache=cache,
        qkv=jnp.asarray(qkv, qkv_dtype),
        positions=rng.integers(0, 500, live + 4),
        slots=np.array(slots, np.int32),
    )


def two_steps(cache, layer, qkv, cos, sin, slots):
    num_q_heads = qkv.shape[1] - 2 * cache.num_kv_heads
    q, k = (apply_rope(x, cos, sin) for x in (qkv[:, :num_q_heads], qkv[:, num_q_heads : -cache.num_kv_heads]))
    return q, cache.write(layer, k, qkv[:, -cache.num_kv_heads :], slots)


@functools.cache
def compiled(backend: str):
    """Without optimisation, which would take longer than it saves, and with every rounding that is written."""
    return jax.jit(
        lambda *arguments: rope_and_write(*arguments, backend=backend),
        compiler_options={"xla_backend_optimization_level": 0, "xla_allow_excess_precision": False},
    )


def in_order(x: np.ndarray) -> np.ndarray:
    """Numbers of a one-byte dtype, numbered by size."""
    bits = np.asarray(x).view(np.int8).astype(int)
    return bits if x.dtype == np.int8 else np.where(bits < 0, -128 - bits, bits)


def assert_one_step_apart(got, expected, qkv):
    got, expected = np.asarray(got), np.asarray(expected)
    assert (got.shape, got.dtype) == (expected.shape, expected.dtype)
    if is_quantized(got.dtype):
        apart = np.abs(in_order(got) - in_order(expected))
        assert apart.max() <= 1
        assert np.mean(apart) <= 0.01
        return
    if got.dtype.itemsize == 2:
        assert np.mean(got != expected) <= 0.01
    ulp = float(max(jnp.finfo(x.dtype).eps for x in (got, qkv)))  # a scale is as good as the value that it comes from
    largest = float(jnp.max(jnp.abs(qkv.astype(jnp.float32))))
    got, expected = got.astype(np.float32), expected.astype(np.float32)
    np.testing.assert_allclose(got, expected, rtol=ulp, atol=2**-22 * largest)


def check_against_two_steps(inputs: Inputs, backend="interpret", layer=1):
    arguments = inputs.arguments()
    got = compiled(backend)(inputs.cache, layer, *arguments)
    expected = two_steps(inputs.cache, layer, *arguments)  # each operation alone: nothing is contracted
    chex.assert_trees_all_equal_structs(got, expected)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert_one_step_apart(x, y, inputs.qkv)
    assert_untouched(got[1], inputs, layer)
    return got


def assert_untouched(cache: jp.KVCache, inputs: Inputs, layer: int):
    """Bit for bit, all but the slots of live tokens in one layer."""
    slots = inputs.slots[: inputs.num_live]
    for before, after in zip(jax.tree.leaves(inputs.cache), jax.tree.leaves(cache), strict=True):
        before, after = np.array(before), np.array(after)
        if after.ndim > 2:
            after[layer, slots // cache.page_size, :, slots % cache.page_size] = FILL
        np.testing.assert_array_equal(after, before)


@pytest.mark.parametrize("backend", ["reference", "xla", "interpret", "auto"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rope_and_write_equals_float64_oracle(dtype, backend):
    inputs, layer = make_inputs(dtype, q_heads=6, kv_heads=3), 2
    cache, qkv, live = inputs.cache, np.asarray(inputs.qkv, np.float64), inputs.num_live
    q, cache = compiled(backend)(cache, layer, *inputs.arguments())
    cos, sin = (np.asarray(x, np.float64) for x in inputs.arguments()[1:3])
    angles = inputs.positions[:, None] * 1e4 ** (-np.arange(8) / 8)
    # An angle is a float32 product of a position and a float32 frequency, two roundings.
    np.testing.assert_allclose(cos + 1j * sin, np.exp(1j * angles), rtol=0, atol=2**-22 * np.max(inputs.positions))
    z = (qkv[..., :8] + 1j * qkv[..., 8:]) * (cos + 1j * sin)[:, None]
    turned = np.concatenate([z.real, z.imag], -1)
    eps, atol = float(jnp.finfo(inputs.qkv.dtype).eps), 2**-22 * np.max(np.abs(qkv))
    np.testing.assert_allclose(np.asarray(q, np.float64), turned[:, :6], rtol=eps, atol=atol)
    page, offset = np.divmod(inputs.slots[:live], cache.page_size)
    for pages, scale, expected in (
        (cache.k_pages, cache.k_scale, turned[:live, 6:9]),
        (cache.v_pages, cache.v_scale, qkv[:live, 9:]),
    ):
        got, step = np.asarray(pages[layer, page, :, offset], np.float64), 0.0
        if scale is not None:
            scale = np.asarray(scale[layer, page, :, offset], np.float64)[..., None]
            got, step = got * scale, np.max(scale) * (0.5 if dtype == "int8" else 2**-9)
        np.testing.assert_allclose(got, expected, rtol=eps + HALF_STEP.get(dtype, 0), atol=atol + step)


@pytest.mark.parametrize(
    ("dtype", "head_dim", "page_size", "q_heads", "kv_heads"),
    [
        ("float32", 16, 1, 4, 2),
        ("bfloat16", 80, 24, 6, 3),
        ("float16", 128, 4, 8, 1),
        ("int8", 96, 4, 15, 3),
        ("float32", 16, 4, 71, 1),
        ("float8_e4m3fn", 256, 1, 5, 5),
    ],
)
def test_rope_and_write_of_any_shape_equals_two_steps(dtype, head_dim, page_size, q_heads, kv_heads):
    check_against_two_steps(
        make_inputs(dtype, head_dim=head_dim, page_size=page_size, q_heads=q_heads, kv_heads=kv_heads)
    )


@pytest.mark.parametrize("scale", [None, 0.02, np.linspace(0.01, 0.03, 6).reshape(3, 2)], ids=["token", "all", "head"])
@pytest.mark.parametrize(("dtype", "qkv_dtype"), [*zip(QUANTIZED, DTYPES, strict=False)])
def test_rope_and_write_quantised_equals_two_steps(dtype, qkv_dtype, scale):
    _, cache = check_against_two_steps(make_inputs(dtype, qkv_dtype=qkv_dtype, head_dim=80, page_size=24, scale=scale))
    assert cache.has_token_scales == (scale is None)


@pytest.mark.parametrize(
    ("qkv_dtype", "dtype"), [("float32", "bfloat16"), ("bfloat16", "float32"), ("float16", "bfloat16")]
)
def test_rope_and_write_into_another_dtype_rounds_as_two_steps(qkv_dtype, dtype):
    q, cache = check_against_two_steps(make_inputs(dtype, qkv_dtype=qkv_dtype))
    assert (q.dtype, cache.dtype) == (qkv_dtype, dtype)


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_rope_and_write_at_each_layer_changes_that_layer(dtype):
    for layer in range(LAYERS):
        check_against_two_steps(make_inputs(dtype), layer=layer)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rope_and_write_by_the_formula_has_the_bits_of_two_steps(dtype):
    inputs = make_inputs(dtype)
    got = rope_and_write(inputs.cache, 0, *inputs.arguments(), backend="xla")
    chex.assert_trees_all_equal(got, two_steps(inputs.cache, 0, *inputs.arguments()))


@pytest.mark.parametrize("backend", ["xla", "interpret"])
@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_rope_and_write_of_padding_alone_changes_nothing_and_rotates(dtype, backend):
    inputs = make_inputs(dtype)
    qkv, cos, sin, slots = inputs.arguments()
    live = inputs.num_live
    q, cache = compiled(backend)(inputs.cache, 1, qkv[live:], cos[live:], sin[live:], slots[live:])
    chex.assert_trees_all_equal(cache, inputs.cache)
    assert_one_step_apart(q, apply_rope(qkv[live:, :4], cos[live:], sin[live:]), qkv)


@pytest.mark.parametrize("backend", ["xla", "interpret"])
def test_rope_and_write_of_rows_of_zeros_stores_zeros(backend):
    inputs = make_inputs("int8")
    qkv, cos, sin, slots = inputs.arguments()
    _, cache = compiled(backend)(inputs.cache, 1, jnp.zeros_like(qkv), cos, sin, slots)
    page, offset = np.divmod(inputs.slots[: inputs.num_live], cache.page_size)
    for x in jax.tree.leaves(cache):
        assert not np.any(x[1, page, :, offset])


@pytest.mark.parametrize("backend", ["xla", "interpret"])
def test_rope_and_write_never_mixes_the_halves_of_a_value(backend):
    inputs = make_inputs()
    qkv, cos, sin, slots = inputs.arguments()
    qkv = qkv.at[:, -1, 3].set(jnp.inf)
    _, cache = compiled(backend)(inputs.cache, 1, qkv, cos, sin, slots)
    page, offset = np.divmod(inputs.slots[: inputs.num_live], cache.page_size)
    np.testing.assert_array_equal(cache.v_pages[1, page, :, offset], qkv[: inputs.num_live, -2:])


@pytest.mark.parametrize("backend", ["xla", "interpret", "auto"])
@pytest.mark.parametrize("unroll", [True, False], ids=["unrolled", "rolled"])
@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_rope_and_write_in_a_scan_over_layers_writes_each_layer(dtype, unroll, backend):
    inputs = make_inputs(dtype)
    qkv, *rest = inputs.arguments()

    def body(cache, layer):
        q, cache = rope_and_write(cache, layer, qkv * (layer + 1).astype(qkv.dtype), *rest, backend=backend)
        return cache, q

    cache, q = jax.jit(lambda cache: jax.lax.scan(body, cache, jnp.arange(LAYERS), unroll=unroll))(inputs.cache)
    expected = inputs.cache
    for layer in range(LAYERS):
        expected_q, expected = compiled(backend)(expected, layer, qkv * (layer + 1), *rest)
        assert_one_step_apart(q[layer], expected_q, LAYERS * qkv)
    for x, y in zip(jax.tree.leaves(cache), jax.tree.leaves(expected), strict=True):
        assert_one_step_apart(x, y, LAYERS * qkv)


@pytest.mark.parametrize("backend", ["xla", "interpret", "auto"])
def test_rope_and_write_of_no_tokens_returns_the_cache(backend):
    inputs = make_inputs()
    q, cache = rope_and_write(inputs.cache, 0, *(x[:0] for x in inputs.arguments()), backend=backend)
    chex.assert_shape(q, (0, 4, 16))
    chex.assert_trees_all_equal(cache, inputs.cache)


@pytest.mark.parametrize("backend", ["interpret", "auto"])
def test_rope_and_write_differentiates_as_two_steps(backend):
    inputs = make_inputs()
    qkv, *rest = inputs.arguments()
    weights = jax.random.normal(jax.random.key(0), inputs.cache.k_pages.shape)

    def loss(function, qkv, cache):
        q, cache = function(cache, 1, qkv, *rest)
        return jnp.sum(q**2) + jnp.sum(weights * cache.k_pages) + jnp.sum(weights * cache.v_pages**2)

    def gradient(function):
        return jax.grad(functools.partial(loss, function), argnums=(0, 1))(qkv, inputs.cache)

    got, expected = gradient(functools.partial(rope_and_write, backend=backend)), gradient(two_steps)
    assert np.count_nonzero(expected[0]) > 0
    chex.assert_trees_all_close(got, expected, rtol=1e-6, atol=1e-6)


def test_rope_and_write_donated_copies_no_pool_on_the_cpu():
    inputs = make_inputs("float32")
    cache = jax.tree.map(lambda x: jnp.tile(x, (1, 200, 1, 1, 1)), inputs.cache)
    lowered = jax.jit(rope_and_write, donate_argnums=0).lower(cache, 1, *inputs.arguments())
    memory = lowered.compile().memory_analysis()
    assert memory.alias_size_in_bytes == 2 * cache.k_pages.nbytes
    assert memory.temp_size_in_bytes < cache.k_pages.nbytes // 8


def lowered(backend: str, platform: str) -> str:
    inputs = make_inputs("bfloat16")
    step = jax.jit(functools.partial(rope_and_write, backend=backend))
    # Pallas asks which GPU it lowers for; this says it without one.
    device = AbstractDevice(device_kind="NVIDIA H200", num_cores=None, platform="gpu")
    with use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
        traced = step.trace(inputs.cache, np.int32(1), *inputs.arguments())
        return traced.lower(lowering_platforms=(platform,)).as_text()


def test_rope_and_write_by_auto_lowers_to_the_kernel_on_cuda_and_to_two_steps_on_a_cpu():
    for_cuda = lowered("auto", "cuda")
    assert for_cuda.count("__gpu$xla.gpu.triton") == 1
    assert "scatter" not in for_cuda
    assert "triton" not in lowered("auto", "cpu")
    assert "scatter" in lowered("xla", "cuda")


BAD = {
    "cache": (("cache", lambda c: c.k_pages), TypeError, "`cache` must be a KVCache; got"),
    "layer": (("layer", lambda _: LAYERS), ValueError, "`layer` must be from 0 to num_layers - 1 = 2; got 3"),
    "list": (("qkv", lambda _: [[[0.0] * 16] * 8] * 7), TypeError, "`qkv` must be an array; got list"),
    "slots list": (("slot_mapping", lambda _: [0] * 7), TypeError, "`slot_mapping` must be an array; got list"),
    "head_dim": (
        ("qkv", lambda x: x[..., :8]),
        ValueError,
        "`qkv` must have shape (num_tokens, num_heads, head_dim = 16)",
    ),
    "flat": (("qkv", lambda x: x.reshape(7, -1)), ValueError, "`qkv` must have shape (num_tokens, num_heads, head_dim"),
    "no queries": (("qkv", lambda x: x[:, :4]), ValueError, "`qkv` must have num_q_heads + 2 * 2 heads"),
    "group": (("qkv", lambda x: x[:, :7]), ValueError, "num_q_heads a multiple of num_kv_heads = 2; got 7"),
    "int": (("qkv", lambda x: x.astype(jnp.int32)), TypeError, "`qkv` must be float32, bfloat16 or float16; got int32"),
    "cos": (("cos", lambda x: x[:-1]), ValueError, "`cos` must have shape (7, 8) for 7 tokens; got (6, 8)"),
    "sin": (("sin", lambda x: x[:, :4]), ValueError, "`sin` must have shape (7, 8) for 7 tokens; got (7, 4)"),
    "cos dtype": (("cos", lambda x: x.astype(jnp.bfloat16)), TypeError, "`cos` must be float32; got bfloat16"),
    "slots": (("slot_mapping", lambda x: x[:, None]), ValueError, "`slot_mapping` must have shape (7,) for 7 tokens"),
    "slots dtype": (("slot_mapping", lambda x: x * 1.0), TypeError, "`slot_mapping` must be int32; got float32"),
    "backend": (("backend", lambda _: "cuda"), ValueError, "`backend` must be one of auto, reference, xla, triton"),
}


@pytest.mark.parametrize("name", BAD)
def test_rope_and_write_of_a_bad_argument_names_it(name):
    (argument, spoil), error, message = BAD[name]
    inputs = make_inputs()
    arguments = dict(zip(("qkv", "cos", "sin", "slot_mapping"), inputs.arguments(), strict=True))
    arguments |= {"cache": inputs.cache, "layer": 0, "backend": "auto"}
    arguments[argument] = spoil(arguments[argument])
    with pytest.raises(error) as info:
        rope_and_write(**arguments)
    assert message in str(info.value)


def test_rope_and_write_of_an_odd_head_dim_is_refused():
    inputs = make_inputs()
    cache = jp.KVCache.create(num_layers=1, num_pages=2, num_kv_heads=2, head_dim=15)
    with pytest.raises(ValueError, match="`cache` must have an even head_dim for rotary embedding; got 15"):
        rope_and_write(cache, 0, *inputs.arguments())


@pytest.mark.parametrize("backend", ["triton", "interpret"])
def test_rope_and_write_without_pallas_triton_is_refused_by_name(monkeypatch, backend):
    inputs = make_inputs()
    monkeypatch.setattr(triton, "plgpu", None)
    with pytest.raises(NotImplementedError, match=f"`backend='{backend}'` cannot run this call: JAX .* has no Pallas"):
        rope_and_write(inputs.cache, 0, *inputs.arguments(), backend=backend)
    got = rope_and_write(inputs.cache, 0, *inputs.arguments())
    chex.assert_trees_all_equal(got, two_steps(inputs.cache, 0, *inputs.arguments()))


def test_rope_and_write_by_triton_on_a_cpu_raises():
    inputs = make_inputs()
    with pytest.raises(ValueError, match="Only interpret mode is supported on CPU"):
        jax.block_until_ready(rope_and_write(inputs.cache, 0, *inputs.arguments(), backend="triton"))


@pytest.mark.parametrize("shape", [(6, 3, 80, 24), (8, 1, 128, 1)], ids=str)
@pytest.mark.parametrize(("dtype", "scale"), [*((dtype, None) for dtype in DTYPES), ("int8", 0.02)])
def test_rope_and_write_ir_writes_each_byte_once_and_reads_no_page(interpreter, dtype, scale, shape):
    q_heads, kv_heads, head_dim, page_size = shape
    inputs = make_inputs(dtype, q_heads=q_heads, kv_heads=kv_heads, head_dim=head_dim, page_size=page_size, scale=scale)
    cache, arguments, layer = inputs.cache, inputs.arguments(), 1
    result = interpreter.run_function(
        lambda cache, *rest: triton.rope_and_write_triton(cache, layer, *rest), cache, *arguments
    )
    assert result.problems == []
    [run] = result.runs
    assert run.report.hazards == []
    traffic = run.report.traffic
    assert np.sum(traffic["qkv_ref"].loaded) == inputs.qkv.nbytes
    assert np.sum(traffic["q_ref"].stored) == inputs.qkv[:, :q_heads].nbytes
    live_bytes = inputs.num_live * kv_heads * head_dim * cache.dtype.itemsize
    pools = traffic["_k_pages_ref"], traffic["_v_pages_ref"]  # called as the inputs whose memory they are
    assert [np.sum(pool.stored) for pool in pools] == [live_bytes, live_bytes]
    assert [np.sum(pool.loaded) for pool in pools] == [0, 0]
    expected = two_steps(cache, layer, *arguments)
    for x, y in zip(jax.tree.leaves(result.outputs), jax.tree.leaves(expected), strict=True):
        assert_one_step_apart(x, y, inputs.qkv)
    assert_untouched(result.outputs[1], inputs, layer)


def shape_of(x):
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


@needs_plugin
@pytest.mark.aot
@pytest.mark.parametrize("gpu", ["h200", "l4"])
@pytest.mark.parametrize(
    ("dtype", "scale"), [*((dtype, None) for dtype in DTYPES), ("int8", 0.02), ("float8_e5m2", 0.02)]
)
def test_rope_and_write_compiled_is_one_launch_in_place(gpu, dtype, scale):
    inputs = make_inputs(dtype, q_heads=32, kv_heads=8, head_dim=128, page_size=16, scale=scale, live=60)
    arguments = jax.tree.map(shape_of, inputs.arguments())
    cache = shape_of_cache(inputs.cache)
    program = compile_for(rope_and_write, cache, shape_of(np.int32(0)), *arguments, gpu=gpu, donate_argnums=0)
    [launch] = program.launches
    assert launch.name == "rope_and_write"
    assert launch.kernel.spill_bytes == 0
    assert launch.kernel.registers <= 64
    assert program.copies(0) == []
    assert program.alias_bytes == nbytes(cache)
    assert program.temp_bytes < 1024


def nbytes(arrays) -> int:
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(arrays))


def shape_of_cache(cache: jp.KVCache) -> jp.KVCache:
    """With pages enough for a copy of the pool to show."""
    return jax.tree.map(
        lambda x: shape_of(x) if x.ndim == 2 else jax.ShapeDtypeStruct((LAYERS, 4096, *x.shape[2:]), x.dtype), cache
    )


@needs_plugin
@pytest.mark.aot
@pytest.mark.parametrize("unroll", [True, False], ids=["unrolled", "rolled"])
@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_rope_and_write_compiled_in_a_scan_copies_no_pool(dtype, unroll):
    inputs = make_inputs(dtype, head_dim=128, page_size=16)
    cache = shape_of_cache(inputs.cache)

    def step(cache, *arguments):
        def body(cache, layer):
            q, cache = rope_and_write(cache, layer, *arguments)
            return cache, q

        return jax.lax.scan(body, cache, np.arange(LAYERS, dtype=np.int32), unroll=unroll)

    program = compile_for(step, cache, *jax.tree.map(shape_of, inputs.arguments()), donate_argnums=0)
    names = [launch.name for launch in program.launches]
    assert names.count("rope_and_write") == (LAYERS if unroll else 1)
    smallest_pool = min(map(nbytes, jax.tree.leaves(cache)))
    assert program.copies(smallest_pool) == []
    assert program.alias_bytes == nbytes(cache)
    assert program.temp_bytes < smallest_pool
