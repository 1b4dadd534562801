import jax.numpy as jnp
import pytest

from jaxpaged.ops.triton_util import ceil_div


@pytest.mark.parametrize(("a", "expected"), [(0, 0), (1, 1), (4, 1), (5, 2)])
def test_ceil_div_rounds_up_in_the_dtype_of_the_first(a, expected):
    assert ceil_div(jnp.int32(a), 4) == expected
    assert ceil_div(jnp.int16(a), 4).dtype == jnp.int16
