"""`bind`: a cache for one step of a model that was not written for it, handed out a layer at a time.

A model of this package threads one cache through its layers. Most others give each layer something of its own: an
attention function, or a cache that the layer changes. `bind` hands out such things and collects what they write:

    def step(model, cache, batch):                                # under `jax.jit`, with the cache donated
        bound = bind(cache, batch)
        for i, block in enumerate(model.blocks):
            block.attn.attention_fn = bound.attention_fn(i)       # nnx.MultiHeadAttention, as it comes
        logits = model(batch.token_ids, batch.positions)
        return logits, bound.cache

The bound cache is the one mutable object of this package. It lives inside the trace of one step and is not a pytree.
"""

from collections.abc import Callable
from typing import Any, NoReturn

from jax.extend.core import get_opaque_trace_state
from jaxtyping import Array, Float

from jaxpaged.cache.batch import Batch
from jaxpaged.cache.kv_cache import KVCache
from jaxpaged.ops.attention import AttentionOptions, attend


def bind(cache: KVCache, batch: Batch) -> "BoundCache":
    """Bind a cache to the batch of one step, for the layers of a model to write to and attend over.

    Call it inside the function that is compiled or differentiated, once a step, and return `.cache` from there.

    Args:
        cache: The cache before the step.
        batch: The step. Its tokens are packed: a model sees them as one sequence of `num_tokens`, with their positions
            in `batch.positions`.
    """
    return BoundCache(cache, batch)


class BoundCache:
    """A cache and a batch during one step. Make one with `bind`.

    Raises:
        RuntimeError: A layer is used where JAX traces anew (inside `scan`, `remat`, `cond` or a `jit` of the model's
            own), from where what it writes could not come back.
    """

    def __init__(self, cache: KVCache, batch: Batch):
        self._cache, self._batch, self._trace = cache, batch, get_opaque_trace_state()

    @property
    def cache(self) -> KVCache:
        """The cache with all that the layers have written so far: what the step returns."""
        self._check_trace()
        return self._cache

    def layer(self, layer: int) -> "BoundLayer":
        """Return what the layer of this number writes to and attends over. The first is 0."""
        self._cache.layer(layer)  # refuses a number that the cache does not have
        return BoundLayer(self, layer)

    def attention_fn(
        self, layer: int, options: AttentionOptions | None = None, *, backend: str = "auto"
    ) -> Callable[..., Array]:
        """Return the layer as the `attention_fn` of Flax's `nnx.MultiHeadAttention` or of Linen's attention modules.

        It takes query, key and value `[..., num_heads, head_dim]`, whose leading axes together count the tokens of the
        batch, writes key and value, and attends. What a token sees follows from the batch and `options`, so a mask or
        a bias is refused by name, and so are dropout and the sowing of weights, which are never stored. `is_causal` and
        `precision` of Flax change nothing: `options` say the first, and float32 is multiplied in float32.

        Args:
            options: How the layer attends; None for causal attention to all keys.
            backend: As in `jaxpaged.paged_attention`.
        """
        bound = self.layer(layer)

        # The names are Flax's: Linen passes those only that it finds in the signature.
        def attention_fn(
            query: Float[Array, "... num_q_heads head_dim"],
            key: Float[Array, "... num_kv_heads head_dim"],
            value: Float[Array, "... num_kv_heads head_dim"],
            bias: Array | None = None,
            mask: Array | None = None,
            *,
            dropout_rate: float = 0.0,
            deterministic: bool = True,
            dtype: Any = None,
            module: Any = None,
            **_: Any,
        ) -> Float[Array, "... num_q_heads head_dim"]:
            for name, given in (("bias", bias), ("mask", mask)):
                if given is not None:
                    _refuse(name, "None, as the batch says what each token sees", "an array", "Call the module without")
            if dropout_rate > 0 and not deterministic:
                _refuse(
                    "deterministic", "True, as attention over pages has no dropout", "False", "Pass it to the module"
                )
            if module is not None:
                _refuse("sow_weights", "False, as the weights are never stored", "True", "Leave it out")
            if dtype is not None:
                query, key, value = (x.astype(dtype) for x in (query, key, value))
            return bound.write_and_attend(query, key, value, options, backend=backend)

        return attention_fn

    def _check_trace(self) -> None:
        if get_opaque_trace_state() != self._trace:
            raise RuntimeError(
                "a bound cache must be used in the trace in which `bind` was called; got another one, as inside "
                "`scan`, `remat`, `cond` or a `jit` of the model's own. Call the layers in a Python loop, or thread "
                "`cache.layer(i)` through the loop as a carry."
            )


class BoundLayer:
    """One layer of a bound cache. Arrays are `[..., num_heads, head_dim]`, the leading axes together `num_tokens`."""

    def __init__(self, bound: BoundCache, layer: int):
        self._bound, self._layer = bound, layer

    def write(self, k: Float[Array, "... num_kv_heads head_dim"], v: Float[Array, "... num_kv_heads head_dim"]) -> None:
        """Store this step's keys, with their positions in them, and values."""
        bound = self._bound
        bound._check_trace()
        view = bound._cache.layer(self._layer).write(self._pack("k", k), self._pack("v", v), bound._batch.ragged)
        bound._cache = view.cache

    def attend(
        self,
        q: Float[Array, "... num_q_heads head_dim"],
        options: AttentionOptions | None = None,
        *,
        backend: str = "auto",
    ) -> Float[Array, "... num_q_heads head_dim"]:
        """Attend to all that the layer holds, this step's keys included: call it after `write`.

        Returns:
            Output in the shape and dtype of `q`.
        """
        bound = self._bound
        bound._check_trace()
        view = bound._cache.layer(self._layer)
        out, _ = attend(self._pack("q", q), view, bound._batch.ragged, options, backend=backend)
        return out.reshape(q.shape)

    def write_and_attend(
        self,
        q: Float[Array, "... num_q_heads head_dim"],
        k: Float[Array, "... num_kv_heads head_dim"],
        v: Float[Array, "... num_kv_heads head_dim"],
        options: AttentionOptions | None = None,
        *,
        backend: str = "auto",
    ) -> Float[Array, "... num_q_heads head_dim"]:
        """Store this step's keys and values, then attend: `write` and `attend` in one call."""
        self.write(k, v)
        return self.attend(q, options, backend=backend)

    def _pack(self, name: str, x: Array) -> Float[Array, "num_tokens num_heads head_dim"]:
        packed = x.reshape(-1, *x.shape[-2:])
        num_tokens = self._bound._batch.token_ids.shape[0]
        if packed.shape[0] != num_tokens:
            raise ValueError(
                f"`{name}` must have shape (..., num_heads, head_dim) with {num_tokens} tokens, as the batch has; got "
                f"{x.shape}. Tokens of all sequences are packed one after another."
            )
        return packed


def _refuse(name: str, expected: str, got: str, hint: str) -> NoReturn:
    raise NotImplementedError(f"`{name}` must be {expected}; got {got}. {hint} {name!r}.")
