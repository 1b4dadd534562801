"""`jax.grad` through every backend against JAX's own derivative of dense attention in float64."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, Mesh, PartitionSpec, use_abstract_mesh

import jaxpaged as jp
from jaxpaged.ops.attention import ATTENTION
from jaxpaged.testing import Case, make_case
from jaxpaged.testing.conformance.calls import gradients
from jaxpaged.testing.gradients import assert_gradient_close, cotangents, expected_gradients

LENGTHS = (0, 1, 3, 4, 5, 17, 40)
RAGGED = ((0, 1, 9, 30, 33), (0, 1, 4, 30, 1))
SINKS = np.linspace(-1.0, 2.0, 4).astype(np.float32)
SLOPES = np.array([0.5, 0.25, 0.1, 0.0], np.float32)
OPTIONS = {
    "plain": {},
    "not_causal": {"causal": False, "sm_scale": 0.3, "sliding_window": 2**31 - 1},
    "all": {"sm_scale": 0.4, "logits_soft_cap": 3.0, "sliding_window": 9, "sinks": SINKS, "alibi_slopes": SLOPES},
}
# Most of a test would be LLVM.
compiled = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


def check(case: Case, backend, wanted=None, **options):
    actual = gradients(backend, case, options, wanted)
    expected = expected_gradients(case, **options)
    assert set(actual) == set(wanted or expected)
    for name, x in actual.items():
        assert np.isfinite(np.asarray(x, np.float32)).all(), name
        assert_gradient_close(x, expected[name], jnp.dtype(case.q.dtype))
    return actual


@pytest.mark.parametrize("option", [pytest.param("plain", marks=pytest.mark.slow), "all"])
def test_grad_of_a_decode_step_equals_float64(option):
    check(make_case(LENGTHS, seed=1), "xla", **OPTIONS[option])


@pytest.mark.parametrize(
    "option", [name if name == "all" else pytest.param(name, marks=pytest.mark.slow) for name in OPTIONS]
)
def test_grad_of_ragged_queries_equals_float64(option):
    check(make_case(*RAGGED, padding_tokens=3, seed=1), "xla", **OPTIONS[option])


@pytest.mark.slow
@pytest.mark.parametrize("window", [None, 20])
def test_grad_of_several_tiles_and_chunks_equals_float64(window):
    case = make_case((300, 70), (130, 66), num_q_heads=2, head_dim=8, page_size=16, seed=7)
    check(case, "xla", sliding_window=window)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "q_per_kv", "head_dim", "page_size", "q_lens"),
    [
        ("bfloat16", 1, 16, 1, None),
        ("float16", 3, 80, 3, (0, 1, 2, 17, 5)),
        ("bfloat16", 5, 16, 200, (0, 1, 2, 17, 5)),
    ],
)
def test_grad_of_shapes_and_dtypes_equals_float64(dtype, q_per_kv, head_dim, page_size, q_lens):
    shape = {"num_q_heads": 2 * q_per_kv, "num_kv_heads": 2, "head_dim": head_dim, "page_size": page_size}
    actual = check(make_case((0, 1, 16, 17, 40), q_lens, **shape, dtype=dtype, seed=5), "xla")
    chex.assert_type(list(actual.values()), jnp.dtype(dtype))


def test_grad_with_a_tree_mask_equals_float64():
    case = make_case((20, 9, 0), (7, 3, 0), seed=4)
    tree = np.random.default_rng(0).random((10, 7)) < 0.5
    token = np.r_[np.arange(7), np.arange(3)]
    tree[np.arange(10), token] = True
    check(case, "xla", tree_mask=tree)


@pytest.mark.parametrize(
    ("dtype", "scale_per"), [pytest.param("int8", "token", marks=pytest.mark.slow), ("float8_e5m2", "head")]
)
def test_grad_over_quantised_pages_equals_float64(dtype, scale_per):
    case = make_case(*RAGGED, dtype=dtype, scale_per=scale_per, padding_tokens=2, seed=6)
    check(case, "xla", ("q", "sinks", "alibi_slopes"), **OPTIONS["all"])


def test_grad_to_pages_of_two_sequences_is_the_sum():
    case = make_case((17, 17, 5), seed=8)
    table = case.page_table.copy()
    table[1] = table[0]
    dense = {name: [getattr(case, name)[i] for i in (0, 0, 2)] for name in ("dense_k", "dense_v")}
    actual = check(dataclasses.replace(case, page_table=table, **dense), "xla")
    assert not actual["k_pages"][1, case.page_table[1]].any()


@pytest.mark.slow
def test_grad_with_layer_or_window_traced_is_bit_equal():
    case = make_case(*RAGGED, seed=9)
    expected = gradients("xla", case, {"sliding_window": 9})
    chex.assert_trees_all_equal(
        gradients("xla", case, {"sliding_window": jnp.int32(9), "layer": jnp.int32(1)}), expected
    )


def test_grad_with_nan_in_padding_is_zero_there_and_right_elsewhere():
    """Neither what padding tokens hold nor the cotangents of rows without keys may reach anything."""
    case = make_case((0, 9, 5), (0, 3, 2), padding_tokens=2, seed=3)
    arrays = case.arguments()
    q, k_pages, v_pages = (arrays.pop(name) for name in ("q", "k_pages", "v_pages"))

    def attend(q, k_pages, v_pages):
        return jp.paged_attention(q, k_pages, v_pages, **arrays, return_lse=True, backend="xla")

    @compiled
    def gradient(q, dout, dlse):
        return jax.vjp(attend, q, k_pages, v_pages)[1]((dout, dlse))

    dout, dlse = cotangents(case)
    expected = gradient(q, dout, dlse)
    assert not expected[0][5:].any()
    actual = gradient(*(jnp.asarray(x).at[5:].set(jnp.nan) for x in (q, dout, dlse)))
    chex.assert_trees_all_equal(actual, expected)


@pytest.mark.slow
def test_grad_under_vmap_equals_one_by_one():
    case = make_case((5, 9), seed=3)
    arrays = case.arguments()
    q = arrays.pop("q")
    both = jnp.stack([q, -q])

    def loss(q):
        return jnp.sum(jp.paged_attention(q, **arrays, sliding_window=6, backend="xla") ** 2)

    gradient = compiled(jax.grad(loss))
    expected = jnp.stack([gradient(x) for x in both])
    chex.assert_trees_all_close(compiled(jax.vmap(jax.grad(loss)))(both), expected, rtol=1e-6, atol=1e-6)
    actual = compiled(jax.grad(lambda q: jax.vmap(loss)(q).sum()))(both)
    chex.assert_trees_all_close(actual, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.slow
def test_grad_in_an_eager_shard_map_over_heads_equals_without():
    arrays = make_case((5, 9), seed=3).arguments()
    pages = tuple(arrays.pop(name) for name in ("q", "k_pages", "v_pages"))
    heads = PartitionSpec(None, "heads"), *[PartitionSpec(None, None, "heads")] * 2

    def attend(*pages):
        return jp.paged_attention(*pages, **arrays, backend="xla")

    mesh = Mesh(np.array(jax.devices()[:1]), ("heads",))
    sharded = jax.shard_map(attend, mesh=mesh, in_specs=heads, out_specs=heads[0], check_vma=False)
    chex.assert_trees_all_close(sharded(*pages), compiled(attend)(*pages), rtol=1e-6, atol=1e-6)
    grads = [
        compiled(jax.grad(lambda *x, f=f: jnp.sum(f(*x) ** 2), argnums=(0, 1, 2)))(*pages) for f in (sharded, attend)
    ]
    chex.assert_trees_all_close(*grads, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("backend", ["xla", "reference"])
def test_grad_to_scales_or_fp8_pages_is_refused_by_name(backend):
    arrays = make_case((5, 3), dtype="float8_e5m2", seed=1).arguments()
    for name in ("k_pages", "v_pages", "k_scale", "v_scale"):
        with pytest.raises(NotImplementedError, match=f"`{name}` has no derivative in paged_attention: quantised"):
            jax.grad(lambda x, name=name: jp.paged_attention(**{**arrays, name: x}, backend=backend).sum())(
                arrays[name]
            )


@pytest.mark.parametrize("backend", ["xla", "auto"])
def test_jvp_fails_with_the_message_of_jax(backend):
    arrays = make_case((5, 3), seed=1).arguments()
    q = arrays.pop("q")
    with pytest.raises(TypeError, match="forward-mode autodiff"):
        jax.jvp(lambda q: jp.paged_attention(q, **arrays, backend=backend), (q,), (q,))


@pytest.mark.parametrize("backend", ["xla", "interpret", "auto"])
@pytest.mark.parametrize("derivative", [jax.hessian, lambda f: jax.grad(lambda q: jnp.sum(jax.grad(f)(q)))])
def test_second_derivative_is_refused_by_name(derivative, backend):
    arrays = make_case((5, 3), seed=1).arguments()
    q = arrays.pop("q")
    with pytest.raises(NotImplementedError, match="paged_attention has no second derivative"):
        derivative(lambda q: jnp.sum(jp.paged_attention(q, **arrays, backend=backend) ** 2))(q)


def lowered(case, backend, platform, differentiate=False):
    arrays = case.arguments()
    layer = arrays.pop("layer")

    def attend(arrays):
        return jp.paged_attention(**arrays, layer=layer, sinks=jnp.asarray(SINKS), backend=backend)

    def gradient(arrays):
        return jax.grad(lambda q: attend({**arrays, "q": q}).sum())(arrays["q"])

    # Pallas asks which GPU it lowers for; this says it without one.
    device = AbstractDevice(device_kind="NVIDIA H200", num_cores=None, platform="gpu")
    with use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
        step = jax.jit(gradient if differentiate else attend)
        return step.trace(arrays).lower(lowering_platforms=(platform,)).as_text()


@pytest.mark.parametrize(
    ("backend", "platform"),
    [("auto", "cuda"), pytest.param("auto", "cpu", marks=pytest.mark.slow), ("interpret", "cpu")],
)
@pytest.mark.parametrize("q_lens", [pytest.param(None, marks=pytest.mark.slow), (2, 5)])
def test_paged_attention_not_differentiated_lowers_to_the_program_without_a_rule(
    backend, platform, q_lens, monkeypatch
):
    case = make_case((3, 9), q_lens, dtype="float8_e5m2")
    lowered(case, backend, platform)  # what JAX has traced before decides which functions of a program are shared
    with_rule = lowered(case, backend, platform)
    monkeypatch.setattr(ATTENTION, "_derivative", lambda run, *arguments: run(*arguments))
    assert with_rule == lowered(case, backend, platform)


@pytest.mark.parametrize("backend", ["auto", "triton"])
def test_grad_lowered_for_cuda_holds_the_kernels_of_forward_once(backend):
    case = make_case((3, 9), (2, 5))
    forward, both = (lowered(case, backend, "cuda", differentiate) for differentiate in (False, True))
    assert both.count("__gpu$xla.gpu.triton") == forward.count("__gpu$xla.gpu.triton") > 0
    assert both.count("stablehlo.while") > forward.count("stablehlo.while")


@pytest.mark.slow
def test_grad_needs_no_memory_for_the_width_of_the_table():
    def temp_bytes(width):
        arrays = make_case((40, 9), (20, 9), max_pages=width).arguments()
        q, layer = arrays.pop("q"), arrays.pop("layer")

        def loss(q, arrays):
            return jp.paged_attention(q, **arrays, layer=layer, backend="xla").sum()

        return jax.jit(jax.grad(loss)).lower(q, arrays).compile().memory_analysis().temp_size_in_bytes

    narrow, wide = temp_bytes(32), temp_bytes(3200)
    assert wide - narrow <= 4 * 2 * 2 * 3200  # the padded table, twice, and nothing per head or query
