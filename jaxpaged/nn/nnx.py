"""Paged attention as a Flax NNX module: put it in where a model had attention over its own cache."""

from flax import nnx

from jaxpaged.nn.paged_attention import write_and_attend


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
        backend: str = "auto",
    ):
        self.sm_scale = sm_scale
        self.logits_soft_cap = logits_soft_cap
        self.sliding_window = sliding_window
        self.backend = backend

    __call__ = write_and_attend
