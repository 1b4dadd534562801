"""The Triton kernels under Pallas's interpreter against the float64 oracle, NaN in every slot without an owner."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxpaged as jp
from jaxpaged.config import AttentionConfig
from jaxpaged.ops.attention.triton import paged_attention_triton, why_unsupported
from jaxpaged.testing import assert_attention_close, make_case, oracle
from tests.ops.attention.harness import partition_of, three_values

CUT = AttentionConfig(num_programs=5)  # every longer sequence is cut, and most shares hold several
WHOLE = AttentionConfig(max_splits=1)
SINKS = np.linspace(-3.0, 6.0, 4).astype(np.float32)
SLOPES = np.array([0.5, 0.25, 0.03, 0.0], np.float32)
OPTIONS = {
    "soft_cap": {"logits_soft_cap": 1.5},
    "window": {"sliding_window": 19},
    "sinks": {"sinks": SINKS},
    "alibi": {"alibi_slopes": SLOPES},
    "all": {"sm_scale": 0.7, "logits_soft_cap": 3.0, "sliding_window": 19, "sinks": SINKS, "alibi_slopes": SLOPES},
}


LENS = (0, 3, 4, 5, 41)  # of the tests that change values only, and so share one compilation


@functools.cache
def compiled(**static):
    """Without optimisation: a kernel runs once, and most of a test would be LLVM."""
    return jax.jit(
        lambda arguments: paged_attention_triton(*three_values(**arguments, **static), interpret=True),
        compiler_options={"xla_backend_optimization_level": 0},
    )


def attend(case, config=CUT, **options):
    arguments = {**case.arguments(), "config": config, **options}
    static = {k: v for k, v in arguments.items() if not isinstance(v, jax.Array | np.ndarray | np.int32 | list)}
    return compiled(**static)({k: v for k, v in arguments.items() if k not in static})


def check(case, config=CUT, **options):
    out, lse = attend(case, config, **options)
    expected_out, expected_lse = oracle(case, **options)
    chex.assert_type([out, lse], [case.q.dtype, jnp.float32])
    assert_attention_close(out, expected_out)
    np.testing.assert_allclose(lse, expected_lse, rtol=2e-5, atol=1e-4)  # -inf only where -inf is expected
    return out, lse


@pytest.mark.parametrize(
    ("q_per_kv", "head_dim", "page_size", "dtype"),
    [
        *(
            pytest.param(*shape, marks=pytest.mark.slow)
            for shape in (
                (1, 16, 1, "float32"),
                (3, 64, 8, "bfloat16"),
                (8, 128, 24, "bfloat16"),
                (17, 256, 16, "float32"),
            )
        ),
        (5, 80, 16, "float16"),
        (71, 16, 7, "bfloat16"),  # two row blocks
    ],
)
def test_triton_shapes_equal_oracle(q_per_kv, head_dim, page_size, dtype):
    """Lengths around the ends of pages and tiles, in every shape."""
    lens = (0, 1, page_size - 1, page_size, page_size + 1, 70, 0, 129)
    kv_heads = 1 if q_per_kv > 8 else 2
    check(
        make_case(
            lens,
            num_q_heads=q_per_kv * kv_heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            page_size=page_size,
            dtype=dtype,
            max_pages=130 if page_size == 1 else 130 // page_size + 1,
        )
    )


@pytest.mark.parametrize(
    "option", [name if name == "all" else pytest.param(name, marks=pytest.mark.slow) for name in OPTIONS]
)
def test_triton_option_equals_oracle(option):
    check(make_case((0, 1, 18, 19, 20, 64, 130), seed=1), **OPTIONS[option])


def test_triton_whole_tiles_equal_oracle():
    check(make_case((0, 1, 18, 19, 20, 64, 130), seed=2), WHOLE, **OPTIONS["all"])


@pytest.mark.parametrize(
    "option", [OPTIONS["all"], *(pytest.param(option, marks=pytest.mark.slow) for option in ({}, {"causal": False}))]
)
def test_triton_ragged_equals_oracle(option):
    """Decode, chunked prefill, speculation and a full prefill in one batch, with idle and padding rows."""
    case = make_case((50, 0, 45, 130, 33, 1), (1, 0, 20, 5, 33, 1), padding_tokens=9, seed=3)
    check(case, dataclasses.replace(CUT, block_q=8), **option)


@pytest.mark.slow
def test_triton_cuts_change_rounding_only():
    case = make_case((300, 5, 90), num_q_heads=2, seed=4)
    whole, whole_lse = attend(case, WHOLE)
    cut, cut_lse = attend(case, AttentionConfig(num_programs=24, block_k=16))
    chex.assert_trees_all_close((cut, cut_lse), (whole, whole_lse), atol=1e-6)
    assert not np.array_equal(cut, whole)  # else nothing was cut


@pytest.mark.slow
@pytest.mark.parametrize("layer", [0, 2])
def test_triton_layer_traced_equals_static(layer):
    case = make_case(LENS, num_layers=3, layer=layer, seed=5)
    static = check(case, WHOLE)
    traced = attend(dataclasses.replace(case, layer=np.int32(layer)), WHOLE)
    chex.assert_trees_all_equal(static, traced)


@pytest.mark.parametrize("entry", [-1, 10**6, 2**31 - 1, -(2**31)])
def test_triton_unused_table_entries_are_not_followed(entry):
    check(make_case(LENS, unused_entry=entry, seed=6))


def test_triton_length_beyond_the_table_reads_the_table_only():
    case = make_case((8, 8), page_size=4, max_pages=2, seed=7)
    out, lse = attend(dataclasses.replace(case, seq_lens=np.array([8, 900], np.int32)), WHOLE)
    chex.assert_trees_all_close((out, lse), oracle(case), atol=1e-5)


def negative_logits(case):
    """The same case with all logits near -200 at sm_scale 20, from products that float32 holds exactly.

    At -200 its own rounding of a product of other numbers is as large as the tolerance.
    """

    def few_bits(x):
        return np.round(np.abs(x) * 16) / 16

    return dataclasses.replace(
        case,
        q=few_bits(case.q),
        k_pages=-few_bits(case.k_pages),
        dense_k=[-few_bits(k) for k in case.dense_k],
    )


@pytest.mark.slow
def test_triton_logits_of_minus_200_after_masked_tiles_stay_finite():
    """The last queries of a tile see nothing of its first KV blocks: a maximum of zero there would swallow the rest."""
    case = negative_logits(make_case((90, 64), (40, 64), seed=8))
    config = AttentionConfig(num_programs=3, block_q=64, block_k=16)
    _, lse = check(case, config, sm_scale=20.0, sliding_window=4)
    assert np.median(lse) < -150


def test_triton_decode_logits_of_minus_200_equal_oracle():
    case = negative_logits(make_case((1, 70), seed=9))
    _, lse = check(case, WHOLE, sm_scale=20.0, sinks=np.full(4, -190.0, np.float32))
    assert np.median(lse) < -100


def test_triton_soft_cap_with_logits_of_ten_thousand_equals_oracle():
    _, lse = check(make_case((5, 70), seed=10), WHOLE, sm_scale=3e3, logits_soft_cap=30.0)
    assert np.max(lse) > 29


def test_triton_sink_far_above_the_logits_takes_all():
    _, lse = check(make_case((0, 5, 70), seed=11), sinks=np.full(4, 300.0, np.float32))
    np.testing.assert_allclose(lse[1:], 300.0)


def test_triton_permuted_pages_give_the_same_bits():
    case = make_case(LENS, seed=12)
    order = np.random.default_rng(0).permutation(case.k_pages.shape[1])
    moved = dataclasses.replace(
        case,
        k_pages=case.k_pages[:, order],
        v_pages=case.v_pages[:, order],
        page_table=np.argsort(order)[case.page_table].astype(np.int32),
    )
    chex.assert_trees_all_equal(attend(case), attend(moved))


def test_triton_mixed_dtypes_compute_in_the_wider():
    case = make_case((7, 40), dtype="bfloat16", seed=13)
    out, lse = attend(dataclasses.replace(case, q=case.q.astype(np.float32)), WHOLE)
    expected_out, expected_lse = oracle(case)
    assert_attention_close(out, expected_out)
    np.testing.assert_allclose(lse, expected_lse, rtol=2e-5)


@pytest.mark.slow
def test_triton_given_plan_equals_its_own():
    case = make_case(LENS, seed=14)
    partition = partition_of(case.seq_lens, num_tokens=len(LENS), config=CUT)
    chex.assert_trees_all_equal(attend(case, None, partitions=[partition]), attend(case, CUT))


def test_triton_partition_for_another_window_raises():
    case = make_case((7, 40), seed=14)
    partition = partition_of(case.seq_lens, num_tokens=2, sliding_window=8)
    message = r"`partition` must be made for .*sliding_window=9.*got one for .*sliding_window=8"
    with pytest.raises(ValueError, match=message):
        jp.paged_attention(**case.arguments(), partition=partition, sliding_window=9, backend="interpret")


def shapes(q, k, v, dtype="float32"):
    q, k, v = (jax.ShapeDtypeStruct(shape, dtype) for shape in (q, k, v))
    return three_values(q, k, v, None, None, layer=0)


@pytest.mark.parametrize(
    ("q_shape", "kv_shape", "dtype", "reason"),
    [
        ((2, 4, 256), (1, 2, 2, 16, 256), "bfloat16", None),
        ((2, 4, 257), (1, 2, 2, 16, 257), "bfloat16", "head_dim is at most 256; got 257"),
        ((2, 4, 64), (1, 2, 2, 16, 64), "int8", "q must be float32, bfloat16 or float16; got int8"),
    ],
)
def test_why_unsupported_names_the_reason(q_shape, kv_shape, dtype, reason):
    assert why_unsupported(*shapes(q_shape, kv_shape, kv_shape, dtype)) == reason


def test_why_unsupported_v_of_another_width_is_refused():
    values = shapes((2, 4, 64), (1, 2, 2, 16, 64), (1, 2, 2, 16, 32))
    assert why_unsupported(*values) == "V must have K's head_dim 64; got 32"


def test_why_unsupported_jax_without_pallas_triton_says_so(monkeypatch):
    monkeypatch.setattr("jaxpaged.ops.triton_util.plgpu", None)
    values = shapes((2, 4, 64), (1, 2, 2, 16, 64), (1, 2, 2, 16, 64))
    assert why_unsupported(*values) == f"JAX {jax.__version__} has no Pallas Triton backend"
    with pytest.raises(NotImplementedError, match="has no Pallas Triton backend"):
        jp.paged_attention(**make_case((3,)).arguments(), backend="interpret")
