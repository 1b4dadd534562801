"""Every backend against the float64 oracle: options on and off, ragged lengths, poison in every slot without an owner.

tests/ops/test_triton.py has more of the Triton kernel; here it is one backend among others. tests/test_mutants.py sees
the same checks fail on code that is wrong on purpose.
"""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

import jaxpaged as jp
from jaxpaged.testing import assert_attention_close, make_case, oracle

BACKENDS = ("reference", "xla", "interpret")
LENGTHS = (0, 1, 3, 4, 5, 17, 40)
RAGGED = ((0, 1, 9, 30, 33), (0, 1, 4, 30, 1))
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
# One compilation of the kernel takes seconds under the interpreter: it gets the options one by one in its own tests.
MATRIX = [(backend, option) for backend in BACKENDS for option in OPTIONS if backend != "interpret" or option == "all"]


def compiled(backend, **static):
    """`paged_attention` under jit, unoptimised: most of a test would be LLVM."""
    return jax.jit(
        lambda arrays: jp.paged_attention(**arrays, **static, backend=backend, return_lse=True),
        compiler_options={"xla_backend_optimization_level": 0},
    )


def run(case, backend, **options):
    options = {k: jnp.asarray(v) if isinstance(v, np.ndarray) else v for k, v in options.items()}
    arrays = case.arguments()
    return compiled(backend, layer=arrays.pop("layer"), **options)(arrays)


def check(case, backend, **options):
    """Output and log-sum-exp of a backend equal the oracle's."""
    out, lse = run(case, backend, **options)
    expected_out, expected_lse = oracle(case, **options)
    chex.assert_type([out, lse], [case.q.dtype, jnp.float32])
    chex.assert_shape([out, lse], [case.q.shape, case.q.shape[:2]])
    assert_attention_close(out, expected_out)
    tolerance = 1e-5 if out.dtype == jnp.float32 else 2e-2
    np.testing.assert_allclose(lse, expected_lse, rtol=tolerance, atol=tolerance)  # -inf only where -inf is expected
    return out, lse


def check_decode(backend, option):
    check(make_case(LENGTHS, seed=1), backend, **OPTIONS[option])


def check_ragged(backend, option):
    check(make_case(*RAGGED, padding_tokens=3, seed=2), backend, **OPTIONS[option])


def check_large_negative_logits(backend):
    """Logits near -200, and a row that sees nothing in the chunks that its longer or shorter neighbours need."""
    case = make_case((300, 10, 200), page_size=16, seed=3)
    negative = [-np.abs(k) for k in case.dense_k]
    case = dataclasses.replace(case, q=np.abs(case.q), k_pages=-np.abs(case.k_pages), dense_k=negative)
    _, lse = check(case, backend, sm_scale=30.0, sliding_window=4)
    assert np.median(lse) < -150


def check_long_tiles(backend):
    """Sequences of several tiles that end inside one. A tile's last queries see nothing of its first chunk of keys."""
    check(make_case((150, 70), (130, 70), num_q_heads=2, head_dim=8, page_size=16, seed=7), backend, sliding_window=4)


def check_sinks_over_several_chunks(backend):
    check(make_case((300, 129, 128), page_size=16, seed=4), backend, sinks=3 * SINKS)


@pytest.mark.parametrize(("backend", "option"), MATRIX)
def test_paged_attention_decode_equals_oracle(backend, option):
    check_decode(backend, option)


@pytest.mark.parametrize(("backend", "option"), MATRIX)
def test_paged_attention_ragged_equals_oracle(backend, option):
    check_ragged(backend, option)


@pytest.mark.parametrize("backend", ["reference", "xla"])
@pytest.mark.parametrize(
    ("dtype", "q_per_kv", "head_dim", "page_size", "q_lens"),
    [
        ("bfloat16", 1, 16, 1, None),
        ("float16", 3, 80, 3, (0, 1, 2, 17, 5)),
        ("bfloat16", 5, 16, 16, (0, 1, 2, 17, 5)),
        ("float32", 8, 80, 16, None),
    ],
)
def test_paged_attention_shapes_and_dtypes_equal_oracle(backend, dtype, q_per_kv, head_dim, page_size, q_lens):
    shape = {"num_q_heads": 2 * q_per_kv, "num_kv_heads": 2, "head_dim": head_dim, "page_size": page_size}
    check(make_case((0, 1, 16, 17, 40), q_lens, **shape, dtype=dtype, seed=5), backend)


