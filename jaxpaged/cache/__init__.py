"""What lies on the device: the pool of pages, and the arrays of a step. It knows no model, no kernel and no policy."""

from jaxpaged.cache.batch import Batch, check_batch_values
from jaxpaged.cache.kv_cache import KVCache, LayerView, PageBlock
from jaxpaged.cache.ragged import Partition, Ragged

__all__ = ["Batch", "KVCache", "LayerView", "PageBlock", "Partition", "Ragged", "check_batch_values"]
