import pytest

from jaxpaged.inspect import ttir


@pytest.fixture(scope="session")
def interpreter():
    """Runs the Triton IR of a kernel with every access checked."""
    return ttir
