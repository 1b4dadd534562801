"""A prefix cache in a file: saved by one process, loaded by another that runs the same model.

The file is one of pages (`page_file`): its metadata say what the pages are, which model's and in which order, and each
page carries its digest as its tag. The version is that of the metadata. It appears under its name when it is complete,
and a page that was damaged since counts as missed, with those that follow it in its prefix.

`cache` is a `KVCache` everywhere: not by its type, which would need JAX.
"""

import hashlib
import json
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from jaxpaged.paging.allocator import PageAllocator
from jaxpaged.paging.records import CachedPages
from jaxpaged.paging.store.layout import PageLayout
from jaxpaged.paging.store.page_file import TAG_NBYTES, PageFile, PageFileError, check_replaceable

VERSION = 1
_BATCH_PAGES = 1024
"""Pages that are on their way at once. An import outside of a jitted step copies the pool; an export takes memory."""


def save_prefix_cache(path: str | os.PathLike, pages: PageAllocator, cache: Any, *, model: str) -> int:
    """Write all cached prefixes and their keys and values to a file. Returns how many pages that were.

    Args:
        path: Where the file is to be. One of pages is replaced in one step, when the new one is complete.
        pages: The allocator of the cache.
        model: A name of the model and its weights, which `load_prefix_cache` must be given again.

    Raises:
        FileExistsError: `path` is there and is not a file of pages.
        OSError: The file cannot be written; what was there before is still there.
        ValueError, TypeError: `model` is not a name.
    """
    path = Path(path)
    check_replaceable(path)
    cached = pages.prefix.cached_pages()
    layout = _layout(cache)
    metadata = _encode(_description(pages, cache, layout, model), cached)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with PageFile.create(part, len(cached.page_ids), layout.nbytes, metadata) as file:
            for batch in _batches(len(cached.page_ids)):
                block = cache.export_pages(cached.page_ids[batch]).to_host()
                file.write(_places(batch), cached.digests[batch], layout.pack(block))
            file.flush()
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
    return len(cached.page_ids)


def load_prefix_cache(path: str | os.PathLike, pages: PageAllocator, cache: Any, *, model: str) -> Any:
    """Read the prefixes of a file into free pages, where later sequences find them. Returns the new cache.

    Those that are cached already are skipped, and those for which no page is plainly free; nothing is evicted for them.
    When an import fails, `pages` forgets all it had cached, rather than offer pages with nothing in them.

    Args:
        path: A file by `save_prefix_cache`.
        pages: The allocator of `cache`, with `prefix_caching`.
        model: The name under which the file was saved.

    Raises:
        PageFileError: The file is not one of a prefix cache, or of another version of the format, or it is damaged
            where it says what it holds.
        ValueError: It was saved for another model, dtype, page size, shape of pages, groups or fixed scales; or `pages`
            has no prefix caching.
        OSError: It cannot be read.
    """
    with PageFile.open(path) as file, ExitStack() as undo:
        saved, cached = _decode(file)
        layout = _layout(cache)
        _check_same(saved, _description(pages, cache, layout, model), file.path)
        undo.callback(pages.prefix.reset)
        for batch in _batches(file.num_pages):
            rows, whole = file.read(_places(batch), cached.digests[batch])
            page_ids = pages.prefix.adopt(_some(cached, _places(batch)[whole]))
            taken = page_ids > 0
            block = layout.unpack(rows[whole][taken])
            empty = cache.export_pages(np.zeros(0, np.int32))
            cache = cache.import_pages(page_ids[taken], type(empty).from_host(block))
        undo.pop_all()
    return cache


def _layout(cache: Any) -> PageLayout:
    return PageLayout.of(cache.export_pages(np.zeros(0, np.int32)).to_host())


def _description(pages: PageAllocator, cache: Any, layout: PageLayout, model: str) -> dict[str, Any]:
    """Return what must be the same where a file is loaded as it was where the file was saved."""
    if not isinstance(model, str):
        raise TypeError(f"`model` must be a str, the name of model and weights; got {type(model).__name__}.")
    if not model:
        raise ValueError("`model` must be the name of model and weights; got ''.")
    scales = None
    if cache.k_scale is not None and not cache.has_token_scales:  # what a stored value stands for is not in its page
        values = [np.asarray(scale, np.float32).tobytes() for scale in (cache.k_scale, cache.v_scale)]
        scales = hashlib.blake2b(b"".join(values), digest_size=8).hexdigest()
    return {
        "model": model,
        "page_size": pages.page_size,
        "pages": str(layout),
        "groups": [[group.name, group.sliding_window] for group in pages.groups],
        "fixed_scales": scales,
        "byte_order": sys.byteorder,
    }


def _check_same(saved: Mapping[str, Any], here: Mapping[str, Any], path: Path) -> None:
    arguments = {"model": "model", "page_size": "pages", "groups": "pages"}
    for name, value in here.items():
        if saved.get(name) != value:
            argument = arguments.get(name, "cache")
            what = f"`{argument}`" if name == argument else f"{name.replace('_', ' ')} of `{argument}`"
            raise ValueError(
                f"{what} must be {saved.get(name)!r}, for which {path} was saved; got {value!r}. Keys and values of "
                "another cache would be wrong ones."
            )


def _encode(description: Mapping[str, Any], cached: CachedPages) -> bytes:
    """Return the metadata of a file: a line of JSON, then the arrays of `cached` as bytes."""
    tokens = cached.tokens
    head = {"prefix_cache": VERSION, "has_tokens": tokens is not None, **description}
    arrays = [cached.digests, cached.parents] + ([] if tokens is None else [tokens.astype("<i4")])
    return b"\n".join([json.dumps(head).encode(), b"".join(x.tobytes() for x in arrays)])


def _decode(file: PageFile) -> tuple[dict[str, Any], CachedPages]:
    """Return the description and the pages, whose ids are 0: they lie nowhere yet."""
    line, _, arrays = file.metadata.partition(b"\n")
    head = json.loads(line) if line.startswith(b'{"prefix_cache"') else {}
    if head.get("prefix_cache") != VERSION:
        version = head.get("prefix_cache", "none")
        raise PageFileError(f"{file.path} must be of a prefix cache, version {VERSION}; got version {version}.")
    num_pages, split = file.num_pages, file.num_pages * TAG_NBYTES
    digests, parents = (
        np.frombuffer(arrays, np.uint8, split, begin).reshape(num_pages, TAG_NBYTES) for begin in (0, split)
    )
    tokens = None
    if head["has_tokens"]:
        tokens = np.frombuffer(arrays, "<i4", -1, 2 * split).reshape(num_pages, -1).astype(np.int32)
    page_ids = np.zeros(num_pages, np.int32)
    return head, CachedPages(digests=digests, parents=parents, page_ids=page_ids, tokens=tokens)


def _some(cached: CachedPages, index: npt.NDArray[np.intp]) -> CachedPages:
    return CachedPages(
        digests=cached.digests[index],
        parents=cached.parents[index],
        page_ids=cached.page_ids[index],
        tokens=None if cached.tokens is None else cached.tokens[index],
    )


def _batches(num_pages: int) -> Iterator[slice]:
    for begin in range(0, num_pages, _BATCH_PAGES):
        yield slice(begin, min(num_pages, begin + _BATCH_PAGES))


def _places(batch: slice) -> npt.NDArray[np.intp]:
    return np.arange(batch.start, batch.stop)
