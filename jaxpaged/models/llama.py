"""The Llama decoder in Flax NNX, over a paged cache.

Layers are one compiled function, called for each with its own parameters. In a compiled step the calls are inlined: on
a GPU the whole step is one CUDA graph and weights are read in place. On a CPU the calls stay outside, so that one layer
is compiled. `lax.scan` over stacked parameters compiles fast too, and copies a layer's weights before it uses them.
"""

from functools import partial
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jaxpaged.cache.batch import Batch
from jaxpaged.cache.kv_cache import KVCache
from jaxpaged.config import AttentionConfig, CacheConfig, LayerSpec
from jaxpaged.models.config import LlamaConfig
from jaxpaged.ops.attention import ATTENTION, AttentionOptions, attend
from jaxpaged.ops.attention.partition import partition_batch
from jaxpaged.ops.linear import LINEAR, linear
from jaxpaged.ops.rope_write import ROPE_AND_WRITE, rope_and_write, rope_angles, rope_frequencies

LayerLoop = Literal["unroll", "scan", "calls"]


class Backends(NamedTuple):
    """What computes the parts of a layer: attention and the write before it, and the products."""

    attention: str
    linear: str


class Block(nnx.Module):
    """One decoder layer: attention and a gated MLP, each behind an RMS norm and added to what came in.

    Weights stand as checkpoints store them, [out, in]; q, k, v are one matrix, gate and up another.
    """

    def __init__(
        self,
        config: LlamaConfig,
        *,
        sliding_window: int | None,
        dtype: DTypeLike,
        backends: Backends,
        rngs: nnx.Rngs,
    ):
        hidden, heads = config.hidden_size, config.num_q_heads + 2 * config.num_kv_heads
        self.config = config
        self.options = AttentionOptions(sliding_window=sliding_window)
        self.backends = backends
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
        """Return the layer's output and the cache with this step's K and V of the layer in it."""
        config, backend = self.config, self.backends.attention
        multiply = partial(linear, eps=config.rms_norm_eps, backend=self.backends.linear)
        with jax.named_scope("attention"):
            qkv = multiply(x, self.qkv[...], norm=self.attn_norm[...])
            qkv = qkv.reshape(-1, config.num_q_heads + 2 * config.num_kv_heads, config.head_dim)
            q, view = rope_and_write(qkv, cache.layer(layer), batch.ragged, *rope, backend=backend)
            attended, _ = attend(q, view, batch.ragged, self.options, backend=backend)
            x = multiply(attended.reshape(x.shape[0], -1), self.o[...], residual=x)
        with jax.named_scope("mlp"):
            hidden = multiply(x, self.gate_up[...], norm=self.mlp_norm[...], gated=True)
            return multiply(hidden, self.down[...], residual=x), view.cache


