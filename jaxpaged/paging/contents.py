"""All cached contents at once: given away, and taken over from another process."""

import numpy as np
import numpy.typing as npt

from jaxpaged.paging.digests import DIGEST_BYTES, as_bytes, as_digests
from jaxpaged.paging.owner import verb
from jaxpaged.paging.reports import CachedPages
from jaxpaged.paging.state import PageState


class ContentVerbs(PageState):
    """`cached_pages` and `adopt`."""

    __slots__ = ()

    @verb
    def cached_pages(self) -> CachedPages:
        """All contents that can be hit, parents before children. Costs a few passes over the pool."""
        cache = self._cache
        if cache is None:
            empty = np.zeros((0, 16), np.uint8)
            return CachedPages(digests=empty, parents=empty, page_ids=np.zeros(0, np.int32))
        page_ids = cache.in_order()
        return CachedPages(
            digests=np.frombuffer(as_bytes(cache.index.digests[page_ids]), np.uint8).reshape(-1, 16),
            parents=np.frombuffer(as_bytes(cache.index.parents[page_ids]), np.uint8).reshape(-1, 16),
            page_ids=page_ids.astype(np.int32),
            tokens=cache.continuations.tokens[page_ids] if cache.continuations is not None else None,
        )

    @verb
    def adopt(self, pages: CachedPages) -> npt.NDArray[np.int32]:
        """Takes free pages for another's cached contents, as many as are plain, and makes them findable.

        They count as used longer ago than anything here. Import their K and V before anybody can hit them.

        Returns:
            [n] the page for each content; 0 for one that is here already, whose parent is not, or that has no room.

        Raises:
            ValueError, TypeError: There is no prefix cache, or the arrays are not those of `cached_pages` of an
                allocator with this page size.
        """
        cache = self._cache
        if cache is None:
            raise ValueError("`adopt` needs a prefix cache: PageAllocator(prefix_caching=True).")
        _check_cached_pages(pages, self._page_size)
        digests, parents = (as_digests([x.tobytes()]) for x in (pages.digests, pages.parents))
        room = min(self._pool.num_plain_pages, self.num_free_pages)
        chosen = cache.adoptable(digests, parents)[:room]
        adopted = np.zeros(len(digests), np.int32)
        adopted[chosen] = cache.adopt(digests[chosen], parents[chosen])
        if cache.continuations is not None and pages.tokens is not None:
            cache.continuations.enter(adopted[chosen].astype(np.intp), parents[chosen], pages.tokens[chosen])
        return adopted


def _check_cached_pages(pages: CachedPages, page_size: int) -> None:
    """Raises by name for what `cached_pages` of an allocator with this page size cannot have given."""
    if not isinstance(pages, CachedPages):
        raise TypeError(f"`pages` must be CachedPages, as `cached_pages` gives them; got {type(pages).__name__}.")
    count = len(pages.digests)
    expected: dict[str, tuple[type[np.integer], int]]
    expected = {"digests": (np.uint8, DIGEST_BYTES), "parents": (np.uint8, DIGEST_BYTES)}
    if pages.tokens is not None:
        expected["tokens"] = (np.int32, page_size)
    for name, (dtype, width) in expected.items():
        array = getattr(pages, name)
        if array.shape != (count, width) or array.dtype != dtype:
            raise ValueError(
                f"`{name}` of `pages` must be {dtype.__name__} [{count}, {width}], for pages of {page_size} tokens; "
                f"got {array.dtype} {list(array.shape)}."
            )
