"""Our backends of `paged_attention` pass what any backend must pass."""

import jax
import pytest

from jaxpaged.testing.conformance import AttentionConformance


class TestReference(AttentionConformance):
    backend = "reference"


class TestXla(AttentionConformance):
    backend = "xla"


class TestInterpret(AttentionConformance):
    backend = "interpret"


@pytest.mark.gpu
@pytest.mark.skipif(jax.default_backend() != "gpu", reason="no NVIDIA GPU")
class TestTriton(AttentionConformance):
    backend = "triton"
