"""The Triton IR of the kernels, run on the CPU with every access checked: what Pallas's interpreter cannot prove."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxpaged.config import AttentionConfig, cdiv
from jaxpaged.ops.attention.tilings import find_tiling
from jaxpaged.ops.attention.triton import paged_attention_triton
from jaxpaged.testing import assert_attention_close, make_case, oracle
from jaxpaged.testing.conformance.grid import cover
from tests.ops.attention.harness import three_values

LENS = (37, 0, 1, 100, 16, 211)
SINKS = np.linspace(-3.0, 6.0, 4).astype(np.float32)
SLOPES = np.array([0.5, 0.25, 0.03, 0.0], np.float32)
CUT = AttentionConfig(num_programs=6)
WHOLE = AttentionConfig(max_splits=1)
DECODE = {
    "plain": ({}, {}),
    "bfloat16": ({"dtype": "bfloat16", "num_q_heads": 8, "head_dim": 64, "page_size": 16}, {}),
    "head_dim_80_page_24": ({"head_dim": 80, "page_size": 24, "dtype": "float16"}, {}),
    "page_1": ({"page_size": 1}, {}),
    "garbage_entries": ({"unused_entry": 2**31 - 1}, {}),
    "window": ({}, {"sliding_window": 33}),
    "all": ({}, {"sliding_window": 33, "logits_soft_cap": 2.0, "sinks": SINKS, "alibi_slopes": SLOPES}),
}


def unowned(case, window):
    """By the kernel's operand what it may not read: slots and table entries of nobody, or of keys before a window."""
    seq_lens, max_pages, page_size = case.seq_lens, case.page_table.shape[1], case.k_pages.shape[3]
    num_new = 1 if case.cu_q_lens is None else np.diff(case.cu_q_lens)
    first = np.maximum(0, seq_lens - num_new - (window or 2**30) + 1)
    key = np.arange(max_pages * page_size)
    live = (key >= first[:, None]) & (key < seq_lens[:, None])  # [num_seqs, max_pages * page_size]
    by_page = live.reshape(len(seq_lens), max_pages, page_size)
    row, column = np.nonzero(by_page.any(-1))
    slots = np.zeros(case.k_pages.shape[:4], bool)
    slots[case.layer, case.page_table[row, column]] = by_page[row, column][:, None]
    marks = {3: ~by_page.any(-1), 5: ~slots[..., None], 6: ~slots[..., None]}
    if np.ndim(case.k_scale) == 4:
        marks |= {7: ~slots, 8: ~slots}
    return marks


def execute(interpreter, case, config, options):
    """Runs the kernels' IR, checks results and accesses, and returns the first kernel's report."""
    arguments = case.arguments()
    layer = arguments.pop("layer")
    heads = case.k_pages.shape[2]
    for name in ("k_scale", "v_scale"):
        if arguments[name] is not None and np.ndim(arguments[name]) < 4:
            arguments[name] = jnp.broadcast_to(arguments[name], (1, heads))
    values = options | ({"sliding_window": int(options["sliding_window"])} if "sliding_window" in options else {})
    result = interpreter.run_function(
        lambda arguments: paged_attention_triton(*three_values(**arguments, **options, layer=layer, config=config)),
        arguments,
        uninitialised={"paged_attention": unowned(case, values.get("sliding_window"))},
    )
    out, lse = result.outputs
    expected_out, expected_lse = oracle(case, **values)
    assert_attention_close(out, expected_out)
    np.testing.assert_allclose(lse, expected_lse, rtol=2e-5, atol=1e-4)
    problems = result.problems
    if config.max_splits != 1:  # what the first kernel leaves open, the second fills: the results above hold no poison
        assert [r.report.kernel for r in result.runs] == ["paged_attention", "paged_attention_combine"]
        problems = [p for p in problems if not p.startswith("unwritten: kernel paged_attention,")]
    assert problems == []
    assert [r.report.hazards for r in result.runs] == [[]] * len(result.runs)
    return result.runs[0].report


@pytest.mark.parametrize(
    "name",
    [x if x in ("head_dim_80_page_24", "all") else pytest.param(x, marks=pytest.mark.slow) for x in DECODE],
)
@pytest.mark.parametrize("config", [CUT, pytest.param(WHOLE, marks=pytest.mark.slow)], ids=["cut", "whole"])
def test_triton_ir_decode_reads_each_live_byte_once(interpreter, name, config):
    shape, options = DECODE[name]
    case = make_case(LENS, seed=1, **shape)
    report = execute(interpreter, case, config, options)
    live = sum(min(n, options.get("sliding_window", n)) for n in LENS) * case.k_pages[0, 0, :, 0].nbytes
    for operand in ("k_ref", "v_ref"):
        assert live <= np.sum(report.traffic[operand].loaded) <= 1.02 * live


