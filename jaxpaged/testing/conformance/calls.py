"""Calls of a backend under test: compiled once for all values of a shape, in each configuration of JAX."""

import contextlib
import functools
import re
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpaged.cache.kv_cache import KVCache, LayerView
from jaxpaged.cache.quantize import is_quantized
from jaxpaged.cache.ragged import Ragged
from jaxpaged.config import AttentionConfig
from jaxpaged.ops.attention import ATTENTION, AttentionOptions, paged_attention
from jaxpaged.ops.attention import attend as attend_by
from jaxpaged.testing.cases import Case
from jaxpaged.testing.conformance.batches import Options
from jaxpaged.testing.gradients import DIFFERENTIABLE, cotangents


@contextlib.contextmanager
def strict_promotion() -> Iterator[None]:
    """Refuses to promote dtypes and ranks. Both settings only refuse: what runs under both runs under each."""
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        yield


CONFIGURATIONS: dict[str, Callable[[], contextlib.AbstractContextManager]] = {
    "default": contextlib.nullcontext,
    "x64": functools.partial(jax.enable_x64, True),
    "strict": strict_promotion,
}
"""Settings of JAX under which a backend gives the same answers."""


def slow(*values: Any) -> list[Any]:
    """Parameters, or tuples of them, that a short run of the suite leaves out: pytest's `-m "not slow"`."""
    return [
        pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=pytest.mark.slow) for value in values
    ]


def jit(function: Callable) -> Any:
    """`jax.jit`, on a CPU unoptimised: most of a test would be LLVM."""
    on_cpu = jax.default_backend() == "cpu"
    return jax.jit(function, compiler_options={"xla_backend_optimization_level": 0} if on_cpu else {})


def assert_refused(backend: str, reason: str, call: Callable, *arguments: Any) -> None:
    """Asserts that a call is refused by name, and for the reason that the backend's `why_unsupported` gives."""
    with pytest.raises(NotImplementedError, match=re.escape(f"`backend={backend!r}` cannot run this call: {reason}")):
        call(*arguments)


def as_arguments(case: Case, options: Options) -> tuple[jax.Array, LayerView, Ragged, AttentionOptions]:
    """A case and its options as the arguments of `attend`. Numpy arrays become JAX's, all else stays static."""
    arrays = case.arguments()
    options = {name: jnp.asarray(x) if hasattr(x, "shape") else x for name, x in options.items()}
    shape = case.k_pages.shape[2:3]
    k_scale, v_scale = (
        x if x is None or jnp.ndim(x) == 4 else jnp.broadcast_to(jnp.asarray(x, jnp.float32), (1, *shape))
        for x in (arrays["k_scale"], arrays["v_scale"])
    )
    cache = KVCache(k_pages=arrays["k_pages"], v_pages=arrays["v_pages"], k_scale=k_scale, v_scale=v_scale)
    ragged = Ragged(
        page_table=arrays["page_table"],
        seq_lens=arrays["seq_lens"],
        cu_q_lens=arrays["cu_q_lens"],
        tree_mask=options.pop("tree_mask", None),
    )
    return arrays["q"], cache.layer(options.pop("layer", case.layer)), ragged, AttentionOptions(**options)


def accepted_arguments(
    backend: str, case: Case, options: Options
) -> tuple[jax.Array, LayerView, Ragged, AttentionOptions]:
    """`as_arguments`, of a call that the backend takes. Skips the test where it refuses such a call by name."""
    arguments = as_arguments(case, options)
    if reason := ATTENTION.why_unsupported(*arguments, backend=backend):
        assert_refused(backend, reason, functools.partial(attend_by, backend=backend), *arguments)
        pytest.skip(f"refused by name: {reason}")
    return arguments


def prepare(backend: str, case: Case, options: Options) -> tuple[Any, list[jax.Array]]:
    """A jitted call of `attend` and its arrays. Skips the test where the backend refuses such a call by name."""
    arguments = accepted_arguments(backend, case, options)
    leaves, treedef = jax.tree.flatten(arguments)
    static = tuple(None if isinstance(leaf, jax.Array) else leaf for leaf in leaves)
    return _compiled(backend, treedef, static), [leaf for leaf in leaves if isinstance(leaf, jax.Array)]


@functools.cache
def _compiled(backend: str, treedef: Any, static: tuple[Hashable, ...]) -> Any:
    """Compiled once for all arguments that have the same leaves where `static` is not None."""

    def call(arrays: list[jax.Array]) -> Any:
        values = iter(arrays)
        leaves = [next(values) if leaf is None else leaf for leaf in static]
        return attend_by(*jax.tree.unflatten(treedef, leaves), backend=backend)

    return jit(call)


def attend(backend: str, case: Case, options: Options) -> tuple[jax.Array, jax.Array]:
    """Output and log-sum-exp by a backend. Skips the test where the backend refuses such a call by name."""
    call, arrays = prepare(backend, case, options)
    return call(arrays)


def with_config(backend: str, case: Case, options: Options, config: AttentionConfig | None) -> Options:
    """Options with a configuration, which is left out where the backend, by name, does not take it."""
    configured = options | {"config": config}
    arguments = as_arguments(case, configured)
    reason = ATTENTION.why_unsupported(*arguments, backend=backend)
    if reason is None or ATTENTION.why_unsupported(*as_arguments(case, options), backend=backend):
        return configured
    assert_refused(backend, reason, functools.partial(attend_by, backend=backend), *arguments)
    return options


def gradients(backend: str, case: Case, options: Options, of: tuple[str, ...] | None = None) -> dict[str, jax.Array]:
    """Gradients by name of the loss that `expected_gradients` differentiates, by all floating arrays, or by `of`.

    Skips the test where the backend refuses such a call by name.
    """
    accepted_arguments(backend, case, options)
    arguments = {**case.arguments(), **options}
    arrays = {
        name: jnp.asarray(x) for name, x in arguments.items() if isinstance(x, jax.Array | np.ndarray | np.generic)
    }
    static = {name: x for name, x in arguments.items() if name not in arrays}
    if of is None:
        of = tuple(name for name in DIFFERENTIABLE if name in arrays and not is_quantized(arrays[name].dtype))
    dout, dlse = (jnp.asarray(x, jnp.float32) for x in cotangents(case))

    def loss(wanted: dict, others: dict) -> jax.Array:
        out, lse = paged_attention(**wanted, **others, **static, backend=backend, return_lse=True)
        # Rows without keys have lse -inf: what a caller makes of it must not come back as NaN.
        return jnp.sum(out.astype(jnp.float32) * dout) + jnp.sum(jnp.where(jnp.isneginf(lse), 0, lse) * dlse)

    wanted = {name: arrays[name] for name in of}
    return jit(jax.grad(loss))(wanted, {name: x for name, x in arrays.items() if name not in of})


def lower_strictly(call: Any, *arguments: Any) -> None:
    """Traces and lowers a jitted call where nothing may be promoted, which only refuses: there is nothing to run."""
    with strict_promotion():
        call.lower(*arguments)
