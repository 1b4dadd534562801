import jax.numpy as jnp
import numpy as np
import pytest

from jaxpaged.ops.rope_write import apply_rope, rope_angles, rope_frequencies


def test_apply_rope_turns_each_pair_as_a_complex_number():
    rng = np.random.default_rng(0)
    x, positions = rng.standard_normal((4, 3, 8)), np.array([0, 1, 7, 600])
    frequencies = 500.0 ** (-np.arange(4) / 4)
    turned = (x[..., :4] + 1j * x[..., 4:]) * np.exp(1j * positions[:, None] * frequencies)[:, None]
    cos, sin = rope_angles(jnp.asarray(positions), rope_frequencies(8, theta=500.0))
    got = apply_rope(jnp.float32(x), cos, sin)
    np.testing.assert_allclose(got, np.concatenate([turned.real, turned.imag], -1), rtol=0, atol=2e-4)
    np.testing.assert_array_equal(got[0], jnp.float32(x)[0])


def test_rope_frequencies_with_factors_divides_them():
    plain = rope_frequencies(8, theta=1e4)
    np.testing.assert_allclose(rope_frequencies(8, theta=1e4, factor=4.0), plain / 4, rtol=1e-6)
    factors = (1.0, 2.0, 8.0, 8.0)
    np.testing.assert_allclose(rope_frequencies(8, theta=1e4, freq_factors=factors), plain / factors, rtol=1e-6)


def test_rope_frequencies_of_an_odd_head_dim_is_refused():
    with pytest.raises(ValueError, match="`head_dim` must be even for rotary embedding; got 7"):
        rope_frequencies(7, theta=1e4)