@pytest.mark.parametrize("backend", ["reference", "xla"])
def test_paged_attention_logits_of_minus_200_equal_oracle(backend):
    check_large_negative_logits(backend)


@pytest.mark.parametrize("backend", ["reference", "xla"])
def test_paged_attention_sinks_over_several_chunks_count_once(backend):
    check_sinks_over_several_chunks(backend)


@pytest.mark.parametrize("backend", ["reference", "xla"])
def test_paged_attention_soft_cap_of_huge_logits_equals_oracle(backend):
    case = make_case(LENGTHS, seed=6)
    out, _ = check(dataclasses.replace(case, q=case.q * np.float32(1e4)), backend, logits_soft_cap=30.0)
    assert np.isfinite(out).all()


@pytest.mark.parametrize("backend", ["reference", "xla"])
def test_paged_attention_long_tiles_equal_oracle(backend):
    check_long_tiles(backend)


@pytest.mark.parametrize("backend", ["reference", "xla"])
def test_paged_attention_of_other_page_ids_and_garbage_entries_is_bit_equal(backend):
    """Where pages lie must not matter, nor what stands in the table past a sequence's last page."""
    case = make_case(LENGTHS, seed=8)
    arrays = case.arguments()
    attend = compiled(backend, layer=arrays.pop("layer"))
    expected = attend(arrays)

    ids = np.concatenate([[0], np.random.default_rng(0).permutation(np.arange(1, case.k_pages.shape[1]))])
    moved = {"k_pages": case.k_pages[:, np.argsort(ids)], "v_pages": case.v_pages[:, np.argsort(ids)]}
    chex.assert_trees_all_equal(
        attend({**arrays, **moved, "page_table": ids[case.page_table].astype(np.int32)}), expected
    )

    used = np.arange(case.page_table.shape[1]) < -(-case.seq_lens[:, None] // 4)
    for entry in (-1, 10**6, 2**31 - 1, -(2**31)):
        garbage = np.where(used, case.page_table, entry).astype(np.int32)
        chex.assert_trees_all_equal(attend({**arrays, "page_table": garbage}), expected)


@pytest.mark.parametrize("backend", ["reference", "xla"])
def test_paged_attention_of_a_row_alone_equals_the_row_in_a_batch(backend):
    case = make_case(LENGTHS, seed=9)
    arrays = case.arguments()
    attend = compiled(backend, layer=arrays.pop("layer"), sliding_window=9)
    out, lse = attend(arrays)
    per_row = ("q", "page_table", "seq_lens")
    for row in (1, 3, 6):
        alone = {**arrays, **{name: arrays[name][row : row + 1] for name in per_row}}
        chex.assert_trees_all_close(attend(alone), (out[row : row + 1], lse[row : row + 1]), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("backend", ["reference", "xla"])
def test_paged_attention_layer_static_traced_or_alone_is_bit_equal(backend):
    case = make_case(LENGTHS, num_layers=3, layer=2, seed=10)
    static = run(case, backend)
    arrays = case.arguments()
    chex.assert_trees_all_equal(compiled(backend)({**arrays, "layer": jnp.int32(2)}), static)
    layer = arrays.pop("layer")
    one_layer = {name: arrays[name][layer] for name in ("k_pages", "v_pages")}
    chex.assert_trees_all_equal(compiled(backend)({**arrays, **one_layer}), static)


def test_paged_attention_without_return_lse_returns_the_output_only():
    case = make_case(LENGTHS, seed=1)
    out = jp.paged_attention(**case.arguments(), backend="xla")
    assert_attention_close(out, oracle(case)[0])


def lowered(case, backend, platform) -> str:
    arrays = case.arguments()
    layer = arrays.pop("layer")
    step = jax.jit(lambda arrays: jp.paged_attention(**arrays, layer=layer, backend=backend))
    # Pallas asks which GPU it lowers for; this says it without one.
    device = AbstractDevice(device_kind="NVIDIA H200", num_cores=None, platform="gpu")
    with use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
        return step.trace(arrays).lower(lowering_platforms=(platform,)).as_text()


@pytest.mark.parametrize("backend", ["triton", "auto"])
def test_paged_attention_lowered_for_cuda_holds_the_triton_kernel(backend):
    assert "__gpu$xla.gpu.triton" in lowered(make_case((3, 9)), backend, "cuda")


def test_paged_attention_auto_lowered_for_cpu_holds_no_kernel():
    text = lowered(make_case((3, 9)), "auto", "cpu")
    assert "triton" not in text
    assert "custom_call" not in text


def test_paged_attention_auto_of_what_triton_cannot_do_takes_xla():
    """head_dim 257 is past the kernel's limit: auto leaves it to XLA on CUDA too, a named backend says why."""
    case = make_case((3, 9), head_dim=257)
    check(case, "auto")
    assert "triton" not in lowered(case, "auto", "cuda")
    for backend in ("triton", "interpret"):
        message = f"`backend='{backend}'` cannot run this call: head_dim is at most 256; got 257"
        with pytest.raises(NotImplementedError, match=message):
            jp.paged_attention(**case.arguments(), backend=backend)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (
            {"q": lambda q: q[0]},
            ValueError,
            r"`q` must have shape \(num_tokens, num_q_heads, head_dim\); got \(4, 16\)",
        ),
        ({"q": lambda q: q[:, :3]}, ValueError, r"`q` must have a multiple of num_kv_heads = 2 heads.*got 3\."),
        ({"q": lambda q: q[:, :0]}, ValueError, r"`q` must have a multiple of num_kv_heads = 2 heads.*got 0\."),
        ({"q": lambda q: q[..., :8]}, ValueError, r"`q` must have the head_dim of the pages, 16; got 8\."),
        ({"q": lambda q: q.astype(jnp.int32)}, TypeError, r"`q` must be of a floating dtype; got int32\."),
        (
            {"q": lambda q: q.astype(jnp.bfloat16)},
            TypeError,
            r"`k_pages` must be of the dtype of `q`, bfloat16, or quantised \(int8, .*; got float32\. Cast",
        ),
        (
            {"v_pages": lambda v: v.astype(jnp.bfloat16)},
            TypeError,
            r"`v_pages` must be of the dtype of `q`, float32, or quantised .*; got bfloat16\.",
        ),
        (
            {"v_pages": lambda v: v[:, 1:]},
            ValueError,
            r"`v_pages` must have the shape of `k_pages` \(2, 9, 2, 4, 16\);",
        ),
        (
            {"layer": None},
            ValueError,
            r"`k_pages` must have shape \(num_layers.* with `layer` given.*got \(2, 9, 2, 4, 16\) and layer=None\.",
        ),
        (
            {"k_pages": lambda k: k[0], "v_pages": lambda v: v[0]},
            ValueError,
            r"without num_layers and `layer=None`; got \(9, 2, 4, 16\) and layer=1\.",
        ),
        ({"layer": 2}, ValueError, r"`layer` must be from 0 to num_layers - 1 = 1; got 2\."),
        ({"layer": -1}, ValueError, r"`layer` must be from 0 to num_layers - 1 = 1; got -1\."),
        (
            {"page_table": lambda t: t[0]},
            ValueError,
            r"`page_table` must have shape \(num_seqs, max_pages\), neither of them 0; got \(5,\)\. Pad missing pages",
        ),
        ({"page_table": lambda t: t[:, :0]}, ValueError, r"`page_table` must have shape .*got \(3, 0\)"),
        (
            {"page_table": lambda t: t.astype(jnp.uint32)},
            TypeError,
            r"`page_table` must be int32; got uint32\.",
        ),
        (
            {"seq_lens": lambda n: n[:2]},
            ValueError,
            r"`seq_lens` must have shape \(num_seqs,\) = \(3,\), a length for each row of `page_table`; got \(2,\)\.",
        ),
        ({"seq_lens": lambda n: n.astype(jnp.float32)}, TypeError, r"`seq_lens` must be int32; got float32\."),
        (
            {"cu_q_lens": None},
            ValueError,
            r"`q` must have one token for each of the 3 rows of `page_table` where `cu_q_lens` is None; got 4\.",
        ),
        (
            {"cu_q_lens": lambda c: c[1:]},
            ValueError,
            r"`cu_q_lens` must have shape \(num_seqs \+ 1,\) = \(4,\); got \(3,\)\.",
        ),
        ({"cu_q_lens": lambda c: c.astype(jnp.int16)}, TypeError, r"`cu_q_lens` must be int32; got int16\."),
        (
            {"logits_soft_cap": 0.0},
            ValueError,
            r"`logits_soft_cap` must be > 0 and finite, or None for no cap; got 0\.0\.",
        ),
        (
            {"logits_soft_cap": np.nan},
            ValueError,
            r"`logits_soft_cap` must be > 0 and finite, or None for no cap; got nan\.",
        ),
        ({"sliding_window": 0}, ValueError, r"`sliding_window` must be an int >= 1.*itself included, .*; got 0\."),
        ({"sliding_window": 2.5}, ValueError, r"`sliding_window` must be an int >= 1.*got 2\.5\."),
        ({"sinks": SINKS[:2]}, ValueError, r"`sinks` must have shape \(num_q_heads,\) = \(4,\); got \(2,\)\."),
        ({"alibi_slopes": SLOPES[None]}, ValueError, r"`alibi_slopes` must have shape .* = \(4,\); got \(1, 4\)\."),
        (
            {"backend": "cuda"},
            ValueError,
            r"`backend` must be one of auto, reference, xla, triton, interpret; got 'cuda'\.",
        ),
    ],
)
def test_paged_attention_with_a_bad_argument_names_it(change, error, message):
    good = make_case((5, 9, 2), (2, 1, 1), seed=1).arguments()
    bad = {name: value(good[name]) if callable(value) else value for name, value in change.items()}
    with pytest.raises(error, match=message):
        jp.paged_attention(**{**good, **bad})


