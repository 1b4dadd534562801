"""Many drawn batches through few compilations: lengths, queries, tables, windows, trees and values change."""

import itertools

import numpy as np
import pytest

from jaxpaged.config import AttentionConfig
from jaxpaged.testing import make_case
from tests.ops.harness import check, with_pool

PAGE_SIZE, MAX_PAGES, SEQS, TOKENS = 4, 10, 6, 30
CONFIG = AttentionConfig(num_programs=4, block_q=8, block_k=16)
# What is compiled: pages, queries over quantised ones, their scales, decode or ragged, options, configuration.
PROGRAMS = {
    "decode": ("float32", None, "token", False, ("sinks",), CONFIG),
    "decode_half": ("bfloat16", None, "token", False, ("window", "alibi_slopes"), CONFIG),
    "decode_int8": ("int8", "float32", "token", False, ("window",), AttentionConfig(split_size=16)),
    "ragged": ("float32", None, "token", True, ("window", "sinks", "alibi_slopes"), CONFIG),
    "ragged_tree": ("float16", None, "token", True, ("tree_mask", "sinks"), CONFIG),
    "ragged_e4m3": ("float8_e4m3fn", "bfloat16", "head", True, ("window", "tree_mask"), AttentionConfig(max_splits=1)),
}


def draw_lengths(rng, ragged):
    """Lengths that the table holds, with padding rows; of ragged batches new tokens too, none to all of a sequence."""
    seq_lens = rng.integers(0, MAX_PAGES * PAGE_SIZE + 1, SEQS) * (rng.random(SEQS) < 0.85)
    if rng.random() < 0.5:  # around the ends of pages
        seq_lens = np.clip(seq_lens // PAGE_SIZE * PAGE_SIZE + rng.integers(-1, 2, SEQS), 0, MAX_PAGES * PAGE_SIZE)
    if not ragged:
        return seq_lens, None
    most = rng.choice([1, 4, 12, TOKENS])
    q_lens, left = np.zeros(SEQS, int), TOKENS
    for i in rng.permutation(SEQS):
        q_lens[i] = rng.integers(0, min(seq_lens[i], most, left) + 1)
        left -= q_lens[i]
    return seq_lens, q_lens


def draw(seed, program):
    dtype, q_dtype, scale_per, ragged, names, config = PROGRAMS[program]
    rng = np.random.default_rng(seed)
    seq_lens, q_lens = draw_lengths(rng, ragged)
    case = make_case(
        seq_lens,
        q_lens,
        dtype=dtype,
        q_dtype=q_dtype,
        scale_per=scale_per,
        page_size=PAGE_SIZE,
        max_pages=MAX_PAGES,
        unused_entry=int(rng.choice([0, -1, 10**6, 2**31 - 1, -(2**31)])),
        padding_tokens=0 if q_lens is None else TOKENS - int(q_lens.sum()),
        seed=seed,
    )
    tree = rng.random((len(case.q), TOKENS)) < 0.6
    if q_lens is not None:
        for begin, end in itertools.pairwise(case.cu_q_lens):
            tree[np.arange(begin, end), np.arange(end - begin)] = True
    drawn = {
        "window": ("sliding_window", np.int32(rng.integers(1, 45))),
        "sinks": ("sinks", rng.normal(size=4).astype(np.float32)),
        "alibi_slopes": ("alibi_slopes", rng.uniform(0, 0.5, 4).astype(np.float32)),
        "tree_mask": ("tree_mask", tree),
    }
    return with_pool(case, SEQS * MAX_PAGES + 3), dict(drawn[name] for name in names) | {"config": config}


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["xla", "interpret"])
@pytest.mark.parametrize("program", PROGRAMS)
def test_paged_attention_drawn_batches_equal_oracle(program, backend):
    """84 batches a program and a backend: 504 each."""
    for seed in range(84):
        case, options = draw(seed, program)
        try:
            check(case, backend, **options)
        except AssertionError as error:
            error.add_note(f"program {program!r}, seed {seed}, seq_lens {case.seq_lens}, cu_q_lens {case.cu_q_lens}")
            raise
