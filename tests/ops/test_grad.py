"""`jax.grad` through every backend against JAX's own derivative of dense attention in float64."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxpaged as jp
from jaxpaged.testing import TOLERANCE, Case, assert_attention_close, make_case

LENGTHS = (0, 1, 3, 4, 5, 17, 40)
RAGGED = ((0, 1, 9, 30, 33), (0, 1, 4, 30, 1))
SINKS = np.linspace(-1.0, 2.0, 4).astype(np.float32)
SLOPES = np.array([0.5, 0.25, 0.1, 0.0], np.float32)
OPTIONS = {
    "plain": {},
    "soft_cap": {"logits_soft_cap": 2.0},
    "window": {"sliding_window": 5},
    "not_causal": {"causal": False, "sm_scale": 0.3},
    "all": {"sm_scale": 0.4, "logits_soft_cap": 3.0, "sliding_window": 9, "sinks": SINKS, "alibi_slopes": SLOPES},
}
DIFFERENTIABLE = ("q", "k_pages", "v_pages", "sinks", "alibi_slopes")


def cotangents(case: Case, seed=0):
    rng = np.random.default_rng(seed)
    dout, dlse = rng.standard_normal(case.q.shape), rng.standard_normal(case.q.shape[:2])
    return dout.astype(case.q.dtype), dlse.astype(np.float32)


def loss_of(backend, dout, dlse, wanted, static):
    """A loss of both outputs, as a function of what is wanted and of the other arrays."""

    def loss(wanted, others):
        out, lse = jp.paged_attention(**wanted, **others, **static, backend=backend, return_lse=True)
        # Rows without keys have lse -inf: what a caller makes of it must not come back as NaN.
        return jnp.sum(out.astype(jnp.float32) * dout) + jnp.sum(jnp.where(jnp.isneginf(lse), 0, lse) * dlse)

    return loss


def gradients(case: Case, backend, wanted=None, seed=0, wrap=lambda f: f, **options):
    """Gradients by name, of all that can be differentiated, or of what is wanted."""
    arrays = case.arguments() | {k: jnp.asarray(x) for k, x in options.items() if hasattr(x, "shape")}
    static = {k: x for k, x in options.items() if not hasattr(x, "shape")}
    static |= {
        k: arrays.pop(k) for k in ("layer", "cu_q_lens", "k_scale", "v_scale") if not hasattr(arrays[k], "shape")
    }
    names = [k for k in DIFFERENTIABLE if k in arrays] if wanted is None else wanted
    dout, dlse = (jnp.asarray(x, jnp.float32) for x in cotangents(case, seed))
    loss = loss_of(backend, dout, dlse, names, static)
    step = jax.jit(jax.grad(wrap(loss)), compiler_options={"xla_backend_optimization_level": 0})
    return step({k: arrays[k] for k in names}, {k: x for k, x in arrays.items() if k not in names})


def dense_loss(arrays, dout, dlse, seen, q_per_kv, sm_scale, logits_soft_cap, distance):
    """Attention as its definition reads, over sequences padded to one length; `seen` is [seqs, queries, keys]."""
    k, v = (jnp.repeat(arrays[name], q_per_kv, axis=2) for name in ("k", "v"))
    logits = jnp.einsum("sqhd,skhd->shqk", arrays["q"], k, precision="highest") * sm_scale
    if logits_soft_cap is not None:
        logits = logits_soft_cap * jnp.tanh(logits / logits_soft_cap)
    if "alibi_slopes" in arrays:
        logits += arrays["alibi_slopes"][:, None, None] * distance[:, None]
    logits = jnp.where(seen[:, None], logits, -1e300)
    if "sinks" in arrays:
        sink = jnp.broadcast_to(arrays["sinks"][:, None, None], (*logits.shape[:3], 1))
        logits, v = jnp.concatenate([logits, sink], axis=3), jnp.pad(v, ((0, 0), (0, 1), (0, 0), (0, 0)))
    p = jax.nn.softmax(logits, axis=3)
    out = jnp.einsum("shqk,skhd->sqhd", p, v, precision="highest")
    lse = jax.nn.logsumexp(logits, axis=3).swapaxes(1, 2)
    live = seen.any(2)[..., None]
    return jnp.sum(jnp.where(live[..., None], out * dout, 0)) + jnp.sum(jnp.where(live, lse * dlse, 0))


def expected_gradients(
    case: Case,
    seed=0,
    *,
    sm_scale=None,
    logits_soft_cap=None,
    sliding_window=None,
    causal=True,
    tree_mask=None,
    **vectors,
):
    """In float64, in the shapes of the arguments: zero in every slot without an owner."""
    num_tokens, num_q_heads, head_dim = case.q.shape
    cu = np.arange(len(case.seq_lens) + 1) if case.cu_q_lens is None else case.cu_q_lens
    num_new = np.diff(cu) * (case.seq_lens > 0)
    longest, width = max(case.seq_lens), max(num_new)
    num_seqs, num_kv_heads = len(num_new), case.k_pages.shape[2]
    key, query = np.arange(longest), np.arange(width)
    position = (case.seq_lens - num_new)[:, None] + query  # [seqs, queries]
    seen = (key < case.seq_lens[:, None, None]) & (query < num_new[:, None])[..., None]
    distance = key - position[..., None]
    if causal:
        seen &= distance <= 0
    if sliding_window is not None:
        seen &= distance > -int(sliding_window)
    arrays = {name: np.zeros((num_seqs, longest, num_kv_heads, head_dim)) for name in ("k", "v")}
    arrays["q"] = np.zeros((num_seqs, width, num_q_heads, head_dim))
    dout, dlse = np.zeros(arrays["q"].shape), np.zeros(arrays["q"].shape[:3])
    packed_dout, packed_dlse = cotangents(case, seed)
    for i, (n, m) in enumerate(zip(case.seq_lens, num_new, strict=True)):
        arrays["k"][i, :n], arrays["v"][i, :n] = case.dense_k[i], case.dense_v[i]
        mine = slice(cu[i], cu[i] + m)
        arrays["q"][i, :m], dout[i, :m], dlse[i, :m] = case.q[mine], packed_dout[mine], packed_dlse[mine]
        if tree_mask is not None:
            seen[i, :m, n - m : n] &= tree_mask[mine, :m]
    arrays |= {name: np.asarray(x, np.float64) for name, x in vectors.items()}
    with jax.enable_x64(True):
        loss = jax.jit(jax.grad(dense_loss), static_argnums=(4, 5, 6))
        scale = head_dim**-0.5 if sm_scale is None else sm_scale
        grads = loss(arrays, dout, dlse, seen, num_q_heads // num_kv_heads, scale, logits_soft_cap, distance)
    grads = {name: np.asarray(x) for name, x in grads.items()}
    expected = {name: grads[name] for name in vectors}
    expected["q"], expected["k_pages"], expected["v_pages"] = (
        np.zeros(x.shape) for x in (case.q, case.k_pages, case.v_pages)
    )
    for i, (n, m) in enumerate(zip(case.seq_lens, num_new, strict=True)):
        expected["q"][cu[i] : cu[i] + m] = grads["q"][i, :m]
        page_size = case.k_pages.shape[3]
        page, offset = case.page_table[i, np.arange(n) // page_size], np.arange(n) % page_size
        for name in ("k", "v"):
            np.add.at(expected[f"{name}_pages"][case.layer], (page, slice(None), offset), grads[name][i, :n])
    return expected


def check(case: Case, backend, wanted=None, wrap=lambda f: f, **options):
    actual = gradients(case, backend, wanted, wrap=wrap, **options)
    expected = expected_gradients(case, **options)
    assert set(actual) == set(wanted or expected)
    for name, x in actual.items():
        assert np.isfinite(np.asarray(x, np.float32)).all(), name
        tolerance = TOLERANCE[jnp.dtype(case.q.dtype).name]
        assert_attention_close(x, expected[name], tolerance=tolerance)
    return actual


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("lengths", [(LENGTHS, None), RAGGED], ids=["decode", "ragged"])
def test_grad_by_xla_equals_float64(lengths, option):
    check(make_case(*lengths, padding_tokens=0 if lengths[1] is None else 3, seed=1), "xla", **OPTIONS[option])
