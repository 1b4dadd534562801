"""Ragged batches drawn to a few fixed shapes, so that a backend is compiled once for hundreds of them."""

import dataclasses
import itertools
from typing import Any

import numpy as np

from jaxpaged.config import NULL_PAGE, AttentionConfig
from jaxpaged.testing.cases import Case, make_case

WILD_ENTRIES = (-1, 10**6, 2**31 - 1, -(2**31))
CUT = AttentionConfig(num_programs=4, block_q=8, block_k=16)
SPLIT = AttentionConfig(split_size=16, block_q=8, block_k=16)
WHOLE = AttentionConfig(max_splits=1, block_q=8, block_k=16)

_POOLS = ("k_pages", "v_pages", "k_scale", "v_scale")

Options = dict[str, Any]
"""Options of `paged_attention` by name: numpy arrays are arguments of the compiled program, all else is static."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Program:
    """What is compiled once: dtypes, sizes, and which options there are. Their values are drawn with each batch.

    Attributes:
        q_dtype: Dtype of the queries over quantised pages.
        scale_per: What has one scale in quantised pages, as in `make_case`.
        is_ragged: Whether sequences have any number of query tokens, or one each.
        drawn: Names of the options that are arrays.
        static: Options that are none, with their values.
        config: Handed over where the backend takes it.
        num_tokens: Packed query tokens of a ragged batch, padding included.
    """

    dtype: str = "float32"
    q_dtype: str | None = None
    scale_per: Any = "token"
    is_ragged: bool = False
    drawn: tuple[str, ...] = ()
    static: tuple[tuple[str, Any], ...] = ()
    config: AttentionConfig = CUT
    num_q_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 16
    page_size: int = 4
    max_pages: int = 18
    num_seqs: int = 6
    num_tokens: int = 40

    @property
    def max_len(self) -> int:
        """KV tokens that a row of the page table holds."""
        return self.page_size * self.max_pages


PROGRAMS = {
    "decode": Program(drawn=("sinks",)),
    "decode_bfloat16": Program(
        dtype="bfloat16",
        drawn=("sliding_window", "alibi_slopes"),
        num_q_heads=10,
        head_dim=80,
        page_size=1,
        max_pages=72,
    ),
    "decode_int8": Program(
        dtype="int8",
        q_dtype="float32",
        drawn=("sliding_window",),
        static=(("logits_soft_cap", 30.0),),
        config=SPLIT,
        page_size=3,
        max_pages=24,
    ),
    # Longer than any chunk of keys or tile of queries that a backend of this package works on at once.
    "ragged": Program(
        is_ragged=True, drawn=("sliding_window", "sinks", "alibi_slopes"), page_size=16, max_pages=19, num_tokens=150
    ),
    "ragged_float16": Program(
        dtype="float16", is_ragged=True, drawn=("tree_mask", "sinks"), static=(("causal", False),), num_kv_heads=4
    ),
    "ragged_float8": Program(
        dtype="float8_e4m3fn",
        q_dtype="bfloat16",
        scale_per="head",
        is_ragged=True,
        drawn=("tree_mask",),
        static=(("sm_scale", 0.3), ("sliding_window", 10)),
        config=WHOLE,
    ),
}
"""Between them: every kind of dtype and scale, every option, each way to cut the work."""


def draw(program: Program, seed: int, lengths: tuple | None = None, **options: Any) -> tuple[Case, Options]:
    """A batch of a program's shape, in a pool of a fixed size, with its options.

    Args:
        lengths: KV tokens of each sequence and, of a ragged batch, query tokens; None draws them.
        options: What is not to be drawn.
    """
    rng = np.random.default_rng(seed)
    seq_lens, q_lens = _draw_lengths(rng, program) if lengths is None else lengths
    case = make_case(
        seq_lens,
        q_lens if program.is_ragged else None,
        num_q_heads=program.num_q_heads,
        num_kv_heads=program.num_kv_heads,
        head_dim=program.head_dim,
        page_size=program.page_size,
        max_pages=program.max_pages,
        dtype=program.dtype,
        q_dtype=program.q_dtype,
        scale_per=program.scale_per,
        unused_entry=int(rng.choice((0, *WILD_ENTRIES))),
        padding_tokens=program.num_tokens - sum(q_lens) if program.is_ragged else 0,
        seed=seed,
    )
    values = {
        "sliding_window": np.int32(rng.integers(1, program.max_len + 5)),
        "sinks": (2 * rng.standard_normal(program.num_q_heads)).astype(np.float32),
        "alibi_slopes": rng.uniform(0, 0.5, program.num_q_heads).astype(np.float32),
        "tree_mask": draw_tree(case, rng, 0.6, width=program.num_tokens),
    }
    drawn = {name: options.get(name, values[name]) for name in program.drawn}
    return _in_pool(case, 3 + program.num_seqs * program.max_pages), dict(program.static) | drawn


def _draw_lengths(rng: np.random.Generator, program: Program) -> tuple:
    """Lengths that the table holds, with padding rows; of ragged batches new tokens too, none to all of a sequence."""
    num_seqs, max_len = program.num_seqs, program.max_len
    seq_lens = rng.integers(0, max_len + 1, num_seqs) * (rng.random(num_seqs) < 0.85)
    if rng.random() < 0.5:  # around the ends of pages
        seq_lens = np.clip(
            seq_lens // program.page_size * program.page_size + rng.integers(-1, 2, num_seqs), 0, max_len
        )
    most = rng.choice([1, 4, 12, program.num_tokens])
    q_lens, left = np.zeros(num_seqs, int), program.num_tokens
    for i in rng.permutation(num_seqs):
        q_lens[i] = rng.integers(0, min(seq_lens[i], most, left) + 1)
        left -= q_lens[i]
    return seq_lens, q_lens


def draw_tree(case: Case, rng: np.random.Generator, share: float, *, width: int | None = None) -> np.ndarray:
    """A tree mask in which each new token sees itself and, with probability `share`, each of the others.

    Args:
        width: Columns; None takes one more than the longest sequence needs.
    """
    starts = first_tokens(case)
    mask = rng.random((len(case.q), width or int(np.diff(starts).max()) + 1)) < share
    for begin, end in itertools.pairwise(starts):
        mask[np.arange(begin, end), np.arange(end - begin)] = True
    return mask


def first_tokens(case: Case) -> np.ndarray:
    """`[num_seqs + 1]`: packed row of each sequence's first query token, and the end of the last."""
    return np.arange(len(case.seq_lens) + 1) if case.cu_q_lens is None else case.cu_q_lens


