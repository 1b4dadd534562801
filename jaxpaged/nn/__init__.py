"""Paged attention for models in Flax: `bind` for any model; `nnx.PagedAttention` and `linen.PagedAttention`."""

from jaxpaged.nn.bind import BoundCache, BoundLayer, bind

__all__ = ["BoundCache", "BoundLayer", "bind"]
