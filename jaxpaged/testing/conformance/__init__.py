"""What any backend must pass, as classes of tests that a backend inherits. Needs pytest."""

import pytest

_MODULES = ("attention", "calls", "linear", "rope_write")
# A failing `assert` of a base class then shows its values, as one in a test module does.
pytest.register_assert_rewrite(*(f"jaxpaged.testing.conformance.{name}" for name in _MODULES))

from jaxpaged.testing.conformance.attention import AttentionConformance  # noqa: E402
from jaxpaged.testing.conformance.linear import LinearConformance  # noqa: E402
from jaxpaged.testing.conformance.rope_write import RopeWriteConformance  # noqa: E402

__all__ = ["AttentionConformance", "LinearConformance", "RopeWriteConformance"]
