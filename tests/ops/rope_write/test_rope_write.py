"""`rope_and_write`: what it takes and refuses, which backend runs; its IR, checked; its machine code."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

import jaxpaged as jp
from jaxpaged.inspect.aot import compile_for
from jaxpaged.ops import triton_util
from jaxpaged.ops.rope_write import apply_rope, rope_and_write
from jaxpaged.ops.rope_write.triton import rope_and_write_triton
from jaxpaged.testing.conformance.rope_write import (
    DTYPES,
    NUM_LAYERS,
    assert_one_step_apart,
    assert_untouched,
    make_rope_write_inputs,
)
from tests.inspect.needs import needs_plugin

QUANTIZED = DTYPES[3:]


def arrays_of(inputs):
    """The arrays beside the cache."""
    return inputs.qkv, *inputs.angles(), jnp.asarray(inputs.slots)


def write(cache, layer, qkv, cos, sin, slots, backend="auto"):
    """`rope_and_write`, from a cache to a cache."""
    nothing = jnp.zeros((1, 1), jnp.int32)  # neither lengths nor page table matter
    ragged = jp.Ragged(page_table=nothing, seq_lens=nothing[0], slot_mapping=slots)
    q, view = rope_and_write(qkv, cache.layer(layer), ragged, cos, sin, backend=backend)
    return q, view.cache


def two_steps(cache, layer, qkv, cos, sin, slots):
    num_q_heads = qkv.shape[1] - 2 * cache.num_kv_heads
    q, k = (apply_rope(x, cos, sin) for x in (qkv[:, :num_q_heads], qkv[:, num_q_heads : -cache.num_kv_heads]))
    return q, cache.write(layer, k, qkv[:, -cache.num_kv_heads :], slots)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rope_and_write_by_the_formula_has_the_bits_of_two_steps(dtype):
    inputs = make_rope_write_inputs(dtype)
    got = write(inputs.cache, 0, *arrays_of(inputs), backend="xla")
    chex.assert_trees_all_equal(got, two_steps(inputs.cache, 0, *arrays_of(inputs)))


def test_rope_and_write_donated_copies_no_pool_on_the_cpu():
    inputs = make_rope_write_inputs("float32")
    cache = jax.tree.map(lambda x: jnp.tile(x, (1, 200, 1, 1, 1)), inputs.cache)
    lowered = jax.jit(write, donate_argnums=0).lower(cache, 1, *arrays_of(inputs))
    memory = lowered.compile().memory_analysis()
    assert memory.alias_size_in_bytes == 2 * cache.k_pages.nbytes
    assert memory.temp_size_in_bytes < cache.k_pages.nbytes // 8


def lowered(backend: str, platform: str) -> str:
    inputs = make_rope_write_inputs("bfloat16")
    step = jax.jit(functools.partial(write, backend=backend))
    # Pallas asks which GPU it lowers for; this says it without one.
    device = AbstractDevice(device_kind="NVIDIA H200", num_cores=None, platform="gpu")
    with use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
        traced = step.trace(inputs.cache, np.int32(1), *arrays_of(inputs))
        return traced.lower(lowering_platforms=(platform,)).as_text()


def test_rope_and_write_by_auto_lowers_to_the_kernel_on_cuda_and_to_two_steps_on_a_cpu():
    for_cuda = lowered("auto", "cuda")
    assert for_cuda.count("__gpu$xla.gpu.triton") == 1
    assert "scatter" not in for_cuda
    assert "triton" not in lowered("auto", "cpu")
    assert "scatter" in lowered("xla", "cuda")


BAD = {
    "cache": (("view", lambda view: view.cache), TypeError, "`view` must be a LayerView, from `cache.layer(...)`; got"),
    "list": (("qkv", lambda _: [[[0.0] * 16] * 8] * 7), TypeError, "`qkv` must be an array; got list"),
    "cos list": (("cos", lambda _: [[0.0] * 8] * 7), TypeError, "`cos` must be an array; got list"),
    "sin list": (("sin", lambda _: [[0.0] * 8] * 7), TypeError, "`sin` must be an array; got list"),
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
    "sin dtype": (("sin", lambda x: x.astype(jnp.bfloat16)), TypeError, "`sin` must be float32; got bfloat16"),
    "cos dtype": (("cos", lambda x: x.astype(jnp.bfloat16)), TypeError, "`cos` must be float32; got bfloat16"),
    "no slots": (
        ("slot_mapping", lambda _: None),
        ValueError,
        "`ragged` must have a `slot_mapping`, where this step's",
    ),
    "slots": (("slot_mapping", lambda x: x[:, None]), ValueError, "`slot_mapping` must have shape (7,) for 7 tokens"),
    "slots dtype": (("slot_mapping", lambda x: x * 1.0), TypeError, "`slot_mapping` must be int32; got float32"),
    "backend": (("backend", lambda _: "cuda"), ValueError, "`backend` must be one of auto, reference, xla, triton"),
}


@pytest.mark.parametrize("name", BAD)
def test_rope_and_write_of_a_bad_argument_names_it(name):
    (argument, spoil), error, message = BAD[name]
    inputs = make_rope_write_inputs()
    arguments = dict(zip(("qkv", "cos", "sin", "slot_mapping"), arrays_of(inputs), strict=True))
    arguments |= {"view": inputs.cache.layer(0), "backend": "auto"}
    arguments[argument] = spoil(arguments[argument])
    nothing = jnp.zeros((1, 1), jnp.int32)
    ragged = jp.Ragged(page_table=nothing, seq_lens=nothing[0], slot_mapping=arguments.pop("slot_mapping"))
    with pytest.raises(error) as info:
        rope_and_write(**arguments, ragged=ragged)
    assert message in str(info.value)


def test_rope_and_write_of_an_odd_head_dim_is_refused():
    inputs = make_rope_write_inputs()
    cache = jp.KVCache.create(num_layers=1, num_pages=2, num_kv_heads=2, head_dim=15)
    with pytest.raises(
        ValueError, match="`view` must be of a cache with an even head_dim for rotary embedding; got 15"
    ):
        write(cache, 0, *arrays_of(inputs))


@pytest.mark.parametrize("backend", ["triton", "interpret"])
def test_rope_and_write_without_pallas_triton_is_refused_by_name(monkeypatch, backend):
    inputs = make_rope_write_inputs()
    monkeypatch.setattr(triton_util, "plgpu", None)
    with pytest.raises(NotImplementedError, match=f"`backend='{backend}'` cannot run this call: JAX .* has no Pallas"):
        write(inputs.cache, 0, *arrays_of(inputs), backend=backend)
    got = write(inputs.cache, 0, *arrays_of(inputs))
    chex.assert_trees_all_equal(got, two_steps(inputs.cache, 0, *arrays_of(inputs)))


def test_rope_and_write_by_triton_on_a_cpu_raises():
    inputs = make_rope_write_inputs()
    with pytest.raises(ValueError, match="Only interpret mode is supported on CPU"):
        jax.block_until_ready(write(inputs.cache, 0, *arrays_of(inputs), backend="triton"))


@pytest.mark.parametrize("shape", [(6, 3, 80, 24), pytest.param((8, 1, 128, 1), marks=pytest.mark.slow)], ids=str)
@pytest.mark.parametrize(
    ("dtype", "scale"),
    [
        *(pytest.param(x, None, marks=() if x == "int8" else pytest.mark.slow) for x in DTYPES),
        pytest.param("int8", 0.02, marks=pytest.mark.slow),
    ],
)
def test_rope_and_write_ir_writes_each_byte_once_and_reads_no_page(interpreter, dtype, scale, shape):
    q_heads, kv_heads, head_dim, page_size = shape
    inputs = make_rope_write_inputs(
        dtype, num_q_heads=q_heads, num_kv_heads=kv_heads, head_dim=head_dim, page_size=page_size, scale=scale
    )
    cache, arguments, layer = inputs.cache, arrays_of(inputs), 1

    def by_kernel(cache, qkv, cos, sin, slots):
        q, view = rope_and_write_triton(qkv, cache.layer(layer), slots, cos, sin)
        return q, view.cache

    result = interpreter.run_function(by_kernel, cache, *arguments)
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
    inputs = make_rope_write_inputs(
        dtype, num_q_heads=32, num_kv_heads=8, head_dim=128, page_size=16, scale=scale, num_live=60
    )
    arguments = jax.tree.map(shape_of, arrays_of(inputs))
    cache = shape_of_cache(inputs.cache)
    program = compile_for(write, cache, shape_of(np.int32(0)), *arguments, gpu=gpu, donate_argnums=0)
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
        lambda x: shape_of(x) if x.ndim == 2 else jax.ShapeDtypeStruct((NUM_LAYERS, 4096, *x.shape[2:]), x.dtype), cache
    )


@needs_plugin
@pytest.mark.aot
@pytest.mark.parametrize("unroll", [True, False], ids=["unrolled", "rolled"])
@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_rope_and_write_compiled_in_a_scan_copies_no_pool(dtype, unroll):
    inputs = make_rope_write_inputs(dtype, head_dim=128, page_size=16)
    cache = shape_of_cache(inputs.cache)

    def step(cache, *arguments):
        def body(cache, layer):
            q, cache = write(cache, layer, *arguments)
            return cache, q

        return jax.lax.scan(body, cache, np.arange(NUM_LAYERS, dtype=np.int32), unroll=unroll)

    program = compile_for(step, cache, *jax.tree.map(shape_of, arrays_of(inputs)), donate_argnums=0)
    names = [launch.name for launch in program.launches]
    assert names.count("rope_and_write") == (NUM_LAYERS if unroll else 1)
    smallest_pool = min(map(nbytes, jax.tree.leaves(cache)))
    assert program.copies(smallest_pool) == []
    assert program.alias_bytes == nbytes(cache)
    assert program.temp_bytes < smallest_pool
