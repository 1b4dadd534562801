"""Paged attention as a Flax NNX module: drop it in where a model had attention over its own cache."""

from flax import nnx
from jaxtyping import Array, Float, Int

from jaxpaged.batch import Batch
from jaxpaged.kv_cache import KVCache
from jaxpaged.ops.attention import Backend, write_and_attend
from jaxpaged.ops.plan import AttentionPlan


class PagedAttention(nnx.Module):
    """Writes this step's K and V into the cache, then attends to all of it. Has no parameters.

    Args:
        sm_scale: As in `jaxpaged.paged_attention`, like the rest.
    """

    def __init__(
        self,
        *,
        sm_scale: float | None = None,
        logits_soft_cap: float | None = None,
        sliding_window: int | None = None,
        backend: Backend = "auto",
    ):
        self.sm_scale = sm_scale
        self.logits_soft_cap = logits_soft_cap
        self.sliding_window = sliding_window
        self.backend = backend

    def __call__(
        self,
        q: Float[Array, "num_tokens num_q_heads head_dim"],
        k: Float[Array, "num_tokens num_kv_heads head_dim"],
        v: Float[Array, "num_tokens num_kv_heads head_dim"],
        cache: KVCache,
        batch: Batch,
        layer: int | Int[Array, ""],
        *,
        sinks: Float[Array, "num_q_heads"] | None = None,
        alibi_slopes: Float[Array, "num_q_heads"] | None = None,
        plan: AttentionPlan | None = None,
    ) -> tuple[Float[Array, "num_tokens num_q_heads head_dim"], KVCache]:
        """One layer's attention, in the dtype of `q`, and the cache after the write.

        `q` and `k` come with their positions in them (`jaxpaged.ops.rope`).
        """
        return write_and_attend(
            q,
            k,
            v,
            cache,
            batch,
            layer,
            sm_scale=self.sm_scale,
            logits_soft_cap=self.logits_soft_cap,
            sliding_window=self.sliding_window,
            backend=self.backend,
            sinks=sinks,
            alibi_slopes=alibi_slopes,
            plan=plan,
        )
