"""The Llama decoder in Flax NNX, over a paged cache.

Parameters and loop follow the device. On a GPU the parameters of all layers are stacked and `lax.scan` runs over them
with the cache as a carry; unrolled, the whole step is one CUDA graph and weights are read in place. On a CPU a scan
copies every layer's weights before it uses them, so there each layer is a call of one compiled function.
"""

from functools import partial
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jaxpaged.batch import Batch
from jaxpaged.config import CacheConfig, LlamaConfig
from jaxpaged.kv_cache import KVCache
from jaxpaged.ops.attention import Backend, attend
from jaxpaged.ops.plan import AttentionPlan, make_plan
from jaxpaged.ops.rope import rope_and_write, rope_angles, rope_frequencies

LayerLoop = Literal["unroll", "scan", "calls"]


class Block(nnx.Module):
    """One decoder layer: attention and a gated MLP, each behind an RMS norm and added to what came in.

    Weights stand as checkpoints store them, [out, in]; q, k, v are one matrix, gate and up another.
    """

    def __init__(self, config: LlamaConfig, *, dtype: DTypeLike, backend: Backend, rngs: nnx.Rngs):
        hidden, heads = config.hidden_size, config.num_q_heads + 2 * config.num_kv_heads
        self.config = config
        self.backend: Backend = backend
        self.attn_norm = nnx.Param(jnp.ones(hidden, dtype))
        self.qkv = _weight(rngs, heads * config.head_dim, hidden, dtype)
        self.o = _weight(rngs, hidden, config.num_q_heads * config.head_dim, dtype)
        self.mlp_norm = nnx.Param(jnp.ones(hidden, dtype))
        self.gate_up = _weight(rngs, 2 * config.intermediate_size, hidden, dtype)
        self.down = _weight(rngs, hidden, config.intermediate_size, dtype)

    def __call__(
        self,
        x: Float[Array, "num_tokens hidden"],
        cache: KVCache,
        batch: Batch,
        layer: int | Array,
        rope: tuple[Array, Array],
        plan: AttentionPlan | None = None,
    ) -> tuple[Float[Array, "num_tokens hidden"], KVCache]:
        """The layer's output and the cache with this step's K and V of the layer in it."""
        config = self.config
        qkv = _linear(_rms_norm(x, self.attn_norm[...], config.rms_norm_eps), self.qkv[...])
        qkv = qkv.reshape(-1, config.num_q_heads + 2 * config.num_kv_heads, config.head_dim)
        q, cache = rope_and_write(cache, layer, qkv, *rope, batch.slot_mapping, backend=self.backend)
        attended = attend(q, cache, batch, layer, plan=plan, backend=self.backend)
        x = x + _linear(attended.reshape(x.shape[0], -1), self.o[...])
        gate, up = jnp.split(
            _linear(_rms_norm(x, self.mlp_norm[...], config.rms_norm_eps), self.gate_up[...]), 2, axis=1
        )
        return x + _linear(jax.nn.silu(gate) * up, self.down[...]), cache


