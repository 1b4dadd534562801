"""Every option of `paged_attention` beside every other: a pairwise grid, and what it needs to become cases."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np

import jaxpaged as jp
from jaxpaged.config import AttentionConfig
from jaxpaged.quantize import MAX_VALUE
from jaxpaged.testing import Case, assert_attention_close, make_case, oracle

VALUES = {
    "dtype": ("float32", "bfloat16", "float16", *MAX_VALUE),
    "scale_per": ("tensor", "head", "token"),
    "q_dtype": ("float32", "bfloat16", "float16"),
    "q_per_kv": (1, 4, 5, 6, 7, 12, 17, 71),
    "head_dim": (16, 64, 80, 96, 112, 128, 192, 256),
    "page_size": (1, 2, 8, 16, 24, 64, 256, 544),
    "queries": ("decode", "ragged", "padded"),
    "layer": ("static", "traced", "alone"),
    "unused_entry": (0, -1, 2**31 - 1),
    "sm_scale": (None, 0.3),
    "logits_soft_cap": (None, 2.0),
    "sliding_window": (None, "static", "traced"),
    "sinks": (False, True),
    "alibi": (False, True),
    "causal": (True, False),
    "tree_mask": (False, True),
    "return_lse": (True, False),
    "config": ("few programs", "whole", "split", "small tiles"),
}
CONFIGS = {
    "few programs": AttentionConfig(num_programs=3),
    "whole": AttentionConfig(max_splits=1),
    "split": AttentionConfig(split_size=16),
    "small tiles": AttentionConfig(num_programs=5, block_q=4, block_k=16),
}
WINDOW = 11


def _without_meaning(row: dict) -> tuple[str, ...]:
    return () if row.get("dtype", "int8") in MAX_VALUE else ("scale_per", "q_dtype")


def pairs(row: dict, ignored=_without_meaning) -> set:
    """What a row covers: its values two by two, those without a meaning left out."""
    names = [name for name in row if name not in ignored(row)]
    return {(a, row[a], b, row[b]) for a, b in itertools.combinations(names, 2)}


def all_pairs(values: dict = VALUES, ignored=_without_meaning) -> set:
    """Every pair that some row can cover."""
    names = itertools.combinations(values, 2)
    found = [{a: x, b: y} for a, b in names for x, y in itertools.product(values[a], values[b])]
    return set().union(*(pairs(row, ignored) for row in found))


def cover(values: dict, ignored=lambda row: ()) -> tuple[dict, ...]:
    """Rows that cover all pairs of values, greedily: the best of a few random ones, each around a missing pair."""
    rng = np.random.default_rng(0)
    missing, rows = all_pairs(values, ignored), []
    while missing:
        # Pairs from the longest lists decide how many rows there are: they come first.
        target = max(sorted(missing, key=str), key=lambda p: len(values[p[0]]) * len(values[p[2]]))
        best: dict = {}
        for _ in range(3):
            row: dict = {}
            while target not in pairs(row, ignored):
                row = {name: options[rng.integers(len(options))] for name, options in values.items()}
                row |= {target[0]: target[1], target[2]: target[3]}
            for name in rng.permutation(list(values)):  # improve one value after another
                options = [{**row, str(name): value} for value in values[name]]
                options = [option for option in options if target in pairs(option, ignored)]
                row = max(options, key=lambda option: len(pairs(option, ignored) & missing))
            best = max(best, row, key=lambda option: len(pairs(option, ignored) & missing))
        missing -= pairs(best, ignored)
        rows.append(best)
    return tuple(rows)


@functools.cache
def grid() -> tuple[dict, ...]:
    return cover(VALUES, _without_meaning)


def name_of(row: dict) -> str:
    kind = f"{row['dtype']}-{row['scale_per']}-{row['q_dtype']}" if row["dtype"] in MAX_VALUE else row["dtype"]
    return f"{kind}-g{row['q_per_kv']}-d{row['head_dim']}-p{row['page_size']}-{row['queries']}-{row['config']}"


def _lengths(page_size: int) -> tuple[int, ...]:
    """Around the ends of a page, the window and a tile of 16; few where a page is long."""
    if page_size > 64:
        return (0, 1, page_size + 1, WINDOW + 2)
    return (0, 1, WINDOW, page_size, page_size + 1, 35)


@functools.cache
def build(index: int) -> tuple[Case, dict, tuple[np.ndarray, np.ndarray]]:
    """The case of a row of the grid, its options, and what the oracle says."""
    row, rng = grid()[index], np.random.default_rng(index)
    kv_heads = 1 if row["q_per_kv"] > 12 else 2
    seq_lens = _lengths(row["page_size"])
    new = (0, 1, 9, 1, 5, 18)[: len(seq_lens)]
    q_lens = None if row["queries"] == "decode" else np.minimum(seq_lens, new)
    case = make_case(
        seq_lens,
        q_lens,
        num_q_heads=row["q_per_kv"] * kv_heads,
        num_kv_heads=kv_heads,
        head_dim=row["head_dim"],
        page_size=row["page_size"],
        dtype=row["dtype"],
        q_dtype=row["q_dtype"] if row["dtype"] in MAX_VALUE else None,
        scale_per=row["scale_per"],
        unused_entry=row["unused_entry"],
        padding_tokens=5 if row["queries"] == "padded" else 0,
        seed=index,
    )
    num_q_heads = case.q.shape[1]
    options = {name: row[name] for name in ("sm_scale", "logits_soft_cap", "causal")}
    options["sliding_window"] = row["sliding_window"] and WINDOW
    if row["sinks"]:
        options["sinks"] = rng.normal(size=num_q_heads).astype(np.float32)
    if row["alibi"]:
        options["alibi_slopes"] = rng.uniform(0, 0.3, num_q_heads).astype(np.float32)
    if row["tree_mask"]:
        options["tree_mask"] = _tree(case, rng)
    return case, options, oracle(case, **options)


def _tree(case: Case, rng: np.random.Generator) -> np.ndarray:
    """Each new token sees itself and some of the others; one column more than the longest needs."""
    num_tokens = len(case.q)
    starts = np.arange(num_tokens + 1) if case.cu_q_lens is None else case.cu_q_lens
    mask = rng.random((num_tokens, int(np.diff(starts).max()) + 1)) < 0.5
    for begin, end in itertools.pairwise(starts):
        mask[np.arange(begin, end), np.arange(end - begin)] = True
    return mask


def attend(case: Case, options: dict, *, backend: str, config=None, layer="static", window="static", **static):
    """`paged_attention` under jit, unoptimised: most of a test would be LLVM."""
    case_layer = case.layer
    if layer == "alone":
        scales = {n: s[case_layer] for n in ("k_scale", "v_scale") if np.ndim(s := getattr(case, n)) == 4}
        case = dataclasses.replace(case, k_pages=case.k_pages[case_layer], v_pages=case.v_pages[case_layer], **scales)
    arrays = {k: v for k, v in (case.arguments() | options).items() if v is not None}
    arrays = {k: jnp.asarray(v) if isinstance(v, np.ndarray) else v for k, v in arrays.items()}
    arrays["layer"] = {"static": case_layer, "traced": jnp.int32(case_layer), "alone": None}[layer]
    if window == "traced":
        arrays["sliding_window"] = jnp.int32(arrays["sliding_window"])
    static |= {k: arrays.pop(k) for k in [k for k, v in arrays.items() if not isinstance(v, jax.Array)]}
    step = jax.jit(
        lambda arrays: jp.paged_attention(**arrays, **static, config=config, backend=backend),
        compiler_options={"xla_backend_optimization_level": 0},
    )
    return step(arrays)


def check_row(index: int, backend: str) -> None:
    """A backend's answer to a row of the grid is the oracle's."""
    row, (case, options, (expected_out, expected_lse)) = grid()[index], build(index)
    result = attend(
        case,
        options,
        backend=backend,
        config=None if backend == "reference" else CONFIGS[row["config"]],  # it cuts nothing, and refuses some
        layer=row["layer"],
        window=row["sliding_window"],
        return_lse=row["return_lse"],
    )
    out = result[0] if row["return_lse"] else result
    assert out.dtype == case.q.dtype
    assert_attention_close(out, expected_out)
    if row["return_lse"]:  # products of 16-bit numbers are exact in float32: no looser than float32's
        assert result[1].dtype == jnp.float32
        np.testing.assert_allclose(result[1], expected_lse, rtol=2e-5, atol=2e-5)  # -inf only where it is expected
