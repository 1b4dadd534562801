"""Models that were not written for a paged cache, on one: their greedy tokens are those of their dense runs."""

import functools
import sys
import types
from collections.abc import Callable

import chex
import flax.linen as linen
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxpaged as jp
from jaxpaged.nn import bind
from jaxpaged.ops.attention import AttentionOptions

VOCAB, HEADS, KV_HEADS, DIM, LAYERS, PAGE_SIZE, MAX_LEN = 31, 4, 2, 8, 2, 4, 16
FEATURES = HEADS * DIM
PROMPTS, NUM_NEW = ([3, 1, 4, 1, 5, 9, 2], [6, 5, 3]), 6

Forward = Callable[[jp.KVCache, jp.Batch], tuple[jax.Array, jp.KVCache]]
"""A step: logits of every token of the batch, and the cache."""


def make_cache(num_kv_heads: int) -> jp.KVCache:
    cache = jp.KVCache.create(
        num_layers=LAYERS, num_pages=12, page_size=PAGE_SIZE, num_kv_heads=num_kv_heads, head_dim=DIM, dtype="float32"
    )
    return jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), cache)


def make_batch(pages: jp.PageAllocator, new: dict[int, list[int]]) -> jp.Batch:
    q_lens = [len(tokens) for tokens in new.values()]
    seq_lens = np.array([pages.seq_len(i) for i in new], np.int32)
    positions = np.concatenate([np.arange(n - m, n) for n, m in zip(seq_lens, q_lens, strict=True)]).astype(np.int32)
    ragged = jp.Ragged(
        page_table=pages.page_table(list(new), MAX_LEN // PAGE_SIZE),
        seq_lens=seq_lens,
        slot_mapping=pages.slot_mapping(list(new), q_lens),
        cu_q_lens=np.cumsum([0, *q_lens], dtype=np.int32),
    )
    return jp.Batch(token_ids=np.concatenate(list(new.values())).astype(np.int32), positions=positions, ragged=ragged)


def greedy_on_pages(forward: Forward, num_kv_heads: int = HEADS) -> list[list[int]]:
    """Both prompts in one batch: a prefill, then a token each a step."""
    step = jax.jit(forward, donate_argnums=0)
    pages, cache = jp.PageAllocator(12, PAGE_SIZE), make_cache(num_kv_heads)
    tokens = [list(prompt) for prompt in PROMPTS]
    new = dict(enumerate(PROMPTS))
    for _ in range(NUM_NEW):
        for i, ids in new.items():
            pages.append(i, len(ids)) if i in pages else pages.add(i, len(ids))
        batch = make_batch(pages, new)
        logits, cache = step(cache, batch)
        new = {i: [int(t)] for i, t in enumerate(logits[batch.ragged.cu_q_lens[1:] - 1].argmax(-1))}
        for i, ids in new.items():
            tokens[i] += ids
    return tokens


def greedy_dense(logits_of: Callable[[jax.Array], jax.Array]) -> list[list[int]]:
    """Each prompt by itself, all of it anew for each token. `logits_of` takes `[MAX_LEN]` token ids."""
    logits_of = jax.jit(logits_of)
    sequences = []
    for prompt in PROMPTS:
        tokens = list(prompt)
        for _ in range(NUM_NEW):
            padded = np.array(tokens + [0] * (MAX_LEN - len(tokens)), np.int32)
            tokens.append(int(logits_of(padded)[len(tokens) - 1].argmax()))
        sequences.append(tokens)
    return sequences


# Flax NNX


class NNXModel(nnx.Module):
    """A decoder that its author wrote for dense attention, with Flax's own module."""

    def __init__(self, num_kv_heads: int | None, *, rngs: nnx.Rngs):
        self.tokens, self.places = (nnx.Embed(n, FEATURES, rngs=rngs) for n in (VOCAB, MAX_LEN))
        self.attentions = nnx.List(
            nnx.MultiHeadAttention(HEADS, FEATURES, num_kv_heads=num_kv_heads, decode=False, rngs=rngs)
            for _ in range(LAYERS)
        )

    def __call__(self, token_ids, positions, mask=None):
        x = self.tokens(token_ids) + self.places(positions)
        for attention in self.attentions:
            x = x + attention(x, mask=mask)
        return self.tokens.attend(x)


@functools.cache
def nnx_model(num_kv_heads: int | None = None):
    return nnx.split(NNXModel(num_kv_heads, rngs=nnx.Rngs(0)))


def nnx_forward(state, cache: jp.KVCache, batch: jp.Batch, num_kv_heads: int | None = None):
    model = nnx.merge(nnx_model(num_kv_heads)[0], state)
    bound = bind(cache, batch)
    for i, attention in enumerate(model.attentions):
        attention.attention_fn = bound.attention_fn(i)
    return model(batch.token_ids, batch.positions), bound.cache


def nnx_dense(state, token_ids, num_kv_heads: int | None = None):
    model = nnx.merge(nnx_model(num_kv_heads)[0], state)
    return model(token_ids, np.arange(len(token_ids)), nnx.make_causal_mask(token_ids))


@pytest.mark.parametrize("num_kv_heads", [None, pytest.param(KV_HEADS, marks=pytest.mark.slow)])
def test_nnx_multi_head_attention_untouched_equals_its_dense_run(num_kv_heads):
    _, state = nnx_model(num_kv_heads)
    paged = greedy_on_pages(
        functools.partial(nnx_forward, state, num_kv_heads=num_kv_heads), num_kv_heads=num_kv_heads or HEADS
    )
    assert paged == greedy_dense(functools.partial(nnx_dense, state, num_kv_heads=num_kv_heads))
    assert len(set(map(tuple, paged))) == 2


def make_prefill() -> tuple[jp.KVCache, jp.Batch]:
    pages = jp.PageAllocator(12, PAGE_SIZE)
    pages.add(0, len(PROMPTS[0]))
    return jax.tree.map(jnp.zeros_like, make_cache(HEADS)), make_batch(pages, {0: PROMPTS[0]})


def prefill_loss(logits) -> jax.Array:
    """The mean negative log-likelihood of the first prompt."""
    prompt = np.array(PROMPTS[0])
    return -jnp.mean(jax.nn.log_softmax(logits)[np.arange(len(prompt) - 1), prompt[1:]])


@pytest.mark.slow
def test_bind_gradient_of_a_prefill_equals_that_of_the_dense_run():
    _, state = nnx_model()
    cache, batch = make_prefill()
    paged = jax.jit(jax.grad(lambda state: prefill_loss(nnx_forward(state, cache, batch)[0])))(state)
    prompt = np.array(PROMPTS[0], np.int32)
    dense = jax.jit(jax.grad(lambda state: prefill_loss(nnx_dense(state, prompt))))(state)
    chex.assert_trees_all_close(paged, dense, atol=1e-5)
    assert max(float(jnp.abs(x).max()) for x in jax.tree.leaves(dense)) > 1e-2


@pytest.mark.slow
def test_bind_leaks_no_tracer_under_jit_traced_anew_and_under_grad():
    _, state = nnx_model()
    cache, batch = make_prefill()
    pages = jp.PageAllocator(12, PAGE_SIZE)
    pages.add(0, 2)
    with jax.checking_leaks():
        step = jax.jit(nnx_forward)
        for each in (batch, make_batch(pages, {0: [1, 2]})):
            step.trace(state, cache, each)
        jax.jit(jax.grad(lambda state: prefill_loss(nnx_forward(state, cache, batch)[0]))).trace(state)


# Flax Linen


class LinenModel(linen.Module):
    """A decoder that its author wrote for dense attention, with Flax's own module."""

    attention_fn_of: Callable[[int], Callable]

    @linen.compact
    def __call__(self, token_ids, positions, mask=None):
        tokens, places = (linen.Embed(n, FEATURES) for n in (VOCAB, MAX_LEN))
        x = tokens(token_ids) + places(positions)
        for i in range(LAYERS):
            x = x + linen.MultiHeadDotProductAttention(HEADS, attention_fn=self.attention_fn_of(i))(x, mask=mask)
        return tokens.attend(x)


def test_linen_multi_head_attention_untouched_equals_its_dense_run():
    places = np.arange(MAX_LEN)
    dense = LinenModel(lambda _: linen.dot_product_attention)
    variables = jax.jit(dense.init)(jax.random.key(1), places, places)

    def forward(cache, batch):
        bound = bind(cache, batch)
        model = LinenModel(bound.attention_fn)
        return model.apply(variables, batch.token_ids, batch.positions), bound.cache

    def dense_logits(token_ids):
        return dense.apply(variables, token_ids, places, linen.make_causal_mask(token_ids))

    assert greedy_on_pages(forward) == greedy_dense(dense_logits)


# Gemma, as its authors publish it


@pytest.fixture
def gemma_modules(monkeypatch):
    """The modules of the package `gemma`. What they take from kauldron (a probe of weights, type names) is stubbed."""
    pytest.importorskip("gemma", reason="the package gemma needs Python 3.12")

    class Identity(linen.Module):
        def __call__(self, x):
            return x

    kauldron, kd, ktyping = (types.ModuleType(name) for name in ("kauldron", "kauldron.kd", "kauldron.ktyping"))
    kd.nn = types.SimpleNamespace(Identity=Identity)
    kauldron.kd = kd
    ktyping.Array = ktyping.Bool = ktyping.Int = dict  # subscripted in annotations
    for module in (kauldron, kd, ktyping):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    from gemma.gm.nn import _modules

    return _modules


def make_gemma(modules):
    """Embedder, a windowed block and a full one, with grouped heads, soft cap, post-norms and QK norm."""

    class Model(linen.Module):
        @linen.compact
        def __call__(self, token_ids, positions, cache_of, mask):
            embedder = modules.Embedder(vocab_size=VOCAB, embed_dim=FEATURES)
            x = embedder.encode(token_ids)[None]
            for i in range(LAYERS):
                kind = modules.AttentionType.LOCAL_SLIDING if i == 0 else modules.AttentionType.GLOBAL
                block = modules.Block(
                    num_heads=HEADS, num_kv_heads=KV_HEADS, embed_dim=FEATURES, head_dim=DIM, hidden_dim=48,
                    use_post_attn_norm=True, use_post_ffw_norm=True, attn_type=kind, query_pre_attn_scalar=0.3,
                    transpose_gating_einsum=False, attn_logits_soft_cap=2.0, sliding_window_size=5, use_qk_norm=True,
                    name=f"block_{i}",
                )  # fmt: skip
                _, x = block(x, positions[None], cache_of(i), mask)
            return embedder.decode(x[0])

    return Model()


def test_gemma_block_untouched_equals_its_dense_run(gemma_modules):
    from gemma.gm.math import apply_rope

    model, places = make_gemma(gemma_modules), np.arange(MAX_LEN)
    causal = jnp.tril(jnp.ones((1, MAX_LEN, MAX_LEN), bool))
    variables = jax.jit(lambda key: model.init(key, places, places, lambda i: None, causal))(jax.random.key(2))

    def attend(next_fun, args, kwargs, context):
        """In place of Gemma's attention over a cache of its own, which threads through the block as it is."""
        module = context.module
        if not (isinstance(module, gemma_modules.Attention) and context.method_name == "__call__"):
            return next_fun(*args, **kwargs)
        x, positions, layer, _ = args
        k, v = module.kv_einsum("BSD,CKDH->CBSKH", x)
        q = module._query_norm(module.q_einsum("BTD,NDH->BTNH", x))
        q, k = (apply_rope(y, positions, base_frequency=10_000) for y in (q, module._key_norm(k)))
        window = module.sliding_window_size if module.attn_type.name == "LOCAL_SLIDING" else None
        options = AttentionOptions(sm_scale=0.3, logits_soft_cap=module.attn_logits_soft_cap, sliding_window=window)
        out = layer.write_and_attend(q, k, v, options)
        return layer, module.attn_vec_einsum("BTNH,NHD->BTD", out)

    def forward(cache, batch):
        bound = bind(cache, batch)
        with linen.intercept_methods(attend):
            logits = model.apply(variables, batch.token_ids, batch.positions, bound.layer, None)
        return logits, bound.cache

    def dense_logits(token_ids):
        return model.apply(variables, token_ids, places, lambda i: None, causal)

    paged = greedy_on_pages(forward, num_kv_heads=KV_HEADS)
    assert paged == greedy_dense(dense_logits)
    assert len({t for tokens in paged for t in tokens[-NUM_NEW:]}) > 2


# Misuse


def inside_scan(use):
    return jax.lax.scan(lambda x, _: (use(x), None), 0.0, None, length=2)


def inside_cond(use):
    return jax.lax.cond(jnp.bool_(True), use, lambda x: x, 0.0)


@pytest.mark.parametrize(
    "elsewhere",
    [inside_scan, lambda use: jax.checkpoint(use)(0.0), inside_cond, lambda use: jax.jit(use)(0.0)],
    ids=["scan", "remat", "cond", "jit"],
)
def test_bound_cache_inside_another_trace_is_refused_by_name(elsewhere):
    pages = jp.PageAllocator(12, PAGE_SIZE)
    pages.add(0, 3)
    batch = make_batch(pages, {0: [1, 2, 3]})

    def step(cache):
        layer = bind(cache, batch).layer(0)

        def use(x):
            layer.write(*[jnp.ones((3, HEADS, DIM))] * 2)
            return x

        return elsewhere(use)

    with pytest.raises(RuntimeError, match="in the trace in which `bind` was called; got another one, as inside"):
        jax.jit(step)(make_cache(HEADS))


def test_bound_cache_after_its_step_is_refused_by_name():
    pages = jp.PageAllocator(12, PAGE_SIZE)
    pages.add(0, 3)
    batch, kept = make_batch(pages, {0: [1, 2, 3]}), []
    jax.jit(lambda cache: kept.append(bind(cache, batch)))(make_cache(HEADS))
    with pytest.raises(RuntimeError, match="in the trace in which `bind` was called"):
        _ = kept[0].cache


def test_attention_fn_refuses_what_pages_do_not_do():
    pages = jp.PageAllocator(12, PAGE_SIZE)
    pages.add(0, 3)
    bound = bind(make_cache(HEADS), make_batch(pages, {0: [1, 2, 3]}))
    attention_fn, x = bound.attention_fn(0), jnp.ones((3, HEADS, DIM))
    for name, arguments in (
        ("mask", {"mask": jnp.ones((1, 3, 3), bool)}),
        ("bias", {"bias": jnp.zeros((1, 3, 3))}),
        ("deterministic", {"dropout_rate": 0.5, "deterministic": False}),
        ("sow_weights", {"module": object()}),
    ):
        with pytest.raises(NotImplementedError, match=f"`{name}` must be "):
            attention_fn(x, x, x, **arguments)
    with pytest.raises(ValueError, match=r"`k` must have shape \(..., num_heads, head_dim\) with 3 tokens"):
        attention_fn(x, x[:2], x)
    with pytest.raises(ValueError, match="`layer` must be from 0 to num_layers - 1 = 1; got 2"):
        bound.attention_fn(2)
