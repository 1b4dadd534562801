"""Attention over pages: the way in, its backends, the partition of a step's work, the derivative."""

from jaxpaged.ops.attention.api import ATTENTION, attend, paged_attention, why_not_on
from jaxpaged.ops.attention.options import AttentionOptions

__all__ = ["ATTENTION", "AttentionOptions", "attend", "paged_attention", "why_not_on"]
