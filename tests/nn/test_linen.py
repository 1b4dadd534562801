"""The Linen adapter: a write and an attention, no more; and a small Linen model that decodes with it."""

import flax.linen as linen
import jax
import jax.numpy as jnp
import pytest

import jaxpaged as jp
from jaxpaged.nn.linen import PagedAttention
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
    make_batch,
    make_cache,
)


def make_adapter(**options):
    return lambda *args, **kwargs: PagedAttention(**options).apply({}, *args, **kwargs)


@pytest.mark.parametrize("option", SHORT)
def test_linen_paged_attention_equals_write_then_attend(option):
    check_equals_write_then_attend(make_adapter, option)


def test_linen_paged_attention_in_jit_with_a_donated_cache_and_a_traced_layer():
    check_jit_with_donated_cache_and_traced_layer(make_adapter)


def test_linen_paged_attention_forwards_the_backend():
    check_backend_is_forwarded(make_adapter)


def test_linen_paged_attention_over_a_bfloat16_cache_keeps_the_dtype_of_q():
    check_bfloat16_cache_keeps_the_dtype_of_q(make_adapter)


class TinyModel(linen.Module):
    """Embedding, two layers of attention, logits over the embedding."""

    @linen.compact
    def __call__(self, cache: jp.KVCache, batch: jp.Batch):
        embed = linen.Embed(11, HEADS * DIM)
        x = embed(batch.token_ids)
        for layer in range(2):
            qkv = linen.Dense((HEADS + 2 * KV_HEADS) * DIM)(x).reshape(-1, HEADS + 2 * KV_HEADS, DIM)
            q, k, v = jnp.split(qkv, (HEADS, HEADS + KV_HEADS), axis=1)
            out, cache = PagedAttention(sliding_window=9, backend="xla")(q, k, v, cache, batch, layer)
            x = x + out.reshape(x.shape)
        return embed.attend(x), cache


@pytest.mark.slow
def test_linen_model_decoding_step_by_step_equals_one_prefill():
    model = TinyModel()
    variables = jax.jit(model.init)(jax.random.key(0), make_cache(), make_batch([3]))
    assert "cache" not in variables  # the cache is an argument, not a variable
    check_decode_loop(lambda cache, batch: model.apply(variables, cache, batch))
