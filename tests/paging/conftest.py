import pytest

from jaxpaged.paging import PageAllocator


@pytest.fixture
def pages() -> PageAllocator:
    """10 usable pages of 4: "a" has 6 tokens in pages 1, 2 and "b" 8 tokens in pages 3, 4."""
    pages = PageAllocator(11, page_size=4)
    pages.add("a", 6)
    pages.add("b", 8)
    return pages
