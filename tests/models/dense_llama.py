"""The Llama decoder without a cache, in float64 numpy: what `jaxpaged.models.llama` is tested against."""

import jax
import numpy as np
from flax import nnx

from jaxpaged.models.llama import Llama


def dense_logits(model: Llama, tokens: list[int]) -> np.ndarray:
    """The same network in float64 numpy over one sequence, with no cache: [len(tokens), vocab_size]."""
    c = model.config
    windows = c.sliding_windows or (None,) * c.num_layers
    params = jax.tree.map(lambda x: np.asarray(x, np.float64), nnx.to_pure_dict(nnx.state(model)))
    angles = np.arange(len(tokens))[:, None] * c.rope_theta ** (-np.arange(0, c.head_dim, 2) / c.head_dim)

    def norm(x, scale):
        return scale * x / np.sqrt((x * x).mean(-1, keepdims=True) + c.rms_norm_eps)

    def turn(x):  # [num_tokens, num_heads, head_dim]
        z = (x[..., : c.head_dim // 2] + 1j * x[..., c.head_dim // 2 :]) * np.exp(1j * angles)[:, None]
        return np.concatenate([z.real, z.imag], -1)

    x = params["embed"][tokens]
    for i in range(c.num_layers):
        layers = params["layers"]  # stacked, or one by one
        w = layers[i] if i in layers else {name: stack[i] for name, stack in layers.items()}
        qkv = (norm(x, w["attn_norm"]) @ w["qkv"].T).reshape(len(tokens), -1, c.head_dim)
        q, k, v = np.split(qkv, (c.num_q_heads, c.num_q_heads + c.num_kv_heads), axis=1)
        k, v = (np.repeat(y, c.num_q_heads // c.num_kv_heads, axis=1) for y in (turn(k), v))
        logits = np.einsum("qhd,khd->hqk", turn(q), k) / np.sqrt(c.head_dim)
        behind = np.arange(len(tokens))[:, None] - np.arange(len(tokens))
        logits[:, (behind < 0) | (behind >= (windows[i] or len(tokens)))] = -np.inf
        p = np.exp(logits - logits.max(-1, keepdims=True))
        out = np.einsum("hqk,khd->qhd", p / p.sum(-1, keepdims=True), v).reshape(len(tokens), -1)
        x = x + out @ w["o"].T
        gate, up = np.split(norm(x, w["mlp_norm"]) @ w["gate_up"].T, 2, axis=1)
        x = x + (gate / (1 + np.exp(-gate)) * up) @ w["down"].T
    return norm(x, params["final_norm"]) @ params["lm_head" if "lm_head" in params else "embed"].T
