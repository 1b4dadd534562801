"""What the adapters for Flax have in common: the call."""

from typing import Any

from jaxtyping import Array, Float, Int

from jaxpaged.cache.batch import Batch
from jaxpaged.cache.kv_cache import KVCache
from jaxpaged.ops.attention import AttentionOptions, attend


def write_and_attend(
    self: Any,
    q: Float[Array, "num_tokens num_q_heads head_dim"],
    k: Float[Array, "num_tokens num_kv_heads head_dim"],
    v: Float[Array, "num_tokens num_kv_heads head_dim"],
    cache: KVCache,
    batch: Batch,
    layer: int | Int[Array, ""],
    *,
    sinks: Float[Array, "num_q_heads"] | None = None,
    alibi_slopes: Float[Array, "num_q_heads"] | None = None,
) -> tuple[Float[Array, "num_tokens num_q_heads head_dim"], KVCache]:
    """Store this step's K and V, then attend to all that is stored.

    Args:
        self: An adapter, with `sm_scale`, `logits_soft_cap`, `sliding_window` and `backend`.
        q: Queries with their positions in them (`jaxpaged.ops.rope_write`), as `k`.
        sinks: As in `jaxpaged.paged_attention`, like `alibi_slopes`.

    Returns:
        Output in the shape and dtype of `q`, and the cache after the write.
    """
    view = cache.layer(layer).write(k, v, batch.ragged)
    options = AttentionOptions(
        sm_scale=self.sm_scale,
        logits_soft_cap=self.logits_soft_cap,
        sliding_window=self.sliding_window,
        sinks=sinks,
        alibi_slopes=alibi_slopes,
    )
    out, _ = attend(q, view, batch.ragged, options, backend=self.backend)
    return out, view.cache
