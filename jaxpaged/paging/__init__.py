"""Page memory on the host: which page belongs to whom. Pure Python and numpy; it never imports JAX.

What is decided here (which page to take, to copy, to give back) is executed on the device by `KVCache`.
"""

from jaxpaged.paging.allocator import PageAllocator
from jaxpaged.paging.digests import Key
from jaxpaged.paging.groups import PageGroup, group_layers
from jaxpaged.paging.observe.trace import TraceRecorder, read_trace
from jaxpaged.paging.pool import OutOfPagesError, PagePool
from jaxpaged.paging.prefix_cache import PrefixCache
from jaxpaged.paging.records import (
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
from jaxpaged.paging.store.offload import exchange_pages
from jaxpaged.paging.store.persist import load_prefix_cache, save_prefix_cache
from jaxpaged.paging.store.swap import SwapSpace, SwapStats

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
    "PrefixCache",
    "Restore",
    "SharingStats",
    "SwapSpace",
    "SwapStats",
    "TraceRecorder",
    "exchange_pages",
    "group_layers",
    "load_prefix_cache",
    "read_trace",
    "save_prefix_cache",
]
