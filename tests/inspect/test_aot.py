"""What the compiler makes of the kernels for GPUs that are not there, and what counts as a copy."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from jaxpaged.cache import KVCache, Ragged
from jaxpaged.config import AttentionConfig
from jaxpaged.inspect.aot import GPUS, Kernel, Launch, compile_for, hlo_copies, lower_for
from jaxpaged.ops.attention import AttentionOptions
from jaxpaged.ops.attention.partition import count_programs, make_partition
from jaxpaged.ops.attention.triton import paged_attention_triton
from tests.inspect.needs import needs_nvdisasm, needs_plugin

shape = jax.ShapeDtypeStruct


def compile_attention(gpu, *, dtype=jnp.bfloat16, head_dim=128, num_tokens=64, config=None, **options):
    num_seqs, num_q_heads, num_kv_heads = 64, 32, 8
    kv = shape((2, 4096, num_kv_heads, 16, head_dim), dtype)
    ragged = Ragged(
        page_table=shape((num_seqs, 64), jnp.int32),
        seq_lens=shape((num_seqs,), jnp.int32),
        cu_q_lens=None if num_tokens == num_seqs else shape((num_seqs + 1,), jnp.int32),
    )
    options = AttentionOptions(config=config, sm_scale=0.1, **options)
    sizes = {"num_q_heads": num_q_heads, "num_kv_heads": num_kv_heads, "page_size": 16}
    partition = jax.eval_shape(functools.partial(make_partition, num_tokens=num_tokens, **sizes), ragged, options)
    return compile_for(
        lambda q, cache, ragged, options: paged_attention_triton(q, cache.layer(1), ragged, options),
        shape((num_tokens, num_q_heads, head_dim), dtype),
        KVCache(k_pages=kv, v_pages=kv),
        dataclasses.replace(ragged, partitions=(partition,)),
        options,
        gpu=gpu,
    )


def check_clean(program, names=("paged_attention", "paged_attention_combine")):
    assert [launch.name for launch in program.launches] == list(names)
    assert [launch.kernel.spill_bytes for launch in program.launches] == [0] * len(names)
    assert program.copies(1) == []


@needs_plugin
@pytest.mark.aot
@pytest.mark.parametrize("gpu", GPUS)
def test_compile_for_decode_is_two_launches_without_spill(gpu):
    program = compile_attention(gpu)
    check_clean(program)
    attention, _ = program.launches
    num_programs = count_programs(AttentionConfig(), 1, 32, 8)
    assert attention.grid == (8, num_programs, 1)
    # Three programs fit an SM of an H200, so the default number of programs runs there at once.
    assert attention.kernel.registers * attention.threads <= 65536 // 3
    assert attention.shared_bytes + 1024 <= GPUS["h200"].shared_per_sm // 3
    assert 8 * num_programs <= 3 * GPUS["h200"].num_sms
    partials = 2 * num_programs * 32 * (128 + 1) * 4  # two slots a program, float32, and their log-sum-exp
    assert partials <= program.temp_bytes < partials + 1024


@needs_plugin
@needs_nvdisasm
@pytest.mark.aot
@pytest.mark.parametrize("gpu", GPUS)
def test_compile_for_decode_pipelines_wide_loads_into_the_matrix_units(gpu):
    sass = compile_attention(gpu).launches[0].kernel.sass()
    assert "LDGSTS.E.BYPASS.128" in sass
    assert any(name in sass for name in ("HMMA", "HGMMA", "UTCHMMA"))


@needs_plugin
@pytest.mark.aot
@pytest.mark.parametrize("gpu", ["l4", "h200"])
@pytest.mark.parametrize(
    ("dtype", "head_dim", "num_tokens"),
    [(jnp.float32, 128, 64), (jnp.float32, 256, 1024), (jnp.bfloat16, 256, 64), (jnp.bfloat16, 128, 1024)],
)
def test_compile_for_tiles_at_the_limits_do_not_spill(gpu, dtype, head_dim, num_tokens):
    check_clean(compile_attention(gpu, dtype=dtype, head_dim=head_dim, num_tokens=num_tokens))


@needs_plugin
@pytest.mark.aot
def test_compile_for_whole_tiles_is_one_launch_without_temporaries():
    program = compile_attention("h200", config=AttentionConfig(max_splits=1), logits_soft_cap=30.0)
    check_clean(program, ["paged_attention"])
    assert program.temp_bytes == 0


@needs_plugin
@pytest.mark.aot
def test_compile_for_counts_graphs_donation_and_copies():
    def step(x, w, cache):
        for _ in range(6):
            x = jax.nn.softmax(x @ w)
        return cache.at[0].set(1.0), x, jnp.sort(x[0])  # a donated buffer goes to the first output it fits

    x = shape((256, 256), jnp.float32)
    donated = compile_for(step, x, x, x, gpu="h200", donate_argnums=(2,))
    kept = compile_for(step, x, x, x, gpu="h200")
    assert (donated.alias_bytes, kept.alias_bytes) == (256 * 256 * 4, 0)
    assert donated.copies(256 * 256 * 4) == []
    assert len(kept.copies(256 * 256 * 4)) == 1
    assert kept.command_buffers == 1
    assert sum(launch.graph for launch in kept.launches) >= 12
    assert [launch.name.split("_")[0] for launch in kept.launches if launch.kernel is None] == ["sort"]
    assert f"{len(kept.launches)} launches, " in str(kept)


@pytest.mark.parametrize(
    ("gpu", "registers", "threads", "shared_bytes", "blocks"),
    [
        ("h200", 128, 128, 72192, 3),  # shared memory
        ("h200", 144, 64, 1024, 6),  # registers: 4608 a warp, so 3 warps a quarter of an SM
        ("h200", 16, 64, 0, 32),  # blocks
        ("l4", 16, 512, 0, 3),  # threads
        ("l4", 128, 128, 72192, 1),
    ],
)
def test_launch_blocks_per_sm_is_the_least_that_anything_allows(gpu, registers, threads, shared_bytes, blocks):
    kernel = Kernel(name="k", registers=registers, spill_bytes=0, cubin=b"")
    launch = Launch(name="k", kernel=kernel, grid=(1,), threads=threads, shared_bytes=shared_bytes, graph=False)
    assert launch.blocks_per_sm(GPUS[gpu]) == blocks


def test_launch_blocks_per_sm_of_unknown_code_raises():
    launch = Launch(name="sort", kernel=None, grid=(1,), threads=32, shared_bytes=0, graph=False)
    with pytest.raises(ValueError, match="`kernel` of sort must be known; got None"):
        launch.blocks_per_sm(GPUS["h200"])


def test_compile_for_unknown_gpu_raises():
    with pytest.raises(ValueError, match=r"`gpu` must be one of a100, l4, h200, b200; got 'v100'\."):
        compile_for(lambda x: x, shape((1,), jnp.float32), gpu="v100")


def test_compile_for_without_plugin_names_it(monkeypatch):
    def no_plugin(**_):
        raise NotImplementedError("topology_desc")

    monkeypatch.setattr("jax.experimental.topologies.get_topology_desc", no_plugin)
    with pytest.raises(
        ModuleNotFoundError, match=r"needs the CUDA plugin jax_plugins\.xla_cuda13: install .*jax-cuda13"
    ):
        compile_for(lambda x: x, shape((1,), jnp.float32))


def compiled_hlo(fn, *args, **jit_kwargs):
    return jax.jit(fn, **jit_kwargs).lower(*args).compile().as_text()


X = shape((64, 64), jnp.float32)
SIZE = 64 * 64 * 4


@pytest.mark.parametrize(
    ("fn", "copies"),
    [
        (lambda x: x + 1, 0),
        (lambda x: x.T * 1.0, 1),
        (lambda x: jnp.concatenate([x, x]), 1),
        (lambda x: x.astype(jnp.bfloat16).astype(jnp.float32).sum(), 0),
        (lambda x: jnp.pad(x, 1), 1),
        (lambda x: jnp.where(x[0, 0] > 0, x, 0.0), 1),
        (lambda x: (x + 1, x.astype(jnp.int32)), 1),
        (lambda x: x.sum(), 0),
    ],
)
def test_hlo_copies_finds_what_only_moves_bytes(fn, copies):
    assert len(hlo_copies(compiled_hlo(fn, X), SIZE)) == copies


def test_hlo_copies_update_in_place_needs_donation():
    def update(x):
        return x.at[3].set(0.0)

    assert len(hlo_copies(compiled_hlo(update, X), SIZE)) == 1
    assert hlo_copies(compiled_hlo(update, X, donate_argnums=0), SIZE) == []


def test_hlo_copies_looks_into_loops_and_counts_no_smaller_array():
    def body(i, x):
        return jax.lax.optimization_barrier(x.T) * 2

    hlo = compiled_hlo(lambda x: jax.lax.fori_loop(0, 5, body, x), X)
    assert hlo_copies(hlo, SIZE)
    assert hlo_copies(hlo, SIZE + 1) == []


def double(x):
    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[...] * 2

    return pl.pallas_call(kernel, out_shape=shape(x.shape, x.dtype), compiler_params=plgpu.CompilerParams())(x)


@pytest.mark.parametrize("gpu", GPUS)
def test_lower_for_lowers_for_each_gpu_without_plugin(gpu):
    assert "__gpu$xla.gpu.triton" in lower_for(double, shape((8, 8), jnp.float32), gpu=gpu).as_text()


def test_lower_for_unknown_gpu_raises():
    with pytest.raises(ValueError, match=r"`gpu` must be one of a100, l4, h200, b200; got 'v100'\."):
        lower_for(double, shape((8, 8), jnp.float32), gpu="v100")


@pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="JAX asks for no list of GPUs")
def test_lower_for_gpu_that_jax_does_not_list_says_what_to_do(monkeypatch):
    monkeypatch.setitem(GPUS, "l40s", dataclasses.replace(GPUS["l4"], name="NVIDIA L40S"))
    message = (
        "a device kind that JAX .* knows; got 'NVIDIA L40S'. Give its entry in GPUS the name of a GPU with the same"
    )
    with pytest.raises(ValueError, match=message):
        lower_for(double, shape((8, 8), jnp.float32), gpu="l40s")


def test_lower_for_passes_other_faults_on():
    def fails(x):
        raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine"):
        lower_for(fails, shape((8, 8), jnp.float32))
