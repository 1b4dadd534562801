"""Code that is wrong on purpose: each mutant here must fail a check of this suite, or that check proves nothing.

A mutant is the source of one module with one text replaced, executed afresh and put wherever the original is bound. The
checks are those of the test files, with small cases. `test_unmutated_code_passes` runs each of them on the source as it
is, put in place the same way.
"""

import dataclasses
import importlib
import sys
import types
from collections.abc import Callable
from functools import partial
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

import jaxpaged
from jaxpaged.config import AttentionConfig
from jaxpaged.testing import make_case
from tests import test_batch, test_kv_cache, test_quantize
from tests.ops import harness, test_attention, test_linear, test_merge, test_rope_write
from tests.paging import test_allocator, test_pool

pytestmark = pytest.mark.slow

Check = Callable[[], None]


def attention(check: str, *arguments) -> Check:
    return partial(getattr(test_attention, check), *arguments)


def allocator(name: str, *arguments) -> Check:
    """A test of tests/paging/test_allocator.py, with what its fixture makes."""

    def check():
        pages = test_allocator.PageAllocator(11, page_size=4)
        pages.add("a", 6)
        pages.add("b", 8)
        getattr(test_allocator, name)(pages, *arguments)

    return check


def write_float32():
    test_kv_cache.test_write_at_slots_changes_these_slots_only(jnp.float32, 1)


def write_int8():
    test_kv_cache.test_write_then_gather_of_a_quantised_cache_is_within_half_a_step("int8", None)


def write_fixed():
    test_kv_cache.test_write_then_gather_of_a_quantised_cache_is_within_half_a_step("int8", "layer")


def update_in_loop():
    test_kv_cache.check_update_in_loop_equals_scatter()


def batch_values():
    test_batch.test_locate_tokens_of_a_ragged_batch_finds_row_and_position()


def merge_of_two():
    test_merge.test_merge_attention_of_two_parts_equals_the_whole(200.0)


def options(backend: str, what: str, config: AttentionConfig | None = None) -> Check:
    """Sequences cut and whole, of many tokens and of one, with one of the later options."""

    def check():
        harness.compiled.cache_clear()  # it may hold what another mutant was traced to
        kind = {"dtype": "int8", "scale_per": what} if what in ("token", "head") else {}
        decode = what in ("decode", "head")
        case = make_case((40, 0, 9, 61), None if decode else (6, 0, 9, 3), **kind, seed=1)
        if what == "head":  # another scale in each layer
            doubled = {n: np.stack([2 * getattr(case, n), getattr(case, n)]) for n in ("k_scale", "v_scale")}
            case = dataclasses.replace(case, **doubled)
        tree = np.random.default_rng(0).random((len(case.q), 10)) < 0.5
        chosen = {
            "token": {},
            "head": {},
            "tree": {"tree_mask": tree},
            "window": {"sliding_window": np.int32(23)},
            "decode": {"sliding_window": np.int32(23), "sinks": test_attention.SINKS},
        }[what]
        try:
            harness.check(case, backend, config=config, **chosen)
        finally:
            harness.compiled.cache_clear()

    return check


def linear(option: str) -> Check:
    return partial(test_linear.check, option, "bfloat16", "interpret")


def rope(dtype: str, **shape) -> Check:
    def check():
        test_rope_write.compiled.cache_clear()  # as above
        try:
            test_rope_write.check_against_two_steps(test_rope_write.make_inputs(dtype, **shape))
        finally:
            test_rope_write.compiled.cache_clear()

    return check


