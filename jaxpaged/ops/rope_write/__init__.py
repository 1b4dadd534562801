"""Rotary embedding, and the write of a layer's new keys and values in the same launch."""

from jaxpaged.ops.rope_write.api import ROPE_AND_WRITE, rope_and_write
from jaxpaged.ops.rope_write.rope import apply_rope, rope_angles, rope_frequencies

__all__ = ["ROPE_AND_WRITE", "apply_rope", "rope_and_write", "rope_angles", "rope_frequencies"]
