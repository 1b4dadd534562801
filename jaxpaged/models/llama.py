"""The Llama decoder in Flax NNX, over a paged cache.

Layers are one compiled function, called for each with its own parameters. In a compiled step the calls are inlined: on
a GPU the whole step is one CUDA graph and weights are read in place. On a CPU the calls stay outside, so that one layer
is compiled. `lax.scan` over stacked parameters compiles fast too, and copies a layer's weights before it uses them.
"""

from functools import partial
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jaxpaged.batch import Batch
from jaxpaged.config import CacheConfig, LlamaConfig
from jaxpaged.kv_cache import KVCache
from jaxpaged.ops.attention import Backend, attend
from jaxpaged.ops.linear import linear, why_unsupported
from jaxpaged.ops.plan import plan_batch
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
    ) -> tuple[Float[Array, "num_tokens hidden"], KVCache]:
        """The layer's output and the cache with this step's K and V of the layer in it."""
        config = self.config
        multiply = partial(_multiply, eps=config.rms_norm_eps, backend=self.backend)
        with jax.named_scope("attention"):
            qkv = multiply(x, self.qkv[...], norm=self.attn_norm[...])
            qkv = qkv.reshape(-1, config.num_q_heads + 2 * config.num_kv_heads, config.head_dim)
            q, cache = rope_and_write(cache, layer, qkv, *rope, batch.slot_mapping, backend=self.backend)
            attended = attend(q, cache, batch, layer, backend=self.backend)
            x = multiply(attended.reshape(x.shape[0], -1), self.o[...], residual=x)
        with jax.named_scope("mlp"):
            hidden = multiply(x, self.gate_up[...], norm=self.mlp_norm[...], gated=True)
            return multiply(hidden, self.down[...], residual=x), cache


class Llama(nnx.Module):
    """A Llama-family language model: `logits, cache = model(cache, batch)`.

    Args:
        dtype: Of parameters and activations. Norms, rotations, softmax and logits are float32 inside.
        layer_loop: `"unroll"`: for a step that is compiled whole (one CUDA graph). `"calls"`: the same parameters,
            for a model that is left outside of `jit`, so that one layer is compiled and called for each. Such a call
            takes the cache that it is given: use the one that it returns.
            `"scan"`: over stacked parameters; compiles fast, copies a layer's weights a turn.
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
        self.backend: Backend = backend
        self.layer_loop = layer_loop
        self.embed = _weight(rngs, config.vocab_size, config.hidden_size, dtype)

        def make_block(rngs: nnx.Rngs) -> Block:
            return Block(config, dtype=dtype, backend=backend, rngs=rngs)

        if layer_loop == "scan":
            stack = nnx.vmap(make_block, axis_size=config.num_layers)
            self.layers = nnx.split_rngs(splits=config.num_layers)(stack)(rngs)
        else:
            self.layers = nnx.List([make_block(rngs) for _ in range(config.num_layers)])
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
        if not self.compiles_itself:  # outside of `jit`, on a CPU, plans would be made for nobody
            with jax.named_scope("attention_plan"):
                batch = plan_batch(batch)
        if isinstance(self.layers, nnx.List):
            call = _call_and_donate if self.compiles_itself else _call_block
            for layer, block in enumerate(self.layers):
                with jax.named_scope(f"layer_{layer}"):
                    x, cache = call(block, x, cache, batch, layer, rope)
        else:

            def body(carry: tuple[Array, KVCache], numbered: tuple[Any, Block]) -> tuple[tuple[Array, KVCache], None]:
                layer, block = numbered
                return block(*carry, batch, layer, rope), None

            layers: tuple[Any, Block] = (jnp.arange(self.config.num_layers), self.layers)
            with jax.named_scope("layers"):
                (x, cache), _ = lax.scan(body, (x, cache), layers)
        head = self.embed if self.lm_head is None else self.lm_head
        return _exit(x, batch, self.final_norm[...], head[...], self.config.rms_norm_eps, self.backend), cache

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
        if layer_loop != "scan":
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
    with jax.named_scope("embedding"):
        return embed[batch.token_ids], rope_angles(batch.positions, frequencies)


@jax.jit
def _call_block(
    block: Block, x: Array, cache: KVCache, batch: Batch, layer: Array, rope: tuple[Array, Array]
) -> tuple[Array, KVCache]:
    return block(x, cache, batch, layer, rope)


_call_and_donate = jax.jit(_call_block, donate_argnames=("x", "cache"))


@partial(jax.jit, static_argnames=("eps", "backend"))
def _exit(x: Array, batch: Batch, final_norm: Array, head: Array, eps: float, backend: Backend) -> Array:
    """Logits after the last new token of each sequence; those of a sequence without one mean nothing."""
    with jax.named_scope("lm_head"):
        if batch.cu_q_lens is not None:
            x = x[batch.cu_q_lens[1:] - 1]
        return _multiply(x, head, norm=final_norm, eps=eps, backend=backend).astype(jnp.float32)


def _multiply(x: Array, weight: Array, *, backend: Backend, **options: Any) -> Array:
    """`linear` by the model's backend, or by XLA where its kernel does not take such a product."""
    return linear(x, weight, backend="xla" if why_unsupported(x) else backend, **options)


def _weight(rngs: nnx.Rngs, num_out: int, num_in: int, dtype: DTypeLike) -> nnx.Param:
    return nnx.Param(jax.random.normal(rngs.params(), (num_out, num_in), dtype) * num_in**-0.5)
