"""Every option of `paged_attention` beside every other: rows of values that cover all pairs, and calls made of them."""

import functools
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np

from jaxpaged.cache.quantize import MAX_VALUE
from jaxpaged.config import AttentionConfig
from jaxpaged.testing.cases import Case, make_case
from jaxpaged.testing.conformance.batches import Options, draw_tree
from jaxpaged.testing.oracle import oracle

Row = dict[str, Any]
"""A value of each option."""

VALUES = {
    "dtype": ("float32", "bfloat16", "float16", *MAX_VALUE),
    "scale_per": ("tensor", "head", "token"),
    "q_dtype": ("float32", "bfloat16", "float16"),
    "q_per_kv": (1, 4, 5, 6, 7, 12, 17, 71),
    "head_dim": (16, 64, 80, 96, 112, 128, 192, 256),
    "page_size": (1, 2, 8, 16, 24, 64, 256, 544),
    "queries": ("decode", "ragged", "padded"),
    "layer": ("static", "traced"),
    "unused_entry": (0, -1, 2**31 - 1),
    "sm_scale": (None, 0.3),
    "logits_soft_cap": (None, 2.0),
    "sliding_window": (None, "static", "traced"),
    "sinks": (False, True),
    "alibi": (False, True),
    "causal": (True, False),
    "tree_mask": (False, True),
    "config": ("few programs", "whole", "split", "small tiles"),
}
CONFIGS = {
    "few programs": AttentionConfig(num_programs=3),
    "whole": AttentionConfig(max_splits=1),
    "split": AttentionConfig(split_size=16),
    "small tiles": AttentionConfig(num_programs=5, block_q=4, block_k=16),
}
WINDOW = 11


def _without_meaning(row: Row) -> tuple[str, ...]:
    return () if row.get("dtype", "int8") in MAX_VALUE else ("scale_per", "q_dtype")


def pairs(row: Row, ignored: Callable[[Row], tuple[str, ...]] = _without_meaning) -> set:
    """What a row covers: its values two by two, those without a meaning left out."""
    names = [name for name in row if name not in ignored(row)]
    return {(a, row[a], b, row[b]) for a, b in itertools.combinations(names, 2)}


def all_pairs(values: dict[str, tuple], ignored: Callable[[Row], tuple[str, ...]] = _without_meaning) -> set:
    """Every pair that some row can cover."""
    names = itertools.combinations(values, 2)
    found = [{a: x, b: y} for a, b in names for x, y in itertools.product(values[a], values[b])]
    return set().union(*(pairs(row, ignored) for row in found))


def cover(values: dict[str, tuple], ignored: Callable[[Row], tuple[str, ...]] = lambda row: ()) -> tuple[Row, ...]:
    """Rows that cover all pairs of values, greedily: the best of a few random ones, each around a missing pair.

    Args:
        ignored: Names of the values that mean nothing in a row.
    """
    rng = np.random.default_rng(0)
    missing, rows = all_pairs(values, ignored), []
    while missing:
        # Pairs from the longest lists decide how many rows there are: they come first.
        target = max(sorted(missing, key=str), key=lambda p: len(values[p[0]]) * len(values[p[2]]))
        best: Row = {}
        for _ in range(3):
            row: Row = {}
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


GRID = cover(VALUES, _without_meaning)
"""Rows that cover every pair of values."""


def name_of(row: Row) -> str:
    """What a test of a row is called."""
    kind = f"{row['dtype']}-{row['scale_per']}-{row['q_dtype']}" if row["dtype"] in MAX_VALUE else row["dtype"]
    return f"{kind}-g{row['q_per_kv']}-d{row['head_dim']}-p{row['page_size']}-{row['queries']}-{row['config']}"


def _lengths(page_size: int) -> tuple[int, ...]:
    """Around the ends of a page, the window and a tile of 16; few where a page is long."""
    if page_size > 64:
        return (0, 1, page_size + 1, WINDOW + 2)
    return (0, 1, WINDOW, page_size, page_size + 1, 35)


@functools.cache
def build(index: int) -> tuple[Case, Options, tuple[np.ndarray, np.ndarray]]:
    """The case of a row of the grid, its options, and what the oracle says."""
    row, rng = GRID[index], np.random.default_rng(index)
    kv_heads = 1 if row["q_per_kv"] > 12 else 2
    seq_lens = _lengths(row["page_size"])
    q_lens = (
        None if row["queries"] == "decode" else [min(pair) for pair in zip(seq_lens, (0, 1, 9, 1, 5, 18), strict=False)]
    )
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
    options["sliding_window"] = {None: None, "static": WINDOW, "traced": np.int32(WINDOW)}[row["sliding_window"]]
    if row["sinks"]:
        options["sinks"] = rng.normal(size=num_q_heads).astype(np.float32)
    if row["alibi"]:
        options["alibi_slopes"] = rng.uniform(0, 0.3, num_q_heads).astype(np.float32)
    if row["tree_mask"]:
        options["tree_mask"] = draw_tree(case, rng, 0.5)
    expected = oracle(case, **options)
    return case, options | ({"layer": np.int32(case.layer)} if row["layer"] == "traced" else {}), expected
