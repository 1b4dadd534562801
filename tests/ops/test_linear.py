"""Matrix products with what stands around them: against float64, in the checked IR, and compiled for four GPUs."""

from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

from jaxpaged.aot import GPUS, compile_for
from jaxpaged.ops import linear as linear_module
from jaxpaged.ops.linear import MAX_TOKENS, linear, rms_norm
from tests.test_aot import needs_plugin

TOLERANCE = {"float32": 2e-6, "float16": 2e-3, "bfloat16": 1.6e-2}  # of the largest output
EPS = 0.5  # large, so that leaving it out shows
OPTIONS = {
    "plain": (False, False, False),
    "norm": (True, False, False),
    "residual": (False, False, True),
    "norm, gated": (True, True, False),
    "all": (True, True, True),
}
Arguments = dict[str, Any]


def make_arguments(option: str, dtype="bfloat16", num_tokens=5, num_in=300, num_out=70) -> Arguments:
    has_norm, gated, has_residual = OPTIONS[option]
    rng = np.random.default_rng(num_tokens + num_in)

    def array(*shape, scale=1.0):
        return jnp.asarray(rng.standard_normal(shape) * scale, dtype)

    return {
        "x": array(num_tokens, num_in),
        "weight": array(num_out * (1 + gated), num_in, scale=2 * num_in**-0.5),
        "norm": array(num_in) if has_norm else None,
        "residual": array(num_tokens, num_out) if has_residual else None,
        "eps": EPS,
        "gated": gated,
    }


def oracle(x, weight, norm, residual, eps, gated) -> np.ndarray:
    x, weight = np.asarray(x, np.float64), np.asarray(weight, np.float64)
    if norm is not None:
        x = np.asarray(norm, np.float64) * x / np.sqrt((x * x).mean(-1, keepdims=True) + eps)
    out = x @ weight.T
    if gated:
        gate, up = np.split(out, 2, axis=1)
        out = gate * (1 + np.tanh(gate / 2)) / 2 * up
    return out if residual is None else out + np.asarray(residual, np.float64)


def assert_close(got, arguments: Arguments) -> None:
    x = arguments["x"]
    expected = oracle(**arguments)
    assert got.dtype == x.dtype
    np.testing.assert_allclose(
        np.asarray(got, np.float64), expected, rtol=0, atol=TOLERANCE[x.dtype.name] * np.abs(expected).max()
    )


def check(option: str, dtype: str, backend: str) -> None:
    arguments = make_arguments(option, dtype)
    # Compiled afresh: a mutant's trace must not be another's.
    assert_close(
        jax.jit(lambda arrays: linear_module.linear(**arrays, eps=EPS, gated=arguments["gated"], backend=backend))(
            {name: arguments[name] for name in ("x", "weight", "norm", "residual")}
        ),
        arguments,
    )


@pytest.mark.parametrize(
    ("dtype", "backend"), [*((dtype, "xla") for dtype in TOLERANCE), ("bfloat16", "interpret"), ("bfloat16", "auto")]
)
@pytest.mark.parametrize("option", OPTIONS)
def test_linear_equals_float64_oracle(option, dtype, backend):
    check(option, dtype, backend)


@pytest.mark.parametrize(("num_tokens", "num_in", "num_out"), [(1, 128, 32), (64, 129, 33), (17, 127, 1), (16, 7, 200)])
def test_linear_of_any_shape_equals_float64_oracle(num_tokens, num_in, num_out):
    arguments = make_arguments("all", "bfloat16", num_tokens, num_in, num_out)
    assert_close(linear(**arguments, backend="interpret"), arguments)


@pytest.mark.parametrize(("dtype", "largest", "backend"), [("float16", 6e4, "auto"), ("bfloat16", 1e18, "interpret")])
def test_linear_of_large_rows_does_not_overflow(dtype, largest, backend):
    arguments = make_arguments("norm", dtype)
    arguments["x"], arguments["norm"] = arguments["x"] / 5 * largest, 2 * arguments["norm"]
    assert_close(linear(**arguments, backend=backend), arguments)