BY_XLA = attention("check_decode", "xla", "plain")
BY_XLA_OPTIONS = attention("check_decode", "xla", "all")
BY_XLA_RAGGED = attention("check_ragged", "xla", "plain")
BY_XLA_LONG = attention("check_long_tiles", "xla")
BY_XLA_NEGATIVE = attention("check_large_negative_logits", "xla")
BY_DEFINITION = attention("check_ragged", "reference", "all")
BY_KERNEL = attention("check_ragged", "interpret", "all")
SPLIT, CUT = AttentionConfig(split_size=16, block_q=4, block_k=16), AttentionConfig(num_programs=3, block_q=4)
XLA_TOKEN, XLA_HEAD, XLA_TREE, XLA_WINDOW = (options("xla", what) for what in ("token", "head", "tree", "window"))
OF_TOKEN, OF_HEAD, OF_TREE, OF_WINDOW = (options("reference", what) for what in ("token", "head", "tree", "window"))
KERNEL_TOKEN, KERNEL_HEAD, KERNEL_TREE, KERNEL_WINDOW = (
    options("interpret", what, CUT) for what in ("token", "head", "tree", "window")
)
KERNEL_SPLIT, KERNEL_SPLIT_DECODE = options("interpret", "window", SPLIT), options("interpret", "decode", SPLIT)
KERNEL_CUT_DECODE = options("interpret", "decode", CUT)
PLAN, QUANTIZE = "jaxpaged/ops/plan.py", "jaxpaged/quantize.py"
XLA, REFERENCE, TRITON = "jaxpaged/ops/xla.py", "jaxpaged/ops/reference.py", "jaxpaged/ops/triton.py"
LINEAR, ROPE_FLOAT, ROPE_INT8 = "jaxpaged/ops/linear.py", rope("float32"), rope("int8", kv_heads=2, q_heads=6)
MERGE, CACHE, BATCH = "jaxpaged/ops/merge.py", "jaxpaged/kv_cache.py", "jaxpaged/batch.py"
SEQUENCES, BATCHES, STATE, POOL, TABLES = (
    "jaxpaged/paging/sequences.py",
    "jaxpaged/paging/batches.py",
    "jaxpaged/paging/state.py",
    "jaxpaged/paging/pool.py",
    "jaxpaged/paging/tables.py",
)