@pytest.mark.parametrize(
    "options",
    [
        {"sliding_window": 7, "sinks": SINKS},
        *(pytest.param(options, marks=pytest.mark.slow) for options in ({}, {"causal": False})),
    ],
)
@pytest.mark.parametrize("config", [CUT, pytest.param(WHOLE, marks=pytest.mark.slow)], ids=["cut", "whole"])
def test_triton_ir_ragged_has_no_fault(interpreter, config, options):
    case = make_case((37, 0, 20, 100), (1, 0, 20, 7), padding_tokens=5, seed=2)
    execute(interpreter, case, config, options)


@pytest.mark.slow
def test_triton_ir_large_group_in_row_blocks_has_no_fault(interpreter):
    case = make_case((37, 0, 20), num_q_heads=71, num_kv_heads=1, seed=3)
    execute(interpreter, case, CUT, {})


VARIANTS = cover(
    {
        "kind": (
            ("float32", None),
            ("bfloat16", None),
            ("float16", None),
            ("int8", "token"),
            ("int8", "head"),
            ("float8_e4m3fn", "token"),
            ("float8_e4m3fn", "tensor"),
            ("float8_e5m2", "token"),
            ("float8_e5m2", "head"),
        ),
        "head_dim": (64, 80, 128, 256),
        "q_lens": (None, (1, 0, 20, 7, 0, 3)),
        "q_per_kv": (1, 2, 4, 17, 71),  # decoding, 16, 32 and 64 rows a tile and two row blocks; ragged, more of them
        "page_size": (1, 16, 24),
        "config": (CUT, WHOLE, AttentionConfig(split_size=64)),
        "window": (None, "static", "traced"),
        "tree": (False, True),
        "others": (False, True),
    }
)


def variant_name(variant: dict) -> str:
    queries = "decode" if variant["q_lens"] is None else "ragged"
    dtype, scale_per = variant["kind"]
    return f"{queries}-{dtype}-{scale_per}-d{variant['head_dim']}-g{variant['q_per_kv']}-p{variant['page_size']}"


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS, ids=map(variant_name, VARIANTS))
def test_triton_ir_shipped_tile_has_no_fault(interpreter, variant):
    """Each tile that the defaults choose, over a ragged batch; garbage wherever nobody may look."""
    (dtype, scale_per), q_lens, rng = variant["kind"], variant["q_lens"], np.random.default_rng(4)
    kv_heads = 2 if variant["q_per_kv"] < 17 else 1
    case = make_case(
        (37, 0, 20, 100, 0, 16),
        q_lens,
        num_q_heads=variant["q_per_kv"] * kv_heads,
        num_kv_heads=kv_heads,
        head_dim=variant["head_dim"],
        page_size=variant["page_size"],
        dtype=dtype,
        scale_per=scale_per or "token",
        q_dtype="bfloat16" if scale_per else None,
        unused_entry=-(2**31),
        padding_tokens=3 if q_lens else 0,
        seed=4,
    )
    num_tokens, num_q_heads, _ = case.q.shape
    options = {}
    if variant["window"]:
        options["sliding_window"] = 19 if variant["window"] == "static" else jnp.int32(19)
    if variant["tree"]:
        options["tree_mask"] = rng.random((num_tokens, 20)) < 0.7
    if variant["others"]:
        options |= {"logits_soft_cap": 2.0, "sinks": rng.normal(size=num_q_heads).astype(np.float32)}
        options |= {"alibi_slopes": rng.uniform(0, 0.3, num_q_heads).astype(np.float32)}
    report = execute(interpreter, case, variant["config"], options)
    if q_lens is None:
        live = sum(min(n, int(options.get("sliding_window", n))) for n in case.seq_lens)
        live *= kv_heads * variant["head_dim"] * case.k_pages.itemsize
        itemsize = max(case.k_pages.itemsize, case.q.itemsize if case.q.itemsize == 4 else 1)
        tiling = find_tiling(variant["q_per_kv"], variant["head_dim"], itemsize, False)
        reads = cdiv(variant["q_per_kv"], tiling.rows)
        for operand in ("k_ref", "v_ref"):
            assert live * reads <= np.sum(report.traffic[operand].loaded) <= 1.02 * live * reads


@pytest.mark.parametrize("window", [pytest.param(40, marks=pytest.mark.slow), jnp.int32(40)], ids=["static", "traced"])
def test_triton_ir_window_reads_no_more_in_a_longer_context(interpreter, window):
    read = []
    for n in (64, 1000):
        case = make_case((n, 0, n + 3), dtype="int8", page_size=16, seed=5)
        report = execute(interpreter, case, WHOLE, {"sliding_window": window})
        names = ("k_ref", "v_ref", "k_scale_ref", "v_scale_ref", "page_table_ref")
        read.append([int(np.sum(report.traffic[name].loaded)) for name in names])
    assert read[0] == read[1]
    assert read[0][:4] == [2 * 40 * 2 * 16] * 2 + [2 * 40 * 2 * 4] * 2
