"""Small cases of every option, for a real GPU: `check` runs one against the float64 oracle.

Used by `benchmarks/gpu_attention.py`, which times nothing before a sample of them passes, and by
`tests/ops/test_triton_gpu.py`, which runs all. What only a device shows: TF32 (an error of 1e-3 where float32 is asked
for), conversions of 8-bit floats that saturate or do not, races, and loads out of bounds.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

import jaxpaged as jp
from jaxpaged.cache.quantize import MAX_VALUE
from jaxpaged.config import AttentionConfig
from jaxpaged.testing import assert_attention_close, make_case, oracle

LENS = (0, 1, 15, 16, 17, 70, 0, 300)
RAGGED_LENS, RAGGED_Q_LENS = (50, 0, 45, 300, 33, 1), (1, 0, 20, 5, 33, 1)
SINKS, SLOPES = np.linspace(-3.0, 6.0, 8).astype(np.float32), (2.0 ** -np.arange(1, 9)).astype(np.float32)
CUT = AttentionConfig(num_programs=16)  # every long sequence, in a batch this small
FIXED, WHOLE = AttentionConfig(split_size=64), AttentionConfig(max_splits=1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Check:
    """One call: a batch as `make_case` draws it, with options of `paged_attention`.

    Attributes:
        ragged: Several query tokens a sequence.
        traced_window: Hands the window over as an array.
        tree: Draws a tree mask.
    """

    case: dict = dataclasses.field(default_factory=dict)
    options: dict = dataclasses.field(default_factory=dict)
    config: AttentionConfig = CUT
    ragged: bool = False
    traced_window: bool = False
    tree: bool = False


BF16 = {"dtype": "bfloat16", "num_q_heads": 8, "num_kv_heads": 2, "head_dim": 128, "page_size": 16}
F32 = BF16 | {"dtype": "float32"}
ALL = {"sm_scale": 0.2, "logits_soft_cap": 3.0, "sliding_window": 40, "sinks": SINKS, "alibi_slopes": SLOPES}
CHECKS = {
    "bfloat16": Check(case=BF16),
    "float16": Check(case=BF16 | {"dtype": "float16"}),
    "float32, not TF32": Check(case=F32),
    "int8": Check(case=BF16 | {"dtype": "int8", "q_dtype": "bfloat16"}),
    "int8, scale a head": Check(case=BF16 | {"dtype": "int8", "q_dtype": "float16", "scale_per": "head"}),
    "float8_e4m3fn": Check(case=BF16 | {"dtype": "float8_e4m3fn", "q_dtype": "bfloat16"}),
    "float8_e5m2": Check(case=BF16 | {"dtype": "float8_e5m2", "q_dtype": "float16"}),
    "ragged": Check(case=BF16 | {"padding_tokens": 9}, ragged=True),
    "ragged, all options": Check(case=BF16, options=ALL, ragged=True),
    "all options": Check(case=F32, options=ALL),
    "fixed cuts": Check(case=BF16, config=FIXED),
    "whole tiles": Check(case=BF16, config=WHOLE),
    "ragged float32": Check(case=F32, ragged=True),
    "ragged float8_e5m2": Check(case=BF16 | {"dtype": "float8_e5m2", "q_dtype": "bfloat16"}, ragged=True),
    "ragged int8, fixed cuts": Check(case=BF16 | {"dtype": "int8", "q_dtype": "bfloat16"}, ragged=True, config=FIXED),
    "ragged, whole tiles": Check(case=BF16, ragged=True, config=WHOLE),
    "not causal": Check(case=BF16, options={"causal": False}, ragged=True),
    "tree": Check(case=BF16, ragged=True, tree=True),
    "window": Check(case=BF16, options={"sliding_window": 19}),
    "window of a traced size": Check(case=BF16, options={"sliding_window": 19}, traced_window=True, ragged=True),
    "sinks": Check(case=BF16, options={"sinks": SINKS}),
    "alibi": Check(case=BF16, options={"alibi_slopes": SLOPES}),
    "soft cap of large logits": Check(case=F32, options={"sm_scale": 900.0, "logits_soft_cap": 30.0}),
    "head_dim 16, page 1": Check(case=BF16 | {"head_dim": 16, "page_size": 1}),
    "head_dim 64, page 256": Check(case=BF16 | {"head_dim": 64, "page_size": 256}),
    "head_dim 80, page 24": Check(case=BF16 | {"head_dim": 80, "page_size": 24}),
    "head_dim 96, float32, page 8": Check(case=BF16 | {"head_dim": 96, "page_size": 8, "dtype": "float32"}),
    "head_dim 112, int8": Check(case=BF16 | {"head_dim": 112, "dtype": "int8", "q_dtype": "bfloat16"}),
    "head_dim 192": Check(case=BF16 | {"head_dim": 192}, ragged=True),
    "head_dim 256, page 544": Check(case=BF16 | {"head_dim": 256, "page_size": 544}, ragged=True),
    "group 1": Check(case=BF16 | {"num_q_heads": 2}),
    "group 7": Check(case=BF16 | {"num_q_heads": 14}, ragged=True),
    "group 17": Check(case=BF16 | {"num_q_heads": 17, "num_kv_heads": 1}),
    "group 71": Check(case=BF16 | {"num_q_heads": 71, "num_kv_heads": 1}),
    "garbage in unused entries": Check(case=BF16 | {"unused_entry": 2**31 - 1}),
}  # fmt: skip
SAMPLE = list(CHECKS)[:12]
"""Those that run before anything is timed: each dtype, each partition, decode and ragged, all options."""


def runs_on(name: str, device: jax.Device) -> bool:
    """Whether a device knows the types of a check: float8_e4m3fn needs compute capability 8.9."""
    is_e4m3 = CHECKS[name].case["dtype"] == "float8_e4m3fn"
    return not (is_e4m3 and device.platform == "gpu" and float(device.compute_capability) < 8.9)


def sample_for(device: jax.Device) -> list[str]:
    """`SAMPLE`, as far as it runs on a device."""
    return [name for name in SAMPLE if runs_on(name, device)]


@functools.cache
def draw(name: str):
    """The batch of a check, and what is handed over beside it."""
    check = CHECKS[name]
    lens, q_lens = (RAGGED_LENS, RAGGED_Q_LENS) if check.ragged else (LENS, None)
    case = make_case(lens, q_lens, seed=list(CHECKS).index(name), **check.case)
    options = dict(check.options)
    if check.tree:
        # A token sees itself, and each of those before it or not.
        rng = np.random.default_rng(0)
        tree = rng.random((case.q.shape[0], max(RAGGED_Q_LENS))) < 0.5
        for begin, q_len in zip(case.cu_q_lens, RAGGED_Q_LENS, strict=False):
            tree[np.arange(begin, begin + q_len), np.arange(q_len)] = True
        options["tree_mask"] = tree
    return case, options


def attend(name: str, case, backend: str) -> tuple[jax.Array, jax.Array]:
    """The check's call on a batch, jitted: output and log-sum-exp."""
    check, options = CHECKS[name], draw(name)[1]
    if check.traced_window:
        options = options | {"sliding_window": jnp.int32(options["sliding_window"])}
    options = {k: jnp.asarray(x) if isinstance(x, np.ndarray) else x for k, x in options.items()}
    static = {k: x for k, x in options.items() if not isinstance(x, jax.Array)}
    arrays = {k: x for k, x in options.items() if k not in static} | case.arguments()

    @jax.jit
    def call(arrays):
        return jp.paged_attention(**arrays, **static, config=check.config, backend=backend, return_lse=True)

    return call(arrays)


