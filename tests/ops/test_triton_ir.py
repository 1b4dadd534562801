"""The Triton IR of the kernels, executed on the CPU with every access checked: what Pallas's interpreter cannot prove.

Needs the checked interpreter `ttir_interp.py` beside the repository, in `../shared/tools`.
"""

import importlib.util
import pathlib
import sys

import numpy as np
import pytest

from jaxpaged.config import AttentionConfig
from jaxpaged.ops.triton import paged_attention_triton
from jaxpaged.testing import assert_attention_close, make_case, oracle

TOOL = pathlib.Path(__file__).parents[3] / "shared" / "tools" / "ttir_interp.py"
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


@pytest.fixture(scope="module")
def interpreter():
    if not TOOL.exists():
        pytest.skip(f"needs {TOOL.name} in ../{TOOL.parent.parent.name}/{TOOL.parent.name}")
    spec = importlib.util.spec_from_file_location(TOOL.stem, TOOL)
    module = sys.modules[TOOL.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def execute(interpreter, case, config, options, **run_options):
    """Runs the kernels' IR, checks results and accesses, and returns the first kernel's report."""
    arguments = case.arguments()
    causal, scale = options.get("causal", True), case.q.shape[-1] ** -0.5
    del arguments["layer"]
    result = interpreter.run_function(
        lambda arguments: paged_attention_triton(
            **arguments, **options, layer=case.layer, sm_scale=scale, config=config
        ),
        arguments,
        **run_options,
    )
    out, lse = result.outputs
    expected_out, expected_lse = oracle(case, **{**options, "causal": causal})
    assert_attention_close(out, expected_out)
    np.testing.assert_allclose(lse, expected_lse, rtol=2e-5, atol=1e-4)
    problems = result.problems
    if config.max_splits != 1:  # what the first kernel leaves open, the second fills: the results above hold no poison
        assert [r.report.kernel for r in result.runs] == ["paged_attention", "paged_attention_combine"]
        problems = [p for p in problems if not p.startswith("unwritten: kernel paged_attention,")]
    assert problems == []
    assert [r.report.hazards for r in result.runs] == [[]] * len(result.runs)
    return result.runs[0].report


@pytest.mark.parametrize("name", DECODE)
@pytest.mark.parametrize("config", [CUT, WHOLE], ids=["cut", "whole"])
def test_triton_ir_decode_reads_each_live_byte_once(interpreter, name, config):
    shape, options = DECODE[name]
    case = make_case(LENS, seed=1, **shape)
    unowned = {}
    if config is WHOLE:  # one call: mark what nobody wrote, NaN or not, as never to be read
        unowned = {"uninitialised": {5: np.isnan(case.k_pages), 6: np.isnan(case.v_pages)}}
    report = execute(interpreter, case, config, options, **unowned)
    live = sum(min(n, options.get("sliding_window", n)) for n in LENS) * case.k_pages[0, 0, :, 0].nbytes
    for operand in ("k_ref", "v_ref"):
        assert live <= np.sum(report.traffic[operand].loaded) <= 1.02 * live


@pytest.mark.parametrize("options", [{}, {"sliding_window": 7, "sinks": SINKS}, {"causal": False}])
@pytest.mark.parametrize("config", [CUT, WHOLE], ids=["cut", "whole"])
def test_triton_ir_ragged_has_no_fault(interpreter, config, options):
    case = make_case((37, 0, 20, 100), (1, 0, 20, 7), padding_tokens=5, seed=2)
    execute(interpreter, case, config, options)


def test_triton_ir_large_group_in_row_blocks_has_no_fault(interpreter):
    case = make_case((37, 0, 20), num_q_heads=71, num_kv_heads=1, seed=3)
    execute(interpreter, case, CUT, {})
