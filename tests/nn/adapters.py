"""What an adapter for a neural-network library must do, whichever library it is."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxpaged as jp

HEADS, KV_HEADS, DIM, LAYERS, PAGE_SIZE = 4, 2, 8, 2, 4
# Of the adapter, and of its call.
OPTIONS = {
    "plain": ({}, {}),
    "sm_scale": ({"sm_scale": 0.9}, {}),
    "soft_cap": ({"logits_soft_cap": 0.7}, {}),
    "window": ({"sliding_window": 2}, {}),
    "sinks": ({}, {"sinks": np.linspace(-1, 2, HEADS, dtype=np.float32)}),
    "alibi": ({}, {"alibi_slopes": np.linspace(0.1, 0.9, HEADS, dtype=np.float32)}),
}

# One option that is the adapter's and one of the call show that both arrive; each by itself is slow.
SHORT = [x if x in ("window", "sinks") else pytest.param(x, marks=pytest.mark.slow) for x in OPTIONS]


def make_cache(dtype=jnp.float32) -> jp.KVCache:
    return jp.KVCache.create(
        num_layers=LAYERS, num_pages=12, page_size=PAGE_SIZE, num_kv_heads=KV_HEADS, head_dim=DIM, dtype=dtype
    )


def make_batch(q_lens: list[int], pages: jp.PageAllocator | None = None) -> jp.Batch:
    """The last `q_lens[i]` tokens of sequences 0, 1, ...; without `pages` they are new ones."""
    if pages is None:
        pages = jp.PageAllocator(12, PAGE_SIZE)
        for seq_id, n in enumerate(q_lens):
            pages.add(seq_id, n)
    ids = range(len(q_lens))
    seq_lens = np.array([pages.seq_len(i) for i in ids], np.int32)
    positions = np.concatenate([np.arange(n - m, n) for n, m in zip(seq_lens, q_lens, strict=True)]).astype(np.int32)
    batch = jp.Batch(
        token_ids=(positions * 7 + 3) % 11,
        positions=positions,
        ragged=jp.Ragged(
            slot_mapping=pages.slot_mapping(ids, q_lens),
            page_table=pages.page_table(ids, 6),
            seq_lens=seq_lens,
            cu_q_lens=None if set(q_lens) == {1} else np.cumsum([0, *q_lens], dtype=np.int32),
        ),
    )
    jp.check_batch_values(batch, num_pages=12, page_size=PAGE_SIZE, vocab_size=11)
    return jax.tree.map(jnp.asarray, batch)


def random_qkv(num_tokens: int, dtype=jnp.float32):
    q, k, v = (
        jax.random.normal(key, (num_tokens, HEADS, DIM), dtype) for key in jax.random.split(jax.random.key(0), 3)
    )
    return q, k[:, :KV_HEADS], v[:, :KV_HEADS]


def by_hand(q, k, v, cache, batch, layer, **options):
    """What the adapter stands for."""
    ragged = batch.ragged
    cache = cache.write(layer, k, v, ragged.slot_mapping)
    out = jp.paged_attention(
        q, cache.k_pages, cache.v_pages, ragged.page_table, ragged.seq_lens, layer=layer, cu_q_lens=ragged.cu_q_lens,
        **options,
    )  # fmt: skip
    return out, cache


def check_equals_write_then_attend(make_adapter, option):
    of_adapter, of_call = OPTIONS[option]
    batch, qkv = make_batch([5, 3]), random_qkv(8)
    adapter = make_adapter(**of_adapter, backend="xla")
    got = jax.jit(lambda cache: adapter(*qkv, cache, batch, 1, **of_call))(make_cache())
    chex.assert_trees_all_close(got, expected(option), atol=1e-6)
    if option != "plain":
        assert np.abs(got[0] - expected("plain")[0]).max() > 1e-3


@functools.cache
def expected(option):
    """By hand, once for all adapters."""
    of_adapter, of_call = OPTIONS[option]
    batch, qkv = make_batch([5, 3]), random_qkv(8)
    return jax.jit(lambda cache: by_hand(*qkv, cache, batch, 1, **of_adapter, **of_call, backend="xla"))(make_cache())


def check_backend_is_forwarded(make_adapter):
    with pytest.raises(ValueError, match="`backend` must be one of .*; got 'cuda'"):
        make_adapter(backend="cuda")(*random_qkv(8), make_cache(), make_batch([5, 3]), 1)


def check_jit_with_donated_cache_and_traced_layer(make_adapter):
    adapter, batch, qkv = make_adapter(), make_batch([5, 3]), random_qkv(8)
    step = jax.jit(lambda cache, layer: adapter(*qkv, cache, batch, layer), donate_argnums=0)
    given = make_cache()
    got = step(given, jnp.int32(1))
    chex.assert_trees_all_close(got, expected("plain"), atol=1e-6)
    assert given.k_pages.is_deleted()
    assert given.v_pages.is_deleted()


def check_bfloat16_cache_keeps_the_dtype_of_q(make_adapter):
    batch, (q, k, v) = make_batch([5, 3]), random_qkv(8)
    adapter = make_adapter(backend="xla")
    out, cache = jax.jit(lambda cache: adapter(q, k, v, cache, batch, 0))(make_cache(jnp.bfloat16))
    chex.assert_type([out, cache.k_pages], [jnp.float32, jnp.bfloat16])
    rounded = [x.astype(jnp.bfloat16) for x in (q, k, v)]
    by_rounded, _ = jax.jit(lambda cache: by_hand(*rounded, cache, batch, 0, backend="xla"))(make_cache(jnp.bfloat16))
    chex.assert_trees_all_equal(out, by_rounded.astype(jnp.float32))


def check_decode_loop(model):
    """A prompt of 6 and then 7 tokens one by one give the logits that a prefill of all of them gives."""
    step = jax.jit(lambda cache, batch: model(cache, batch), donate_argnums=0)
    pages, cache = jp.PageAllocator(12, PAGE_SIZE), make_cache()
    pages.add(0, 6)
    pages.add(1, 2)
    logits, cache = step(cache, make_batch([6, 2], pages))
    steps = [logits[:6]]
    for _ in range(7):
        pages.append(0)
        pages.append(1)
        logits, cache = step(cache, make_batch([1, 1], pages))
        steps.append(logits[:1])
    whole, _ = step(make_cache(), make_batch([13]))
    chex.assert_shape(whole, (13, 11))
    chex.assert_trees_all_close(jnp.concatenate(steps), whole, atol=2e-5)
    # A model that does not look back would pass, too: the first token must matter to the last.
    batch = make_batch([13])
    other, _ = step(make_cache(), dataclasses.replace(batch, token_ids=batch.token_ids.at[5].set(9)))
    assert np.abs(other[-1] - whole[-1]).max() > 1e-3
