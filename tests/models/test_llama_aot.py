"""What XLA makes of a whole decode step for an H200: one CUDA graph, and no large copy in it."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import jaxpaged as jp
from jaxpaged.engine.sampling.sample import SamplingBatch, sample
from jaxpaged.inspect.aot import CompiledProgram, compile_for
from jaxpaged.models.config import LlamaConfig
from jaxpaged.models.llama import Llama
from jaxpaged.paging import group_layers
from tests.inspect.needs import needs_plugin

CONFIG = LlamaConfig(
    vocab_size=8192,
    hidden_size=576,
    intermediate_size=1536,
    num_layers=2,
    num_q_heads=9,
    num_kv_heads=3,
    head_dim=64,
    max_position=8192,
    rms_norm_eps=1e-5,
)
NUM_SEQS = 16
POOL_BYTES = 2 * 8192 * 3 * 16 * 64 * 2  # of K or of V


def compile_decode_step(
    *, layer_loop: str, sampled: bool = False, sliding_windows: tuple[int | None, ...] | None = None
) -> CompiledProgram:
    def array(dtype, *dims):
        return jax.ShapeDtypeStruct((NUM_SEQS, *dims), dtype)

    def of_groups(*shape):
        return jax.ShapeDtypeStruct(shape if len(groups) == 1 else (len(groups), *shape), jnp.int32)

    num_layers = len(sliding_windows or "12")
    config = dataclasses.replace(CONFIG, num_layers=num_layers, sliding_windows=sliding_windows)
    model = nnx.eval_shape(lambda: Llama(config, dtype=jnp.bfloat16, layer_loop=layer_loop, rngs=nnx.Rngs(0)))
    groups, places = group_layers(model.layer_specs)
    pool = dataclasses.asdict(model.cache_config(num_pages=8192))
    cache = jax.eval_shape(lambda: jp.KVCache.create(**pool, layer_places=places))
    ragged = jp.Ragged(slot_mapping=of_groups(NUM_SEQS), page_table=of_groups(NUM_SEQS, 64), seq_lens=array(jnp.int32))
    batch = jp.Batch(token_ids=array(jnp.int32), positions=array(jnp.int32), ragged=ragged)
    sampling = SamplingBatch(
        temperature=array(jnp.float32),
        top_k=array(jnp.int32),
        top_p=array(jnp.float32),
        seed=array(jnp.uint32),
        position=array(jnp.int32),
    )

    def step(model, cache, batch, sampling):
        logits, cache = model(cache, batch)
        return sample(logits, sampling), cache

    return compile_for(step, model, cache, batch, sampling if sampled else None, gpu="h200", donate_argnums=1)


def smallest_weight_bytes() -> int:
    """Of a layer's matrices."""
    return CONFIG.hidden_size * CONFIG.num_q_heads * CONFIG.head_dim * 2


@needs_plugin
@pytest.mark.aot
@pytest.mark.parametrize("sampled", [False, True])
def test_decode_step_on_an_h200_is_one_command_buffer_without_large_copies(sampled):
    program = compile_decode_step(layer_loop="unroll", sampled=sampled)
    assert program.command_buffers == 1
    assert "kWhile" not in program.thunks
    assert all(launch.graph for launch in program.launches), program
    names = [launch.name for launch in program.launches]
    assert sum(name.startswith("paged_attention") for name in names) == 2 * CONFIG.num_layers
    # The sampler's own [NUM_SEQS, vocab_size] arrays are smaller than any weight.
    assert program.copies(smallest_weight_bytes()) == []
    assert program.alias_bytes >= 2 * POOL_BYTES
    assert program.temp_bytes < POOL_BYTES


@needs_plugin
@pytest.mark.aot
def test_decode_step_over_page_groups_launches_no_more_a_layer():
    """Three groups of a layer, two windows: two more launches a step, the partition of the second window."""
    one_group = compile_decode_step(layer_loop="unroll", sliding_windows=(512, 512, 512))
    groups = compile_decode_step(layer_loop="unroll", sliding_windows=(512, None, 512))
    assert groups.command_buffers == 1
    assert groups.copies(smallest_weight_bytes()) == []
    assert groups.alias_bytes >= POOL_BYTES  # a row of K and one of V
    assert len(groups.launches) <= len(one_group.launches) + 2
    names = [launch.name for launch in groups.launches]
    layer = [n for n in names if n.startswith(("linear", "rope_and_write", "paged_attention"))]
    assert len(layer) == 7 * 3 + 1  # and the head


@needs_plugin
@pytest.mark.aot
def test_decode_step_with_a_rolled_scan_copies_weights_and_no_cache():
    """The price of compiling fast; that it shows here is what makes the test above worth something."""
    program = compile_decode_step(layer_loop="scan")
    assert "kWhile" in program.thunks
    assert program.copies(smallest_weight_bytes()) != []
    assert program.copies(POOL_BYTES) == []
