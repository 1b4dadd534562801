"""Every backend against the float64 oracle: options on and off, ragged lengths, poison in every slot without an owner."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxpaged as jp
from jaxpaged.testing import assert_attention_close, make_case, oracle

BACKENDS = ("reference", "xla", "interpret")
LENGTHS = (0, 1, 3, 4, 5, 17, 40)
SINKS = np.linspace(-1.0, 2.0, 4).astype(np.float32)
SLOPES = np.array([0.5, 0.25, 0.1, 0.0], np.float32)
OPTIONS = {
    "plain": {},
    "sm_scale": {"sm_scale": 0.3},
    "soft_cap": {"logits_soft_cap": 2.0},
    "window": {"sliding_window": 5},
    "window_1": {"sliding_window": 1},
    "sinks": {"sinks": SINKS},
    "alibi": {"alibi_slopes": SLOPES},
    "not_causal": {"causal": False},
    "all": {"sm_scale": 0.4, "logits_soft_cap": 3.0, "sliding_window": 9, "sinks": SINKS, "alibi_slopes": SLOPES},
}


def run(case, backend, **options):
    options = {k: jnp.asarray(v) if isinstance(v, np.ndarray) else v for k, v in options.items()}
    return jax.jit(
        lambda arrays: jp.paged_attention(**arrays, **static(case), **options, backend=backend, return_lse=True)
    )({k: v for k, v in case.arguments().items() if k != "layer"})


def static(case):
    return {"layer": case.layer}


def check(case, backend, **options):
    out, lse = run(case, backend, **options)
    expected_out, expected_lse = oracle(case, **options)
    assert out.dtype == case.q.dtype
    assert lse.dtype == jnp.float32
    assert_attention_close(out, expected_out)
    finite = np.isfinite(expected_lse)
    np.testing.assert_array_equal(np.isneginf(np.asarray(lse)), ~finite)
    tolerance = 1e-5 if out.dtype == jnp.float32 else 2e-2
    np.testing.assert_allclose(np.asarray(lse)[finite], expected_lse[finite], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("option", OPTIONS)
def test_paged_attention_decode_equals_oracle(backend, option):
    check(make_case(LENGTHS, seed=1), backend, **OPTIONS[option])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("option", OPTIONS)
def test_paged_attention_ragged_equals_oracle(backend, option):
    case = make_case((0, 1, 9, 30, 33), (0, 1, 4, 30, 1), padding_tokens=3, seed=2)
    check(case, backend, **OPTIONS[option])
