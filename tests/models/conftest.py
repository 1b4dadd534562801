import pytest

from jaxpaged.models.gguf import GGUFModel, builtin_model_path, read_gguf
from jaxpaged.models.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def builtin_model() -> GGUFModel:
    """The built-in model, read once (about 2 s and 0.5 GiB)."""
    return read_gguf(builtin_model_path())


@pytest.fixture(scope="session")
def builtin_tokenizer(builtin_model: GGUFModel) -> Tokenizer:
    return Tokenizer(builtin_model.tokenizer)
