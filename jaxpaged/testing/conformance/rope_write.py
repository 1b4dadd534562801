"""`RopeWriteConformance`: what any backend of `rope_and_write` must pass.

A rotation is two products and a sum in float32, which a compiler may contract: an ulp of the larger product, and where
that tips a rounding, one step of the dtype that follows. `assert_one_step_apart` allows that and no more.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.typing import ArrayLike, DTypeLike

from jaxpaged.cache.kv_cache import KVCache, LayerView
from jaxpaged.cache.quantize import MAX_VALUE, is_quantized
from jaxpaged.cache.ragged import Ragged
from jaxpaged.ops.rope_write import ROPE_AND_WRITE, apply_rope, rope_and_write, rope_angles, rope_frequencies
from jaxpaged.testing.conformance.calls import CONFIGURATIONS, assert_refused, lower_strictly, slow

NUM_LAYERS, NUM_PAGES, FILL = 3, 7, 3
FLOATS = ("float32", "bfloat16", "float16")
DTYPES = (*FLOATS, *MAX_VALUE)
_OTHER_DTYPES = tuple(dtype for dtype in DTYPES if dtype not in ("float32", "int8"))
_HALF_STEP = {"float8_e4m3fn": 2**-4, "float8_e5m2": 2**-3}  # of a value; of int8, half of its step of 1
_HEAD_SCALES = np.linspace(0.01, 0.03, 2 * NUM_LAYERS).reshape(NUM_LAYERS, 2)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeWriteInputs:
    """A cache full of `FILL`, and what to write: every token but the last four, which are padding of each kind."""

    cache: KVCache
    qkv: jax.Array
    positions: np.ndarray
    slots: np.ndarray

    @property
    def num_live(self) -> int:
        """Tokens that are no padding."""
        return len(self.slots) - 4

    def angles(self) -> tuple[jax.Array, jax.Array]:
        """Cosine and sine of each token's rotation."""
        frequencies = rope_frequencies(self.cache.head_dim, theta=1e4)
        return rope_angles(jnp.asarray(self.positions, jnp.int32), frequencies)

    def arguments(self, layer: int | jax.Array) -> tuple[jax.Array, LayerView, Ragged, jax.Array, jax.Array]:
        """The arguments of `rope_and_write`. Of the step it reads the slots only."""
        nobody = jnp.zeros((1, 1), jnp.int32)
        ragged = Ragged(page_table=nobody, seq_lens=nobody[0], slot_mapping=jnp.asarray(self.slots))
        return self.qkv, self.cache.layer(layer), ragged, *self.angles()

    def stored(self, pages: jax.Array, layer: int) -> np.ndarray:
        """What lies in the slots of the live tokens."""
        page, offset = np.divmod(self.slots[: self.num_live], self.cache.page_size)
        return np.asarray(pages)[layer, page, :, offset]


def make_rope_write_inputs(
    dtype: DTypeLike = "float32",
    *,
    qkv_dtype: DTypeLike | None = None,
    num_q_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 16,
    page_size: int = 4,
    scale: ArrayLike | None = None,
    num_live: int = 3,
) -> RopeWriteInputs:
    """Draws inputs whose mistakes show: slots in no order, the last of the pool among them.

    Args:
        dtype: Of the cache.
        qkv_dtype: None is that of the cache, or bfloat16 where it is quantised.
        scale: The fixed scale of keys, as `KVCache.create` takes it, and half of that of values.
    """
    rng = np.random.default_rng(head_dim + page_size)
    cache = KVCache.create(
        num_layers=NUM_LAYERS,
        num_pages=NUM_PAGES,
        page_size=page_size,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        dtype=dtype,
        k_scale=scale,
        v_scale=None if scale is None else 2 * np.asarray(scale),
    )
    cache = jax.tree.map(lambda x: x if x.ndim == 2 else jnp.full_like(x, FILL), cache)
    num_slots = cache.num_slots
    qkv = rng.standard_normal((num_live + 4, num_q_heads + 2 * num_kv_heads, head_dim))
    # The last slot of the pool, where -1 would wrap to, has an owner; and -1 comes after it.
    owned = [num_slots - 1, *rng.permutation(np.arange(1, num_slots - 1))[: num_live - 1]]
    return RopeWriteInputs(
        cache=cache,
        qkv=jnp.asarray(qkv, qkv_dtype or ("bfloat16" if is_quantized(dtype) else dtype)),
        positions=rng.integers(0, 500, num_live + 4),
        slots=np.array([*owned, -1, num_slots, 2**31 - 1, -(2**31)], np.int32),
    )


