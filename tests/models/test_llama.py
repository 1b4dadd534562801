import dataclasses
import json
from pathlib import Path

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxpaged as jp
from jaxpaged.engine import Engine, SamplingParams, SchedulerConfig
from jaxpaged.inspect.aot import hlo_copies
from jaxpaged.models import llama
from jaxpaged.models.config import LlamaConfig
from jaxpaged.models.llama import Llama
from jaxpaged.paging import group_layers
from tests.models.dense_llama import dense_logits

GREEDY = json.loads((Path(__file__).parent.parent / "data/greedy_smollm2.json").read_text("utf-8"))
CONFIG = LlamaConfig(
    vocab_size=96,
    hidden_size=48,
    intermediate_size=80,
    num_layers=3,
    num_q_heads=6,
    num_kv_heads=2,
    head_dim=16,
    max_position=128,
    rms_norm_eps=1e-5,
)
PAGE_SIZE, MAX_PAGES = 4, 8


def make_model(layer_loop: str, config: LlamaConfig = CONFIG, dtype=jnp.float32) -> Llama:
    """The same weights for each loop, by way of the tree that checkpoint readers make."""
    stacked = Llama(config, layer_loop="scan", rngs=nnx.Rngs(1))
    params = nnx.to_pure_dict(nnx.state(stacked))
    return Llama.from_params(config, params, dtype=dtype, backend="auto", layer_loop=layer_loop)


def make_cache(dtype=jnp.float32, num_pages: int = 3 * MAX_PAGES + 1) -> jp.KVCache:
    cache = jp.KVCache.create(
        num_layers=CONFIG.num_layers, num_pages=num_pages, page_size=PAGE_SIZE, num_kv_heads=2, head_dim=16, dtype=dtype
    )
    return jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), cache)


