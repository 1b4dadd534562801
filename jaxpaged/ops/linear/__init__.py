"""A layer's matrix products, with norm, activation and residual in them."""

from jaxpaged.ops.linear.api import LINEAR, linear
from jaxpaged.ops.linear.xla import rms_norm

__all__ = ["LINEAR", "linear", "rms_norm"]
