"""Whole functions: which calls run, in which order, with what; and what is refused by name."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxpaged.inspect import ttir
from jaxpaged.inspect.aot import lower_for
from tests.inspect.ttir_kernels import ROWS, lowered_call, pallas, struct


def double(x):
    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[...] * 2

    return pallas(kernel, jax.ShapeDtypeStruct(x.shape, x.dtype))(x)


@jax.custom_vjp
def doubled(x):
    return double(x)


doubled.defvjp(lambda x: (double(x), None), lambda _, g: (double(g),))


@jax.custom_jvp
def doubled_forward(x):
    return double(x)


doubled_forward.defjvps(lambda t, _, x: 2 * t)


@pytest.mark.parametrize(
    ("f", "want", "calls"),
    [
        (lambda x: jax.jit(double)(x) + 1, lambda x: 2 * x + 1, 1),
        (lambda x: jax.vmap(double)(x), lambda x: 2 * x, 1),
        (lambda x: double(double(x)), lambda x: 4 * x, 2),
        (lambda x: jax.checkpoint(lambda x: jnp.sin(double(x)))(x), lambda x: jnp.sin(2 * x), 1),
        (doubled_forward, lambda x: 2 * x, 1),
        (doubled, lambda x: 2 * x, 1),
        (jax.grad(lambda x: jnp.sin(doubled(x)).sum()), lambda x: 2 * jnp.cos(2 * x), 2),
        (
            lambda x: {"a": [double(x)], "b": double(x.astype(jnp.bfloat16))},
            lambda x: {"a": [2 * x], "b": 2 * x.astype(jnp.bfloat16)},
            2,
        ),
    ],
    ids=["jit", "vmap", "twice", "checkpoint", "custom_jvp", "custom_vjp", "grad", "tree"],
)
def test_run_function_returns_what_the_function_does(f, want, calls):
    result = ttir.run_function(f, ROWS)
    assert len(result.runs) == calls
    assert result.problems == []
    assert jax.tree.structure(result.outputs) == jax.tree.structure(want(ROWS))
    for x, y in zip(jax.tree.leaves(result.outputs), jax.tree.leaves(want(ROWS)), strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_allclose(np.asarray(x, np.float32), np.asarray(y, np.float32), rtol=1e-5, atol=1e-6)


def test_run_function_collects_the_problems_of_each_call():
    def copy_first(x_ref, o_ref):
        o_ref[0, :] = x_ref[0, :]

    result = ttir.run_function(lambda x: (double(x), pallas(copy_first, struct(8, 8))(x)), ROWS)
    assert result.runs[0].report.problems == []
    [problem] = result.problems
    assert problem == "unwritten: kernel copy_first, operand o_ref float32[8, 8], element [1, 0], 56 element(s)"
    assert f"PROBLEM {problem}" in str(result.runs[1].report)


@pytest.mark.parametrize(
    ("f", "message"),
    [
        (lambda x: lax.scan(lambda c, r: (double(c) + r, c), jnp.zeros(8), x), "a Triton call inside scan"),
        (lambda x: lax.cond(x[0, 0] > 0, double, lambda x: x - 1, x), "a Triton call inside cond"),
    ],
)
def test_run_function_with_a_call_in_a_loop_or_branch_is_refused(f, message):
    with pytest.raises(ttir.UnsupportedOp, match=message):
        ttir.run_function(f, ROWS)


def test_run_function_evaluates_loops_without_calls():
    result = ttir.run_function(lambda x: double(lax.fori_loop(0, 3, lambda i, c: c + i, x)), ROWS)
    np.testing.assert_array_equal(result.outputs, 2 * (ROWS + 3))


def test_run_function_with_marks_for_an_unknown_kernel_raises():
    with pytest.raises(ValueError, match=r"`uninitialised` must name kernels that run \(kernel\); got kernal\."):
        ttir.run_function(double, ROWS, uninitialised={"kernal": {0: np.zeros((8, 8), bool)}})


def test_run_with_wrong_inputs_raises():
    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[...]

    call, x = lowered_call(kernel, struct(8, 8), ROWS), np.asarray(ROWS)
    with pytest.raises(ValueError, match=r"input 0 of kernel must be float32\[8, 8\]; got float64\[8, 8\]\."):
        ttir.run(call, x.astype(np.float64))
    with pytest.raises(ValueError, match=r"input 0 of kernel must be float32\[8, 8\]; got float32\[4, 8\]\."):
        ttir.run(call, x[:4])
    with pytest.raises(ValueError, match=r"`inputs` of kernel must be 1 arrays; got 2\."):
        ttir.run(call, x, x)
    with pytest.raises(ValueError, match=r"`uninitialised` must name inputs 0 to 0; got \[1\]\."):
        ttir.run(call, x, uninitialised={1: np.zeros((8, 8), bool)})


def test_run_leaves_its_inputs_as_they_are():
    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[...] + 1

    x = np.asarray(ROWS).copy()
    call = lowered_call(kernel, struct(8, 8), ROWS, input_output_aliases={0: 0})
    [out] = ttir.run(call, x)
    np.testing.assert_array_equal(out, x + 1)
    np.testing.assert_array_equal(x, ROWS)


def test_find_triton_calls_reads_grids_and_operands_of_a_whole_function():
    def add(x_ref, y_ref, o_ref):
        o_ref[...] = x_ref[...] + y_ref[...].astype(jnp.float32)

    def f(x):
        return pallas(add, struct(8, 8), grid=(2, 3, 4), input_output_aliases={0: 0})(double(x), x.astype(jnp.bfloat16))

    first, second = ttir.find_triton_calls(lower_for(f, ROWS))
    assert (first.name, first.grid, second.name, second.grid) == ("kernel", (1, 1, 1), "add", (2, 3, 4))
    assert second.operands == [((8, 8), np.dtype(np.float32)), ((8, 8), np.dtype(jnp.bfloat16))]
    assert second.results == [((8, 8), np.dtype(np.float32))]
    assert second.aliases == {0: 0}
    assert second.names == ["in0", "in1", "out0"]
    assert "tt.func" in second.ir