def owned_slots(case: Case) -> np.ndarray:
    """`[num_layers, num_pages, page_size]` bool: whether a sequence keeps a token there."""
    page_size = case.k_pages.shape[3]
    owned = np.zeros((*case.k_pages.shape[:2], page_size), bool)
    for table, n in zip(case.page_table, case.seq_lens, strict=True):
        key = np.arange(n)
        owned[:, table[key // page_size], key % page_size] = True
    return owned


def with_poison(case: Case, poison: float, rng: np.random.Generator) -> Case:
    """The same case, with `poison` in each slot that nobody owns, and in its scales; int8 pages get random bytes."""
    nobody = np.broadcast_to(~owned_slots(case)[:, :, None], case.k_pages.shape[:4])
    changed = {}
    for name in ("k_pages", "v_pages"):
        pages = getattr(case, name).copy()
        size = pages[nobody].shape
        with np.errstate(over="ignore"):
            garbage = rng.integers(-128, 128, size) if pages.dtype == np.int8 else np.full(size, poison)
            pages[nobody] = garbage.astype(pages.dtype)
        changed[name] = pages
    for name in ("k_scale", "v_scale"):
        if np.ndim(scale := getattr(case, name)) == 4:
            changed[name] = np.where(nobody, np.float32(poison), scale)
    return dataclasses.replace(case, **changed)


def with_entries_past_the_last_page(case: Case, entry: int) -> Case:
    """The same case, with `entry` in every column of the page table that a sequence does not need."""
    pages = -(-case.seq_lens[:, None] // case.k_pages.shape[3])
    used = np.arange(case.page_table.shape[1]) < pages
    return dataclasses.replace(case, page_table=np.where(used, case.page_table, entry).astype(np.int32))


def without_pages_before(case: Case, window: int) -> Case:
    """The same case after a window has passed: the pages before it are poisoned, and their entries lead anywhere."""
    page_table = case.page_table.copy()
    pools = {name: x.copy() for name in _POOLS if np.ndim(x := getattr(case, name)) >= 4}
    for i, (n, num_new) in enumerate(zip(case.seq_lens, np.diff(first_tokens(case)), strict=True)):
        dead = max(0, n - num_new - window + 1) // case.k_pages.shape[3]
        for pool in pools.values():
            pool[:, page_table[i, :dead]] = 127 if pool.dtype == np.int8 else np.nan
        page_table[i, 1:dead:2] = 10**6
    return dataclasses.replace(case, page_table=page_table, **pools)


def with_pages_permuted(case: Case, rng: np.random.Generator) -> Case:
    """The same case in other pages."""
    case = with_entries_past_the_last_page(case, NULL_PAGE)
    order = rng.permutation(case.k_pages.shape[1])
    moved = {name: pool[:, order] for name in _POOLS if np.ndim(pool := getattr(case, name)) >= 4}
    return dataclasses.replace(case, page_table=np.argsort(order)[case.page_table].astype(np.int32), **moved)


def with_rows(case: Case, options: Options, rows: tuple[int, ...]) -> tuple[Case, Options]:
    """Those sequences of a case, in that order, then padding rows up to its number of sequences and tokens."""
    num_padding = len(case.seq_lens) - len(rows)
    starts = first_tokens(case)
    tokens = np.concatenate([np.arange(starts[i], starts[i + 1]) for i in rows])
    tokens = np.pad(tokens, (0, len(case.q) - len(tokens)))
    q_lens = np.pad(np.diff(starts)[list(rows)], (0, num_padding))
    table = np.pad(case.page_table[list(rows)], ((0, num_padding), (0, 0)), constant_values=-1)
    nothing = [x[:0] for x in case.dense_k[:1]] * num_padding
    changed = dataclasses.replace(
        case,
        q=case.q[tokens],
        page_table=table,
        seq_lens=np.pad(case.seq_lens[list(rows)], (0, num_padding)),
        cu_q_lens=None if case.cu_q_lens is None else np.cumsum([0, *q_lens], dtype=np.int32),
        dense_k=[case.dense_k[i] for i in rows] + nothing,
        dense_v=[case.dense_v[i] for i in rows] + nothing,
    )
    if "tree_mask" in options:
        options = options | {"tree_mask": options["tree_mask"][tokens]}
    return changed, options


def with_keys(case: Case, columns: slice) -> Case:
    """The same queries over the keys in some columns of the page table."""
    page_size, width = case.k_pages.shape[3], case.page_table.shape[1]
    begin, end, _ = columns.indices(width)
    table = np.pad(case.page_table[:, columns], ((0, 0), (0, width - (end - begin))))
    first, last = begin * page_size, end * page_size
    return dataclasses.replace(
        case,
        page_table=table,
        seq_lens=np.clip(case.seq_lens - first, 0, last - first).astype(np.int32),
        dense_k=[x[first:last] for x in case.dense_k],
        dense_v=[x[first:last] for x in case.dense_v],
    )


def with_negative_logits(case: Case) -> Case:
    """The same case with 64 |q| and -|K|, of few bits: logits far below zero whose products float32 holds exactly."""

    def few_bits(x: np.ndarray) -> np.ndarray:
        return np.round(np.abs(x) * x.dtype.type(16)) / x.dtype.type(16)

    return dataclasses.replace(
        case,
        q=few_bits(case.q) * case.q.dtype.type(64),
        k_pages=-few_bits(case.k_pages),
        dense_k=[-few_bits(k) for k in case.dense_k],
    )


def _in_pool(case: Case, num_pages: int) -> Case:
    """The same case in a pool of a fixed size, so that another draw needs no other compilation."""

    def grow(x: np.ndarray) -> np.ndarray:
        more = np.full((x.shape[0], num_pages - x.shape[1], *x.shape[2:]), 127 if x.dtype == np.int8 else np.nan)
        return np.concatenate([x, more.astype(x.dtype)], axis=1)

    pools = {name: grow(x) for name in _POOLS if np.ndim(x := getattr(case, name)) >= 4}
    return dataclasses.replace(case, **pools)
