"""Paged attention as a Flax Linen module: the twin of `jaxpaged.nn.nnx.PagedAttention`."""

from flax import linen

from jaxpaged.nn.paged_attention import write_and_attend


class PagedAttention(linen.Module):
    """Writes this step's K and V into the cache, then attends to all of it. Has no parameters.

    Attributes:
        sm_scale: As in `jaxpaged.paged_attention`, like the rest.
    """

    sm_scale: float | None = None
    logits_soft_cap: float | None = None
    sliding_window: int | None = None
    backend: str = "auto"

    __call__ = write_and_attend
