"""The Triton kernels on a real GPU against the float64 oracle. `JAX_PLATFORMS=cuda pytest -m gpu -n 0`

Elsewhere all of it is skipped; without JAX_PLATFORMS the suite never looks for a GPU.
"""

import dataclasses

import jax
import numpy as np
import pytest

from benchmarks.gpu_cases import CHECKS, SAMPLE, attend, check_attention, check_write, draw, runs_on
from jaxpaged.cache.quantize import MAX_VALUE
from jaxpaged.ops.linear import linear
from jaxpaged.testing.conformance.linear import OPTIONS, assert_linear_close, make_linear_arguments

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(jax.default_backend() != "gpu", reason="no NVIDIA GPU")]


@pytest.mark.parametrize(("name", "backend"), [*((x, "triton") for x in CHECKS), *((x, "xla") for x in SAMPLE)])
def test_gpu_attention_equals_oracle(name, backend):
    if runs_on(name, jax.devices()[0]):
        check_attention(name, backend)
    else:
        with pytest.raises(NotImplementedError, match="float8_e4m3fn"):
            check_attention(name, "triton")


@pytest.mark.parametrize("num_tokens", [1, 13, 64])
@pytest.mark.parametrize("option", OPTIONS)
def test_gpu_linear_equals_oracle(option, num_tokens):
    arguments = make_linear_arguments(option, "bfloat16", num_tokens, 4096, 1000)
    assert_linear_close(linear(**arguments, backend="triton"), arguments)


@pytest.mark.parametrize("dtype", MAX_VALUE)
def test_gpu_write_saturates_and_rounds_to_nearest(dtype):
    check_write(dtype)


@pytest.mark.parametrize("name", ["bfloat16", "ragged, all options", "int8"])
def test_gpu_permuted_pages_give_the_same_bits(name):
    case = draw(name)[0]
    order = np.random.default_rng(0).permutation(case.k_pages.shape[1])
    scales = {} if case.k_scale is None else {"k_scale": case.k_scale[:, order], "v_scale": case.v_scale[:, order]}
    moved = dataclasses.replace(
        case,
        k_pages=case.k_pages[:, order],
        v_pages=case.v_pages[:, order],
        page_table=np.argsort(order)[case.page_table].astype(np.int32),
        **scales,
    )
    for x, y in zip(attend(name, case, "triton"), attend(name, moved, "triton"), strict=True):
        np.testing.assert_array_equal(np.asarray(x, np.float32), np.asarray(y, np.float32))


@pytest.mark.parametrize("name", ["fixed cuts", "whole tiles"])
def test_gpu_row_alone_has_the_bits_that_it_has_in_a_batch(name):
    case = draw(name)[0]
    together = attend(name, case, "triton")
    for i in range(len(case.seq_lens)):
        alone = dataclasses.replace(
            case, q=case.q[i : i + 1], page_table=case.page_table[i : i + 1], seq_lens=case.seq_lens[i : i + 1]
        )
        for x, y in zip(attend(name, alone, "triton"), together, strict=True):
            np.testing.assert_array_equal(np.asarray(x[0], np.float32), np.asarray(y[i], np.float32))


def test_gpu_auto_is_the_triton_kernel():
    case = draw("bfloat16")[0]
    out, lse = attend("bfloat16", case, "auto")
    expected_out, expected_lse = attend("bfloat16", case, "triton")
    np.testing.assert_array_equal(np.asarray(out, np.float32), np.asarray(expected_out, np.float32))
    np.testing.assert_array_equal(lse, expected_lse)
