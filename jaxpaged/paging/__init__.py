"""Page memory on the host: which page belongs to whom. Pure Python and numpy; it never imports JAX.

What is decided here (which page to take, to copy, to give back) is executed on the device by `KVCache`.
"""

from jaxpaged.paging.allocator import PageAllocator
from jaxpaged.paging.digests import Key
from jaxpaged.paging.groups import PageGroup
from jaxpaged.paging.offload import exchange_pages
from jaxpaged.paging.persist import load_prefix_cache, save_prefix_cache
from jaxpaged.paging.pool import OutOfPagesError, PagePool
from jaxpaged.paging.reports import (
    CachedPages,
    Eviction,
    HostPages,
    PageCopy,
    PageEvent,
    PageExplanation,
    PageStats,
    PoolSnapshot,
    Restore,
    SharingStats,
)
from jaxpaged.paging.swap import SwapSpace, SwapStats
from jaxpaged.paging.trace import TraceRecorder, read_trace

__all__ = [
    "CachedPages",
    "Eviction",
    "HostPages",
    "Key",
    "OutOfPagesError",
    "PageAllocator",
    "PageCopy",
    "PageEvent",
    "PageExplanation",
    "PageGroup",
    "PagePool",
    "PageStats",
    "PoolSnapshot",
    "Restore",
    "SharingStats",
    "SwapSpace",
    "SwapStats",
    "TraceRecorder",
    "exchange_pages",
    "load_prefix_cache",
    "read_trace",
    "save_prefix_cache",
]