def batch_of(tokens: list[list[int]], new: list[int]) -> jp.Batch:
    """The step that computes the last `new[i]` of each sequence's tokens, over a shuffled page table."""
    ids = np.random.default_rng(3).permutation(np.arange(1, 3 * MAX_PAGES + 1)).astype(np.int32)
    page_table = ids[: len(tokens) * MAX_PAGES].reshape(-1, MAX_PAGES)
    positions = [np.arange(len(t) - n, len(t)) for t, n in zip(tokens, new, strict=True)]
    slots = [row[p // PAGE_SIZE] * PAGE_SIZE + p % PAGE_SIZE for row, p in zip(page_table, positions, strict=True)]
    return jp.Batch(
        token_ids=np.concatenate([t[len(t) - n :] for t, n in zip(tokens, new, strict=True)]).astype(np.int32),
        positions=np.concatenate(positions).astype(np.int32),
        ragged=jp.Ragged(
            slot_mapping=np.concatenate(slots).astype(np.int32),
            page_table=page_table,
            seq_lens=np.array([len(t) for t in tokens], np.int32),
            cu_q_lens=None if set(new) == {1} else np.cumsum([0, *new], dtype=np.int32),
        ),
    )


TOKENS = [list(np.random.default_rng(i).integers(0, 96, n)) for i, n in enumerate((9, 1, 17))]


@pytest.mark.parametrize(
    ("layer_loop", "tied"),
    [
        ("unroll", False),
        ("calls", True),
        pytest.param("scan", True, marks=pytest.mark.slow),
        pytest.param("scan", False, marks=pytest.mark.slow),
        pytest.param("unroll", True, marks=pytest.mark.slow),
        pytest.param("calls", False, marks=pytest.mark.slow),
    ],
)
def test_llama_prompt_then_decode_equals_dense_float64(layer_loop, tied):
    config = dataclasses.replace(CONFIG, tie_embeddings=tied)
    model, reference = make_model(layer_loop, config), make_model("scan", config)
    forward = model if layer_loop == "calls" else jax.jit(model, donate_argnums=0)
    expected = [dense_logits(reference, tokens) for tokens in TOKENS]
    prompts = [t[:-1] if len(t) > 1 else t for t in TOKENS]
    logits, cache = forward(make_cache(), batch_of(prompts, [len(p) for p in prompts]))
    for row, prompt, rows in zip(logits, prompts, expected, strict=True):
        np.testing.assert_allclose(row, rows[len(prompt) - 1], rtol=2e-4, atol=2e-4)
    logits, cache = forward(cache, batch_of(TOKENS, [1, 1, 1]))
    chex.assert_shape(logits, (3, config.vocab_size))
    for row, rows in zip(logits, expected, strict=True):
        np.testing.assert_allclose(row, rows[-1], rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("layer_loop", ["calls", pytest.param("unroll", marks=pytest.mark.slow)])
def test_llama_with_windows_over_page_groups_equals_dense_float64(layer_loop):
    """Chunk by chunk, then decode; pages that windows have passed are another's by then."""
    config = dataclasses.replace(CONFIG, sliding_windows=(5, None, 3))
    model = Llama(config, layer_loop=layer_loop, rngs=nnx.Rngs(1))
    forward = model if layer_loop == "calls" else jax.jit(model, donate_argnums=0)
    groups, places = group_layers(config.layer_specs)
    pages = jp.PageAllocator(30, PAGE_SIZE, groups=groups)
    pool = dataclasses.asdict(model.cache_config(num_pages=30, page_size=PAGE_SIZE))
    cache = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), jp.KVCache.create(**pool, layer_places=places))
    tokens, expected = TOKENS[2], dense_logits(model, TOKENS[2])
    pages.add("other", 3)  # so that page ids of groups differ
    for begin, end in ((0, 8), (8, 16), (16, 17)):
        if begin:
            pages.append("it", end - begin)
        else:
            pages.add("it", end)
        slots = [pages.slot_mapping(["it"], [end - begin], group=group.name) for group in groups]
        ragged = jp.Ragged(
            page_table=pages.page_tables(["it"], MAX_PAGES),
            seq_lens=np.array([end], np.int32),
            slot_mapping=np.stack(slots),
            cu_q_lens=np.array([0, end - begin], np.int32),
        )
        positions = np.arange(begin, end, dtype=np.int32)
        batch = jp.Batch(token_ids=np.array(tokens[begin:end], np.int32), positions=positions, ragged=ragged)
        windows = [group.sliding_window for group in groups]
        jp.check_batch_values(batch, num_pages=30, page_size=PAGE_SIZE, sliding_windows=windows)
        logits, cache = forward(cache, batch)
        np.testing.assert_allclose(logits[0], expected[end - 1], rtol=2e-4, atol=2e-4)
    assert pages.num_held_pages("it") < 3 * 5
    with pytest.raises(ValueError, match=r"^`layer_loop` must be 'unroll' or 'calls' where layers have different"):
        Llama(config, layer_loop="scan", rngs=nnx.Rngs(1))
    with pytest.raises(ValueError, match=r"^`sliding_windows` must have one for each of num_layers = 3; got 2\.$"):
        Llama(dataclasses.replace(CONFIG, sliding_windows=(5, None)), rngs=nnx.Rngs(1))


@pytest.mark.parametrize(
    ("dtype", "new"),
    [
        (jnp.float32, [1, 1, 1]),
        pytest.param(jnp.bfloat16, [9, 1, 5], marks=pytest.mark.slow),
        pytest.param(jnp.float32, [9, 1, 5], marks=pytest.mark.slow),
        pytest.param(jnp.bfloat16, [1, 1, 1], marks=pytest.mark.slow),
    ],
    ids=["float32-decode", "bfloat16-prefill", "float32-prefill", "bfloat16-decode"],
)
def test_llama_step_on_the_cpu_copies_no_cache_and_at_most_one_layer(dtype, new):
    num_pages = 4000  # the pool is larger than the weights, so that a copy of it cannot hide
    cache, batch = jax.tree.map(jnp.zeros_like, make_cache(dtype, num_pages)), batch_of(TOKENS, new)
    by_scan, by_calls = make_model("scan", dtype=dtype), make_model("calls", dtype=dtype)
    x, rope = llama._enter(by_calls.embed[...], batch, CONFIG)
    steps = {"calls": llama._call_and_donate.lower(by_calls.layers[0], x, cache, batch, jnp.int32(1), rope)}
    # JAX 0.10 widens 16-bit weights and cache on a CPU: stacked weights all at once, and at each update it passes over
    # the pool, if without a copy in memory. A model on a CPU runs by calls.
    widens = dtype != jnp.float32 and jax.__version_info__ < (0, 11)
    if not widens:
        steps["scan"] = jax.jit(lambda m, c, b: m(c, b), donate_argnums=1).lower(by_scan, cache, batch)
    pool = cache.k_pages.nbytes
    layer = sum(x.nbytes for x in jax.tree.leaves(by_scan.layers)) // CONFIG.num_layers
    for name, lowered in steps.items():
        compiled = lowered.compile()
        memory = compiled.memory_analysis()
        assert memory.alias_size_in_bytes >= 2 * pool, name
        assert memory.temp_size_in_bytes < layer + 2**18, name
        if not widens:
            assert hlo_copies(compiled.as_text(), pool) == [], name


def test_llama_calls_traces_its_layer_once():
    model, cache = make_model("calls"), make_cache()
    before = llama._call_block._cache_size()
    for _ in range(3):
        _, cache = model(cache, batch_of(TOKENS, [1, 1, 1]))
    assert llama._call_block._cache_size() - before <= 1


@pytest.mark.slow  # the next test has the first tokens of each
@pytest.mark.parametrize("index", range(len(GREEDY)))
def test_llama_builtin_greedy_equals_transformers(builtin_engine, builtin_tokenizer, index):
    """Prompts of one token, code, chat, accents, emoji, digits and 600 tokens; ids from transformers in float32."""
    record = GREEDY[index]
    stop = tuple(builtin_tokenizer.stop_token_ids)
    params = SamplingParams(max_new_tokens=len(record["token_ids"]), stop_token_ids=stop)
    [output] = builtin_engine.generate([record["prompt_token_ids"]], params)
    assert list(output.token_ids) == record["token_ids"], f"least gap between two logits: {record['min_gap']}"
    assert output.finish_reason.value == ("stop" if record["token_ids"][-1] in stop else "length")


@pytest.mark.slow
def test_llama_builtin_greedy_in_one_batch_equals_one_by_one(builtin_engine, builtin_tokenizer):
    records = GREEDY[:8]
    params = [SamplingParams(max_new_tokens=min(6, len(r["token_ids"]))) for r in records]
    outputs = builtin_engine.generate([r["prompt_token_ids"] for r in records], params)
    for record, output in zip(records, outputs, strict=True):
        assert list(output.token_ids) == record["token_ids"][: len(output.token_ids)]
    stats = builtin_engine.stats()
    assert stats.num_free_pages == stats.num_pages


@pytest.fixture(scope="module")
def builtin_engine(builtin_model) -> Engine:
    model = Llama.from_params(
        builtin_model.config, builtin_model.params, dtype=jnp.float32, backend="auto", layer_loop="calls"
    )
    return Engine(model, model.cache_config(num_pages=128), SchedulerConfig(max_model_len=1024))


@pytest.mark.slow
@pytest.mark.parametrize("layer_loop", ["scan", "unroll"])
def test_llama_called_outside_of_jit_leaves_the_cache_that_it_was_given(layer_loop):
    model, cache, batch = make_model(layer_loop), make_cache(), batch_of(TOKENS, [1, 1, 1])
    chex.assert_trees_all_equal(model(cache, batch)[0], model(cache, batch)[0])


@pytest.mark.slow
@pytest.mark.parametrize("layer_loop", ["scan", "unroll"])
def test_llama_gradient_by_the_cache_is_not_cut(layer_loop):
    model, cache, batch = make_model(layer_loop), make_cache(), batch_of(TOKENS, [1, 1, 1])
    gradient = jax.jit(jax.grad(lambda cache: model(cache, batch)[0].sum()))(jax.tree.map(jnp.ones_like, cache))
    assert np.count_nonzero(gradient.v_pages)