@pytest.mark.parametrize("backend", ["xla", "reference", "interpret", "auto"])
def test_paged_attention_takes_numpy_arrays(backend):
    case = make_case((5, 3), (2, 1), seed=3)
    arrays = {k: v for k, v in vars(case).items() if not k.startswith("dense")}
    out = jp.paged_attention(**arrays, sinks=SINKS, backend=backend)
    assert_attention_close(out, oracle(case, sinks=SINKS)[0])


def test_paged_attention_with_what_is_no_plan_or_another_is_refused():
    case = make_case((5, 3))
    with pytest.raises(TypeError, match="`plan` must be an AttentionPlan, from make_plan, or None; got str"):
        jp.paged_attention(**case.arguments(), plan="x", backend="xla")
    plan = jp.make_plan(case.seq_lens, num_tokens=2, sliding_window=3)
    with pytest.raises(ValueError, match="`plan` must be made for PlanKey"):
        jp.paged_attention(**case.arguments(), plan=plan, backend="xla")
    with pytest.raises(TypeError, match="`q` must be an array; got list"):
        jp.paged_attention(**{**case.arguments(), "q": [1.0]})


@pytest.mark.parametrize("head_dim", [4, 8])
def test_paged_attention_of_one_byte_pages_with_narrow_heads_equals_oracle(head_dim):
    case = make_case((5, 17), dtype="int8", head_dim=head_dim)
    for backend in ("interpret", "auto"):  # `auto` traces the kernel, wherever it runs
        assert_attention_close(jp.paged_attention(**case.arguments(), backend=backend), oracle(case)[0])
