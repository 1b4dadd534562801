"""Calls of `paged_attention` that share one compilation for all values of a shape."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

import jaxpaged as jp
from jaxpaged.testing import Case, assert_attention_close, oracle


@functools.cache
def compiled(**static):
    """Unoptimised: most of a test would be LLVM."""
    return jax.jit(
        lambda arrays: jp.paged_attention(**arrays, **static, return_lse=True),
        compiler_options={"xla_backend_optimization_level": 0},
    )


def call(case: Case, backend: str, **options):
    """Output and log-sum-exp. Arrays among the options are arguments of the compiled function, the rest is static."""
    arguments = {**case.arguments(), **options, "backend": backend}
    arrays = {k: jnp.asarray(v) for k, v in arguments.items() if isinstance(v, np.ndarray | np.generic | jax.Array)}
    return compiled(**{k: v for k, v in arguments.items() if k not in arrays})(arrays)


def check(case: Case, backend: str, **options):
    """The answer is the oracle's, the log-sum-exp as tightly as in float32: products of 16-bit numbers are exact."""
    out, lse = call(case, backend, **options)
    options.pop("config", None)
    expected_out, expected_lse = oracle(case, **options)
    assert_attention_close(out, expected_out)
    np.testing.assert_allclose(lse, expected_lse, rtol=2e-5, atol=2e-5)  # -inf only where -inf is expected
    return out, lse


def with_pool(case: Case, num_pages: int) -> Case:
    """The same case in a pool of a fixed size, so that another draw needs no other compilation."""

    def grow(x):
        if np.ndim(x) < 4:
            return x
        more = np.full((x.shape[0], num_pages - x.shape[1], *x.shape[2:]), 127 if x.dtype == np.int8 else np.nan)
        return np.concatenate([x, more.astype(x.dtype)], axis=1)

    pools = {name: grow(getattr(case, name)) for name in ("k_pages", "v_pages", "k_scale", "v_scale")}
    return dataclasses.replace(case, **pools)


def owned_slots(case: Case) -> np.ndarray:
    """[num_layers, num_pages, page_size] bool: whether a sequence keeps a token there."""
    page_size = case.k_pages.shape[3]
    owned = np.zeros((*case.k_pages.shape[:2], page_size), bool)
    for table, n in zip(case.page_table, case.seq_lens, strict=True):
        key = np.arange(n)
        owned[:, table[key // page_size], key % page_size] = True
    return owned
