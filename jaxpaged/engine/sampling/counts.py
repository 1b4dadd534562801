"""How often each sequence with penalties holds each token: `[num_seats, vocab_size]` int32 that stays on the device.

A sequence has a seat, a row, while it runs. Its history is uploaded when it sits down; from then on each step counts
what it samples, so that the next one can start before the host has seen the token. An entry is 1 where the prompt holds
the token, and 2 more for each time that the output does.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from jaxpaged.engine.sampling.batch import PAD, Penalties, bucket

IN_PROMPT, IN_OUTPUT = 1, 2
_MIN_WIDTH = 64  # tokens that a history is padded to at least: each power of two is a compilation


def seat_history(
    counts: Int[Array, "num_seats vocab_size"], seat: int, token_ids: np.ndarray, num_prompt: int
) -> Int[Array, "num_seats vocab_size"]:
    """Return the counts with the history of a sequence in a seat, whatever was there before.

    Args:
        token_ids: `[num_tokens]` int32, prompt and output.
        num_prompt: Tokens of the prompt among them.
    """
    padded = np.full(max(_MIN_WIDTH, bucket(len(token_ids))), PAD, np.int32)
    padded[: len(token_ids)] = token_ids
    return _seat(counts, *jax.device_put((np.int32(seat), padded, np.int32(num_prompt))))


@partial(jax.jit, donate_argnames="counts")
def _seat(counts: Array, seat: Array, token_ids: Array, num_prompt: Array) -> Array:
    is_prompt = jnp.arange(len(token_ids)) < num_prompt
    row = jnp.zeros(counts.shape[1], counts.dtype)
    row = row.at[jnp.where(is_prompt, token_ids, PAD)].set(IN_PROMPT, mode="drop")
    row = row.at[jnp.where(is_prompt, PAD, token_ids)].add(IN_OUTPUT, mode="drop")
    return counts.at[seat].set(row)


def count_sampled(counts: Int[Array, "num_seats vocab_size"], penalties: Penalties, token_ids: Array) -> Array:
    """Return the counts with the token that each row sampled."""
    return counts.at[penalties.counted, token_ids].add(IN_OUTPUT, mode="drop")
