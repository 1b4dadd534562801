"""`--profile`, and the names that it shows."""

import dataclasses
import io
import sys

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import jaxpaged as jp
from jaxpaged.models.config import LlamaConfig
from jaxpaged.models.llama import Llama
from tests.cli.command import run


@pytest.mark.parametrize("command", [*(pytest.param(c, marks=pytest.mark.slow) for c in ("generate", "chat")), "bench"])
def test_profile_writes_a_trace_and_says_where(model_path, tmp_path, monkeypatch, capfd, command):
    arguments = {
        "generate": ("the hen", "--max-new-tokens", "2"),
        "chat": ("--max-new-tokens", "2"),
        "bench": ("--num-requests", "1", "--prompt-len", "3", "--output-len", "2"),
    }[command]
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"the hen\n")))
    traces = tmp_path / "new" / "traces"
    code, _, err = run(capfd, command, "--model", str(model_path), *arguments, "--profile", str(traces))
    assert code == 0
    assert f"Trace written below {traces}: see it in XProf or Perfetto.\n" in err
    assert [path.stat().st_size > 0 for path in traces.rglob("*.xplane.pb")] == [True]


@pytest.mark.parametrize("layer_loop", ["unroll", pytest.param("scan", marks=pytest.mark.slow)])
def test_llama_names_the_parts_of_a_step(layer_loop):
    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=24, num_layers=2, num_q_heads=2, num_kv_heads=1, head_dim=8,
        max_position=64, rms_norm_eps=1e-5,
    )  # fmt: skip
    model = nnx.eval_shape(lambda: Llama(config, backend="xla", layer_loop=layer_loop, rngs=nnx.Rngs(0)))
    cache = jax.eval_shape(lambda: jp.KVCache.create(**dataclasses.asdict(model.cache_config(num_pages=4))))

    def array(*dims):
        return jax.ShapeDtypeStruct(dims, jnp.int32)

    batch = jp.Batch(
        token_ids=array(2),
        positions=array(2),
        ragged=jp.Ragged(slot_mapping=array(2), page_table=array(2, 2), seq_lens=array(2)),
    )
    hlo = jax.jit(lambda model, cache, batch: model(cache, batch)).lower(model, cache, batch).compile().as_text()
    layers = ["layer_0", "layer_1"] if layer_loop == "unroll" else ["layers"]
    for scope in ("embedding", *layers, "attention", "mlp", "lm_head"):
        assert f"/{scope}/" in hlo, scope
