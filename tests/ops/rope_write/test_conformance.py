"""Our backends of `rope_and_write` pass what any backend must pass."""

import jax
import pytest

from jaxpaged.testing.conformance import RopeWriteConformance


class TestXla(RopeWriteConformance):
    backend = "xla"


class TestInterpret(RopeWriteConformance):
    backend = "interpret"


@pytest.mark.slow
class TestAuto(RopeWriteConformance):
    backend = "auto"


@pytest.mark.gpu
@pytest.mark.skipif(jax.default_backend() != "gpu", reason="no NVIDIA GPU")
class TestTriton(RopeWriteConformance):
    backend = "triton"
