"""Models that fail and tokenizers that others have: what the tests of the engine's faults share."""

import jax.numpy as jnp
import numpy as np

from jaxpaged.engine import SamplingParams
from jaxpaged.models.llama import Llama
from tests.engine.tiny import make_engine


def solo(model, prompt: list[int], params: SamplingParams) -> tuple[int, ...]:
    """The tokens of a request alone."""
    [output] = make_engine(model).generate([prompt], params)
    return output.token_ids


class Broken:
    """A model that fails, or whose logits are not finite, when it sees one token id."""

    def __init__(self, model: Llama, token_id: int, how: str):
        self.model, self.token_id, self.how = model, token_id, how
        self.compiles_itself, self.vocab_size, self.max_position = True, 64, 96

    def __call__(self, cache, batch):
        logits, new_cache = self.model(cache, batch)
        hit = np.asarray(batch.token_ids) == self.token_id
        if hit.any() and self.how == "raise":
            raise RuntimeError("the model is broken")
        if hit.any() and self.how == "raise and lose":
            new_cache.k_pages.delete()
            raise RuntimeError("the model is broken")
        if self.how == "nan":
            ends = np.arange(len(hit)) if batch.ragged.cu_q_lens is None else np.asarray(batch.ragged.cu_q_lens)[1:] - 1
            logits = jnp.where(hit[ends][:, None], jnp.nan, logits)
        return logits, new_cache


BAD, GOOD = [9, 9, 63], [5, 7, 5, 7, 2]


def good_params(model) -> SamplingParams:
    """Eight tokens, the broken one not among them."""
    return SamplingParams(max_new_tokens=8, logit_bias={63: float("-inf")})


class Letters:
    """A tokenizer of 64 characters."""

    def decode(self, token_ids, skip_special_tokens: bool = True) -> str:
        return "".join(chr(48 + t) for t in token_ids)


class Failing(Letters):
    """Fails at one token."""

    def __init__(self, token: int):
        self.token = token

    def decode(self, token_ids, skip_special_tokens: bool = True) -> str:
        if self.token in token_ids:
            raise RuntimeError(f"no text for {self.token}")
        return super().decode(token_ids)


class FewLetters(Letters):
    """Knows half of the model's tokens."""

    def decode(self, token_ids, skip_special_tokens: bool = True) -> str:
        if max(token_ids) >= 32:
            raise IndexError("no such token")
        return super().decode(token_ids)
