import pytest
from flax import nnx

from jaxpaged.models.llama import Llama
from tests.engine.tiny import CONFIG


@pytest.fixture(scope="session")
def model() -> Llama:
    return Llama(CONFIG, layer_loop="calls", rngs=nnx.Rngs(0))
