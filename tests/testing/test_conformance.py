"""The conformance suite takes a third party's backend as it takes ours, and finds what is wrong with a wrong one."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from jaxpaged.ops.attention import ATTENTION
from jaxpaged.ops.attention.reference import paged_attention_reference, why_not_by_reference
from jaxpaged.ops.dispatch import Backend
from jaxpaged.testing.conformance import AttentionConformance


def attend_densely(q, view, ragged, options):
    k, v = view.cache.gather(view.row, ragged.page_table, ragged.seq_lens)
    k, v = (jnp.repeat(x, q.shape[1] // x.shape[2], axis=2) for x in (k, v))
    logits = jnp.einsum("shd,skhd->shk", q, k, precision="highest") * options.scale(q.shape[2])
    live = jnp.arange(k.shape[1])[None, :] < ragged.seq_lens[:, None]
    sinks = jnp.where(live[:, :1], options.sinks[None, :], -jnp.inf)
    lse = jnp.logaddexp(jax.nn.logsumexp(jnp.where(live[:, None], logits, -jnp.inf), axis=2), sinks)
    p = jnp.where(live[:, None], jnp.exp(logits - jnp.where(live[:, :1], lse, 0)[:, :, None]), 0)
    return jnp.einsum("shk,skhd->shd", p, v, precision="highest"), lse


def why_not_densely(q, _view, ragged, options):
    rest = dataclasses.replace(options, sinks=None, config=None)
    plain = rest == type(options)() and options.sinks is not None and not options.is_batch_invariant
    return None if plain and ragged.cu_q_lens is None and q.dtype == jnp.float32 else "it decodes in float32 with sinks"


def with_cache(**changes):
    """A backend that takes the cache for another one."""

    def run(q, view, ragged, options):
        cache = dataclasses.replace(view.cache, **{name: change(view.cache) for name, change in changes.items()})
        return paged_attention_reference(q, dataclasses.replace(view, cache=cache), ragged, options)

    return run


def with_ragged(**changes):
    """A backend that takes the sequences of the step for others."""

    def run(q, view, ragged, options):
        changed = {name: change(getattr(ragged, name)) for name, change in changes.items()}
        return paged_attention_reference(q, view, dataclasses.replace(ragged, **changed), options)

    return run


def with_options(**changes):
    """A backend that takes the options for others."""

    def run(q, view, ragged, options):
        changed = {name: change(getattr(options, name)) for name, change in changes.items()}
        return paged_attention_reference(q, view, ragged, dataclasses.replace(options, **changed))

    return run


def with_result(change):
    """A backend that does something to what it returns."""
    return lambda q, view, *rest: change(*paged_attention_reference(q, view, *rest), view.cache)


def ones(scale):
    return None if scale is None else jnp.ones_like(scale)


# Of each, the program of the suite that is to find it.
MUTANTS = {
    "K as V": (with_cache(v_pages=lambda cache: cache.k_pages), "decode"),
    "no scale of K": (with_cache(k_scale=lambda cache: ones(cache.k_scale)), "decode_int8"),
    "another sequence's table": (with_ragged(page_table=lambda table: jnp.roll(table, 1, axis=0)), "decode"),
    "mask off by one": (with_ragged(seq_lens=lambda n: n - 1), "decode"),
}
MORE_MUTANTS = {
    "V as K": (with_cache(k_pages=lambda cache: cache.v_pages), "decode"),
    "no scale of V": (with_cache(v_scale=lambda cache: ones(cache.v_scale)), "ragged_float8"),
    "another layer": (with_cache(k_pages=lambda cache: jnp.roll(cache.k_pages, 1, axis=0)), "decode"),
    "another KV head": (with_cache(v_pages=lambda cache: jnp.roll(cache.v_pages, 1, axis=2)), "decode"),
    "another slot of the page": (with_cache(v_pages=lambda cache: jnp.roll(cache.v_pages, 1, axis=3)), "decode"),
    "not causal": (with_options(causal=lambda _: False), "ragged"),
    "window of one more": (with_options(sliding_window=lambda window: window + 1), "decode_bfloat16"),
    "window of one less": (with_options(sliding_window=lambda window: window - 1), "ragged"),
    "no window": (with_options(sliding_window=lambda _: None), "decode_int8"),
    "no sinks": (with_options(sinks=lambda _: None), "decode"),
    "no slopes": (with_options(alibi_slopes=lambda _: None), "decode_bfloat16"),
    "slopes of other heads": (with_options(alibi_slopes=lambda slopes: jnp.roll(slopes, 1)), "ragged"),
    "another scale of logits": (with_options(sm_scale=lambda _: 0.25), "ragged_float8"),
    "no tree": (with_ragged(tree_mask=lambda _: None), "ragged_float16"),
    "tree the other way round": (with_ragged(tree_mask=lambda mask: jnp.roll(mask, 1, axis=1)), "ragged_float16"),
    "log-sum-exp in base 2": (with_result(lambda out, lse, _: (out, lse / jnp.log(2))), "decode"),
    "slots of nobody weighed by 0": (with_result(lambda out, lse, c: (out + 0 * c.v_pages.sum(), lse)), "decode"),
    "output in another dtype": (with_result(lambda out, lse, _: (out.astype(jnp.float16), lse)), "decode"),
}


@pytest.fixture(scope="module", autouse=True)
def registered():
    """All of these, until the end of this module."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ATTENTION, "_backends", dict(ATTENTION._backends))
        ATTENTION.register(Backend("dense", attend_densely, why_not_densely))
        for name, (run, _) in (MUTANTS | MORE_MUTANTS).items():
            ATTENTION.register(Backend(name, run, why_not_by_reference, is_differentiable=True))
        yield


class TestDense(AttentionConformance):
    backend = "dense"


@pytest.mark.parametrize("name", [*MUTANTS, *(pytest.param(name, marks=pytest.mark.slow) for name in MORE_MUTANTS)])
def test_a_mutant_fails(name):
    suite = AttentionConformance()
    suite.backend = name
    with pytest.raises(AssertionError):
        suite.test_drawn_batches_equal_oracle((MUTANTS | MORE_MUTANTS)[name][1], range(8), "default")


def test_a_soft_cap_that_is_ignored_fails():
    name = "no cap"
    ATTENTION.register(Backend(name, with_options(logits_soft_cap=lambda _: None), why_not_by_reference))
    suite = AttentionConformance()
    suite.backend = name
    with pytest.raises(AssertionError):
        suite.test_soft_cap_of_logits_of_ten_thousand_equals_oracle("decode_int8")
