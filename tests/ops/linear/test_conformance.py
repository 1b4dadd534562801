"""Our backends of `linear` pass what any backend must pass."""

import jax
import pytest

from jaxpaged.testing.conformance import LinearConformance


class TestXla(LinearConformance):
    backend = "xla"


class TestInterpret(LinearConformance):
    backend = "interpret"


@pytest.mark.slow
class TestAuto(LinearConformance):
    backend = "auto"


@pytest.mark.gpu
@pytest.mark.skipif(jax.default_backend() != "gpu", reason="no NVIDIA GPU")
class TestTriton(LinearConformance):
    backend = "triton"
