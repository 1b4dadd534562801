from pathlib import Path

import pytest

from tests.cli.command import Terminal
from tests.models.tiny_gguf import write_tiny_gguf


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    """A directory with gpt2.gguf and llama.gguf, named after their vocabularies."""
    directory = tmp_path_factory.mktemp("models")
    write_tiny_gguf(directory / "gpt2.gguf")
    write_tiny_gguf(directory / "llama.gguf", kind="llama")
    return directory


@pytest.fixture(scope="module")
def model_path(models) -> Path:
    """One of them."""
    return models / "gpt2.gguf"


@pytest.fixture
def terminal(monkeypatch):
    opened = []
    yield lambda name: opened.append(Terminal(name, monkeypatch)) or opened[-1]
    monkeypatch.undo()
    for each in opened:
        each.close()