class Llama(nnx.Module):
    """A Llama-family language model: `logits, cache = model(cache, batch)`.

    Args:
        dtype: Of parameters and activations. Norms, rotations, softmax and logits are float32 inside.
        layer_loop: `"unroll"` (one CUDA graph a step), `"scan"` (compiles fast, copies a layer's weights a turn), both
            over stacked parameters; `"calls"`: parameters layer by layer, one compiled layer called for each. Under an
            outer `jit`, calls are inlined, so leave the model outside of it to have them compiled once.
    """

    def __init__(
        self,
        config: LlamaConfig,
        *,
        dtype: DTypeLike = jnp.float32,
        backend: Backend = "auto",
        layer_loop: LayerLoop = "unroll",
        rngs: nnx.Rngs,
    ):
        for name, value, known in (("layer_loop", layer_loop, LayerLoop), ("backend", backend, Backend)):
            if value not in get_args(known):
                raise ValueError(f"`{name}` must be one of {', '.join(get_args(known))}; got {value!r}.")
        self.config = config
        self.dtype = jnp.dtype(dtype)
        self.layer_loop = layer_loop
        self.embed = _weight(rngs, config.vocab_size, config.hidden_size, dtype)

        def make_block(rngs: nnx.Rngs) -> Block:
            return Block(config, dtype=dtype, backend=backend, rngs=rngs)

        if layer_loop == "calls":
            self.layers = nnx.List([make_block(rngs) for _ in range(config.num_layers)])
        else:
            stack = nnx.vmap(make_block, axis_size=config.num_layers)
            self.layers = nnx.split_rngs(splits=config.num_layers)(stack)(rngs)
        self.final_norm = nnx.Param(jnp.ones(config.hidden_size, dtype))
        self.lm_head = None if config.tie_embeddings else _weight(rngs, config.vocab_size, config.hidden_size, dtype)

    def __call__(self, cache: KVCache, batch: Batch) -> tuple[Float[Array, "num_seqs vocab_size"], KVCache]:
        """Logits after the last new token of each sequence, float32, and the cache with all new tokens in it."""
        c, shape = self.config, (cache.num_layers, cache.num_kv_heads, cache.head_dim)
        if shape != (c.num_layers, c.num_kv_heads, c.head_dim):
            raise ValueError(
                "`cache` must have (num_layers, num_kv_heads, head_dim) = "
                f"{(c.num_layers, c.num_kv_heads, c.head_dim)}; got {shape}. Make it from `cache_config`."
            )
        x, rope = _enter(self.embed[...], batch, self.config)
        if isinstance(self.layers, nnx.List):
            for layer, block in enumerate(self.layers):
                x, cache = _call_block(block, x, cache, batch, layer, rope)
        else:
            plan = make_plan(batch.seq_lens, batch.cu_q_lens, num_tokens=x.shape[0])

            def body(carry: tuple[Array, KVCache], numbered: tuple[Any, Block]) -> tuple[tuple[Array, KVCache], None]:
                layer, block = numbered
                return block(*carry, batch, layer, rope, plan), None

            # Of numpy: in an unrolled loop its elements are constants; those of `jnp.arange` would be a launch each.
            layers: tuple[Any, Block] = (np.arange(self.config.num_layers, dtype=np.int32), self.layers)
            (x, cache), _ = lax.scan(body, (x, cache), layers, unroll=self.layer_loop == "unroll")
        head = self.embed if self.lm_head is None else self.lm_head
        return _exit(x, batch, self.final_norm[...], head[...], self.config.rms_norm_eps), cache

    @property
    def vocab_size(self) -> int:
        """Token ids that it knows."""
        return self.config.vocab_size

    @property
    def max_position(self) -> int:
        """Context length, in tokens."""
        return self.config.max_position

    @property
    def compiles_itself(self) -> bool:
        """Whether the engine should leave it outside of `jit`."""
        return self.layer_loop == "calls"

    def cache_config(self, *, num_pages: int, page_size: int = 16) -> CacheConfig:
        """The shape of a cache for this model, in the model's dtype."""
        return CacheConfig(
            num_layers=self.config.num_layers,
            num_pages=num_pages,
            page_size=page_size,
            num_kv_heads=self.config.num_kv_heads,
            head_dim=self.config.head_dim,
            dtype=self.dtype.name,
        )

    @classmethod
    def from_params(
        cls, config: LlamaConfig, params: dict, *, dtype: DTypeLike, backend: Backend, layer_loop: LayerLoop
    ) -> "Llama":
        """A model with the parameters of a checkpoint reader: a tree named as the attributes here, layers stacked."""
        model = nnx.eval_shape(
            lambda: cls(config, dtype=dtype, backend=backend, layer_loop=layer_loop, rngs=nnx.Rngs(0))
        )
        graph, state = nnx.split(model)
        if layer_loop == "calls":
            layers = {i: {name: x[i] for name, x in params["layers"].items()} for i in range(config.num_layers)}
            params = {**params, "layers": layers}
        nnx.replace_by_pure_dict(state, jax.tree.map(lambda x: jnp.asarray(x, dtype), params))
        return nnx.merge(graph, state)


@partial(jax.jit, static_argnames="config")
def _enter(embed: Array, batch: Batch, config: LlamaConfig) -> tuple[Array, tuple[Array, Array]]:
    """Embeddings of the new tokens, and the angles of their positions."""
    frequencies = rope_frequencies(
        config.head_dim, theta=config.rope_theta, factor=config.rope_factor, freq_factors=config.rope_freq_factors
    )
    return embed[batch.token_ids], rope_angles(batch.positions, frequencies)


@partial(jax.jit, donate_argnames=("x", "cache"))
def _call_block(
    block: Block, x: Array, cache: KVCache, batch: Batch, layer: Array, rope: tuple[Array, Array]
) -> tuple[Array, KVCache]:
    return block(x, cache, batch, layer, rope)


@partial(jax.jit, static_argnames="eps")
def _exit(x: Array, batch: Batch, final_norm: Array, head: Array, eps: float) -> Array:
    """Logits after the last new token of each sequence; those of a sequence without one mean nothing."""
    if batch.cu_q_lens is not None:
        x = x[batch.cu_q_lens[1:] - 1]
    return _linear(_rms_norm(x, final_norm, eps), head).astype(jnp.float32)


def _weight(rngs: nnx.Rngs, num_out: int, num_in: int, dtype: DTypeLike) -> nnx.Param:
    return nnx.Param(jax.random.normal(rngs.params(), (num_out, num_in), dtype) * num_in**-0.5)


def _linear(x: Array, weight: Array) -> Array:
    """`x @ weight.T`. A float32 model multiplies in float32 everywhere: a GPU's default would be TF32."""
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return lax.dot_general(x, weight, (((1,), (1,)), ((), ())), precision=precision)


def _rms_norm(x: Array, scale: Array, eps: float) -> Array:
    wide = x.astype(jnp.float32)
    wide = wide * lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return scale * wide.astype(x.dtype)
