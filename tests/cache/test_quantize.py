"""One byte a value: rounding, clipping, scales."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpaged.cache.quantize import MAX_VALUE, dequantize, is_quantized, layer_scale, measure_scale, quantize


def numbers(dtype) -> np.ndarray:
    """Every finite number of a one-byte dtype, sorted, in float64."""
    values = np.arange(256, dtype=np.uint8).view(jnp.dtype(dtype)).astype(np.float64)
    # -128 is left out: a scale that maps it would have to map 128, which int8 lacks.
    values = values[np.isfinite(values) & (np.abs(values) <= MAX_VALUE[dtype])]
    return np.unique(values)


@pytest.mark.parametrize("dtype", MAX_VALUE)
def test_max_value_is_the_largest_number(dtype):
    largest = jnp.finfo(dtype).max if dtype != "int8" else jnp.iinfo(dtype).max
    assert MAX_VALUE[dtype] == float(largest)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_is_quantized_of_a_wider_dtype_is_false(dtype):
    assert not is_quantized(dtype)


@pytest.mark.parametrize("dtype", MAX_VALUE)
@pytest.mark.parametrize("jitted", [False, True])
def test_quantize_takes_the_nearest_number(dtype, jitted):
    """Of values between all numbers of the dtype, and of the numbers themselves exactly."""
    grid = numbers(dtype)
    x = np.random.default_rng(0).uniform(-MAX_VALUE[dtype], MAX_VALUE[dtype], 4000).astype(np.float32)
    x = np.concatenate([x, x / MAX_VALUE[dtype], grid.astype(np.float32)])[None]
    function = jax.jit(quantize, static_argnums=2) if jitted else quantize
    got = np.asarray(function(jnp.asarray(x), jnp.ones(1), dtype)).astype(np.float64)
    # Within a rounding of the best, where JAX takes fp8 by way of a narrow type.
    nearest = np.abs(x[0][:, None] - grid).min(1)
    step = np.diff(grid)[np.clip(np.searchsorted(grid, x[0]) - 1, 0, len(grid) - 2)]
    np.testing.assert_array_less(np.abs(got[0] - x[0]), nearest + 1e-3 * step + 1e-30)
    np.testing.assert_array_equal(got[0, -len(grid) :], grid)


@pytest.mark.parametrize("dtype", MAX_VALUE)
def test_quantize_of_what_does_not_fit_gives_the_largest_number(dtype):
    x = jnp.array([[1e6, -1e6, 3.4e38, -3.4e38, np.inf, -np.inf, MAX_VALUE[dtype] * 1.03]], jnp.float32)
    got = quantize(x, jnp.ones(1), dtype).astype(jnp.float32)
    np.testing.assert_array_equal(np.abs(got), MAX_VALUE[dtype])
    np.testing.assert_array_equal(np.sign(got), np.sign(x))


@pytest.mark.parametrize("dtype", MAX_VALUE)
@pytest.mark.parametrize("magnitude", [1e-20, 1.0, 1e20])
def test_measure_scale_returns_the_largest_value_of_a_row_exactly(dtype, magnitude):
    x = jnp.asarray(np.random.default_rng(1).normal(size=(50, 3, 16)) * magnitude, jnp.float32)
    scale = measure_scale(x, dtype)
    assert scale.shape == (50, 3)
    assert scale.dtype == jnp.float32
    back = dequantize(quantize(x, scale, dtype), scale)
    top = np.argmax(np.abs(x), -1)[..., None]
    at_top = np.take_along_axis(np.asarray(back), top, -1), np.take_along_axis(np.asarray(x), top, -1)
    np.testing.assert_allclose(*at_top, rtol=2e-7)
    # Half a step: of int8 everywhere the same, of fp8 a share of the value, down to its smallest numbers.
    half = {"int8": (0.0, 0.5), "float8_e4m3fn": (2**-4, 2**-10), "float8_e5m2": (2**-3, 2**-17)}[dtype]
    allowed = half[0] * np.abs(x) + half[1] * np.asarray(scale)[..., None]
    assert np.all(np.abs(back - x) <= allowed * (1 + 1e-3))


@pytest.mark.parametrize("dtype", MAX_VALUE)
def test_quantize_of_a_row_of_zeros_gives_zeros(dtype):
    x = jnp.zeros((2, 8), jnp.bfloat16)
    scale = measure_scale(x, dtype)
    np.testing.assert_array_equal(scale, 0)
    np.testing.assert_array_equal(dequantize(quantize(x, scale, dtype), scale), 0)


def test_layer_scale_of_one_row_serves_all_layers():
    np.testing.assert_array_equal(layer_scale(jnp.array([[1.0, 2.0]]), 5), [1, 2])
    np.testing.assert_array_equal(layer_scale(jnp.array([[1.0, 2.0], [3.0, 4.0]]), jnp.int32(1)), [3, 4])
