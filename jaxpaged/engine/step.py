"""The jitted step: batch in, next tokens out. Everything that JAX traces of the engine is in this file.

enter (the batch from one upload) -> model(cache, batch) -> logits -> leave (sample)
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from jaxpaged.cache.batch import Batch
from jaxpaged.cache.kv_cache import KVCache
from jaxpaged.engine.packing import Layout, unpack
from jaxpaged.engine.sampling.batch import SamplingBatch
from jaxpaged.engine.sampling.counts import count_sampled
from jaxpaged.engine.sampling.sample import Sampled, sample


class Model(Protocol):
    """What the engine runs: a pytree (a Flax NNX module is one) with a forward pass over a paged cache.

    A function `(params, cache, batch) -> (logits, cache)` is one as `jax.tree_util.Partial(function, params)`.
    In each layer it writes the new K and V before it attends, as `jaxpaged.nn` does.

    Where it has `layer_specs`, a `jaxpaged.LayerSpec` for each layer, layers with a sliding window hold no pages that
    the window has passed: a layer must not attend further back than it declares. Without, all layers keep all pages.
    """

    def __call__(self, cache: KVCache, batch: Batch) -> tuple[jax.Array, KVCache]:
        """Return float32 logits `[num_seqs, vocab_size]` after each sequence's last token, and the cache written."""
        ...


Step = Callable[[KVCache, jax.Array | None, jax.Array, jax.Array, Layout], tuple[Sampled, KVCache, jax.Array | None]]
"""`(cache, counts, packed, previous, layout) -> (what was sampled, cache, counts)`: see `make_step`."""


def make_step(model: Model, *, compile_whole: bool) -> Step:
    """Return a step of this model.

    The step takes the cache, the counts of tokens for penalties (None in a program without), the arrays of `pack`, and
    the tokens that the step before sampled, `[max_rows]` int32. It returns what was sampled, `token_ids` as long as the
    tokens of the step before, and cache and counts as they are after it.

    Args:
        compile_whole: Compile model and sampling into one program, with cache and counts donated. False calls the model
            as it is, for one that compiles its own pieces (`Llama(layer_loop="calls")`).
    """
    if not compile_whole:
        return partial(_step_in_pieces, model)
    leaves, treedef = jax.tree.flatten(model)  # once: a tree of hundreds of modules takes milliseconds

    def step(cache, counts, packed, previous, layout):
        return _whole_step(leaves, cache, counts, packed, previous, treedef, layout)

    return step


@partial(jax.jit, static_argnames=("treedef", "layout"), donate_argnames=("cache", "counts"))
def _whole_step(
    leaves: list,
    cache: KVCache,
    counts: jax.Array | None,
    packed: jax.Array,
    previous: jax.Array,
    treedef: Any,
    layout: Layout,
) -> tuple[Sampled, KVCache, jax.Array | None]:
    batch, sampling = _enter(packed, previous, layout)
    with jax.named_scope("model"):
        logits, cache = jax.tree.unflatten(treedef, leaves)(cache, batch)
    sampled, counts = _leave(_checked(logits, batch), sampling, counts, len(previous))
    return sampled, cache, counts


def _step_in_pieces(
    model: Model, cache: KVCache, counts: jax.Array | None, packed: jax.Array, previous: jax.Array, layout: Layout
) -> tuple[Sampled, KVCache, jax.Array | None]:
    batch, sampling = _compiled_enter(packed, previous, layout)
    logits, cache = model(cache, batch)
    sampled, counts = _compiled_leave(_checked(logits, batch), sampling, counts, len(previous))
    return sampled, cache, counts


def _enter(packed: jax.Array, previous: jax.Array, layout: Layout) -> tuple[Batch, SamplingBatch | None]:
    """Return the batch, with the tokens that the step before sampled in their places, and how to sample."""
    batch, from_rows, sampling = unpack(packed, layout)
    token_ids = jnp.where(from_rows >= 0, previous[jnp.maximum(from_rows, 0)], batch.token_ids)
    return dataclasses.replace(batch, token_ids=token_ids), sampling


def _checked(logits: jax.Array, batch: Batch) -> jax.Array:
    """Return what the model returned, if it has a row for each sequence."""
    num_seqs = batch.ragged.num_seqs
    if logits.ndim != 2 or logits.shape[0] != num_seqs:
        raise ValueError(
            f"The model's logits must have shape (num_seqs, vocab_size), with {num_seqs} sequences here; got "
            f"{logits.shape}. A row is wanted after the last new token of each."
        )
    return logits


def _leave(
    logits: jax.Array, sampling: SamplingBatch | None, counts: jax.Array | None, num_out: int
) -> tuple[Sampled, jax.Array | None]:
    """Return what is sampled in each row, its tokens cut or padded to `num_out`, and the counts with these tokens."""
    with jax.named_scope("sample"):
        sampled = sample(logits, sampling, counts)
        if counts is not None and sampling is not None and sampling.penalties is not None:
            counts = count_sampled(counts, sampling.penalties, sampled.token_ids)
    token_ids = sampled.token_ids[:num_out]
    return dataclasses.replace(sampled, token_ids=jnp.pad(token_ids, (0, num_out - len(token_ids)))), counts


_compiled_enter = jax.jit(_enter, static_argnames="layout")
_compiled_leave = jax.jit(_leave, static_argnames="num_out", donate_argnames="counts")
