"""The GGUF container: metadata, tensor directory, tensor data. What they mean is for `jaxpaged.models.gguf` to know.

The header is read here, in one pass, with every length checked against the end of the file. The `gguf` package's own
reader takes 5 s over a 49,152-token vocabulary (this one 0.2 s) and hands out short reads of a truncated file as data.
The package supplies the type numbers, the block sizes and the dequantisation.

Source: the GGUF specification (ggml, docs/gguf.md), versions 2 and 3, little endian.
"""

import dataclasses
import math
import struct
from pathlib import Path
from typing import Any

import numpy as np

try:
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType
    from gguf.quants import dequantize
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "`jaxpaged.models.gguf` needs the package gguf. Install jaxpaged[models].", name=error.name
    ) from error

_SCALARS = {
    GGUFValueType.UINT8: np.dtype("u1"),
    GGUFValueType.INT8: np.dtype("i1"),
    GGUFValueType.UINT16: np.dtype("<u2"),
    GGUFValueType.INT16: np.dtype("<i2"),
    GGUFValueType.UINT32: np.dtype("<u4"),
    GGUFValueType.INT32: np.dtype("<i4"),
    GGUFValueType.UINT64: np.dtype("<u8"),
    GGUFValueType.INT64: np.dtype("<i8"),
    GGUFValueType.FLOAT32: np.dtype("<f4"),
    GGUFValueType.FLOAT64: np.dtype("<f8"),
    GGUFValueType.BOOL: np.dtype("?"),
}

_DEFAULT_ALIGNMENT = 32  # bytes
_CHUNK_ELEMENTS = 1 << 17  # 0.5 MiB of float32: the dequantiser's temporaries stay in the second-level cache


@dataclasses.dataclass(frozen=True, slots=True)
class GGUFTensor:
    """Where a tensor lies in the file.

    Attributes:
        shape: In numpy's order, the file's reversed: a matrix is [out, in].
        offset: Bytes from the start of the file.
    """

    shape: tuple[int, ...]
    dtype: GGMLQuantizationType
    offset: int
    num_bytes: int


@dataclasses.dataclass(frozen=True, slots=True)
class GGUFFile:
    """An open file.

    Attributes:
        data: The whole file, uint8 [num_bytes], mapped: read when it is used.
        metadata: Scalars as Python values, arrays of strings as lists, arrays of numbers as numpy arrays.
    """

    path: Path
    data: np.ndarray
    metadata: dict[str, Any]
    tensors: dict[str, GGUFTensor]

    def error(self, name: str, expected: str, got: object, hint: str = "") -> ValueError:
        """Return a complaint about a key or a tensor of this file."""
        return ValueError(f"{self.path}: `{name}` must {expected}; got {got}.{hint and ' ' + hint}")

    def get(self, key: str, kind: type, default: Any = None) -> Any:
        """Return the value of `key`, `default` where it is absent.

        Raises:
            ValueError: The value is of another type than `kind`. An int passes for a float.
        """
        if key not in self.metadata:
            return default
        value = self.metadata[key]
        if kind is float and type(value) is int:
            return float(value)
        if type(value) is not kind:
            raise self.error(key, f"be of type {kind.__name__}", type(value).__name__)
        return value

    def positive_int(self, key: str, default: int | None = None) -> int:
        """Return a positive int, required where there is no default. An array that repeats one number stands for that
        number.

        Raises:
            ValueError: It is absent, something else, or differs from layer to layer.
        """
        value = self.metadata.get(key, default)
        if value is None:
            raise self.error(key, "be in the file's metadata", "nothing")
        if isinstance(value, np.ndarray):
            if value.size == 0 or (value != value[0]).any():
                raise self.error(key, "be the same for every layer", f"{value.size} numbers that differ")
            value = value[0].item()
        if type(value) is not int or value < 1:
            raise self.error(key, "be a positive integer", repr(value))
        return value

    def dequantize_into(self, out: np.ndarray, name: str, row_order: np.ndarray | None = None) -> None:
        """Write a tensor as float32, a chunk at a time.

        Args:
            out: Contiguous float32 of the tensor's shape.
            row_order: For each row of `out` the tensor's row that goes there; None keeps the order. Rows hold whole
                blocks, so they move while quantised.

        Raises:
            ValueError: The gguf package cannot dequantise the tensor's type.
        """
        tensor = self.tensors[name]
        block_elements, block_bytes = GGML_QUANT_SIZES[tensor.dtype]
        raw = self.data[tensor.offset : tensor.offset + tensor.num_bytes]
        if row_order is not None:
            raw = raw.reshape(len(row_order), -1)[row_order]
        blocks, elements = raw.reshape(-1, block_bytes), out.reshape(-1, block_elements)
        step = _CHUNK_ELEMENTS // block_elements
        try:
            with np.errstate(
                invalid="ignore", over="ignore"
            ):  # an infinite scale makes infinite weights, without a word
                for start in range(0, len(blocks), step):
                    chunk = blocks[start : start + step]
                    # As one long row: the dequantiser takes 16 rows at a time, and these are short.
                    elements[start : start + step] = dequantize(chunk.reshape(-1), tensor.dtype).reshape(len(chunk), -1)
        except NotImplementedError as error:
            expected = "have a type that the gguf package can dequantise"
            raise self.error(name, expected, tensor.dtype.name) from error


