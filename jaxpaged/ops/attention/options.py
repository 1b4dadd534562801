"""`AttentionOptions`: how a layer attends, apart from what lies where and who attends to what."""

import dataclasses
import math
from collections.abc import Hashable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxpaged.config import AttentionConfig


@jax.tree_util.register_pytree_node_class
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AttentionOptions:
    """How a layer attends: all that is not the cache's or the step's. `jaxpaged.paged_attention` has the formula.

    A pytree: `sinks`, `alibi_slopes` and a window that is an array are leaves, everything else is static.

    Attributes:
        sm_scale: Factor of the logits; None means `head_dim ** -0.5`.
        logits_soft_cap: Bound of the scaled logits, > 0.
        sliding_window: Tokens that a query sees, itself included, >= 1; an int, or an int32 scalar array where layers
            of one compiled loop differ. Chunks of keys outside are not read.
        causal: Whether a query sees only keys up to its own position.
        config: Tiles and partition of the Triton kernel; None takes those of the partition, or the defaults.
        sinks: A logit a head that takes part in the denominator only.
        alibi_slopes: A slope a head.
    """

    sm_scale: float | None = None
    logits_soft_cap: float | None = None
    sliding_window: int | Int[Array, ""] | None = None
    causal: bool = True
    config: AttentionConfig | None = None
    sinks: Float[Array, "num_q_heads"] | None = None
    alibi_slopes: Float[Array, "num_q_heads"] | None = None

    @property
    def static_window(self) -> int | None:
        """The window whose size is part of the program; None where there is none, or one that is traced."""
        return self.sliding_window if isinstance(self.sliding_window, int) else None

    @property
    def traced_window(self) -> Int[Array, ""] | None:
        """The window whose size is an array; None where there is none, or one that is static."""
        return None if isinstance(self.sliding_window, int) else self.sliding_window

    @property
    def is_batch_invariant(self) -> bool:
        """Whether a sequence's result has the same bits whatever else is in the batch."""
        return self.config is not None and self.config.is_batch_invariant

    def scale(self, head_dim: int) -> float:
        """Return the factor of the logits."""
        return head_dim**-0.5 if self.sm_scale is None else self.sm_scale

    def tree_flatten(self) -> tuple[tuple, Hashable]:
        """Return the leaves, and what is static."""
        static = (self.sm_scale, self.logits_soft_cap, self.static_window, self.causal, self.config)
        return (self.sinks, self.alibi_slopes, self.traced_window), static

    @classmethod
    def tree_unflatten(cls, static: Any, leaves: Any) -> "AttentionOptions":
        """Return the options again."""
        sm_scale, logits_soft_cap, static_window, causal, config = static
        sinks, alibi_slopes, traced_window = leaves
        return cls(
            sm_scale=sm_scale,
            logits_soft_cap=logits_soft_cap,
            sliding_window=static_window if traced_window is None else traced_window,
            causal=causal,
            config=config,
            sinks=sinks,
            alibi_slopes=alibi_slopes,
        )


def check_options(options: AttentionOptions, num_q_heads: int) -> None:
    """Raise ValueError for a number or a shape that does not fit, by name."""
    sm_scale, cap, window = options.sm_scale, options.logits_soft_cap, options.sliding_window
    if sm_scale is not None and not math.isfinite(sm_scale):
        raise ValueError(f"`sm_scale` must be finite, or None for head_dim ** -0.5; got {sm_scale}.")
    if cap is not None and not 0 < cap < math.inf:
        raise ValueError(f"`logits_soft_cap` must be > 0 and finite, or None for no cap; got {cap}.")
    is_scalar = isinstance(window, jax.Array) and window.shape == () and window.dtype == jnp.int32
    if not (window is None or is_scalar or (isinstance(window, int) and 1 <= window < 2**31)):
        raise ValueError(
            "`sliding_window` must be an int >= 1, the tokens that a query sees, itself included, or such an int32 "
            f"scalar of JAX, or None; got {window!r}."
        )
    for name, x in (("sinks", options.sinks), ("alibi_slopes", options.alibi_slopes)):
        if x is not None and x.shape != (num_q_heads,):
            raise ValueError(f"`{name}` must have shape (num_q_heads,) = ({num_q_heads},); got {x.shape}.")
