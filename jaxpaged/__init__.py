"""Paged KV cache and paged attention for JAX and Flax.

Each name loads its module when it is first used, so that importing this imports neither JAX nor Flax nor any model.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jaxpaged.batch import Batch, check_batch_values
    from jaxpaged.config import NULL_PAGE, AttentionConfig, CacheConfig
    from jaxpaged.engine import Engine, RequestOutput, SamplingParams, SchedulerConfig
    from jaxpaged.kv_cache import KVCache, PageBlock
    from jaxpaged.ops.attention import paged_attention
    from jaxpaged.ops.cascade import cascade_attention
    from jaxpaged.ops.merge import merge_attention
    from jaxpaged.ops.plan import AttentionPlan, make_plan, plan_batch
    from jaxpaged.ops.rope import rope_and_write
    from jaxpaged.paging import OutOfPagesError, PageAllocator, PageCopy

__version__ = "0.1.0"

__all__ = [
    "NULL_PAGE",
    "AttentionConfig",
    "AttentionPlan",
    "Batch",
    "CacheConfig",
    "Engine",
    "KVCache",
    "OutOfPagesError",
    "PageAllocator",
    "PageBlock",
    "PageCopy",
    "RequestOutput",
    "SamplingParams",
    "SchedulerConfig",
    "cascade_attention",
    "check_batch_values",
    "make_plan",
    "merge_attention",
    "paged_attention",
    "plan_batch",
    "rope_and_write",
]

_NAMES_OF = {
    "batch": ("Batch", "check_batch_values"),
    "config": ("NULL_PAGE", "AttentionConfig", "CacheConfig"),
    "engine": ("Engine", "RequestOutput", "SamplingParams", "SchedulerConfig"),
    "kv_cache": ("KVCache", "PageBlock"),
    "ops.attention": ("paged_attention",),
    "ops.cascade": ("cascade_attention",),
    "ops.merge": ("merge_attention",),
    "ops.plan": ("AttentionPlan", "make_plan", "plan_batch"),
    "ops.rope": ("rope_and_write",),
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