def open_gguf(path: Path) -> GGUFFile:
    """Read a file's header and map its data.

    Raises:
        FileNotFoundError: No such file.
        ValueError: Not a GGUF file, another version, cut short or damaged.
    """
    if not path.exists():
        raise FileNotFoundError(f"`path` must name a GGUF file; got {path}, which does not exist.")
    if not path.is_file():
        kind = "a directory" if path.is_dir() else "no regular file"
        raise ValueError(f"`path` must name a GGUF file; got {path}, {kind}.")
    if path.stat().st_size == 0:  # cannot be mapped
        raise ValueError(f"`path` must name a GGUF file; got {path}, which is empty.")
    data = np.memmap(path, np.uint8, mode="r")
    cursor = _Cursor(path, memoryview(data))
    _check_version(path, bytes(data[:4]), cursor)
    num_tensors, num_keys = cursor.uint64("the number of tensors"), cursor.uint64("the number of keys")

    metadata: dict[str, Any] = {}
    for index in range(num_keys):
        key = cursor.string(f"key {index + 1} of {num_keys}")
        if key in metadata:
            raise ValueError(f"{path}: each key must be there once; got `{key}` twice. The file is damaged.")
        metadata[key] = cursor.value(key)

    entries: dict[str, tuple[tuple[int, ...], int, int]] = {}
    for index in range(num_tensors):
        what = f"entry {index + 1} of {num_tensors} in the tensor directory"
        name, rank = cursor.string(what), cursor.uint32(what)
        if name in entries:
            raise ValueError(f"{path}: each tensor must be there once; got `{name}` twice. The file is damaged.")
        shape = np.frombuffer(cursor.take(8 * rank, what), "<u8")[::-1].tolist()
        entries[name] = tuple(shape), cursor.uint32(what), cursor.uint64(what)

    alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
    if type(alignment) is not int or alignment < 1:
        raise ValueError(f"{path}: `general.alignment` must be a positive integer; got {alignment!r}.")
    data_start = -(-cursor.offset // alignment) * alignment
    tensors = {}
    for name, (shape, type_number, offset) in entries.items():
        dtype, num_bytes = _measure(path, name, shape, type_number)
        tensors[name] = GGUFTensor(shape, dtype, data_start + offset, num_bytes)
        if data_start + offset + num_bytes > len(data):
            raise _truncated(path, f"tensor {name!r}", data_start + offset + num_bytes, len(data))
    return GGUFFile(path, data, metadata, tensors)


class _Cursor:
    """Walks the header. A read past the end of the file raises, and says what was being read."""

    def __init__(self, path: Path, data: memoryview):
        self.path, self.data, self.offset = path, data, 0

    def take(self, num_bytes: int, what: str) -> memoryview:
        start, self.offset = self.offset, self.offset + num_bytes
        if self.offset > len(self.data):
            raise _truncated(self.path, what, self.offset, len(self.data))
        return self.data[start : self.offset]

    def uint32(self, what: str) -> int:
        return struct.unpack("<I", self.take(4, what))[0]

    def uint64(self, what: str) -> int:
        return struct.unpack("<Q", self.take(8, what))[0]

    def string(self, what: str) -> str:
        text = self.take(self.uint64(what), what)
        try:
            return str(text, "utf-8")
        except UnicodeDecodeError as error:
            got = bytes(text[:40])
            raise ValueError(f"{self.path}: {what} must be UTF-8; got {got!r}. The file is damaged.") from error

    def value(self, key: str) -> Any:
        what = f"the value of {key!r}"
        kind = self._kind(key, what)
        if kind is GGUFValueType.STRING:
            return self.string(what)
        if kind is not GGUFValueType.ARRAY:
            dtype = _SCALARS[kind]
            return np.frombuffer(self.take(dtype.itemsize, what), dtype)[0].item()
        kind, length = self._kind(key, what), self.uint64(what)
        if kind is GGUFValueType.STRING:
            return [self.string(what) for _ in range(length)]
        if kind is GGUFValueType.ARRAY:
            raise ValueError(f"{self.path}: `{key}` must be a scalar or a flat array; got an array of arrays.")
        dtype = _SCALARS[kind]
        return np.frombuffer(self.take(dtype.itemsize * length, what), dtype)

    def _kind(self, key: str, what: str) -> GGUFValueType:
        number = self.uint32(what)
        try:
            return GGUFValueType(number)
        except ValueError:
            expected = "have a value type of 0 to 12"
            raise ValueError(f"{self.path}: `{key}` must {expected}; got {number}. The file is damaged.") from None


def _check_version(path: Path, magic: bytes, cursor: _Cursor) -> None:
    if not b"GGUF".startswith(magic):
        raise ValueError(f"`path` must name a GGUF file; got {path}, which starts with {magic!r}, not b'GGUF'.")
    cursor.take(4, "the magic number")
    version = cursor.uint32("the version")
    if version in (2, 3):
        return
    swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
    got = f"{swapped} in big-endian order" if swapped in (2, 3) else version
    raise ValueError(f"{path}: the GGUF version must be 2 or 3, little endian; got {got}. Convert the model again.")


def _measure(path: Path, name: str, shape: tuple[int, ...], type_number: int) -> tuple[GGMLQuantizationType, int]:
    """Return a tensor's type and size in bytes."""
    try:
        dtype = GGMLQuantizationType(type_number)
    except ValueError:
        expected = "have a tensor type that the gguf package knows"
        raise ValueError(f"{path}: `{name}` must {expected}; got number {type_number}. Try a newer gguf.") from None
    block_elements, block_bytes = GGML_QUANT_SIZES[dtype]
    if not shape or shape[-1] % block_elements:
        expected = f"have rows of whole {dtype.name} blocks of {block_elements} elements"
        raise ValueError(f"{path}: `{name}` must {expected}; got shape {shape}.")
    return dtype, math.prod(shape) // block_elements * block_bytes


def _truncated(path: Path, what: str, end: int, size: int) -> ValueError:
    got = f"{path}, truncated or damaged: {what} ends at byte {end:,} of {size:,}"
    return ValueError(f"`path` must name a whole GGUF file; got {got}. Fetch the file again.")