def test_linear_rounds_the_product_before_it_adds_the_residual():
    arguments = {"x": jnp.full((1, 2), 1 + 2**-7, jnp.bfloat16), "residual": jnp.full((1, 1), -2.0, jnp.bfloat16)}
    arguments["weight"] = jnp.asarray([[1.0, 1 + 2**-7]], jnp.bfloat16)
    # The product is 2 + 3 * 2^-7 + 2^-14, of which bfloat16 keeps 2 + 2^-5: 2^-5 is left.
    for backend in ("interpret", "xla"):
        assert float(linear(**arguments, backend=backend)[0, 0]) == 2**-5


def test_linear_gate_of_any_size_is_finite():
    arguments = make_arguments("all", "bfloat16")
    arguments["x"] *= 1000
    arguments["norm"] = None
    assert_close(linear(**arguments, backend="interpret"), arguments)


@pytest.mark.parametrize("option", OPTIONS)
def test_linear_kernel_reads_each_weight_once_and_nothing_out_of_bounds(interpreter, option):
    arguments = make_arguments(option)
    eps, gated = arguments.pop("eps"), arguments.pop("gated")
    arrays = [arguments[name] for name in ("x", "weight", "norm", "residual")]
    result = interpreter.run_function(lambda *arrays: linear_module._by_triton(eps, gated, False, *arrays), *arrays)
    assert result.problems == []
    [run] = result.runs
    assert run.report.hazards == []
    traffic = run.report.traffic
    assert np.sum(traffic["weight_ref"].loaded) == arguments["weight"].nbytes
    assert np.sum(traffic["out_ref"].stored) == 2 * 5 * 70
    [out] = jax.tree.leaves(result.outputs)
    assert_close(jnp.asarray(out), arguments | {"eps": eps, "gated": gated})


REFUSED = {
    (MAX_TOKENS + 1, "bfloat16"): f"it takes 1 to {MAX_TOKENS} tokens; got 65",
    (0, "bfloat16"): f"it takes 1 to {MAX_TOKENS} tokens; got 0",
    (4, "float32"): "it multiplies bfloat16; got float32",
    (4, "float16"): "it multiplies bfloat16; got float16",
}


@pytest.mark.parametrize(("num_tokens", "dtype"), REFUSED)
def test_linear_of_what_the_kernel_does_not_take_is_refused_by_name_and_xla_by_auto(num_tokens, dtype):
    arguments = make_arguments("norm", dtype, num_tokens)
    for backend in ("triton", "interpret"):
        with pytest.raises(NotImplementedError) as info:
            linear(**arguments, backend=backend)
        assert str(info.value) == f"`backend='{backend}'` cannot run this call: {REFUSED[num_tokens, dtype]}"
    chex.assert_trees_all_equal(linear(**arguments, backend="auto"), linear(**arguments, backend="xla"))


def test_linear_without_pallas_triton_is_refused_by_name_and_xla_by_auto(monkeypatch):
    arguments = make_arguments("norm")
    expected = linear(**arguments, backend="xla")
    monkeypatch.setattr(linear_module, "plgpu", None)
    with pytest.raises(NotImplementedError, match="has no Pallas Triton backend"):
        linear(**arguments, backend="triton")
    chex.assert_trees_all_equal(linear(**arguments), expected)


@pytest.mark.parametrize("backend", ["interpret", "auto"])
def test_linear_differentiates_as_the_formula(backend):
    arguments = make_arguments("all")

    def loss(x, weight, norm, residual, backend):
        return jnp.sum(linear(x, weight, norm=norm, residual=residual, gated=True, backend=backend) ** 2)

    arrays = [arguments[name] for name in ("x", "weight", "norm", "residual")]
    gradient = jax.grad(loss, argnums=(0, 1, 2, 3))
    got, expected = gradient(*arrays, backend), gradient(*arrays, "xla")
    for x, y in zip(got, expected, strict=True):
        assert np.count_nonzero(y)
        scale = np.abs(np.asarray(y, np.float64)).max()
        # The cotangent is 2 * out, which the kernel rounds less often than the formula.
        np.testing.assert_allclose(np.asarray(x, np.float64), np.asarray(y, np.float64), rtol=0, atol=2e-2 * scale)


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
        linear(**(make_arguments("all") | changed))
    assert message in str(info.value)


def test_linear_by_auto_lowers_to_the_kernel_on_cuda_and_to_the_formula_on_a_cpu():
    arguments = make_arguments("norm")
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
    arguments = make_arguments(option, "bfloat16", num_tokens, 4096, 2048)
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