# What is wrong: (file, text, what stands there instead, the check that must notice).
MUTANTS = {
    "xla: K for V": (XLA, "gather(v_pages, ids)", "gather(k_pages, ids)", BY_XLA),
    "xla: another sequence's table": (XLA, "page_table[i]", "page_table[-1]", BY_XLA_RAGGED),
    "xla: mask one early": (XLA, "key <= position", "key < position", BY_XLA),
    "xla: mask one late": (XLA, "key <= position", "key <= position + 1", BY_XLA_RAGGED),
    "xla: window one wide": (XLA, "key > position - sliding", "key >= position - sliding", XLA_WINDOW),
    "xla: scale dropped": (XLA, "logits *= sm_scale", "logits *= 0.25", BY_XLA_OPTIONS),
    "xla: soft cap dropped": (XLA, "if logits_soft_cap is not None:", "if False:", BY_XLA_OPTIONS),
    "xla: V not zeroed": (
        XLA,
        "jnp.where(live[:, None], gather(v_pages, ids).astype(q.dtype), 0)",
        "gather(v_pages, ids).astype(q.dtype)",
        BY_XLA,
    ),
    "xla: K scale dropped": (XLA, "sm_scale * scale_of(k_scale, ids)", "sm_scale", XLA_HEAD),
    "xla: K scale of another page": (XLA, "scale_of(k_scale, ids)", "scale_of(k_scale, ids[::-1])", XLA_TOKEN),
    "xla: K scale of another layer": (XLA, "layer_scale(scale, layer)", "layer_scale(scale, 0)", XLA_HEAD),
    "xla: V scale of another head": (
        XLA,
        "jnp.where(live, scale_of(v_scale, ids), 0)",
        "jnp.where(live, scale_of(v_scale, ids)[::-1], 0)",
        XLA_HEAD,
    ),
    "xla: V scale not zeroed": (
        XLA,
        "jnp.where(live, scale_of(v_scale, ids), 0)",
        "scale_of(v_scale, ids)",
        XLA_TOKEN,
    ),
    "xla: largest value not taken back": (XLA, "(largest * jnp.where(total", "(jnp.where(total", XLA_TOKEN),
    "xla: tree one late": (XLA, "key - tile.num_old,", "key - tile.num_old - 1,", XLA_TREE),
    "xla: tree of another token": (XLA, "(tree_mask, first, block_q)", "(tree_mask, 0, block_q)", XLA_TREE),
    "xla: traced window ignored": (
        XLA,
        "if sliding_window is not None:\n            seen",
        "if isinstance(sliding_window, int):\n            seen",
        XLA_WINDOW,
    ),
    "xla: one key past the end": (XLA, "key < tile.seq_len", "key <= tile.seq_len", BY_XLA),
    "xla: no guard for a row without keys": (
        XLA,
        "jnp.where(jnp.isneginf(new_max), 0, new_max)",
        "new_max",
        BY_XLA_LONG,
    ),
    "xla: maximum starts at 0": (
        XLA,
        "jnp.full(q.shape[:2], -jnp.inf)",
        "jnp.zeros(q.shape[:2])",
        BY_XLA_NEGATIVE,
    ),
    "xla: sink in lse only": (XLA, "out * share[..., None]", "out", BY_XLA_OPTIONS),
    "xla: sink dropped": (XLA, "(lse, sinks.astype", "(lse, (sinks - 1e9).astype", BY_XLA_OPTIONS),
    "xla: sink counted twice": (XLA, "(lse, sinks.astype", "(lse, (sinks + 0.7).astype", BY_XLA_OPTIONS),
    "xla: ALiBi the wrong way": (XLA, "(key - position)", "(position - key)", BY_XLA_OPTIONS),
    "xla: lse without log": (XLA, "jnp.log(jnp.where(total > 0, total, 1))", "jnp.where(total > 0, total, 1)", BY_XLA),
    "reference: K for V": (REFERENCE, "dense(v_pages, v_scale)", "dense(k_pages, v_scale)", BY_DEFINITION),
    "reference: K scale dropped": (REFERENCE, "dense(k_pages, k_scale)", "dense(k_pages, None)", OF_HEAD),
    "reference: scale of another page": (REFERENCE, "scale[layer, ids]", "scale[layer, ids[::-1]]", OF_TOKEN),
    "reference: scale of another layer": (REFERENCE, "layer_scale(scale, layer)", "layer_scale(scale, 0)", OF_HEAD),
    "reference: tree one late": (REFERENCE, "key - (n - num_new)", "key - (n - num_new) - 1", OF_TREE),
    "reference: traced window ignored": (
        REFERENCE,
        "if sliding_window is not None:",
        "if isinstance(sliding_window, int):",
        OF_WINDOW,
    ),
    "reference: another sequence's table": (REFERENCE, "page_table[row[token]]", "page_table[-1]", BY_DEFINITION),
    "reference: mask one early": (REFERENCE, "key <= query_position", "key < query_position", BY_DEFINITION),
    "reference: window one narrow": (
        REFERENCE,
        "query_position - sliding_window",
        "query_position - sliding_window + 1",
        BY_DEFINITION,
    ),
    "reference: scale dropped": (REFERENCE, "* sm_scale", "* 0.25", BY_DEFINITION),
    "reference: soft cap dropped": (REFERENCE, "if logits_soft_cap is not None:", "if False:", BY_DEFINITION),
    "reference: V not zeroed": (REFERENCE, "jnp.where(seen[:, None], by_head, 0)", "by_head", BY_DEFINITION),
    "reference: no guard for a row without keys": (
        REFERENCE,
        "jnp.where(jnp.isneginf(lse), 0, lse)[:, None]",
        "lse[:, None]",
        BY_DEFINITION,
    ),
    "reference: sink dropped": (REFERENCE, "if sinks is not None:", "if False:", BY_DEFINITION),
    "reference: sink over no keys": (
        REFERENCE,
        "jnp.where(seen.any(), sinks.astype(dtype), -jnp.inf)",
        "sinks.astype(dtype)",
        BY_DEFINITION,
    ),
    "reference: ALiBi the wrong way": (REFERENCE, "(key - query_position)", "(query_position - key)", BY_DEFINITION),
    "triton: K for V": (TRITON, "v = _load_rows(v_ref,", "v = _load_rows(k_ref,", BY_KERNEL),
    "triton: another sequence's table": (TRITON, "page_table_ref.at[tile.seq,", "page_table_ref.at[0,", BY_KERNEL),
    "triton: mask one late": (
        TRITON,
        "key[None, :] <= position[:, None]",
        "key[None, :] <= position[:, None] + 1",
        BY_KERNEL,
    ),
    "triton: window one wide": (
        TRITON,
        "key[None, :] > position[:, None] - sliding_window",
        "key[None, :] >= position[:, None] - sliding_window",
        BY_KERNEL,
    ),
    "triton: scale dropped": (TRITON, "(sm_scale * LOG2E * k_scale)", "(LOG2E * k_scale)", BY_KERNEL),
    "triton: V not zeroed": (
        TRITON,
        "return masked_load(\n"
        "            ref.at[layer, page[:, None], kv_head, offset[:, None], dim], live[:, None] & (dim < head_dim)\n"
        "        )",
        "return ref[layer, page[:, None], kv_head, offset[:, None], dim]",
        BY_KERNEL,
    ),
    "triton: K scale dropped": (TRITON, "* LOG2E * k_scale)", "* LOG2E)", KERNEL_HEAD),
    "triton: K scale of another slot": (
        TRITON,
        "masked_load(k_scale_ref.at[slot], live)",
        "masked_load(k_scale_ref.at[layer, page, kv_head, 0 * key], live)",
        KERNEL_TOKEN,
    ),
    "triton: K scale of another layer": (TRITON, "ref[0 if ref.shape[0] == 1 else layer,", "ref[0,", KERNEL_HEAD),
    "triton: V scale of another head": (
        TRITON,
        "masked_load(v_scale_ref.at[slot], live)",
        "masked_load(v_scale_ref.at[layer, page, 1 - kv_head, key % page_size], live)",
        KERNEL_TOKEN,
    ),
    "triton: largest value not taken back": (TRITON, "1 / largest if", "1.0 if", KERNEL_TOKEN),
    "triton: tree one late": (TRITON, "(key - tile.num_old)", "(key - tile.num_old - 1)", KERNEL_TREE),
    "triton: tree of the tile's first token": (
        TRITON,
        "tree_ref.at[token, i]",
        "tree_ref.at[tile.token + 0 * token, i]",
        KERNEL_TREE,
    ),
    "triton: traced window ignored": (
        TRITON,
        "sliding_window if window_ref is None else window_ref[0]",
        "sliding_window",
        KERNEL_WINDOW,
    ),
    "triton: sink in each piece": (TRITON, "part_begin, None, 1.0", "part_begin, sink, 1.0", KERNEL_SPLIT_DECODE),
    "triton: sink dropped where cut": (
        TRITON,
        "None if sinks_ref is None else sinks_ref[head]",
        "None if True else sinks_ref[head]",
        KERNEL_CUT_DECODE,
    ),
    "triton: parts of another token": (
        TRITON,
        "program % max_pieces * q_ref.shape[0] + tile.token",
        "program % max_pieces * q_ref.shape[0]",
        KERNEL_SPLIT,
    ),
    "triton: last piece not merged": (
        TRITON,
        "(tile.kv_end - 1) // split_size, max_pieces - 1",
        "(tile.kv_end - 1) // split_size - 1, max_pieces - 1",
        KERNEL_SPLIT,
    ),
    "rope: half turned the other way": (
        TRITON,
        "second * cos + first * sin",
        "second * cos - first * sin",
        ROPE_FLOAT,
    ),
    "rope: V turned too": (TRITON, "jnp.where(is_v[:, None], x, y)", "y", ROPE_FLOAT),
    "rope: K stands after V": (
        TRITON,
        "write(k_ref, k_fixed_ref, k_scale_ref, k_head,",
        "write(k_ref, k_fixed_ref, k_scale_ref, 1 - k_head,",
        ROPE_FLOAT,
    ),
    "rope: padding written": (
        TRITON,
        "(slot >= 0) & (slot < num_pages * page_size)",
        "slot < num_pages * page_size",
        ROPE_FLOAT,
    ),
    "rope: scale of half a head": (
        TRITON,
        "jnp.maximum(*(measure_scale(x, pages_ref.dtype) for x in halves))",
        "measure_scale(halves[0], pages_ref.dtype)",
        ROPE_INT8,
    ),
    "rope: scale of the next slot": (
        TRITON,
        "scale_ref.at[layer, page, kv_head, offset]",
        "scale_ref.at[layer, page, kv_head, (offset + 1) % page_size]",
        ROPE_INT8,
    ),
    "linear: eps dropped": (LINEAR, "squares * (1 / num_in) + eps)", "squares * (1 / num_in))", linear("norm")),
    "linear: norm's scale dropped": (LINEAR, "x *= masked_load(norm_ref.at[k], in_k)[None, :]", "pass", linear("norm")),
    "linear: mean over the padding": (LINEAR, "squares * (1 / num_in)", "squares * (1 / 384)", linear("norm")),
    "linear: gate and what it passes swapped": (
        LINEAR,
        "out *= products[1] / (1 + jnp.exp(-out))",
        "out *= products[1] / (1 + jnp.exp(-products[1]))",
        linear("norm, gated"),
    ),
    "linear: second half of the gate's rows": (
        LINEAR,
        "column + half * num_out",
        "column + half",
        linear("norm, gated"),
    ),
    "linear: residual dropped": (LINEAR, "+ masked_load(residual_ref.at[row, column], live)", "", linear("residual")),
    "linear: end of a row left out": (LINEAR, "cdiv(num_in, block_k)", "num_in // block_k", linear("plain")),
    "plan: a piece counted twice": (
        PLAN,
        "(piece + 1) * split_size)",
        "(piece + 2) * split_size)",
        KERNEL_SPLIT_DECODE,
    ),
    "plan: traced window ignored": (
        PLAN,
        "window = kv_len if sliding_window is None else",
        "window = kv_len if not isinstance(sliding_window, int) else",
        KERNEL_CUT_DECODE,
    ),
    "plan: old tokens counted one short": (
        PLAN,
        "num_old = kv_lens[seq] - q_lens[seq]",
        "num_old = kv_lens[seq] - q_lens[seq] - 1",
        KERNEL_TREE,
    ),
    "quantize: not clipped": (
        QUANTIZE,
        "jnp.clip(scaled, -largest, largest).astype(dtype)",
        "scaled.astype(dtype)",
        partial(test_quantize.test_quantize_of_what_does_not_fit_gives_the_largest_number, "float8_e5m2"),
    ),
    "quantize: cut off": (
        QUANTIZE,
        "jnp.floor(scaled + 0.5)",
        "jnp.trunc(scaled)",
        partial(test_quantize.test_quantize_takes_the_nearest_number, "int8", False),
    ),
    "quantize: no guard for zeros": (
        QUANTIZE,
        "jnp.where(scale == 0, 1, scale)[..., None]",
        "scale[..., None]",
        partial(test_quantize.test_quantize_of_a_row_of_zeros_gives_zeros, "float8_e4m3fn"),
    ),
    "cache: measured scale not kept": (CACHE, "measured[..., None]", "jnp.ones_like(measured)[..., None]", write_int8),
    "cache: fixed scale of another layer": (CACHE, "broadcast_to(scale[layer],", "broadcast_to(scale[0],", write_fixed),
    "cache: V exported with K's scales": (
        CACHE,
        '"v_scale": self.v_scale}',
        '"v_scale": self.k_scale}',
        partial(test_kv_cache.test_export_import_and_copy_take_the_scales_along_bit_for_bit, "int8"),
    ),
    "merge: weights swapped": (MERGE, "weight_a, weight_b =", "weight_b, weight_a =", merge_of_two),
    "merge: maximum dropped from lse": (MERGE, "shift + jnp.log(norm)", "jnp.log(norm)", merge_of_two),
    "merge: no guard for two empty parts": (
        MERGE,
        "jnp.where(jnp.isneginf(lse_max), 0, lse_max)",
        "lse_max",
        test_merge.test_merge_attention_with_the_empty_part_changes_nothing,
    ),
    "cache: one slot later": (
        CACHE,
        "slot_mapping % self.page_size",
        "(slot_mapping + 1) % self.page_size",
        write_float32,
    ),
    "cache: another layer": (CACHE, "jnp.full_like(page, layer)", "jnp.full_like(page, 0)", write_float32),
    "cache: K written as V": (CACHE, "self._encode(v, self.v_scale,", "self._encode(k, self.v_scale,", write_float32),
    "cache: padding scattered": (CACHE, "GatherScatterMode.FILL_OR_DROP", "GatherScatterMode.CLIP", write_float32),
    "cache: padding written in the loop": (CACHE, "& (starts[i] < shape)", "", update_in_loop),
    "cache: gather not cut": (
        CACHE,
        "jnp.where(live[..., None, None], tokens, 0)",
        "tokens",
        test_kv_cache.test_gather_returns_tokens_in_order_and_zeros_past_the_end,
    ),
    "cache: copy the other way": (
        CACHE,
        "import_pages(dst_page_ids, self.export_pages(src_page_ids))",
        "import_pages(src_page_ids, self.export_pages(dst_page_ids))",
        test_kv_cache.test_copy_pages_to_others_leaves_the_sources,
    ),
    "batch: position of the first token": (
        BATCH,
        "seq_lens[row] - cu_q_lens[row + 1] + token",
        "token - cu_q_lens[row]",
        batch_values,
    ),
    "batch: padding is live": (BATCH, "live = row < seq_lens.shape[0]", "live = row >= 0", batch_values),
    "allocator: fork keeps no count": (
        SEQUENCES,
        "self._pool.share(page_ids[num_dead:].astype(np.intp))",
        "pass",
        allocator("test_free_of_the_parent_leaves_the_child_its_pages"),
    ),
    "allocator: shared page not copied": (
        STATE,
        "not self._pool.is_private(table.last_page(row))",
        "False",
        allocator("test_append_to_a_shared_partial_page_copies_it_once"),
    ),
    "allocator: copied page not released": (
        SEQUENCES,
        "self._pool.drop(np.array([copies[-1].src]))",
        "pass",
        allocator("test_append_to_a_shared_partial_page_copies_it_once"),
    ),
    "allocator: truncate keeps a page": (
        SEQUENCES,
        "num_kept = cdiv(num_tokens, self._page_size)",
        "num_kept = num_tokens // self._page_size + 1",
        allocator("test_truncate_keeps_the_first_tokens_and_frees_the_pages_past_them", 4, 1),
    ),
    "allocator: free keeps the pages": (
        SEQUENCES,
        "else:\n                    self._pool.put(page_ids)",
        "else:\n                    pass",
        allocator("test_free_then_add_reuses_the_id_and_the_pages"),
    ),
    "allocator: slots of the first tokens": (
        BATCHES,
        "ragged_arange(lengths - counts, counts)",
        "ragged_arange(np.zeros_like(counts), counts)",
        allocator("test_slot_mapping_packs_the_last_tokens_of_each_sequence"),
    ),
    "pool: a page handed out twice": (
        POOL,
        "self._top = end = top + count",
        "self._top = (end := top + count) - (count > 1)",
        test_pool.test_allocate_whole_pool_hands_out_each_page_once_and_never_the_null_page,
    ),
    "pool: the null page handed out": (
        POOL,
        "np.arange(1, num_pages, dtype=np.int32)",
        "np.arange(num_pages - 1, dtype=np.int32)",
        test_pool.test_allocate_whole_pool_hands_out_each_page_once_and_never_the_null_page,
    ),
    "tables: no padding": (
        TABLES,
        "np.copyto(table, padding, where=",
        "np.copyto(table, padding, where=False & ",
        allocator("test_page_table_pads_with_the_null_page"),
    ),
    "tables: copy put in the first place": (
        TABLES,
        "self.num_pages.item(row) - 1] = page_id",
        "0] = page_id",
        allocator("test_append_to_a_shared_partial_page_copies_it_once"),
    ),
}
CHECKS = {(file, check): name for name, (file, _, _, check) in reversed(MUTANTS.items())}


