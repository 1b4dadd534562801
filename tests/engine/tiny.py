"""What most tests of the engine share: limits that cut prompts in chunks, prompts, and engines for `model`."""

import dataclasses

import numpy as np

from jaxpaged.config import CacheConfig, LlamaConfig
from jaxpaged.engine import Engine, SchedulerConfig

CONFIG = LlamaConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_q_heads=4,
    num_kv_heads=2,
    head_dim=8,
    max_position=96,
    rms_norm_eps=1e-5,
)
CACHE = CacheConfig(num_layers=2, num_pages=80, page_size=4, num_kv_heads=2, head_dim=8, dtype="float32")
LIMITS = SchedulerConfig(max_num_seqs=4, max_step_tokens=16, max_model_len=96)
PROMPTS = [[int(t) for t in np.random.default_rng(i).integers(0, 64, n)] for i, n in enumerate((1, 17, 40, 5))]


def make_engine(model, num_pages: int = 80, limits: SchedulerConfig = LIMITS, **options) -> Engine:
    """Engines of the same shapes, whose programs are compiled once a process."""
    return Engine(model, dataclasses.replace(CACHE, num_pages=num_pages), limits, **options)
