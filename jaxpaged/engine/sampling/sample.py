"""The next token from logits, on the device, one program for a whole batch of unlike requests.

Nothing here reads a value on the host, and no row's result depends on another row. The draw follows from seed and
position alone; that is why speculation gives the very tokens that come without it.
"""

import dataclasses
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, UInt

from jaxpaged.engine.sampling.batch import PAD, Penalties, SamplingBatch
from jaxpaged.engine.sampling.counts import IN_OUTPUT

_LANES = 256  # tokens of a group in `_draw`
_NUM_CANDIDATES = 256  # the likeliest tokens, among which `keep_likeliest` looks first on a CPU


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RowLogprobs:
    """Log-probabilities of tokens: the log-softmax of the model's own logits, before any processing.

    Attributes:
        logprobs: Of one token a row.
        top_ids, top_logprobs: The likeliest, best first; of equal ones the smaller id first.
    """

    logprobs: Float[Array, "*rows"]
    top_ids: Int[Array, "*rows num_top"]
    top_logprobs: Float[Array, "*rows num_top"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """What `sample` returns.

    Attributes:
        token_ids: One a row.
        is_finite: Whether all of the row's logits were finite before any processing. Where they were not, the token is
            some token of the vocabulary and means nothing.
        logprobs: Where they were asked for.
    """

    token_ids: Int[Array, "num_seqs"]
    is_finite: Bool[Array, "num_seqs"]
    logprobs: RowLogprobs | None = None


def sample(
    logits: Float[Array, "num_seqs vocab_size"],
    params: SamplingBatch | None,
    counts: Int[Array, "num_seats vocab_size"] | None = None,
) -> Sampled:
    """Return one token a row. `params=None` says that every row is greedy, and compiles to an argmax.

    In this order: banned stop tokens, logit bias, repetition, frequency and presence penalty, then the likeliest token
    where the temperature is 0; else temperature, top-k, top-p of what top-k left, min-p, and the draw. Source of the
    order: vLLM's sampler up to the penalties, Hugging Face `transformers` from the temperature on.

    Args:
        counts: How often each sequence with penalties holds each token: see `jaxpaged.engine.sampling.counts`.
    """
    is_finite = jnp.isfinite(logits).all(-1)
    if params is None:
        return Sampled(token_ids=_argmax(logits), is_finite=is_finite)
    processed = process(logits, params, counts)
    token_ids = _argmax(processed)
    if params.temperature is not None and params.seed is not None:
        drawn = _draw(_weights(processed, params.temperature, params), params.seed, params.position)
        token_ids = jnp.where(params.temperature > 0, drawn, token_ids)
    logprobs = None
    if params.num_logprobs is not None:
        told = token_ids if params.next_ids is None else jnp.where(params.next_ids >= 0, params.next_ids, token_ids)
        logprobs = token_logprobs(logits, told, params.num_logprobs)
    return Sampled(token_ids=token_ids, is_finite=is_finite, logprobs=logprobs)


def token_logprobs(
    logits: Float[Array, "num_rows vocab_size"], next_ids: Int[Array, "num_rows"], num_top: int = 0
) -> RowLogprobs:
    """Return log-probabilities of given tokens and of the likeliest ones: those of a prompt, or of what was drawn.

    Numerics: float32. Among other rows a row's may change in the last place (XLA's exp does, with the array's shape).

    Args:
        logits: As they came from the model, before any processing.
        next_ids: The token that follows each row.
        num_top: How many of the likeliest tokens to tell; those past the vocabulary are left out.
    """
    logits = logits.astype(jnp.float32)
    largest = logits.max(-1, keepdims=True)
    log_total = largest + jnp.log(_row_sums(jnp.exp(logits - largest)))[:, None]
    of_next = jnp.take_along_axis(logits, next_ids[:, None], axis=-1, mode="clip") - log_total
    top, top_ids = lax.top_k(logits, min(num_top, logits.shape[-1]))
    return RowLogprobs(logprobs=of_next[:, 0], top_ids=top_ids, top_logprobs=top - log_total)


def process(
    logits: Float[Array, "num_seqs vocab_size"],
    params: SamplingBatch,
    counts: Int[Array, "num_seats vocab_size"] | None = None,
) -> Float[Array, "num_seqs vocab_size"]:
    """Return logits after bans, bias and penalties: what greedy rows take the largest of. A feature unused is exact: x
    - 0.
    """
    logits = logits.astype(jnp.float32)
    row = jnp.arange(logits.shape[0], dtype=jnp.int32)[:, None]
    if params.stop_ids is not None and params.min_position is not None:
        stop_ids = jnp.where((params.position < params.min_position)[:, None], params.stop_ids, PAD)
        logits = logits.at[row, stop_ids].set(-jnp.inf, mode="drop")
    if params.bias_ids is not None and params.bias_values is not None:
        logits = logits.at[row, params.bias_ids].add(params.bias_values, mode="drop")
    if params.penalties is not None and counts is not None:
        logits = _penalised(logits, params.penalties, counts)
    return logits


def _penalised(logits: Float[Array, "num_seqs vocab_size"], p: Penalties, counts: Array) -> Array:
    row = jnp.arange(logits.shape[0], dtype=jnp.int32)[:, None]
    seen = counts.at[p.seat].get(mode="fill", fill_value=0).at[row, p.recent].add(IN_OUTPUT, mode="drop")
    num_output = seen // IN_OUTPUT
    penalty = jnp.where(seen > 0, p.repetition[:, None], 1)
    logits = jnp.where(logits > 0, logits / penalty, logits * penalty)
    logits = logits - p.frequency[:, None] * num_output.astype(jnp.float32)
    return logits - jnp.where(num_output > 0, p.presence[:, None], 0)


def _weights(logits: Float[Array, "num_seqs vocab_size"], temperature: Array, params: SamplingBatch) -> Array:
    """Return probabilities of the draw but for their sum, `[num_seqs, vocab_size]`; the likeliest token has 1."""
    largest = logits.max(-1, keepdims=True)  # taken off first: a tiny temperature then overflows only downwards
    scaled = (logits - largest) / jnp.where(temperature > 0, temperature, 1)[:, None]
    weights = jnp.exp(scaled)
    if params.top_k is not None and params.top_p is not None:
        weights = jnp.where(keep_likeliest(scaled, params.top_k, params.top_p), weights, 0)
    if params.min_p is not None:
        weights = jnp.where(weights >= params.min_p[:, None], weights, 0)
    return weights


def _draw(
    weights: Float[Array, "num_seqs vocab_size"], seed: UInt[Array, "num_seqs"], position: Int[Array, "num_seqs"]
) -> Int[Array, "num_seqs"]:
    """Return one token a row with probability proportional to its weight, from two uniform numbers.

    The first chooses one of the groups, by their sums, the second a token in it. Gumbel noise would want a random
    number for each token of the vocabulary: 23 ms against 2 at 16 rows of 49,152 (2 CPU cores).
    """
    # Columns g, g + num_groups, g + 2 num_groups ... are a group.
    groups = _padded(weights).reshape(weights.shape[0], _LANES, -1)

    def uniform(seed: Array, position: Array) -> Array:
        return jax.random.uniform(jax.random.fold_in(jax.random.key(seed), position), (2,), jnp.float32)

    u = jax.vmap(uniform)(seed, position)
    group = _pick(groups.sum(1), u[:, 0])
    lane = _pick(jnp.take_along_axis(groups, group[:, None, None], axis=2)[:, :, 0], u[:, 1])
    return lane * groups.shape[2] + group


def _padded(x: Float[Array, "num_seqs vocab_size"]) -> Array:
    """With zeros up to a multiple of `_LANES`."""
    return jnp.pad(x, ((0, 0), (0, -x.shape[-1] % _LANES)))


def _row_sums(x: Float[Array, "num_seqs vocab_size"]) -> Float[Array, "num_seqs"]:
    """Sum in an order of their own: XLA's for a whole row hangs on the number of rows, on a CPU at least."""
    x = _padded(x).reshape(x.shape[0], -1, _LANES).sum(1)
    while x.shape[1] > 1:
        half = x.shape[1] // 2
        x = x[:, :half] + x[:, half:]
    return x[:, 0]


def _pick(weights: Float[Array, "num_seqs n"], u: Float[Array, "num_seqs"]) -> Int[Array, "num_seqs"]:
    """Return the first index at which the running sum passes `u` of the whole; never one of weight 0."""
    sums = jnp.cumsum(weights, axis=-1)
    index = jnp.arange(weights.shape[-1], dtype=jnp.int32)
    passes = (weights > 0) & (sums > u[:, None] * sums[:, -1:])
    # Running sums round, so that none may pass a `u` next to 1: the last one that weighs anything then.
    last = jnp.where(weights > 0, index[None, :], 0).max(-1)
    return jnp.minimum(jnp.where(passes, index[None, :], weights.shape[-1]).min(-1), last)


def _argmax(logits: Float[Array, "num_seqs vocab_size"]) -> Int[Array, "num_seqs"]:
    """Return the first index of the largest. XLA's argmax takes four times as long on a CPU as these two reductions."""
    index = jnp.arange(logits.shape[-1], dtype=jnp.int32)
    best = jnp.where(logits == logits.max(-1, keepdims=True), index[None, :], logits.shape[-1])
    return jnp.minimum(best.min(-1), logits.shape[-1] - 1)  # of NaN nothing is the largest


def keep_likeliest(
    logits: Float[Array, "num_seqs vocab_size"], top_k: Int[Array, "num_seqs"], top_p: Float[Array, "num_seqs"]
) -> Bool[Array, "num_seqs vocab_size"]:
    """Return which tokens top-k and then top-p leave. Tokens that tie with the last stay too.

    What is kept is a threshold on the logits: the largest that still leaves k tokens, then the largest that still
    leaves probability p. A GPU finds both without a sort, bit by bit. On a CPU that is slow (40 ms at 16 rows of
    49,152 tokens, 2 cores) and sorting out the first `_NUM_CANDIDATES` is not (5 ms): only when these do not settle
    some row is it done. What a row gets depends on that row alone either way.
    """
    keys = _ordered_bits(logits)
    k = jnp.where(top_k > 0, top_k, logits.shape[-1])
    top_p = jnp.maximum(top_p, jnp.finfo(jnp.float32).tiny)  # of 0, no token at all would be enough
    weights = jnp.exp(logits - logits.max(-1, keepdims=True))
    find = partial(lax.platform_dependent, cpu=_thresholds_by_candidates, default=_thresholds_by_bits)
    by_count, by_mass = find(logits, keys, weights, k, top_p)
    kept = keys >= by_count[:, None]
    return kept & ((keys >= by_mass[:, None]) | (top_p >= 1)[:, None])


def _thresholds_by_bits(
    _, keys: Array, weights: Array, k: Array, top_p: Array, *, unroll: bool = True
) -> tuple[Array, Array]:
    """Return the keys from which on top-k keeps and top-p keeps: floats order like integers, so 32 halvings find each.

    Unrolled, as a while loop would break a GPU's command buffer in two; a CPU compiles the loop ten times as fast.
    """
    by_count = _largest_threshold(keys, lambda kept: kept.sum(-1) >= k, unroll)
    weights = jnp.where(keys >= by_count[:, None], weights, 0)
    enough = top_p * weights.sum(-1)
    by_mass = _largest_threshold(keys, lambda kept: jnp.where(kept, weights, 0).sum(-1) >= enough, unroll)
    return by_count, by_mass


def _thresholds_by_candidates(
    logits: Array, keys: Array, weights: Array, k: Array, top_p: Array
) -> tuple[Array, Array]:
    """Return the same from the likeliest tokens in order, and bit by bit for the rows that want more of them."""
    vocab_size = keys.shape[-1]
    num_candidates = min(_NUM_CANDIDATES, vocab_size)
    best, ids = lax.top_k(logits, num_candidates)
    best_keys = _ordered_bits(best)
    last = jnp.clip(k - 1, 0, num_candidates - 1)[:, None]
    by_count = jnp.where(k < vocab_size, jnp.take_along_axis(best_keys, last, axis=-1)[:, 0], 0)
    total = _row_sums(jnp.where(keys >= by_count[:, None], weights, 0))
    reached = jnp.cumsum(jnp.take_along_axis(weights, ids, axis=-1), axis=-1) >= (top_p * total)[:, None]
    by_mass = jnp.take_along_axis(best_keys, reached.argmax(-1)[:, None], axis=-1)[:, 0]
    settled = ((k <= num_candidates) | (k >= vocab_size)) & (reached.any(-1) | (top_p >= 1))

    def from_all() -> tuple[Array, Array]:
        slow = _thresholds_by_bits(logits, keys, weights, k, top_p, unroll=False)
        return jnp.where(settled, by_count, slow[0]), jnp.where(settled, by_mass, slow[1])

    return lax.cond(settled.all(), lambda: (by_count, by_mass), from_all)


def _ordered_bits(x: Float[Array, "..."]) -> UInt[Array, "..."]:
    """Return unsigned integers in the order of the floats: flip all bits of a negative, the sign bit of the others."""
    x = jnp.where(x == 0, 0, x.astype(jnp.float32))  # -0.0 is no less
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    sign = jnp.uint32(1 << 31)
    return jnp.where(bits >= sign, ~bits, bits | sign)


def _largest_threshold(
    keys: UInt[Array, "num_seqs vocab_size"], enough: Callable[[Array], Array], unroll: bool
) -> UInt[Array, "num_seqs"]:
    """Return the largest t for which the tokens with `keys >= t` are `enough`, bit by bit from the highest; 0 if none
    is.
    """

    def halve(index: Array | int, threshold: Array) -> Array:
        higher = threshold | (jnp.uint32(1 << 31) >> jnp.uint32(index))
        return jnp.where(enough(keys >= higher[:, None]), higher, threshold)

    return lax.fori_loop(0, 32, halve, jnp.zeros(keys.shape[0], jnp.uint32), unroll=unroll)