for name in jaxpaged.__all__:  # or the package would keep whatever a mutant was first used as
    getattr(jaxpaged, name)


def put_in_place(file: str, text: str, replacement: str, monkeypatch) -> None:
    """Executes the module with the text replaced, and binds its names wherever the original's are bound."""
    name = file.removesuffix(".py").replace("/", ".")
    original = importlib.import_module(name)
    source = Path(original.__file__).read_text()
    assert source.count(text) == 1, f"{text!r} must be in {file} once, or the mutant is another than it says"
    mutant = types.ModuleType(name)
    exec(compile(source.replace(text, replacement), original.__file__, "exec"), vars(mutant))
    for key, value in vars(original).items():
        if getattr(value, "__module__", None) != name:
            continue
        for module in [m for n, m in sys.modules.items() if n.split(".")[0] in ("jaxpaged", "tests")]:
            for bound_as in [k for k, v in vars(module).items() if v is value]:
                monkeypatch.setattr(module, bound_as, getattr(mutant, key))
        if file in (SEQUENCES, BATCHES, STATE) and isinstance(value, type):  # others inherit from it
            for method, function in vars(getattr(mutant, key)).items():
                if isinstance(function, types.FunctionType):
                    monkeypatch.setattr(value, method, function)


@pytest.mark.parametrize(("file", "check"), CHECKS, ids=CHECKS.values())
def test_unmutated_code_passes(file, check, monkeypatch):
    _, text, _, _ = MUTANTS[CHECKS[file, check]]
    put_in_place(file, text, text, monkeypatch)
    check()


@pytest.mark.parametrize("name", MUTANTS)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NaN and infinities, where the mutant makes them
def test_mutant_is_noticed(name, monkeypatch):
    file, text, replacement, check = MUTANTS[name]
    put_in_place(file, text, replacement, monkeypatch)
    with pytest.raises(AssertionError):
        check()
