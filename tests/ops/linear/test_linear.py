"""`linear`: what it takes and refuses, which backend runs; in the checked IR, and compiled for four GPUs."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

from jaxpaged.inspect.aot import GPUS, compile_for
from jaxpaged.ops import triton_util
from jaxpaged.ops.linear import linear, rms_norm
from jaxpaged.ops.linear.triton import MAX_TOKENS, linear_triton, why_unsupported
from jaxpaged.testing.conformance.linear import OPTIONS, assert_linear_close, make_linear_arguments
from tests.inspect.needs import needs_plugin


@pytest.mark.parametrize("option", [x if x == "all" else pytest.param(x, marks=pytest.mark.slow) for x in OPTIONS])
def test_linear_kernel_reads_each_weight_once_and_nothing_out_of_bounds(interpreter, option):
    arguments = make_linear_arguments(option)
    eps, gated = arguments.pop("eps"), arguments.pop("gated")
    arrays = [arguments[name] for name in ("x", "weight", "norm", "residual")]
    result = interpreter.run_function(lambda *arrays: linear_triton(*arrays, eps, gated), *arrays)
    assert result.problems == []
    [run] = result.runs
    assert run.report.hazards == []
    traffic = run.report.traffic
    assert np.sum(traffic["weight_ref"].loaded) == arguments["weight"].nbytes
    assert np.sum(traffic["out_ref"].stored) == 2 * 5 * 70
    [out] = jax.tree.leaves(result.outputs)
    assert_linear_close(jnp.asarray(out), arguments | {"eps": eps, "gated": gated})


REFUSED = {
    (MAX_TOKENS + 1, "bfloat16"): f"it takes 1 to {MAX_TOKENS} tokens; got 65",
    (0, "bfloat16"): f"it takes 1 to {MAX_TOKENS} tokens; got 0",
    (4, "float32"): "it multiplies bfloat16; got float32",
    (4, "float16"): "it multiplies bfloat16; got float16",
}


@pytest.mark.parametrize(("num_tokens", "dtype"), REFUSED)
def test_linear_of_what_the_kernel_does_not_take_is_refused_by_name_and_xla_by_auto(num_tokens, dtype):
    arguments = make_linear_arguments("norm", dtype, num_tokens)
    for backend in ("triton", "interpret"):
        with pytest.raises(NotImplementedError) as info:
            linear(**arguments, backend=backend)
        assert str(info.value) == f"`backend='{backend}'` cannot run this call: {REFUSED[num_tokens, dtype]}"
    chex.assert_trees_all_equal(linear(**arguments, backend="auto"), linear(**arguments, backend="xla"))


def test_linear_kernel_takes_a_full_tile_of_tokens_and_no_empty_weight():
    x, weight = jnp.ones((MAX_TOKENS, 8), jnp.bfloat16), jnp.ones((1, 8), jnp.bfloat16)
    assert why_unsupported(x, weight, None, None, 1e-5, False) is None
    reason = "it takes a weight with values; got (0, 8)"
    assert why_unsupported(x, weight[:0], None, None, 1e-5, False) == reason


def test_linear_without_pallas_triton_is_refused_by_name_and_xla_by_auto(monkeypatch):
    arguments = make_linear_arguments("norm")
    expected = linear(**arguments, backend="xla")
    monkeypatch.setattr(triton_util, "plgpu", None)
    with pytest.raises(NotImplementedError, match="has no Pallas Triton backend"):
        linear(**arguments, backend="triton")
    chex.assert_trees_all_equal(linear(**arguments), expected)


def test_rms_norm_of_a_row_has_a_mean_square_of_one():
    x = jax.random.normal(jax.random.key(0), (3, 64)) * 7
    np.testing.assert_allclose(jnp.mean(rms_norm(x, jnp.ones(64), 0.0) ** 2, axis=1), 1, rtol=1e-6)


BAD = {
    "list": ({"x": [[1.0]]}, TypeError, "`x` must be an array; got list"),
    "flat": ({"x": jnp.ones(300, jnp.bfloat16)}, ValueError, "`weight` must have shape (num_out, num_in) for `x`"),
    "width": ({"x": jnp.ones((5, 299), jnp.bfloat16)}, ValueError, "got (140, 300) and (5, 299)"),
    "odd": ({"weight": jnp.ones((141, 300), jnp.bfloat16)}, ValueError, "`weight` must have an even number of rows"),
    "norm": ({"norm": jnp.ones(299, jnp.bfloat16)}, ValueError, "`norm` must have shape (300,); got (299,)"),
    "residual": ({"residual": jnp.ones((5, 140), jnp.bfloat16)}, ValueError, "`residual` must have shape (5, 70)"),
    "dtype": ({"norm": jnp.ones(300)}, TypeError, "`norm` must be of the dtype of `x`, bfloat16; got float32"),
    "eps": ({"eps": jnp.float32(1)}, TypeError, "`eps` must be a number, static; got Array"),
    "integers": ({"x": jnp.ones((5, 300), jnp.int32)}, TypeError, "`x` must be of a floating dtype; got int32"),
    "backend": ({"backend": "cuda"}, ValueError, "`backend` must be one of auto, reference, xla, triton"),
}


@pytest.mark.parametrize("name", BAD)
def test_linear_of_a_bad_argument_names_it(name):
    changed, error, message = BAD[name]
    with pytest.raises(error) as info:
        linear(**(make_linear_arguments("all") | changed))
    assert message in str(info.value)


def test_linear_by_auto_lowers_to_the_kernel_on_cuda_and_to_the_formula_on_a_cpu():
    arguments = make_linear_arguments("norm")
    step = jax.jit(lambda x, weight, norm: linear(x, weight, norm=norm))
    device = AbstractDevice(device_kind="NVIDIA H200", num_cores=None, platform="gpu")
    with use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
        traced = step.trace(arguments["x"], arguments["weight"], arguments["norm"])
        for_cuda, for_cpu = (traced.lower(lowering_platforms=(p,)).as_text() for p in ("cuda", "cpu"))
    assert for_cuda.count("__gpu$xla.gpu.triton") == 1
    assert "stablehlo.dot_general" not in for_cuda
    assert "stablehlo.dot_general" in for_cpu


@needs_plugin
@pytest.mark.aot
@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize("num_tokens", [1, 64])
@pytest.mark.parametrize("option", ["residual", "norm", "norm, gated"])
def test_linear_compiled_is_one_launch_that_does_not_spill(option, num_tokens, gpu):
    arguments = make_linear_arguments(option, "bfloat16", num_tokens, 4096, 2048)
    gated = arguments["gated"]
    shapes = [
        None if arguments[name] is None else jax.ShapeDtypeStruct(arguments[name].shape, jnp.bfloat16)
        for name in ("x", "weight", "norm", "residual")
    ]
    program = compile_for(
        lambda x, weight, norm, residual: linear(x, weight, norm=norm, residual=residual, gated=gated),
        *shapes,
        gpu=gpu,
    )
    [launch] = program.launches
    assert launch.name == "linear"
    assert launch.kernel is not None
    assert launch.kernel.spill_bytes == 0
    assert launch.blocks_per_sm(GPUS[gpu]) >= 1
    assert (program.copies(0), program.temp_bytes) == ([], 0)
