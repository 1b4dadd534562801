"""Paged KV cache and paged attention for JAX and Flax. Importing this imports neither flax nor any model."""

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
