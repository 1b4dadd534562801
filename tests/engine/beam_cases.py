"""What beam search is tried on: a tiny random model, whose weights numpy makes, prompts and options.

`tests/data/make_beams.py` runs these with `transformers`, and the tests with the engine.
"""

import itertools

import numpy as np

from jaxpaged.models.config import LlamaConfig

CONFIG = LlamaConfig(
    vocab_size=48,
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_q_heads=4,
    num_kv_heads=2,
    head_dim=8,
    max_position=64,
    rms_norm_eps=1e-5,
    tie_embeddings=False,
)
PROMPTS = [np.random.default_rng(i).integers(0, 48, n).tolist() for i, n in enumerate((1, 7, 8, 17))]
NUM_NEW = 12
OPTIONS = [
    {"num_beams": num_beams, "length_penalty": penalty, "early_stopping": early, "stop_token_ids": stops}
    for num_beams, penalty, early, stops in (
        *itertools.product((3,), (-1.0, 0.0, 1.0, 2.0), (False, True, "never"), ((3, 9, 30),)),
        *itertools.product((2, 5), (1.0,), (False, True, "never"), ((5,),)),
        (4, 1.0, False, ()),
    )
]
BUILTIN_PROMPTS = ["The capital of France is", "def fibonacci(n):\n", "Once upon a time there was a lighthouse"]
BUILTIN_OPTIONS = {"num_beams": 4, "max_new_tokens": 16, "stop_token_ids": (2,)}


def make_weights() -> dict:
    """As `Llama.from_params` takes them, layers stacked. The head is scaled up, so that rounding decides nothing."""
    c, rng = CONFIG, np.random.default_rng(7)

    def normal(*shape: int) -> np.ndarray:
        return (rng.standard_normal(shape) * shape[-1] ** -0.5).astype(np.float32)

    layers, heads = c.num_layers, c.num_q_heads + 2 * c.num_kv_heads
    return {
        "embed": normal(c.vocab_size, c.hidden_size),
        "layers": {
            "attn_norm": np.ones((layers, c.hidden_size), np.float32),
            "qkv": normal(layers, heads * c.head_dim, c.hidden_size),
            "o": normal(layers, c.hidden_size, c.num_q_heads * c.head_dim),
            "mlp_norm": np.ones((layers, c.hidden_size), np.float32),
            "gate_up": normal(layers, 2 * c.intermediate_size, c.hidden_size),
            "down": normal(layers, c.hidden_size, c.intermediate_size),
        },
        "final_norm": np.ones(c.hidden_size, np.float32),
        "lm_head": 2 * normal(c.vocab_size, c.hidden_size),
    }
