"""`LinearConformance`: what any backend of `linear` must pass."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.typing import DTypeLike

from jaxpaged.ops.linear import LINEAR, linear
from jaxpaged.testing.conformance.calls import (
    CONFIGURATIONS,
    assert_refused,
    jit,
    lower_strictly,
    slow,
)

TOLERANCE = {"float32": 2e-6, "float16": 2e-3, "bfloat16": 1.6e-2}
"""Largest error of an output, as a share of the largest of all outputs."""

OPTIONS = {
    "plain": (False, False, False),
    "norm": (True, False, False),
    "residual": (False, False, True),
    "norm, gated": (True, True, False),
    "all": (True, True, True),
}
"""Whether there is a norm, a gate and a residual."""

_EPS = 0.5  # large, so that leaving it out shows
_ARRAYS = ("x", "weight", "norm", "residual")


def make_linear_arguments(
    option: str, dtype: DTypeLike = "bfloat16", num_tokens: int = 5, num_in: int = 300, num_out: int = 70
) -> dict[str, Any]:
    """Draws arguments of `linear` with outputs of about 1 before the residual."""
    has_norm, gated, has_residual = OPTIONS[option]
    rng = np.random.default_rng(num_tokens + num_in)

    def array(*shape: int, scale: float = 1.0) -> jax.Array:
        return jnp.asarray(rng.standard_normal(shape) * scale, dtype)

    return {
        "x": array(num_tokens, num_in),
        "weight": array(num_out * (1 + gated), num_in, scale=2 * num_in**-0.5),
        "norm": array(num_in) if has_norm else None,
        "residual": array(num_tokens, num_out) if has_residual else None,
        "eps": _EPS,
        "gated": gated,
    }


def linear_oracle(x: Any, weight: Any, norm: Any, residual: Any, eps: float, gated: bool) -> np.ndarray:
    """The product with all that stands around it, in float64."""
    x, weight = np.asarray(x, np.float64), np.asarray(weight, np.float64)
    if norm is not None:
        x = np.asarray(norm, np.float64) * x / np.sqrt((x * x).mean(-1, keepdims=True) + eps)
    out = x @ weight.T
    if gated:
        gate, up = np.split(out, 2, axis=1)
        out = gate * (1 + np.tanh(gate / 2)) / 2 * up
    return out if residual is None else out + np.asarray(residual, np.float64)


def assert_linear_close(actual: jax.Array, arguments: dict[str, Any]) -> None:
    """Asserts that an output has the dtype of `x` and is the oracle's, within the tolerance of that dtype."""
    x = arguments["x"]
    expected = linear_oracle(**arguments)
    assert actual.dtype == x.dtype
    allowed = TOLERANCE[x.dtype.name] * np.abs(expected).max(initial=0)
    np.testing.assert_allclose(np.asarray(actual, np.float64), expected, rtol=0, atol=allowed)


class LinearConformance:
    """What any backend of `linear` must pass; a subclass in a test module names the backend.

    Attributes:
        backend: Name under which it is registered. What it cannot run, by its own `why_unsupported`, it must refuse
            with that reason.
    """

    backend: str

    def prepare(self, arguments: dict[str, Any]) -> tuple[Callable, dict[str, Any]]:
        """A call of `linear` and its arrays. Skips the test where the backend refuses them by name."""
        arrays = {name: arguments[name] for name in _ARRAYS}
        static = {name: x for name, x in arguments.items() if name not in arrays}

        def call(arrays):
            return linear(**arrays, **static, backend=self.backend)

        if reason := LINEAR.why_unsupported(*arguments.values(), backend=self.backend):
            assert_refused(self.backend, reason, call, arrays)
            pytest.skip(f"refused by name: {reason}")
        return call, arrays

    def check(self, arguments: dict[str, Any]) -> None:
        """The answer is the oracle's."""
        call, arrays = self.prepare(arguments)
        assert_linear_close(jit(call)(arrays), arguments)

    @pytest.mark.parametrize("configuration", ["default", "x64"])
    @pytest.mark.parametrize("dtype", TOLERANCE)
    @pytest.mark.parametrize("option", ["all", *slow("plain", "norm", "residual", "norm, gated")])
    def test_product_equals_float64(self, option, dtype, configuration):
        """With and without norm, gate and residual."""
        with CONFIGURATIONS[configuration]():
            self.check(make_linear_arguments(option, dtype))

    @pytest.mark.parametrize("dtype", TOLERANCE)
    def test_strict_promotion_refuses_nothing(self, dtype):
        """A user may forbid JAX to promote dtypes or ranks."""
        call, arrays = self.prepare(make_linear_arguments("all", dtype))
        lower_strictly(jit(call), arrays)

    @pytest.mark.parametrize(
        ("num_tokens", "num_in", "num_out"), [(1, 128, 32), (17, 127, 1), *slow((64, 129, 33), (16, 7, 200))]
    )
    def test_any_shape_equals_float64(self, num_tokens, num_in, num_out):
        """Sizes beside the tiles of a kernel."""
        self.check(make_linear_arguments("all", "bfloat16", num_tokens, num_in, num_out))

    def test_gate_of_any_size_is_finite(self):
        """e^-x of a large gate overflows; its share of the product does not."""
        arguments = make_linear_arguments("all")
        self.check(arguments | {"x": arguments["x"] * 1000, "norm": None})

    @pytest.mark.parametrize(("dtype", "largest"), [("float16", 6e4), ("bfloat16", 1e18)])
    def test_large_rows_do_not_overflow(self, dtype, largest):
        """The norm's scale times `x` may be more than the dtype holds; the normed row is not."""
        arguments = make_linear_arguments("norm", dtype)
        self.check(arguments | {"x": arguments["x"] / 5 * largest, "norm": 2 * arguments["norm"]})

    def test_product_is_rounded_before_the_residual_is_added(self):
        """As where the two are separate operations."""
        one = np.float32(1)
        arrays = {
            "x": jnp.full((1, 2), one + 2**-7, jnp.bfloat16),
            "weight": jnp.asarray([[one, one + 2**-7]], jnp.bfloat16),
            "norm": None,
            "residual": jnp.full((1, 1), -2 * one, jnp.bfloat16),
        }
        call, arrays = self.prepare(arrays | {"eps": _EPS, "gated": False})
        # The product is 2 + 3 * 2^-7 + 2^-14, of which bfloat16 keeps 2 + 2^-5: 2^-5 is left.
        assert float(jit(call)(arrays)[0, 0]) == 2**-5

    def test_gradients_equal_those_of_the_formula(self):
        """By all four arrays."""
        call, arrays = self.prepare(make_linear_arguments("all"))

        def loss(arrays):
            return jnp.sum(call(arrays).astype(jnp.float32) ** 2)

        def loss_of_formula(arrays):
            out = linear(**arrays, eps=_EPS, gated=True, backend="xla")
            return jnp.sum(out.astype(jnp.float32) ** 2)

        actual, expected = (jit(jax.grad(f))(arrays) for f in (loss, loss_of_formula))
        for name, x in expected.items():
            scale = np.abs(np.asarray(x, np.float64)).max()
            assert scale > 0
            # The cotangent is 2 * out, which a kernel rounds less often than the formula.
            np.testing.assert_allclose(
                np.asarray(actual[name], np.float64), np.asarray(x, np.float64), rtol=0, atol=2e-2 * scale
            )