def rope_write_oracle(inputs: RopeWriteInputs, layer: int) -> tuple[np.ndarray, KVCache]:
    """Rotated queries, and the cache after the write, in numpy: float32, every rounding as it is written."""
    cache, qkv = jax.tree.map(np.array, inputs.cache), np.asarray(inputs.qkv)
    cos, sin = (np.asarray(x)[:, None] for x in inputs.angles())
    first, second = np.split(qkv.astype(np.float32), 2, axis=-1)
    turned = np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(qkv.dtype)
    num_kv_heads, live = cache.num_kv_heads, slice(inputs.num_live)
    page, offset = np.divmod(inputs.slots[live], cache.page_size)
    for pages, scale, x in (
        (cache.k_pages, cache.k_scale, turned[live, -2 * num_kv_heads : -num_kv_heads]),
        (cache.v_pages, cache.v_scale, qkv[live, -num_kv_heads:]),
    ):
        if scale is not None:
            x, largest = x.astype(np.float32), np.float32(MAX_VALUE[pages.dtype.name])
            if scale.ndim == 4:
                scale[layer, page, :, offset] = np.abs(x).max(-1) / largest
                factor = scale[layer, page, :, offset]
            else:
                factor = scale[layer]
            x = x / np.where(factor == 0, 1, factor)[..., None]
            x = (np.floor(x + np.float32(0.5)) if pages.dtype == np.int8 else x).clip(-largest, largest)
        pages[layer, page, :, offset] = x.astype(pages.dtype)
    return turned[:, : -2 * num_kv_heads], cache


def _formula(qkv: Any, view: LayerView, ragged: Ragged, cos: Any, sin: Any) -> tuple[jax.Array, LayerView]:
    """The rotation and the write that `rope_and_write` joins: what its derivative is that of."""
    num_kv_heads = view.cache.num_kv_heads
    q, k, v = jnp.split(qkv, (qkv.shape[1] - 2 * num_kv_heads, qkv.shape[1] - num_kv_heads), axis=1)
    return apply_rope(q, cos, sin), view.write(apply_rope(k, cos, sin), v, ragged)


@functools.cache
def _compiled(backend: str) -> Any:
    """Without optimisation, which would take longer than it saves, and with every rounding that is written."""
    level = {"xla_backend_optimization_level": 0} if jax.default_backend() == "cpu" else {}
    return jax.jit(
        lambda *arguments: rope_and_write(*arguments, backend=backend),
        compiler_options=level | {"xla_allow_excess_precision": False},
    )


def assert_one_step_apart(actual: ArrayLike, expected: ArrayLike, qkv: jax.Array) -> None:
    """Asserts that two results of a rotation of `qkv` differ by its rounding, and where they are narrow, seldom."""
    got, wanted = np.asarray(actual), np.asarray(expected)
    assert (got.shape, got.dtype) == (wanted.shape, wanted.dtype)
    if is_quantized(got.dtype):
        apart = np.abs(_in_order(got) - _in_order(wanted))
        assert apart.max() <= 1
        assert np.mean(apart) <= 0.01
        return
    if got.dtype.itemsize == 2:
        assert np.mean(got != wanted) <= 0.01
    ulp = float(max(jnp.finfo(x.dtype).eps for x in (got, qkv)))  # a scale is as good as the value that it comes from
    largest = float(np.max(np.abs(np.asarray(qkv, np.float32))))
    np.testing.assert_allclose(got.astype(np.float32), wanted.astype(np.float32), rtol=ulp, atol=2**-22 * largest)


