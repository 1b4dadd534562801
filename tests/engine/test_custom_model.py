"""A model of one's own in the engine: everything that it needs is in this file."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxpaged as jp
from jaxpaged.config import CacheConfig
from jaxpaged.engine import Engine, SamplingParams
from jaxpaged.nn.nnx import PagedAttention

VOCAB_SIZE, HIDDEN, HEADS, NUM_LAYERS, MAX_LEN = 32, 24, 2, 2, 40


class Layer(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.norm = nnx.LayerNorm(HIDDEN, rngs=rngs)
        self.qkv = nnx.Linear(HIDDEN, 3 * HIDDEN, rngs=rngs)
        self.attention = PagedAttention()
        self.out = nnx.Linear(HIDDEN, HIDDEN, rngs=rngs)

    def __call__(self, x, cache: jp.KVCache, batch: jp.Batch, layer: int):
        q, k, v = jnp.split(self.qkv(self.norm(x)).reshape(len(x), 3 * HEADS, -1), 3, axis=1)
        attended, cache = self.attention(q, k, v, cache, batch, layer)
        return x + self.out(attended.reshape(x.shape)), cache


class Gpt(nnx.Module):
    """A decoder with learned positions. The engine asks for no more than `__call__`."""

    def __init__(self, rngs: nnx.Rngs):
        self.embed = nnx.Embed(VOCAB_SIZE, HIDDEN, rngs=rngs)
        self.position = nnx.Embed(MAX_LEN, HIDDEN, rngs=rngs)
        self.layers = nnx.List([Layer(rngs) for _ in range(NUM_LAYERS)])
        self.head = nnx.Linear(HIDDEN, VOCAB_SIZE, rngs=rngs)

    def __call__(self, cache: jp.KVCache, batch: jp.Batch):
        x = self.embed(batch.token_ids) + self.position(batch.positions)
        for layer, block in enumerate(self.layers):
            x, cache = block(x, cache, batch, layer)
        ends = (
            jnp.arange(len(batch.ragged.seq_lens)) if batch.ragged.cu_q_lens is None else batch.ragged.cu_q_lens[1:] - 1
        )
        return self.head(x[ends]), cache


def dense_logprobs(model: Gpt, tokens: list[int]) -> np.ndarray:
    """Log-probabilities of the same network over one sequence, with no cache: [len(tokens), VOCAB_SIZE]."""
    x = model.embed(np.pad(tokens, (0, MAX_LEN - len(tokens)))) + model.position(np.arange(MAX_LEN))
    for block in model.layers:
        q, k, v = jnp.split(block.qkv(block.norm(x)).reshape(len(x), 3 * HEADS, -1), 3, axis=1)
        attended = jax.nn.dot_product_attention(q[None], k[None], v[None], is_causal=True)[0]
        x = x + block.out(attended.reshape(x.shape))
    return np.asarray(jax.nn.log_softmax(model.head(x)))[: len(tokens)]


def test_engine_runs_a_flax_module_of_ones_own():
    model = Gpt(nnx.Rngs(0))
    cache = CacheConfig(
        num_layers=NUM_LAYERS,
        num_pages=24,
        page_size=4,
        num_kv_heads=HEADS,
        head_dim=HIDDEN // HEADS,
        dtype="float32",
    )
    engine = Engine(model, cache, jp.SchedulerConfig(max_num_seqs=2, max_step_tokens=16, max_model_len=MAX_LEN))
    prompts = [np.random.default_rng(i).integers(0, VOCAB_SIZE, n).tolist() for i, n in enumerate((3, 21))]
    params = SamplingParams(max_new_tokens=6, num_logprobs=1, prompt_logprobs=0)
    for prompt, output in zip(prompts, engine.generate(prompts, params), strict=True):
        tokens = [*prompt, *output.token_ids]
        logprobs = dense_logprobs(model, tokens)
        assert logprobs[len(prompt) - 1 : -1].argmax(-1).tolist() == list(output.token_ids)
        told = [x.logprob for x in (*output.prompt_logprobs[1:], *output.logprobs)]
        np.testing.assert_allclose(told, logprobs[np.arange(len(tokens) - 1), tokens[1:]], rtol=0, atol=2e-5)
    for prompt, (best, _) in zip(prompts, engine.beam_search(prompts, num_beams=2, max_new_tokens=6), strict=True):
        tokens = [*prompt, *best.token_ids]
        logprobs = dense_logprobs(model, tokens)[len(prompt) - 1 : -1]
        assert best.score == pytest.approx(logprobs[np.arange(6), list(best.token_ids)].mean(), abs=2e-5)
    assert engine.stats().num_free_pages == 23
