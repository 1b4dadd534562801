"""Paged KV cache and paged attention for JAX and Flax.

Each name loads its module when it is first used, so that importing this imports neither JAX nor Flax nor any model.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jaxpaged.cache.batch import Batch, check_batch_values
    from jaxpaged.cache.kv_cache import KVCache, LayerView, PageBlock
    from jaxpaged.cache.ragged import Ragged
    from jaxpaged.config import NULL_PAGE, AttentionConfig, CacheConfig, LayerSpec
    from jaxpaged.engine import Engine, RequestOutput, SamplingParams, SchedulerConfig
    from jaxpaged.ops.attention import AttentionOptions, attend, paged_attention
    from jaxpaged.ops.attention.cascade import cascade_attention
    from jaxpaged.ops.attention.merge import merge_attention
    from jaxpaged.ops.attention.partition import partition_batch
    from jaxpaged.ops.rope_write import rope_and_write
    from jaxpaged.paging import OutOfPagesError, PageAllocator, PageCopy

__version__ = "0.1.0"

__all__ = [
    "NULL_PAGE",
    "AttentionConfig",
    "AttentionOptions",
    "Batch",
    "CacheConfig",
    "Engine",
    "KVCache",
    "LayerSpec",
    "LayerView",
    "OutOfPagesError",
    "PageAllocator",
    "PageBlock",
    "PageCopy",
    "Ragged",
    "RequestOutput",
    "SamplingParams",
    "SchedulerConfig",
    "attend",
    "cascade_attention",
    "check_batch_values",
    "merge_attention",
    "paged_attention",
    "partition_batch",
    "rope_and_write",
]

_NAMES_OF = {
    "cache": ("Batch", "KVCache", "LayerView", "PageBlock", "Ragged", "check_batch_values"),
    "config": ("NULL_PAGE", "AttentionConfig", "CacheConfig", "LayerSpec"),
    "engine": ("Engine", "RequestOutput", "SamplingParams", "SchedulerConfig"),
    "ops.attention": ("AttentionOptions", "attend", "paged_attention"),
    "ops.attention.cascade": ("cascade_attention",),
    "ops.attention.merge": ("merge_attention",),
    "ops.attention.partition": ("partition_batch",),
    "ops.rope_write": ("rope_and_write",),
    "paging": ("OutOfPagesError", "PageAllocator", "PageCopy"),
}
_MODULE_OF = {name: f"jaxpaged.{module}" for module, names in _NAMES_OF.items() for name in names}


def __getattr__(name: str) -> object:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'jaxpaged' has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(_MODULE_OF[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
