"""Writes tiny, deterministic GGUF files: all that the reader knows, in a file of about 0.3 MB that loads at once."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter, TokenType
from gguf.quants import quantize

CHAT_TEMPLATE = (
    "{% for message in messages %}\n"
    "    {% if message['role'] not in ('system', 'user', 'assistant') %}\n"
    "        {{- raise_exception('no such role: ' + message['role']) }}\n"
    "    {% endif %}\n"
    "    {{- bos_token + message['role'] + '\\n' + message['content'] + eos_token + '\\n' -}}\n"
    "{% endfor %}\n"
    "{% if add_generation_prompt %}\n"
    "    {{- bos_token + 'assistant\\n' -}}\n"
    "{% endif %}\n"
)
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MERGES = ("t h", "th e", "Ġ the", "i n", "e r", "Ġ a", "1 2", "12 3", "Ã ©")
WHOLE_WORD = "zebra"  # a token that no merges make
PIECES = ("▁", "▁the", "the", "he", "t", "h", "e", "in", "▁in", "i", "n", "ch", "ech", "c", "er", "r", "a", "s", "é")


def byte_chars() -> list[str]:
    """The character that stands for each byte in a byte-level vocabulary."""
    chars, spare = [], 256
    for byte in range(256):
        printable = 33 <= byte <= 126 or 161 <= byte <= 172 or byte >= 174
        chars.append(chr(byte) if printable else chr(spare))
        spare += not printable
    return chars


def tiny_tensors(
    *,
    vocab_size: int,
    hidden: int = 64,
    inner: int = 96,
    num_layers: int = 2,
    num_q_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 16,
    tied: bool = True,
    seed: int = 0,
) -> dict[str, np.ndarray]:
    """Random float32 weights by GGUF name, [out, in], with Q and K in the half-split order that the reader returns."""
    rng = np.random.default_rng(seed)

    def matrix(rows: int, columns: int) -> np.ndarray:
        return rng.standard_normal((rows, columns), np.float32) * np.float32(2 / columns**0.5)

    def norm() -> np.ndarray:
        return 1 + rng.standard_normal(hidden, np.float32) / 10

    tensors = {"token_embd.weight": matrix(vocab_size, hidden)}
    for layer in range(num_layers):
        tensors |= {
            f"blk.{layer}.attn_norm.weight": norm(),
            f"blk.{layer}.attn_q.weight": matrix(num_q_heads * head_dim, hidden),
            f"blk.{layer}.attn_k.weight": matrix(num_kv_heads * head_dim, hidden),
            f"blk.{layer}.attn_v.weight": matrix(num_kv_heads * head_dim, hidden),
            f"blk.{layer}.attn_output.weight": matrix(hidden, num_q_heads * head_dim),
            f"blk.{layer}.ffn_norm.weight": norm(),
            f"blk.{layer}.ffn_gate.weight": matrix(inner, hidden),
            f"blk.{layer}.ffn_up.weight": matrix(inner, hidden),
            f"blk.{layer}.ffn_down.weight": matrix(hidden, inner),
        }
    tensors["output_norm.weight"] = norm()
    if not tied:
        tensors["output.weight"] = matrix(vocab_size, hidden)
    return tensors


def tiny_vocabulary(kind: str = "gpt2") -> dict[str, Any]:
    """The tokenizer's metadata: byte-level BPE, or SentencePiece with byte fallback."""
    if kind == "gpt2":
        tokens = [*SPECIAL, *byte_chars(), *(merge.replace(" ", "") for merge in MERGES), WHOLE_WORD]
        types = [TokenType.CONTROL] * len(SPECIAL) + [TokenType.NORMAL] * (len(tokens) - len(SPECIAL))
        specific = {"pre": "smollm", "merges": list(MERGES), "bos_token_id": 1, "eos_token_id": 2}
    else:
        tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *PIECES]
        types = [
            TokenType.UNKNOWN,
            *[TokenType.CONTROL] * 2,
            *[TokenType.BYTE] * 256,
            *[TokenType.NORMAL] * len(PIECES),
        ]
        scores = [0.0] * 259 + [-float(rank) for rank in range(len(PIECES))]
        specific = {"scores": scores, "bos_token_id": 1, "eos_token_id": 2}
    plain = {"model": kind, "tokens": tokens, "token_type": [int(type_) for type_ in types]}
    return {f"tokenizer.ggml.{key}": value for key, value in (plain | specific).items()}


def write_tiny_gguf(
    path: Path,
    *,
    kind: str = "gpt2",
    architecture: str = "llama",
    quantization: GGMLQuantizationType = GGMLQuantizationType.F32,
    metadata: Mapping[str, Any] | None = None,
    tensors: Mapping[str, np.ndarray | None] | None = None,
    **shape: Any,
) -> dict[str, np.ndarray]:
    """Write a random model and return its weights, as `tiny_tensors` does.

    Args:
        kind: "gpt2" or "llama", the tokenizer.
        quantization: Of every matrix.
        metadata: Keys to set, or to leave out (None).
        tensors: Tensors to set, written as they are, or to leave out (None).
        shape: Arguments of `tiny_tensors`; the file's metadata follows them.
    """
    size = {"hidden": 64, "inner": 96, "num_layers": 2, "num_q_heads": 4, "num_kv_heads": 2, "head_dim": 16} | shape
    vocabulary = tiny_vocabulary(kind)
    weights = tiny_tensors(vocab_size=len(vocabulary["tokenizer.ggml.tokens"]), **size)
    entries = {
        "general.name": "tiny",
        "llama.block_count": size["num_layers"],
        "llama.context_length": 256,
        "llama.embedding_length": size["hidden"],
        "llama.feed_forward_length": size["inner"],
        "llama.attention.head_count": size["num_q_heads"],
        "llama.attention.head_count_kv": size["num_kv_heads"],
        "llama.attention.key_length": size["head_dim"],
        "llama.attention.value_length": size["head_dim"],
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.dimension_count": size["head_dim"],
        "llama.rope.freq_base": 10000.0,
        **vocabulary,
        "tokenizer.chat_template": CHAT_TEMPLATE,
        **(metadata or {}),
    }
    heads = {"attn_q": size["num_q_heads"], "attn_k": size["num_kv_heads"]}

    writer = GGUFWriter(path, architecture)
    for key, value in entries.items():
        if value is not None:
            _add(writer, key, value)
    for name, weight in weights.items():
        if name in (tensors or {}):
            continue
        part = name.split(".")[-2]
        stored = _interleave(weight, heads[part]) if part in heads else weight
        dtype = quantization if weight.ndim == 2 else GGMLQuantizationType.F32
        writer.add_tensor(name, quantize(stored, dtype), raw_dtype=dtype)
    for name, weight in (tensors or {}).items():
        if weight is not None:
            writer.add_tensor(name, weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return weights


def _interleave(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """The rotary order of the file, made row by row: the two halves of each head are dealt out in turn."""
    rows = []
    for head in np.split(weight, num_heads):
        first, second = np.split(head, 2)
        for pair in zip(first, second, strict=True):
            rows.extend(pair)
    return np.stack(rows)


def _add(writer: GGUFWriter, key: str, value: Any) -> None:
    add = {str: writer.add_string, bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32}
    if isinstance(value, list):
        writer.add_array(key, value)
    else:
        add[type(value)](key, value)
