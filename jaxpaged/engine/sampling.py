"""The next token from logits, on the device, one program for a whole batch of unlike requests."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, UInt


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SamplingBatch:
    """How each row of a batch is to be sampled.

    Attributes:
        temperature: 0 takes the likeliest token.
        top_k: 0 keeps all tokens.
        top_p: 1 keeps all tokens.
        seed: Of the request.
        position: Index of the token to draw in its sequence. Seed and position make the draw.
    """

    temperature: Float[Array, "num_seqs"]
    top_k: Int[Array, "num_seqs"]
    top_p: Float[Array, "num_seqs"]
    seed: UInt[Array, "num_seqs"]
    position: Int[Array, "num_seqs"]


def sample(logits: Float[Array, "num_seqs vocab_size"], params: SamplingBatch | None) -> Int[Array, "num_seqs"]:
    """One token id a row. `params=None` says that every row is greedy, and compiles to an argmax.

    Temperature comes first, then top-k, then top-p of what top-k left, as in Hugging Face `transformers`. The draw is
    the argmax of logits plus Gumbel noise.
    """
    greedy = logits.argmax(-1).astype(jnp.int32)
    if params is None:
        return greedy
    scaled = logits / jnp.where(params.temperature > 0, params.temperature, 1)[:, None]
    kept = keep_likeliest(scaled, params.top_k, params.top_p)

    def noise(seed: Array, position: Array) -> Array:
        return jax.random.gumbel(jax.random.fold_in(jax.random.key(seed), position), logits.shape[1:])

    drawn = (jnp.where(kept, scaled, -jnp.inf) + jax.vmap(noise)(params.seed, params.position)).argmax(-1)
    return jnp.where(params.temperature > 0, drawn.astype(jnp.int32), greedy)


def keep_likeliest(
    logits: Float[Array, "num_seqs vocab_size"], top_k: Int[Array, "num_seqs"], top_p: Float[Array, "num_seqs"]
) -> Array:
    """Which tokens top-k and then top-p leave, `[num_seqs, vocab_size]` bool. Tokens that tie with the last stay too.

    Sorting a vocabulary is slow on a CPU and several launches on a GPU. What is kept is a threshold on the logits, and
    as floats order like integers, 32 halvings of the integers find it exactly: the largest threshold that still leaves
    k tokens, then the largest that still leaves probability p.
    """
    keys = _ordered_bits(logits)
    k = jnp.where(top_k > 0, top_k, logits.shape[-1])
    by_count = _largest_threshold(keys, lambda kept: kept.sum(-1) >= k)
    kept = keys >= by_count[:, None]
    p = jax.nn.softmax(jnp.where(kept, logits, -jnp.inf), axis=-1)
    top_p = jnp.maximum(top_p, jnp.finfo(jnp.float32).tiny)  # of 0, no token at all would be enough
    by_mass = _largest_threshold(keys, lambda kept: jnp.where(kept, p, 0).sum(-1) >= top_p)
    return kept & ((keys >= by_mass[:, None]) | (top_p >= 1)[:, None])


def _ordered_bits(x: Float[Array, "..."]) -> UInt[Array, "..."]:
    """Unsigned integers in the order of the floats: flip all bits of a negative, the sign bit of the others."""
    bits = lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32)
    sign = jnp.uint32(1 << 31)
    return jnp.where(bits >= sign, ~bits, bits | sign)


def _largest_threshold(keys: UInt[Array, "num_seqs vocab_size"], enough) -> UInt[Array, "num_seqs"]:
    """The largest t for which the tokens with `keys >= t` are `enough`, bit by bit from the highest; 0 if none is."""
    threshold = jnp.zeros(keys.shape[0], jnp.uint32)
    for bit in range(31, -1, -1):
        higher = threshold | jnp.uint32(1 << bit)
        threshold = jnp.where(enough(keys >= higher[:, None]), higher, threshold)
    return threshold
