"""The registry that all operations share: named backends run or raise, `auto` follows the platform, one derivative."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpaged.config import BACKENDS
from jaxpaged.ops.attention import ATTENTION
from jaxpaged.ops.dispatch import Backend, Op, take_arrays
from jaxpaged.ops.linear import LINEAR
from jaxpaged.ops.rope_write import ROPE_AND_WRITE


def make_op(reason: str | None = None) -> Op:
    """x times a static factor: the formula, and a kernel that adds 100 to tell which ran."""
    return Op(
        Backend("plain", lambda x, factor: x * factor, is_differentiable=True),
        Backend("kernel", lambda x, factor: jax.lax.stop_gradient(x * factor + 100), lambda *_: reason),
        formula="plain",
        kernel="kernel",
    )


def test_op_by_name_runs_that_backend():
    op, x = make_op(), jnp.float32(3)
    assert op(x, 2, backend="plain") == 6
    assert op(x, 2, backend="kernel") == 106
    assert op(x, 2, backend="auto") == 6  # on a CPU


def test_op_of_an_unknown_name_lists_the_known():
    with pytest.raises(ValueError, match=r"`backend` must be one of auto, plain, kernel; got 'cuda'\."):
        make_op()(jnp.float32(3), 2, backend="cuda")


def test_op_that_a_named_backend_cannot_do_raises_with_the_reason_and_auto_takes_the_formula():
    op, x = make_op("it is too small"), jnp.float32(3)
    with pytest.raises(NotImplementedError, match="`backend='kernel'` cannot run this call: it is too small"):
        op(x, 2, backend="kernel")
    traced = jax.make_jaxpr(lambda x: op(x, 2, backend="auto"))(x)
    assert "100" not in str(traced)  # what the kernel cannot take is not even traced


def test_op_auto_holds_the_kernel_for_cuda_only():
    step = jax.jit(lambda x: make_op()(x, 2.0, backend="auto")).trace(jnp.float32(3))
    texts = {platform: step.lower(lowering_platforms=(platform,)).as_text() for platform in ("cpu", "cuda")}
    assert "1.000000e+02" in texts["cuda"]
    assert "1.000000e+02" not in texts["cpu"]


@pytest.mark.parametrize("backend", ["plain", "kernel", "auto"])
def test_op_differentiates_as_the_formula_on_every_backend(backend):
    assert jax.grad(lambda x: make_op()(x, 2.0, backend=backend))(jnp.float32(3)) == 2
    tangent = jax.jvp(lambda x: make_op()(x, 2.0, backend=backend), (jnp.float32(3),), (jnp.float32(5),))[1]
    assert tangent == 10


def test_op_with_a_rule_of_its_own_uses_it_but_for_what_jax_differentiates():
    calls = []

    def rule(run, *arguments):
        calls.append(arguments)
        return run(*arguments)

    op = Op(
        Backend("plain", lambda x: x, is_differentiable=True),
        Backend("kernel", lambda x: x),
        formula="plain",
        kernel="kernel",
        derivative=rule,
    )
    op(1, backend="plain")
    assert calls == []
    op(2, backend="kernel")
    assert calls == [(2,)]


def test_register_auto_is_refused():
    with pytest.raises(ValueError, match="`backend` must have a name of its own; got 'auto'"):
        make_op().register(Backend("auto", lambda x: x))


@pytest.mark.parametrize("op", [ATTENTION, ROPE_AND_WRITE, LINEAR])
def test_names_of_an_operation_are_those_of_the_command_line(op):
    assert op.names == BACKENDS


def test_take_arrays_leaves_what_is_static():
    arrays, rebuild = take_arrays({"a": np.ones(2), "b": 3, "c": (jnp.zeros(1), None, True)})
    assert len(arrays) == 2
    chex.assert_trees_all_equal(rebuild(["x", "y"]), {"a": "x", "b": 3, "c": ("y", None, True)})
