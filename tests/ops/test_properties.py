"""What must not change a result, and must not change a bit of it where that is promised."""

import dataclasses
import itertools

import chex
import jax.numpy as jnp
import numpy as np
import pytest

import jaxpaged as jp
from jaxpaged.config import AttentionConfig
from jaxpaged.testing import Case, make_case
from tests.ops.harness import call, check, owned_slots

BACKENDS = ["reference", "xla", "interpret"]
CUT = AttentionConfig(num_programs=5, block_q=8, block_k=16)
SPLIT = AttentionConfig(split_size=16, block_q=8, block_k=16)
WHOLE = AttentionConfig(max_splits=1, block_q=8, block_k=16)
LENS, NEW = (0, 3, 4, 5, 41, 70), (0, 3, 4, 1, 19, 33)
QUANTISED = {"dtype": "int8", "scale_per": "token"}
KINDS = {"float32": {}, "int8": QUANTISED}


def rows_of(case: Case, rows, padding: int = 0) -> Case:
    """The same sequences, some or all of them, in another order and with other padding."""
    starts = np.arange(len(case.seq_lens) + 1) if case.cu_q_lens is None else case.cu_q_lens
    tokens = np.concatenate([np.arange(starts[i], starts[i + 1]) for i in rows])
    q = case.q[np.append(tokens, np.zeros(padding, int))]
    q_lens = np.diff(starts)[list(rows)]
    changed = {
        "q": q,
        "page_table": case.page_table[list(rows)],
        "seq_lens": case.seq_lens[list(rows)],
        "cu_q_lens": None if case.cu_q_lens is None else np.cumsum([0, *q_lens], dtype=np.int32),
        "dense_k": [case.dense_k[i] for i in rows],
        "dense_v": [case.dense_v[i] for i in rows],
    }
    return dataclasses.replace(case, **changed)


def by_row(case: Case, result) -> list:
    starts = np.arange(len(case.seq_lens) + 1) if case.cu_q_lens is None else case.cu_q_lens
    return [[np.asarray(x)[a:b] for x in result] for a, b in itertools.pairwise(starts)]


