"""The way into attention: what it takes and refuses, and which backend runs. test_conformance.py has the answers."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

import jaxpaged as jp
from jaxpaged.testing import assert_attention_close, make_case, oracle
from tests.ops.attention.harness import partition_of

LENGTHS = (0, 1, 3, 4, 5, 17, 40)
SINKS = np.linspace(-1.0, 2.0, 4).astype(np.float32)
SLOPES = np.array([0.5, 0.25, 0.1, 0.0], np.float32)


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


@pytest.mark.parametrize("backend", [pytest.param("reference", marks=pytest.mark.slow), "xla"])
def test_paged_attention_layer_static_traced_or_alone_is_bit_equal(backend):
    case = make_case(LENGTHS, num_layers=3, layer=2, seed=10)
    static = run(case, backend)
    arrays = case.arguments()
    chex.assert_trees_all_equal(compiled(backend)({**arrays, "layer": jnp.int32(2)}), static)
    layer = arrays.pop("layer")
    one_layer = {name: arrays[name][layer] for name in ("k_pages", "v_pages")}
    chex.assert_trees_all_equal(compiled(backend)({**arrays, **one_layer}), static)


def test_paged_attention_without_return_lse_returns_the_output_only():
    case = make_case(
        (150, 3), (40, 1), seed=1
    )  # a tile of the prompt begins in one chunk of keys, and ends in the next
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
        ({"sliding_window": 2**31}, ValueError, r"`sliding_window` must be an int >= 1.*got 2147483648\."),
        ({"sliding_window": np.int32(3)}, ValueError, r"`sliding_window` must be .* int32 scalar of JAX, or None"),
        ({"sliding_window": jnp.float32(3)}, ValueError, r"`sliding_window` must be .* int32 scalar of JAX, or None"),
        ({"sliding_window": jnp.ones(1, jnp.int32)}, ValueError, r"`sliding_window` must be .* int32 scalar of JAX"),
        ({"sm_scale": np.inf}, ValueError, r"`sm_scale` must be finite, or None for head_dim \*\* -0\.5; got inf\."),
        ({"tree_mask": np.ones((4, 2), np.int8)}, ValueError, r"`tree_mask` must be bool .* = \(4, \.\.\.\); got int8"),
        ({"tree_mask": np.ones((3, 2), bool)}, ValueError, r"`tree_mask` must be bool .*; got bool \(3, 2\)"),
        ({"tree_mask": np.ones(4, bool)}, ValueError, r"`tree_mask` must be bool .*; got bool \(4,\)"),
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


@pytest.mark.parametrize(
    "name",
    ["q", "k_pages", "v_pages", "page_table", "seq_lens", "cu_q_lens", "sinks", "alibi_slopes", "tree_mask"],
)
def test_paged_attention_with_a_list_for_an_array_names_it(name):
    with pytest.raises(TypeError, match=f"`{name}` must be an array; got list"):
        jp.paged_attention(**make_case((5, 9, 2), (2, 1, 1)).arguments() | {name: [1.0]}, backend="xla")


@pytest.mark.parametrize("backend", ["xla", "reference", pytest.param("interpret", marks=pytest.mark.slow), "auto"])
def test_paged_attention_takes_numpy_arrays(backend):
    case = make_case((5, 3), (2, 1), seed=3)
    arrays = {k: v for k, v in vars(case).items() if not k.startswith("dense")}
    out = jp.paged_attention(**arrays, sinks=SINKS, backend=backend)
    assert_attention_close(out, oracle(case, sinks=SINKS)[0])


def test_paged_attention_with_what_is_no_partition_or_another_is_refused():
    case = make_case((5, 3))
    with pytest.raises(TypeError, match="`partition` must be a Partition, from make_partition, or None; got str"):
        jp.paged_attention(**case.arguments(), partition="x", backend="xla")
    partition = partition_of(case.seq_lens, num_tokens=2, sliding_window=3)
    with pytest.raises(ValueError, match="`partition` must be made for PartitionKey"):
        jp.paged_attention(**case.arguments(), partition=partition, backend="xla")


@pytest.mark.slow
@pytest.mark.parametrize("head_dim", [4, 8])
def test_paged_attention_of_one_byte_pages_with_narrow_heads_equals_oracle(head_dim):
    case = make_case((5, 17), dtype="int8", head_dim=head_dim)
    arrays, (expected, _) = case.arguments(), oracle(case)
    for backend in ("interpret", "auto"):  # `auto` traces the kernel, wherever it runs
        assert_attention_close(jp.paged_attention(**arrays, backend=backend), expected)
    layer = arrays.pop("layer")
    alone = {name: arrays[name][layer] for name in ("k_pages", "v_pages", "k_scale", "v_scale")}
    assert_attention_close(jp.paged_attention(**arrays | alone, backend="reference"), expected)


@pytest.mark.parametrize("backend", ["reference", "xla", "interpret", "auto"])
def test_paged_attention_of_no_tokens_returns_none(backend):
    arrays = make_case((5, 3), (0, 0)).arguments()
    out, lse = jp.paged_attention(**arrays, return_lse=True, backend=backend)
    chex.assert_shape([out, lse], [(0, 4, 16), (0, 4)])
    chex.assert_type([out, lse], jnp.float32)


def test_paged_attention_takes_numpy_integers_of_any_size_that_fit():
    arrays = make_case((5, 3), (2, 1)).arguments()
    expected = jp.paged_attention(**arrays, backend="xla")
    wide = {name: np.asarray(arrays[name], np.int64) for name in ("page_table", "seq_lens", "cu_q_lens")}
    chex.assert_trees_all_equal(jp.paged_attention(**arrays | wide, backend="xla"), expected)
    wide["page_table"][0, 0] = 2**32 + 1
    with pytest.raises(TypeError, match="`page_table` must be int32; got int64"):
        jp.paged_attention(**arrays | wide, backend="xla")
