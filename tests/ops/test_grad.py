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
from jaxpaged.ops import attention
from jaxpaged.testing import TOLERANCE, Case, assert_attention_close, make_case

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


def gradients(case: Case, backend, wanted=None, seed=0, **options):
    """Gradients by name, of all that can be differentiated, or of what is wanted."""
    arrays = case.arguments() | {k: jnp.asarray(x) for k, x in options.items() if hasattr(x, "shape")}
    static = {k: x for k, x in options.items() if not hasattr(x, "shape")}
    static |= {
        k: arrays.pop(k) for k in ("layer", "cu_q_lens", "k_scale", "v_scale") if not hasattr(arrays[k], "shape")
    }
    names = [k for k in DIFFERENTIABLE if k in arrays] if wanted is None else wanted
    dout, dlse = (jnp.asarray(x, jnp.float32) for x in cotangents(case, seed))
    loss = loss_of(backend, dout, dlse, names, static)
    return compiled(jax.grad(loss))({k: arrays[k] for k in names}, {k: x for k, x in arrays.items() if k not in names})


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
    _, num_q_heads, head_dim = case.q.shape
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
        loss = compiled(jax.grad(dense_loss), static_argnums=(4, 5, 6))
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


def assert_gradient_close(actual, expected, dtype):
    """Each row within the tolerance of its dtype, and exactly 0 where nothing can flow.

    In 16 bits a row whose probability is small may cancel to less than the rounding of the output that it was computed
    from: there, within a fiftieth of the tolerance of the largest row.
    """
    if dtype.itemsize == 2:
        largest = np.abs(expected).max()
        nothing = ~expected.any(-1)
        assert not np.asarray(actual, np.float32)[nothing].any()
        if expected.ndim > 1:
            floor = np.where(nothing, 0, largest / 50)[..., None]
            actual, expected = (
                np.concatenate([np.asarray(x, np.float64), y], -1) for x, y in ((actual, floor), (expected, floor))
            )
    assert_attention_close(actual, expected, tolerance=TOLERANCE[dtype.name])


def check(case: Case, backend, wanted=None, **options):
    actual = gradients(case, backend, wanted, **options)
    expected = expected_gradients(case, **options)
    assert set(actual) == set(wanted or expected)
    for name, x in actual.items():
        assert np.isfinite(np.asarray(x, np.float32)).all(), name
        assert_gradient_close(x, expected[name], jnp.dtype(case.q.dtype))
    return actual


@pytest.mark.parametrize("option", ["plain", "all"])
def test_grad_of_a_decode_step_equals_float64(option):
    check(make_case(LENGTHS, seed=1), "xla", **OPTIONS[option])


@pytest.mark.parametrize("option", OPTIONS)
def test_grad_of_ragged_queries_equals_float64(option):
    check(make_case(*RAGGED, padding_tokens=3, seed=1), "xla", **OPTIONS[option])


@pytest.mark.parametrize("backend", ["reference", "interpret"])
def test_grad_by_other_backends_equals_float64(backend):
    check(make_case(*RAGGED, padding_tokens=3, seed=2), backend, **OPTIONS["all"])


@pytest.mark.parametrize("window", [None, 20])
def test_grad_of_several_tiles_and_chunks_equals_float64(window):
    case = make_case((300, 70), (130, 66), num_q_heads=2, head_dim=8, page_size=16, seed=7)
    check(case, "xla", sliding_window=window)


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


@pytest.mark.parametrize(("dtype", "scale_per"), [("int8", "token"), ("float8_e5m2", "head")])
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


def test_grad_with_layer_or_window_traced_is_bit_equal():
    case = make_case(*RAGGED, seed=9)
    expected = gradients(case, "xla", sliding_window=9)
    chex.assert_trees_all_equal(gradients(case, "xla", sliding_window=jnp.int32(9), layer=jnp.int32(1)), expected)


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


@pytest.mark.parametrize(("backend", "platform"), [("auto", "cuda"), ("auto", "cpu"), ("interpret", "cpu")])
@pytest.mark.parametrize("q_lens", [None, (2, 5)])
def test_paged_attention_not_differentiated_lowers_to_the_program_without_a_rule(
    backend, platform, q_lens, monkeypatch
):
    case = make_case((3, 9), q_lens, dtype="float8_e5m2")
    with_rule = lowered(case, backend, platform)
    monkeypatch.setattr(
        attention, "attend_with_gradient", lambda attend, *arrays, **options: attend(*arrays, **options)
    )
    assert with_rule == lowered(case, backend, platform)


@pytest.mark.parametrize("backend", ["auto", "triton"])
def test_grad_lowered_for_cuda_holds_the_kernels_of_forward_once(backend):
    case = make_case((3, 9), (2, 5))
    forward, both = (lowered(case, backend, "cuda", differentiate) for differentiate in (False, True))
    assert both.count("__gpu$xla.gpu.triton") == forward.count("__gpu$xla.gpu.triton") > 0
    assert both.count("stablehlo.while") > forward.count("stablehlo.while")


def test_grad_needs_no_memory_for_the_width_of_the_table():
    def temp_bytes(width):
        arrays = make_case((40, 9), (20, 9), max_pages=width).arguments()
        q, layer = arrays.pop("q"), arrays.pop("layer")

        def loss(q, arrays):
            return jp.paged_attention(q, **arrays, layer=layer, backend="xla").sum()

        return jax.jit(jax.grad(loss)).lower(q, arrays).compile().memory_analysis().temp_size_in_bytes

    narrow, wide = temp_bytes(32), temp_bytes(3200)
    assert wide - narrow <= 4 * 2 * 2 * 3200  # the padded table, twice, and nothing per head or query