def check_attention(name: str, backend: str) -> None:
    """Raises AssertionError where the backend's result is not the oracle's."""
    case, options = draw(name)
    out, lse = attend(name, case, backend)
    expected_out, expected_lse = oracle(case, **options)
    assert_attention_close(out, expected_out)
    np.testing.assert_allclose(lse, expected_lse, rtol=2e-5, atol=2e-3 if out.dtype != jnp.float32 else 1e-4)


def check_write(dtype: str) -> None:
    """Raises AssertionError where quantised values are not the nearest, or what is too large does not saturate."""
    largest = MAX_VALUE[dtype]
    x = np.random.default_rng(0).standard_normal((6, 2, 16)).astype(np.float32) * largest / 2
    x[0, 0, :4] = 1e6 * largest, -1e6 * largest, largest * 1.5, largest
    cache = jp.KVCache.create(
        num_layers=1, num_pages=3, page_size=4, num_kv_heads=2, head_dim=16, dtype=dtype, k_scale=1.0, v_scale=1.0
    )
    slots = jnp.array([4, 5, 6, 7, 8, 99], jnp.int32)
    cache = jax.jit(lambda cache, x: cache.write(0, x, x, slots))(cache, jnp.asarray(x))
    stored = np.asarray(cache.k_pages[0, 1:].swapaxes(1, 2).reshape(8, 2, 16)[:5].astype(jnp.float32))
    clipped = x[:5].clip(-largest, largest)
    expected = np.floor(clipped + 0.5) if dtype == "int8" else clipped.astype(jnp.dtype(dtype)).astype(np.float32)
    np.testing.assert_array_equal(stored, expected)


def failures(names: list[str], backends: tuple[str, ...]) -> dict[str, str]:
    """Of each check that does not hold, why; checks of `check_write` included."""
    found = {}
    for name in names:
        for backend in backends:
            try:
                check_attention(name, backend)
            except (AssertionError, NotImplementedError, ValueError, jax.errors.JaxRuntimeError) as error:
                found[f"{name} by {backend}"] = f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
    for dtype in MAX_VALUE:
        try:
            check_write(dtype)
        except (AssertionError, jax.errors.JaxRuntimeError) as error:
            found[f"write {dtype}"] = f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
    return found