def assert_untouched(cache: KVCache, inputs: RopeWriteInputs, layer: int) -> None:
    """Asserts that not a bit of a cache changed, but in the slots of live tokens of one layer."""
    slots = inputs.slots[: inputs.num_live]
    for before, after in zip(jax.tree.leaves(inputs.cache), jax.tree.leaves(cache), strict=True):
        before, after = np.array(before), np.array(after)
        if after.ndim > 2:
            after[layer, slots // cache.page_size, :, slots % cache.page_size] = FILL
        np.testing.assert_array_equal(after, before)


def _in_order(x: np.ndarray) -> np.ndarray:
    """Numbers of a one-byte dtype, numbered by size."""
    bits = x.view(np.int8).astype(int)
    return bits if x.dtype == np.int8 else np.where(bits < 0, -128 - bits, bits)


class RopeWriteConformance:
    """What any backend of `rope_and_write` must pass; a subclass in a test module names the backend.

    Attributes:
        backend: Name under which it is registered. What it cannot run, by its own `why_unsupported`, it must refuse
            with that reason.
    """

    backend: str

    def run(self, inputs: RopeWriteInputs, layer: int = 1) -> tuple[jax.Array, KVCache]:
        """Rotated queries and the cache after the write. Skips the test where the backend refuses it by name."""
        arguments = self.accepted(inputs.arguments(layer))
        q, view = _compiled(self.backend)(*arguments)
        return q, view.cache

    def accepted(self, arguments: tuple) -> tuple:
        """The arguments, if the backend takes them. Skips the test where it refuses them by name."""
        qkv, view, ragged, *angles = arguments
        if reason := ROPE_AND_WRITE.why_unsupported(qkv, view, ragged.slot_mapping, *angles, backend=self.backend):
            assert_refused(self.backend, reason, functools.partial(rope_and_write, backend=self.backend), *arguments)
            pytest.skip(f"refused by name: {reason}")
        return arguments

    def check(self, inputs: RopeWriteInputs, layer: int = 1) -> None:
        """Both results are the oracle's, and not a bit of the cache changes but in the slots of live tokens."""
        result = self.run(inputs, layer)
        expected = rope_write_oracle(inputs, layer)
        assert jax.tree.structure(result) == jax.tree.structure(expected)
        for x, y in zip(jax.tree.leaves(result), jax.tree.leaves(expected), strict=True):
            assert_one_step_apart(x, y, inputs.qkv)
        assert_untouched(result[1], inputs, layer)

    @pytest.mark.parametrize("configuration", ["default", "x64"])
    @pytest.mark.parametrize("dtype", ["float32", "int8", *slow(*_OTHER_DTYPES)])
    def test_rotation_and_write_equal_float64(self, dtype, configuration):
        """Queries in the rotated plane, keys and values in their slots, times their scales."""
        with CONFIGURATIONS[configuration]():
            inputs = make_rope_write_inputs(dtype)
            q, cache = self.run(inputs, layer=2)
            cos, sin = (np.asarray(x, np.float64) for x in inputs.angles())
        qkv, live = np.asarray(inputs.qkv, np.float64), inputs.num_live
        angles = inputs.positions[:, None] * 1e4 ** (-np.arange(8) / 8)
        # An angle is a float32 product of a position and a float32 frequency, two roundings.
        np.testing.assert_allclose(cos + 1j * sin, np.exp(1j * angles), rtol=0, atol=2**-22 * np.max(inputs.positions))
        z = (qkv[..., :8] + 1j * qkv[..., 8:]) * (cos + 1j * sin)[:, None]
        turned = np.concatenate([z.real, z.imag], -1)
        eps, atol = float(jnp.finfo(inputs.qkv.dtype).eps), 2**-22 * np.max(np.abs(qkv))
        assert q.dtype == inputs.qkv.dtype
        np.testing.assert_allclose(np.asarray(q, np.float64), turned[:, :4], rtol=eps, atol=atol)
        for pages, scales, expected in (
            (cache.k_pages, cache.k_scale, turned[:live, 4:6]),
            (cache.v_pages, cache.v_scale, qkv[:live, 6:]),
        ):
            stored, step = inputs.stored(pages, 2).astype(np.float64), 0.0
            if scales is not None:
                scale = inputs.stored(scales, 2).astype(np.float64)[..., None]
                stored, step = stored * scale, np.max(scale) * (0.5 if dtype == "int8" else 2**-9)
            np.testing.assert_allclose(stored, expected, rtol=eps + _HALF_STEP.get(dtype, 0), atol=atol + step)

    @pytest.mark.parametrize("dtype", ["float32", "int8", *slow(*_OTHER_DTYPES)])
    def test_strict_promotion_refuses_nothing(self, dtype):
        """A user may forbid JAX to promote dtypes or ranks."""
        arguments = self.accepted(make_rope_write_inputs(dtype).arguments(1))
        lower_strictly(_compiled(self.backend), *arguments)

    @pytest.mark.parametrize(
        ("dtype", "head_dim", "page_size", "num_q_heads", "num_kv_heads"),
        [
            ("bfloat16", 80, 24, 6, 3),
            *slow(
                ("float32", 16, 1, 4, 2),
                ("float16", 128, 4, 8, 1),
                ("int8", 96, 4, 15, 3),
                ("float32", 16, 4, 71, 1),
                ("float8_e4m3fn", 256, 1, 5, 5),
            ),
        ],
    )
    def test_any_shape_equals_oracle(self, dtype, head_dim, page_size, num_q_heads, num_kv_heads):
        """Head widths that are no power of two, groups that divide nothing, pages of one slot."""
        heads = {"num_q_heads": num_q_heads, "num_kv_heads": num_kv_heads}
        self.check(make_rope_write_inputs(dtype, head_dim=head_dim, page_size=page_size, **heads))

    @pytest.mark.parametrize("scale", [_HEAD_SCALES, *slow(None, 0.02)], ids=["head", "token", "all"])
    @pytest.mark.parametrize(
        ("dtype", "qkv_dtype"),
        [("int8", "float32"), *slow(("float8_e5m2", "float16"), ("float8_e4m3fn", "bfloat16"))],
    )
    def test_each_kind_of_scale_equals_oracle(self, dtype, qkv_dtype, scale):
        """Scales measured for each token, and fixed ones, which are left as they are."""
        inputs = make_rope_write_inputs(dtype, qkv_dtype=qkv_dtype, head_dim=80, page_size=24, scale=scale)
        self.check(inputs)

    @pytest.mark.parametrize(
        ("qkv_dtype", "dtype"), [("float16", "bfloat16"), *slow(("bfloat16", "float32"), ("float32", "bfloat16"))]
    )
    def test_into_another_dtype_equals_oracle(self, qkv_dtype, dtype):
        """Queries keep the dtype of `qkv`; keys and values take the cache's."""
        self.check(make_rope_write_inputs(dtype, qkv_dtype=qkv_dtype))

    @pytest.mark.parametrize("dtype", ["float32", "int8"])
    def test_at_each_layer_changes_that_layer(self, dtype):
        """The first, the last, and one between."""
        for layer in range(NUM_LAYERS):
            self.check(make_rope_write_inputs(dtype), layer)

    @pytest.mark.parametrize("dtype", ["float32", "int8"])
    def test_padding_alone_changes_nothing_and_rotates(self, dtype):
        """Slots below 0, and from the end of the pool on, are dropped."""
        inputs = make_rope_write_inputs(dtype)
        padding = np.array([-1, -2, -(2**31), *(inputs.cache.num_slots + np.arange(4))], np.int32)
        q, cache = self.run(dataclasses.replace(inputs, slots=padding))
        _assert_same_bits(cache, inputs.cache)
        assert_one_step_apart(q, rope_write_oracle(inputs, 1)[0], inputs.qkv)

    def test_rows_of_zeros_store_zeros(self):
        """A measured scale of 0 divides nothing."""
        inputs = make_rope_write_inputs("int8")
        _, cache = self.run(dataclasses.replace(inputs, qkv=jnp.zeros_like(inputs.qkv)))
        for x in jax.tree.leaves(cache):
            assert not np.any(inputs.stored(x, 1))

    def test_values_are_not_rotated(self):
        """An infinite entry of V does not touch the other half of its head: inf * 0 would be NaN."""
        inputs = make_rope_write_inputs()
        inputs = dataclasses.replace(inputs, qkv=inputs.qkv.at[:, -1, 3].set(jnp.inf))
        _, cache = self.run(inputs)
        np.testing.assert_array_equal(inputs.stored(cache.v_pages, 1), inputs.qkv[: inputs.num_live, -2:])

    @pytest.mark.parametrize("unroll", [False, *slow(True)], ids=["rolled", "unrolled"])
    @pytest.mark.parametrize("dtype", ["int8", *slow("bfloat16")])
    def test_scan_over_layers_writes_each_layer(self, dtype, unroll):
        """With the cache as the carry and the layer traced."""
        inputs = make_rope_write_inputs(dtype)
        qkv, _, ragged, *angles = self.accepted(inputs.arguments(0))

        def body(cache, layer):
            factor = (layer + 1).astype(qkv.dtype)
            q, view = rope_and_write(qkv * factor, cache.layer(layer), ragged, *angles, backend=self.backend)
            return view.cache, q

        layers = jnp.arange(NUM_LAYERS, dtype=jnp.int32)
        cache, q = jax.jit(lambda cache: jax.lax.scan(body, cache, layers, unroll=unroll))(inputs.cache)
        expected = inputs.cache
        for layer in range(NUM_LAYERS):
            arguments = qkv * (layer + 1), expected.layer(layer), ragged, *angles
            expected_q, view = _compiled(self.backend)(*arguments)
            expected = view.cache
            assert_one_step_apart(q[layer], expected_q, NUM_LAYERS * qkv)
        for x, y in zip(jax.tree.leaves(cache), jax.tree.leaves(expected), strict=True):
            assert_one_step_apart(x, y, NUM_LAYERS * qkv)

    def test_no_tokens_return_the_cache(self):
        """A step in which nobody has work."""
        inputs = make_rope_write_inputs()
        nobody = dataclasses.replace(inputs, qkv=inputs.qkv[:0], positions=inputs.positions[:0], slots=inputs.slots[:0])
        q, cache = self.run(nobody, layer=0)
        assert q.shape == (0, 4, 16)
        _assert_same_bits(cache, inputs.cache)

    def test_gradients_equal_those_of_the_formula(self):
        """Through queries and cache, by what is written and by the cache before."""
        inputs = make_rope_write_inputs()
        _, _, ragged, *angles = self.accepted(inputs.arguments(1))
        weights = np.random.default_rng(0).standard_normal(inputs.cache.k_pages.shape).astype(np.float32)

        def gradient(function):
            def loss(qkv, cache):
                q, view = function(qkv, cache.layer(1), ragged, *angles)
                pools = view.cache.k_pages, view.cache.v_pages**2
                return jnp.sum(q**2) + sum(jnp.sum(weights * pool) for pool in pools)

            return jax.jit(jax.grad(loss, argnums=(0, 1)))(inputs.qkv, inputs.cache)

        actual, expected = gradient(functools.partial(rope_and_write, backend=self.backend)), gradient(_formula)
        assert np.count_nonzero(expected[0]) > 0
        for x, y in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-6, atol=1e-6)


def _assert_same_bits(actual: Any, expected: Any) -> None:
    for x, y in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))
