import chex
import jax.numpy as jnp
import numpy as np
import pytest

import jaxpaged as jp
from jaxpaged.ops.attention.merge import sum_dtype


def attend(logits, values):
    """Softmax attention in float64 over the last axis of `logits`; values [num_keys, head_dim]."""
    if logits.shape[-1] == 0:
        return np.zeros((*logits.shape[:-1], values.shape[-1])), np.full(logits.shape[:-1], -np.inf)
    lse = np.logaddexp.reduce(logits, axis=-1)
    return np.exp(logits - lse[..., None]) @ values, lse


def parts(*sizes, scale=1.0, seed=0):
    rng = np.random.default_rng(seed)
    logits, values = scale * rng.standard_normal((3, sum(sizes))), rng.standard_normal((sum(sizes), 8))
    cuts = np.cumsum(sizes)[:-1]
    pieces = zip(np.split(logits, cuts, axis=1), np.split(values, cuts), strict=True)
    return attend(logits, values), [tuple(jnp.float32(x) for x in attend(*piece)) for piece in pieces]


@pytest.mark.parametrize("scale", [1.0, 200.0])
def test_merge_attention_of_two_parts_equals_the_whole(scale):
    whole, (a, b) = parts(5, 9, scale=scale)
    chex.assert_trees_all_close(jp.merge_attention(*a, *b), tuple(jnp.float32(x) for x in whole), rtol=3e-6, atol=3e-6)


def test_merge_attention_is_associative():
    _, (a, b, c) = parts(3, 4, 6, seed=1)
    left = jp.merge_attention(*jp.merge_attention(*a, *b), *c)
    right = jp.merge_attention(*a, *jp.merge_attention(*b, *c))
    chex.assert_trees_all_close(left, right, rtol=2e-6, atol=2e-6)


def test_merge_attention_with_the_empty_part_changes_nothing():
    _, (a, empty) = parts(5, 0)
    chex.assert_trees_all_equal(jp.merge_attention(*a, *empty), a)
    chex.assert_trees_all_equal(jp.merge_attention(*empty, *a), a)
    chex.assert_trees_all_equal(jp.merge_attention(*empty, *empty), empty)


def test_merge_attention_with_a_part_of_no_weight_changes_nothing():
    _, (a, (out_b, lse_b)) = parts(5, 9)
    out, lse = jp.merge_attention(a[0], a[1] + 300, out_b, lse_b - 300)
    chex.assert_trees_all_equal((out, lse), (a[0], a[1] + 300))


def test_sums_are_of_float64_where_values_are():
    assert [sum_dtype(dtype) for dtype in (jnp.float64, jnp.float32, jnp.bfloat16)] == [
        jnp.float64,
        jnp.float32,
        jnp.float32,
    ]


def test_merge_attention_keeps_the_dtype_of_the_output():
    _, ((out_a, lse_a), (out_b, lse_b)) = parts(3, 4)
    out, lse = jp.merge_attention(out_a.astype(jnp.bfloat16), lse_a, out_b.astype(jnp.bfloat16), lse_b)
    assert out.dtype == jnp.bfloat16
    assert lse.dtype == jnp.float32


def test_merge_attention_of_shapes_that_do_not_fit_is_refused():
    _, ((out_a, lse_a), (out_b, lse_b)) = parts(3, 4)
    with pytest.raises(ValueError, match=r"`out_a` and `out_b` must have one shape.*got \(3, 8\), \(2, 8\)"):
        jp.merge_attention(out_a, lse_a, out_b[:2], lse_b)
    with pytest.raises(ValueError, match=r"`lse_a` and `lse_b` that shape without.*got .* \(2,\) and \(3,\)"):
        jp.merge_attention(out_a, lse_a[:2], out_b, lse_b)
    with pytest.raises(ValueError, match=r"`lse_a` and `lse_b` that shape without.*got .* \(3,\) and \(2,\)"):
        jp.merge_attention(out_a, lse_a, out_b, lse_b[:2])
    with pytest.raises(TypeError, match="`lse_b` must be an array; got list"):
        jp.merge_attention(out_a, lse_a, out_b, [0.0])