class Llama(nnx.Module):
    """A Llama-family language model: `logits, cache = model(cache, batch)`.

    Args:
        dtype: Dtype of parameters and activations. Norms, rotations, softmax and logits are float32 inside.
        backend: What computes attention, and rotates and writes before it: see `jaxpaged.paged_attention`.
        linear_backend: What computes the products. `"auto"` takes a kernel on a GPU for few tokens in bfloat16, and
            XLA for the rest.
        attention: How a kernel cuts attention; None is for the kind of GPU that the cache says it lies on.
        layer_loop: `"unroll"`: for a step that is compiled whole (one CUDA graph). `"calls"`: the same parameters,
            for a model that is left outside of `jit`, so that one layer is compiled and called for each. Such a call
            takes the cache that it is given: use the one that it returns.
            `"scan"`: over stacked parameters; compiles fast, copies a layer's weights a turn, and needs layers with
            the same window.

    Raises:
        ValueError: An unknown backend or layer loop, or one that the configuration's windows rule out; or they are not
            one a layer.
    """

    def __init__(
        self,
        config: LlamaConfig,
        *,
        dtype: DTypeLike = jnp.float32,
        backend: str = "auto",
        linear_backend: str = "auto",
        attention: AttentionConfig | None = None,
        layer_loop: LayerLoop = "unroll",
        rngs: nnx.Rngs,
    ):
        if layer_loop not in get_args(LayerLoop):
            raise ValueError(f"`layer_loop` must be one of {', '.join(get_args(LayerLoop))}; got {layer_loop!r}.")
        for op in (ATTENTION, ROPE_AND_WRITE):
            op.check_name(backend)
        LINEAR.check_name(linear_backend)
        windows = [spec.sliding_window for spec in config.layer_specs]
        if len(windows) != config.num_layers:
            raise ValueError(
                f"`sliding_windows` must have one for each of num_layers = {config.num_layers}; got {len(windows)}."
            )
        if layer_loop == "scan" and len(set(windows)) > 1:
            raise ValueError(
                "`layer_loop` must be 'unroll' or 'calls' where layers have different windows, for a scan is one "
                "program for all; got 'scan'."
            )
        self.config = config
        self.dtype = jnp.dtype(dtype)
        self.backends = Backends(backend, linear_backend)
        self.attention = attention or AttentionConfig()
        self.layer_loop = layer_loop
        self.embed = _weight(rngs, config.vocab_size, config.hidden_size, dtype)

        def make_block(rngs: nnx.Rngs, window: int | None = windows[0]) -> Block:
            return Block(config, sliding_window=window, dtype=dtype, backends=self.backends, rngs=rngs)

        if layer_loop == "scan":
            stack = nnx.vmap(make_block, axis_size=config.num_layers)
            self.layers = nnx.split_rngs(splits=config.num_layers)(stack)(rngs)
        else:
            self.layers = nnx.List([make_block(rngs, window) for window in windows])
        self.final_norm = nnx.Param(jnp.ones(config.hidden_size, dtype))
        self.lm_head = None if config.tie_embeddings else _weight(rngs, config.vocab_size, config.hidden_size, dtype)

    def __call__(self, cache: KVCache, batch: Batch) -> tuple[Float[Array, "num_seqs vocab_size"], KVCache]:
        """Return logits after the last new token of each sequence, float32, and the cache with all new tokens in it."""
        c, shape = self.config, (cache.num_layers, cache.num_kv_heads, cache.head_dim)
        if shape != (c.num_layers, c.num_kv_heads, c.head_dim):
            raise ValueError(
                "`cache` must have (num_layers, num_kv_heads, head_dim) = "
                f"{(c.num_layers, c.num_kv_heads, c.head_dim)}; got {shape}. Make it from `cache_config`."
            )
        x, rope = _enter(self.embed[...], batch, self.config)
        if not self.compiles_itself:  # outside of `jit`, on a CPU, partitions would be made for nobody
            with jax.named_scope("partition"):
                windows = tuple(dict.fromkeys(spec.sliding_window for spec in c.layer_specs))
                batch = partition_batch(
                    batch, cache, num_q_heads=c.num_q_heads, sliding_windows=windows, config=self.attention
                )
        if isinstance(self.layers, nnx.List):
            call, numbers = _call_block, range(len(self.layers))
            if self.compiles_itself:  # one program for all layers, which takes the number of one as an array
                call, numbers = _call_and_donate, jax.device_put(list(np.arange(len(self.layers), dtype=np.int32)))
            for i, (layer, block) in enumerate(zip(numbers, self.layers, strict=True)):
                with jax.named_scope(f"layer_{i}"):
                    x, cache = call(block, x, cache, batch, layer, rope)
        else:

            def body(carry: tuple[Array, KVCache], numbered: tuple[Any, Block]) -> tuple[tuple[Array, KVCache], None]:
                layer, block = numbered
                return block(*carry, batch, layer, rope), None

            layers: tuple[Any, Block] = (jnp.arange(self.config.num_layers), self.layers)
            with jax.named_scope("layers"):
                (x, cache), _ = lax.scan(body, (x, cache), layers)
        head = self.embed if self.lm_head is None else self.lm_head
        return _exit(x, batch, self.final_norm[...], head[...], c.rms_norm_eps, self.backends.linear), cache

    @property
    def vocab_size(self) -> int:
        """Token ids that it knows."""
        return self.config.vocab_size

    @property
    def max_position(self) -> int:
        """Context length, in tokens."""
        return self.config.max_position

    @property
    def layer_specs(self) -> tuple[LayerSpec, ...]:
        """What each layer keeps in a cache: the engine divides the layers into page groups by it."""
        return self.config.layer_specs

    @property
    def compiles_itself(self) -> bool:
        """Whether the engine should leave it outside of `jit`."""
        return self.layer_loop == "calls"

    def cache_config(self, *, num_pages: int, page_size: int = 16) -> CacheConfig:
        """Return the shape of a cache for this model, in the model's dtype."""
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
        cls, config: LlamaConfig, params: dict, *, dtype: DTypeLike, layer_loop: LayerLoop, **options: Any
    ) -> "Llama":
        """Return a model with the parameters of a checkpoint reader: a tree named as the attributes here, layers
        stacked.

        Args:
            options: Of `Llama`.
        """
        model = nnx.eval_shape(lambda: cls(config, dtype=dtype, layer_loop=layer_loop, rngs=nnx.Rngs(0), **options))
        graph, state = nnx.split(model)
        if layer_loop != "scan":
            layers = {i: {name: x[i] for name, x in params["layers"].items()} for i in range(config.num_layers)}
            params = {**params, "layers": layers}
        nnx.replace_by_pure_dict(state, jax.tree.map(lambda x: jax.device_put(x).astype(dtype), params))
        return nnx.merge(graph, state)


@partial(jax.jit, static_argnames="config")
def _enter(embed: Array, batch: Batch, config: LlamaConfig) -> tuple[Array, tuple[Array, Array]]:
    """Return embeddings of the new tokens, and the angles of their positions."""
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
def _exit(x: Array, batch: Batch, final_norm: Array, head: Array, eps: float, backend: str) -> Array:
    """Return logits after the last new token of each sequence; those of a sequence without one mean nothing."""
    with jax.named_scope("lm_head"):
        if batch.ragged.cu_q_lens is not None:
            x = x[batch.ragged.cu_q_lens[1:] - 1]
        return linear(x, head, norm=final_norm, eps=eps, backend=backend).astype(jnp.float32)


def _weight(rngs: nnx.Rngs, num_out: int, num_in: int, dtype: DTypeLike) -> nnx.Param:
    return nnx.Param(jax.random.normal(rngs.params(), (num_out, num_in), dtype) * num_in**-0.5)
