"""Names for the content of pages: a digest of the tokens of a page, of what else shaped its KV, and of all before it.

    digest(page i) = blake2b(digest(page i - 1), tokens of page i, keys of page i), 128 bits

so two pages with one digest hold the same KV, wherever and by whomever it was computed: the digests depend on nothing
of the process (not on `PYTHONHASHSEED`, not on the byte order), and 128 bits of a cryptographic hash leave no room
for an accident or for a crafted prompt that hits another's pages.
"""

import hashlib
import struct
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from jaxpaged.checks import as_count

DIGEST_BYTES = 16
_HASHER = hashlib.blake2b(digest_size=DIGEST_BYTES)

Digests = npt.NDArray[np.uint64]
"""[num_pages, 2]"""

TokenIds = list[int] | tuple[int, ...] | range | npt.NDArray[np.integer]
TOKEN_LISTS = (np.ndarray, list, tuple, range)


class Key(NamedTuple):
    """What besides the tokens shaped a sequence's KV, from the token at `position` on.

    Two keys are the same only where all three parts are: a kind never collides with another, nor a text with a number.

    Attributes:
        kind: The kind of thing: "adapter", "image", "salt", ...
        value: The thing itself: a name, a number, or the bytes of a hash.
        position: The first token that it shapes: 0 for an adapter or a tenant's salt, the placeholder's for an image.
    """

    kind: str
    value: str | int | bytes
    position: int = 0

    def encode(self, first_token: int) -> bytes:
        """Return the key as bytes for the page that begins at `first_token`, each part with its type and its length."""
        parts = (self.kind, self.value, self.position - first_token)
        return b"".join(_encode(part) for part in parts)


def _encode(part: str | int | bytes) -> bytes:
    if isinstance(part, bytes):
        tag, data = b"b", part
    else:
        tag, data = b"s" if isinstance(part, str) else b"i", str(part).encode()
    return b"%b%d:%b" % (tag, len(data), data)


def check_keys(keys: Iterable[Key]) -> tuple[Key, ...]:
    """Return the keys, once it is sure that each can be encoded. Raises TypeError or ValueError by name."""
    try:
        keys = tuple(keys)
    except TypeError:
        raise TypeError(f"`keys` must be a list of Key; got {keys!r}. Leave it out where there are none.") from None
    for key in keys:
        if not isinstance(key, Key) or type(key.kind) is not str or type(key.value) not in (str, int, bytes):
            raise TypeError(f"`keys` must be Key(kind: str, value: str | int | bytes, position); got {key!r}.")
        as_count(key.position, "`position` of {!r}", key)
    return keys


def root_digest(page_size: int) -> bytes:
    """Return the parent of every first page: one for each page size and version of this scheme."""
    return _digest(b"jaxpaged prefix 1, pages of %d" % page_size)


def group_tag(name: str, sliding_window: int | None) -> np.uint64:
    """Return what is exclusive-ored into a digest's first word, so that groups do not share pages of equal tokens."""
    tag = _digest(Key("group", name, sliding_window or 0).encode(0))
    return np.frombuffer(tag, "<u8")[0].astype(np.uint64)


def as_tokens(token_ids: TokenIds, label: str = "`token_ids`") -> npt.NDArray[np.int32]:
    """Return tokens as an int32 array of one axis; raises by name for anything else."""
    try:
        tokens = np.asarray(token_ids)
    except ValueError:  # lists of several lengths
        raise ValueError(f"{label} must be one list of integers; got a list of lists.") from None
    if tokens.ndim != 1:
        raise ValueError(f"{label} must have one axis; got shape {tokens.shape}.")
    if not len(tokens):
        return tokens.astype(np.int32)
    if tokens.dtype.kind not in "iu":
        # Integers that are too large for any type of numpy, or for one of them all, come as objects or as floats.
        given = token_ids if isinstance(token_ids, list | tuple) else ()
        for token in given:
            if type(token) is int and not 0 <= token < 2**31:
                raise ValueError(_range_of(label, token))
        raise TypeError(f"{label} must be integers; got {tokens.dtype}.")
    for token in (tokens.min(), tokens.max()):
        if not 0 <= token < 2**31:
            raise ValueError(_range_of(label, token))
    return tokens.astype(np.int32, copy=False)


def _range_of(label: str, token: int | np.integer) -> str:
    return f"{label} must be in 0 .. 2**31 - 1; got {token}. Cut padding such as -1 off."


def hash_pages(
    tokens: npt.NDArray[np.int32], page_size: int, *, parent: bytes, keys: Sequence[Key] = (), first_page: int = 0
) -> Digests:
    """[full pages of `tokens`, 2] Return their digests. Costs about half a microsecond a page of 16.

    Args:
        tokens: From the first token of page `first_page` on.
        page_size: Tokens a page.
        parent: The digest of the page before.
        keys: The keys of the whole sequence; those outside these pages are not looked at.
        first_page: The place of the first of these pages in its sequence.
    """
    num_full = len(tokens) // page_size * page_size
    pages = struct.iter_unpack(f"{4 * page_size}s", tokens[:num_full].astype("<i4", copy=False).tobytes())
    extra = _keys_by_page(keys, page_size)
    digests = []
    new_hasher = _HASHER.copy  # a third faster than making each one from its arguments
    for index, (page,) in enumerate(pages, first_page):
        hasher = new_hasher()
        hasher.update(parent + page)
        if index in extra:
            hasher.update(extra[index])
        parent = hasher.digest()
        digests.append(parent)
    return as_digests(digests)


def as_digests(digests: Iterable[bytes]) -> Digests:
    """[n, 2] Return the digests as numbers, of the same value on every machine."""
    return np.frombuffer(b"".join(digests), "<u8").astype(np.uint64, copy=False).reshape(-1, 2)


def as_bytes(digest: Digests) -> bytes:
    """Return one digest as bytes, or several one after the other."""
    return digest.astype("<u8", copy=False).tobytes()


def _keys_by_page(keys: Sequence[Key], page_size: int) -> dict[int, bytes]:
    """Return the encoded keys of each page that has some; their order among each other says nothing."""
    pages: dict[int, list[bytes]] = {}
    for key in keys:
        page = key.position // page_size
        pages.setdefault(page, []).append(key.encode(page * page_size))
    return {page: b"".join(sorted(encoded)) for page, encoded in pages.items()}


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=DIGEST_BYTES).digest()
