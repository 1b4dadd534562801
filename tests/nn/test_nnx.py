"""The NNX adapter: a write and an attention, no more; and a small NNX model that decodes with it."""

import chex
import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import jaxpaged as jp
from jaxpaged.nn.nnx import PagedAttention
from tests.nn.adapters import (
    DIM,
    HEADS,
    KV_HEADS,
    SHORT,
    check_backend_is_forwarded,
    check_bfloat16_cache_keeps_the_dtype_of_q,
    check_decode_loop,
    check_equals_write_then_attend,
    check_jit_with_donated_cache_and_traced_layer,
)


def make_adapter(**options):
    return PagedAttention(**options)


@pytest.mark.parametrize("option", SHORT)
def test_nnx_paged_attention_equals_write_then_attend(option):
    check_equals_write_then_attend(make_adapter, option)


def test_nnx_paged_attention_in_jit_with_a_donated_cache_and_a_traced_layer():
    check_jit_with_donated_cache_and_traced_layer(make_adapter)


def test_nnx_paged_attention_over_a_bfloat16_cache_keeps_the_dtype_of_q():
    check_bfloat16_cache_keeps_the_dtype_of_q(make_adapter)


def test_nnx_paged_attention_has_no_parameters():
    chex.assert_trees_all_equal(jax.tree.leaves(nnx.state(PagedAttention(sliding_window=3))), [])


class TinyModel(nnx.Module):
    """Embedding, two layers of attention, logits over the embedding."""

    def __init__(self, *, rngs: nnx.Rngs):
        self.embed = nnx.Embed(11, HEADS * DIM, rngs=rngs)
        self.qkv = nnx.List([nnx.Linear(HEADS * DIM, (HEADS + 2 * KV_HEADS) * DIM, rngs=rngs) for _ in range(2)])
        self.attention = PagedAttention(sliding_window=9, backend="xla")

    def __call__(self, cache: jp.KVCache, batch: jp.Batch):
        x = self.embed(batch.token_ids)
        for layer, linear in enumerate(self.qkv):
            qkv = linear(x).reshape(-1, HEADS + 2 * KV_HEADS, DIM)
            q, k, v = jnp.split(qkv, (HEADS, HEADS + KV_HEADS), axis=1)
            out, cache = self.attention(q, k, v, cache, batch, layer)
            x = x + out.reshape(x.shape)
        return self.embed.attend(x), cache


def test_nnx_model_decoding_step_by_step_equals_one_prefill():
    graph, state = nnx.split(TinyModel(rngs=nnx.Rngs(0)))
    check_decode_loop(lambda cache, batch: nnx.merge(graph, state)(cache, batch))


def test_nnx_paged_attention_forwards_the_backend():
    check_backend_is_forwarded(make_adapter)
