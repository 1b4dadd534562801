"""Arguments of the allocator's verbs as JSON can hold them, and back, so that they come back equal."""

from collections.abc import Iterable
from typing import Any

import numpy as np

from jaxpaged.paging.digests import DIGEST_BYTES, Key
from jaxpaged.paging.groups import PageGroup
from jaxpaged.paging.records import CachedPages, HostPages


class AskedHost:
    """Another's host memory, and what it was found to have."""

    def __init__(self, host: HostPages):
        self._host = host
        self.found: set[bytes] = set()

    def has(self, digest: bytes) -> bool:
        """Whether the content is there."""
        if self._host.has(digest):
            self.found.add(digest)
        return digest in self.found


class RecordedHost:
    """Host memory that has what it was found to have when the trace was written."""

    def __init__(self, digests: Iterable[str]):
        self._digests = {bytes.fromhex(digest) for digest in digests}

    def has(self, digest: bytes) -> bool:
        """Whether the content was there."""
        return digest in self._digests


def to_json(name: str, value: Any) -> Any:
    """An argument as JSON can hold it. Raises TypeError by its name where that would not come back equal."""
    if value is None:
        return None
    if name == "host":
        return sorted(digest.hex() for digest in value.found)
    if name == "keys":
        return [[key.kind, _value_to_json(key.value), key.position] for key in value]
    if name == "pages":
        arrays = {"digests": value.digests, "parents": value.parents}
        tokens = None if value.tokens is None or not len(value.tokens) else value.tokens.tolist()
        return {key: array.tobytes().hex() for key, array in arrays.items()} | {"tokens": tokens}
    return _plain(name, value)


def from_json(name: str, value: Any) -> Any:
    """The argument. Raises ValueError by its name for what `to_json` does not give."""
    try:
        return _parsed(name, value)
    except (ValueError, TypeError, LookupError, AttributeError, OverflowError) as error:
        raise ValueError(f"`{name}` must be as TraceRecorder writes it; got another form: {error}.") from error


def _parsed(name: str, value: Any) -> Any:
    if value is None:
        return None
    if name == "host":
        return RecordedHost(value)
    if name == "groups":
        return [PageGroup(*group) for group in value]
    if name == "keys":
        return [Key(kind, _value_from_json(part), position) for kind, part, position in value]
    if name == "pages":
        digests, parents = (
            np.frombuffer(bytes.fromhex(value[key]), np.uint8).reshape(-1, DIGEST_BYTES)
            for key in ("digests", "parents")
        )
        tokens = None if value["tokens"] is None else np.array(value["tokens"], np.int32)
        return CachedPages(digests=digests, parents=parents, page_ids=np.zeros(len(digests), np.int32), tokens=tokens)
    return value


def _plain(name: str, value: Any) -> Any:
    if isinstance(value, np.ndarray | np.generic):
        value = value.tolist()
    if isinstance(value, list | tuple | range) and not name.endswith("_id"):
        return [_plain(name, item) for item in value]
    if not isinstance(value, str | int | float):
        raise TypeError(f"`{name}` must be of numbers and strings to be in a trace; got {type(value).__name__}.")
    return value


def _value_to_json(value: str | int | bytes) -> Any:
    return {"hex": value.hex()} if isinstance(value, bytes) else value


def _value_from_json(value: Any) -> Any:
    return bytes.fromhex(value["hex"]) if isinstance(value, dict) else value