INVARIANT = {
    "split": ("interpret", SPLIT),
    "whole": ("interpret", WHOLE),
    "xla": ("xla", SPLIT),
    "reference": ("reference", None),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("q_lens", [None, NEW], ids=["decode", "ragged"])
@pytest.mark.parametrize("name", INVARIANT)
def test_paged_attention_row_has_the_same_bits_in_any_batch(name, q_lens, kind):
    """Alone, among others, in another order, behind padding."""
    backend, config = INVARIANT[name]
    case = make_case(LENS, q_lens, **KINDS[kind], seed=1)
    options = {"config": config, "sliding_window": np.int32(60), "sinks": np.linspace(-1, 2, 4).astype(np.float32)}
    expected = by_row(case, call(case, backend, **options))
    for rows in ((4,), (5, 0, 4), (5, 4, 3, 2, 1, 0)):
        other = rows_of(case, rows, padding=0 if q_lens is None else 7)
        for row, result in zip(rows, by_row(other, call(other, backend, **options)), strict=True):
            chex.assert_trees_all_equal(result, expected[row])


@pytest.mark.parametrize("backend", ["xla", "interpret"])
def test_paged_attention_ragged_row_alone_equals_the_row_in_a_batch(backend):
    case = make_case(LENS, NEW, seed=2)
    expected = by_row(case, call(case, backend, config=CUT))
    for row in (4, 5):
        alone = rows_of(case, (row,))
        chex.assert_trees_all_close(list(call(alone, backend, config=CUT)), expected[row], rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", KINDS)
def test_paged_attention_permuted_pages_give_the_same_bits(kind, backend):
    case = make_case(LENS, **KINDS[kind], seed=3)
    order = np.random.default_rng(0).permutation(case.k_pages.shape[1])
    pools = {name: getattr(case, name) for name in ("k_pages", "v_pages", "k_scale", "v_scale")}
    moved = {name: pool[:, order] for name, pool in pools.items() if pool is not None}
    moved["page_table"] = np.argsort(order)[case.page_table].astype(np.int32)
    chex.assert_trees_all_equal(
        call(case, backend, config=CUT), call(dataclasses.replace(case, **moved), backend, config=CUT)
    )


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", ["float32", "int8", "float8_e5m2"])
@pytest.mark.parametrize("q_lens", [None, NEW], ids=["decode", "ragged"])
def test_paged_attention_slots_of_nobody_do_not_matter(kind, q_lens, backend):
    """Past the end of a sequence, in pages of nobody and of the null page, in values and in scales."""
    case = make_case(LENS, q_lens, dtype=kind, seed=4)
    nobody = ~owned_slots(case)[:, :, None]  # [num_layers, num_pages, 1, page_size]
    results, rng = [], np.random.default_rng(0)
    for poison in (0, 1e30, -np.inf, np.inf, np.nan):
        changed = {}
        for name in ("k_pages", "v_pages"):
            pages = getattr(case, name).copy()
            garbage = rng.integers(-128, 128, pages.shape) if kind == "int8" else np.full(pages.shape, poison)
            with np.errstate(over="ignore"):
                pages[np.broadcast_to(nobody, pages.shape[:4])] = garbage.astype(pages.dtype)[
                    np.broadcast_to(nobody, pages.shape[:4])
                ]
            changed[name] = pages
        if case.k_scale is not None:
            changed |= {n: np.where(nobody, np.float32(poison), getattr(case, n)) for n in ("k_scale", "v_scale")}
        results.append(call(dataclasses.replace(case, **changed), backend, config=CUT))
    for result in results[1:]:
        chex.assert_trees_all_equal(result, results[0])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("window", ["static", "traced"])
@pytest.mark.parametrize("q_lens", [None, (0, 3, 4, 1, 9, 20)], ids=["decode", "ragged"])
def test_paged_attention_pages_before_the_window_are_not_followed(q_lens, window, backend):
    """Their pages may be somebody else's by now, their entries anything."""
    case = make_case(LENS, q_lens, page_size=4, seed=5)
    expected = call(case, backend, config=CUT, sliding_window=10 if window == "static" else np.int32(10))
    page_table, k_pages, v_pages = (getattr(case, n).copy() for n in ("page_table", "k_pages", "v_pages"))
    for i, n in enumerate(case.seq_lens):
        num_new = 1 if q_lens is None else q_lens[i]
        dead = max(0, n - num_new - 10 + 1) // 4
        k_pages[:, page_table[i, :dead]] = np.nan
        v_pages[:, page_table[i, :dead]] = np.nan
        page_table[i, 1:dead:2] = 10**6
    changed = dataclasses.replace(case, page_table=page_table, k_pages=k_pages, v_pages=v_pages)
    actual = call(changed, backend, config=CUT, sliding_window=10 if window == "static" else np.int32(10))
    chex.assert_trees_all_equal(actual, expected)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("q_lens", [None, NEW], ids=["decode", "ragged"])
@pytest.mark.parametrize("entry", [-1, 10**6, 2**31 - 1, -(2**31)])
def test_paged_attention_entries_past_the_last_page_are_not_followed(entry, q_lens, backend):
    clean, garbage = (make_case(LENS, q_lens, unused_entry=e, **QUANTISED, seed=6) for e in (0, entry))
    chex.assert_trees_all_equal(call(garbage, backend, config=CUT), call(clean, backend, config=CUT))


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("q_lens", [None, NEW], ids=["decode", "ragged"])
def test_paged_attention_traced_window_has_the_bits_of_the_static(q_lens, backend):
    case = make_case(LENS, q_lens, seed=7)
    for window in (1, 16, 50):
        traced = call(case, backend, config=CUT, sliding_window=np.int32(window))
        chex.assert_trees_all_equal(traced, call(case, backend, config=CUT, sliding_window=window))


@pytest.mark.parametrize(
    ("backend", "config"), [*((backend, CUT) for backend in BACKENDS), ("xla", SPLIT), ("interpret", SPLIT)]
)
def test_paged_attention_logits_of_minus_200_behind_masked_tiles_equal_oracle(backend, config):
    """Each of 64 drafts sees itself only: of the four tiles of its keys one, and all logits far below zero."""
    case = make_case((64, 70), (64, 40), seed=8)
    case = dataclasses.replace(
        case, q=np.abs(case.q), k_pages=-np.abs(case.k_pages), dense_k=[-np.abs(k) for k in case.dense_k]
    )
    mask = np.zeros((104, 64), bool)
    for begin, end in ((0, 64), (64, 104)):
        mask[np.arange(begin, end), np.arange(end - begin)] = True
    _, lse = check(case, backend, config=config, tree_mask=mask, sm_scale=20.0)
    assert np.median(lse) < -150


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", KINDS)
def test_paged_attention_soft_cap_of_logits_of_ten_thousand_equals_oracle(kind, backend):
    case = make_case(LENS, **KINDS[kind], seed=9)
    _, lse = check(case, backend, config=CUT, sm_scale=3e3, logits_soft_cap=30.0)
    assert np.max(lse) > 29


@pytest.mark.parametrize("config", [CUT, SPLIT, WHOLE], ids=["cut", "split", "whole"])
def test_paged_attention_sinks_of_a_cut_sequence_count_once(config):
    """Sinks as heavy as the keys together: counted with each piece, they would halve the output again."""
    sinks = np.full(4, np.log(70.0), np.float32)
    case = make_case((70, 70), seed=10)
    check(dataclasses.replace(case, q=case.q * 0), "interpret", config=config, sinks=sinks)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn", "float8_e5m2"])
def test_paged_attention_of_a_quantised_cache_equals_that_of_what_it_gives_back(dtype, backend):
    """Written, measured and quantised by `KVCache`, then attended to: as over the gathered values in float32."""
    rng = np.random.default_rng(11)
    cache = jp.KVCache.create(num_layers=2, num_pages=9, page_size=4, num_kv_heads=2, head_dim=16, dtype=dtype)
    plain = jp.KVCache.create(num_layers=2, num_pages=9, page_size=4, num_kv_heads=2, head_dim=16, dtype="float32")
    k, v = jnp.asarray(rng.normal(size=(2, 20, 2, 16)) * 3, jnp.float32)
    table, lens = jnp.array([[3, 8, 1], [5, 2, 0]], jnp.int32), jnp.array([12, 8], jnp.int32)
    slots = (table[:, :, None] * 4 + jnp.arange(4)).ravel()[:20]
    cache = cache.write(1, k, v, slots)
    k_back, v_back = (x.reshape(24, 2, 16)[:20] for x in cache.gather(1, table, lens))
    plain = plain.write(1, k_back, v_back, slots)
    q = jnp.asarray(rng.normal(size=(2, 4, 16)), jnp.float32)
    results = [
        jp.paged_attention(
            q, c.k_pages, c.v_pages, table, lens, layer=1, k_scale=c.k_scale, v_scale=c.v_scale, backend=backend
        )
        for c in (cache, plain)
    ]
    chex.assert_trees_all_close(*results, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("config", [SPLIT, WHOLE], ids=["split", "whole"])
def test_paged_attention_by_reference_refuses_batch_invariant_mode(config):
    with pytest.raises(NotImplementedError, match="`backend='reference'` has no batch-invariant mode: its sums are"):
        call(make_case(LENS), "reference", config=config)
