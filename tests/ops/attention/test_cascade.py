"""`cascade_attention` against the float64 oracle of the whole sequences, prefix and own part in one."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxpaged as jp
from jaxpaged.cache.ragged import Tile
from jaxpaged.config import NULL_PAGE
from jaxpaged.ops.attention import cascade
from jaxpaged.testing import assert_attention_close, make_case, oracle
from tests.ops.attention.harness import partition_of

SINKS = np.linspace(-1.0, 2.0, 4).astype(np.float32)
ALL = {"sm_scale": 0.4, "logits_soft_cap": 3.0, "sinks": SINKS}
# A group without a prefix, one without a sequence, a prefix that ends inside a page (of 4) and one that does not.
PREFIXES = (0, 9, 13, 16)
GROUPS = (0, 0, 2, 2, 2, 3, 3)
OWN = (5, 0, 1, 4, 17, 0, 6)


# Most of a test would be LLVM.
compiled = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


def make_cascade(q_lens=None, own=OWN, padding_tokens=0, **shape):
    """Arguments of `cascade_attention`, and the case of the whole sequences for the oracle.

    Prefixes are drawn as sequences without queries, so that they have pages, and poison behind them, like any other.
    """
    num = len(PREFIXES)
    lengths, queries = (*PREFIXES, *own), (*[0] * num, *([1] * len(own) if q_lens is None else q_lens))
    case = make_case(lengths, queries, padding_tokens=padding_tokens, **shape)
    arrays = case.arguments()
    table, cu = arrays["page_table"], arrays["cu_q_lens"][num:]
    arrays |= {
        "prefix_page_table": table[:num],
        "prefix_lens": arrays["seq_lens"][:num],
        "page_table": table[num:],
        "seq_lens": arrays["seq_lens"][num:],
        "group_of_seq": jnp.asarray(GROUPS, jnp.int32),
        "cu_q_lens": None if q_lens is None else cu,
    }
    rows = list(zip(GROUPS, range(num, len(lengths)), strict=True))
    dense = {
        name: [np.concatenate([x[group], x[row]]) if lengths[row] else x[row] for group, row in rows]
        for name, x in (("dense_k", case.dense_k), ("dense_v", case.dense_v))
    }
    seq_lens = np.array([len(k) for k in dense["dense_k"]], np.int32)
    return arrays, dataclasses.replace(case, seq_lens=seq_lens, cu_q_lens=np.asarray(cu), **dense)


def run(arrays, backend, **options):
    static = {name: x for name, x in arrays.items() if not hasattr(x, "shape")} | options
    step = compiled(lambda arrays: jp.cascade_attention(**arrays, **static, return_lse=True, backend=backend))
    return step({name: x for name, x in arrays.items() if hasattr(x, "shape")})


def check(arrays, case, backend, **options):
    out, lse = run(arrays, backend, **{k: jnp.asarray(x) if hasattr(x, "shape") else x for k, x in options.items()})
    expected_out, expected_lse = oracle(case, **options)
    chex.assert_type([out, lse], [case.q.dtype, jnp.float32])
    assert_attention_close(out, expected_out)
    tolerance = 1e-5 if out.dtype == jnp.float32 else 2e-2
    np.testing.assert_allclose(lse, expected_lse, rtol=tolerance, atol=tolerance)  # -inf only where -inf is expected


@pytest.mark.parametrize("options", [pytest.param({}, marks=pytest.mark.slow), ALL], ids=["plain", "all"])
@pytest.mark.parametrize("q_lens", [None, (5, 0, 1, 3, 4, 0, 2)], ids=["decode", "ragged"])
@pytest.mark.parametrize("backend", [pytest.param("reference", marks=pytest.mark.slow), "xla"])
def test_cascade_attention_equals_oracle_of_whole_sequences(backend, q_lens, options):
    check(*make_cascade(q_lens, padding_tokens=0 if q_lens is None else 3, seed=1), backend, **options)


@pytest.mark.slow
@pytest.mark.parametrize("q_lens", [None, (5, 0, 1, 3, 4, 0, 2)], ids=["decode", "ragged"])
def test_cascade_attention_by_the_kernel_equals_oracle(q_lens):
    """More programs than tiles, and a prefix cut between them."""
    arrays, case = make_cascade(q_lens, padding_tokens=0 if q_lens is None else 3, seed=2)
    check(arrays | {"config": jp.AttentionConfig(num_programs=5, block_q=2)}, case, "interpret", **ALL)


@pytest.mark.parametrize(
    "shape",
    [
        pytest.param({"dtype": "bfloat16", "num_q_heads": 6, "num_kv_heads": 2}, marks=pytest.mark.slow),
        pytest.param({"dtype": "int8", "scale_per": "token"}, marks=pytest.mark.slow),
        {"dtype": "float8_e5m2", "scale_per": "head", "q_dtype": "bfloat16"},
        {"page_size": 16, "num_kv_heads": 4, "head_dim": 24},
    ],
    ids=lambda shape: "-".join(map(str, shape.values())),
)
def test_cascade_attention_of_shapes_and_dtypes_equals_oracle(shape):
    check(*make_cascade((5, 0, 1, 3, 4, 0, 2), seed=3, **shape), "xla")


def test_cascade_attention_with_a_tree_mask_equals_oracle():
    q_lens = (5, 0, 1, 3, 4, 0, 2)
    tree = np.random.default_rng(0).random((15, 5)) < 0.5
    tree[np.arange(15), np.concatenate([np.arange(m) for m in q_lens])] = True
    check(*make_cascade(q_lens, seed=4), "xla", tree_mask=tree)


def test_cascade_attention_of_one_layer_without_lse_returns_the_output_only():
    arrays, case = make_cascade(seed=5)
    layer = arrays.pop("layer")
    arrays |= {name: arrays[name][layer] for name in ("k_pages", "v_pages")}
    del arrays["cu_q_lens"]
    out = compiled(lambda arrays: jp.cascade_attention(**arrays, backend="xla"))(
        {name: x for name, x in arrays.items() if x is not None}
    )
    assert_attention_close(out, oracle(case)[0])


@pytest.mark.slow
def test_cascade_attention_gradient_equals_that_of_whole_sequences():
    """Through both calls and the merge, to prefixes that several sequences share; padding rows give no NaN."""
    arrays, case = make_cascade(own=(5, 0, 1, 4, 17, 3, 0), seed=6)
    arrays["prefix_lens"] //= 4
    arrays["prefix_lens"] *= 4
    lengths, own = np.asarray(arrays["prefix_lens"]), np.asarray(arrays["seq_lens"])
    tables, whole = (
        (np.asarray(arrays[name]) for name in ("prefix_page_table", "page_table")),
        np.zeros((7, 16), np.int32),
    )
    prefix_table, own_table = tables
    for row, group in enumerate(GROUPS):
        ids = np.concatenate([prefix_table[group, : lengths[group] // 4], own_table[row]])
        whole[row, : len(ids)] = ids
    common = {"layer": case.layer, "sinks": jnp.asarray(SINKS), "return_lse": True, "backend": "xla"}
    seq_lens = jnp.asarray(np.where(own > 0, own + lengths[np.array(GROUPS)], 0), jnp.int32)
    names = "prefix_page_table", "prefix_lens", "page_table", "seq_lens", "group_of_seq"

    def in_parts(q, k, v):
        return jp.cascade_attention(q, k, v, **{name: arrays[name] for name in names}, **common)

    def at_once(q, k, v):
        return jp.paged_attention(q, k, v, jnp.asarray(whole), seq_lens, **common)

    def loss(attend, *x):
        out, lse = attend(*x)
        return jnp.sum(out**2) + jnp.sum(jnp.where(jnp.isneginf(lse), 0, lse))

    operands = arrays["q"], arrays["k_pages"], arrays["v_pages"]
    parts, whole = (
        compiled(jax.value_and_grad(functools.partial(loss, attend), argnums=(0, 1, 2)))(*operands)
        for attend in (in_parts, at_once)
    )
    chex.assert_trees_all_close(parts, whole, rtol=2e-5, atol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize(("q_lens", "block_q"), [(None, 2), (None, 16), ((5, 0, 1, 3, 4, 0, 2), 4)])
def test_cascade_attention_reads_a_prefix_once_a_tile_of_queries(q_lens, block_q, monkeypatch):
    calls = []

    def record(q, k_pages, v_pages, page_table, seq_lens, **options):
        calls.append((page_table, seq_lens, options))
        return jnp.zeros(q.shape), jnp.zeros(q.shape[:2])

    monkeypatch.setattr(cascade, "paged_attention", record)
    arrays, _ = make_cascade(q_lens)
    config = jp.AttentionConfig(block_q=block_q)
    jp.cascade_attention(**arrays, config=config, backend="xla")
    (prefix,) = [call for call in calls if call[0].shape[0] == len(PREFIXES)]
    _, lengths, options = prefix
    partition = partition_of(
        lengths, options["cu_q_lens"], num_tokens=len(arrays["q"]), causal=options["causal"], config=options["config"]
    )
    tiles = Tile(*np.asarray(partition.tiles).T)
    queries = np.bincount(GROUPS, np.ones(7) if q_lens is None else q_lens, minlength=4).astype(int)
    for group, (length, num) in enumerate(zip(PREFIXES, queries, strict=True)):
        mine = (tiles.seq == group) & (tiles.num_q > 0)
        assert (tiles.kv_end - tiles.kv_begin)[mine].sum() == length * -(-num // block_q)


def test_cascade_attention_never_follows_an_entry_past_the_end():
    arrays, case = make_cascade(seed=7, unused_entry=10**6)
    out, lse = run(arrays, "xla")
    tables = {
        name: jnp.where(arrays[name] == 10**6, NULL_PAGE, arrays[name]) for name in ("prefix_page_table", "page_table")
    }
    chex.assert_trees_all_equal(run(arrays | tables, "xla"), (out, lse))
    assert_attention_close(out, oracle(case)[0])


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"prefix_page_table": lambda t: t[0]}, ValueError, r"`prefix_page_table` must have shape .* got \(7,\)\."),
        ({"prefix_page_table": lambda t: t[:, :0]}, ValueError, r"`prefix_page_table` must have .* got \(4, 0\)\."),
        ({"prefix_lens": lambda n: n[1:]}, ValueError, r"`prefix_lens` must have shape .* = \(4,\).*; got \(3,\)\."),
        ({"group_of_seq": lambda g: g[1:]}, ValueError, r"`group_of_seq` must have shape .* = \(7,\).*; got \(6,\)\."),
        ({"prefix_lens": lambda n: n.astype(jnp.int16)}, TypeError, r"`prefix_lens` must be int32; got int16\."),
        ({"prefix_page_table": lambda t: [[0]]}, TypeError, r"`prefix_page_table` must be an array; got list\."),
        ({"prefix_lens": lambda n: [0]}, TypeError, r"`prefix_lens` must be an array; got list\."),
        ({"page_table": lambda t: [[0]]}, TypeError, r"`page_table` must be an array; got list\."),
        (
            {"group_of_seq": lambda g: g.at[4].add(-1)},
            ValueError,
            r"`group_of_seq` must hold .* got \[0, 0, 2, 2, 1, 3, 3\]\.",
        ),
        (
            {"group_of_seq": lambda g: g + 1},
            ValueError,
            r"`group_of_seq` must hold groups from 0 to .* = 3,.*got \[1, 1,",
        ),
        ({"group_of_seq": lambda g: g - 1}, ValueError, r"`group_of_seq` must hold .* got \[-1, -1,"),
        ({"group_of_seq": lambda g: list(GROUPS)}, TypeError, r"`group_of_seq` must be an array; got list\."),
        ({"seq_lens": lambda n: n[1:]}, ValueError, r"`seq_lens` must have shape \(num_seqs,\) = \(7,\)"),
        ({"page_table": lambda t: t[0]}, ValueError, r"`page_table` must have shape"),
        ({"sinks": lambda s: jnp.zeros(3)}, ValueError, r"`sinks` must have shape"),
    ],
)
def test_cascade_attention_with_a_bad_argument_names_it(change, error, message):
    arrays, _ = make_cascade()
    (name, f), *_ = change.items()
    with pytest.raises(error, match=message):
        jp.cascade_attention(**{**arrays, name: f(arrays.get(name))})
