"""Page memory on the host: which page belongs to whom. Pure Python and numpy; it never imports JAX.

What is decided here (which page to take, to copy, to give back) is executed on the device by `KVCache`.
"""

from jaxpaged.paging.allocator import PageAllocator, PageCopy, PageStats
from jaxpaged.paging.pool import OutOfPagesError, PagePool

__all__ = ["OutOfPagesError", "PageAllocator", "PageCopy", "PagePool", "PageStats"]
