"""Which tiles the Triton kernel takes: a table, with what the compiler makes of each row.

A row is taken for a KV head's query rows, a width (head_dim up to the next power of two), an item size and a pressure
on registers. None of them asks for more shared memory than an L4 has. Beside each stand the registers a thread on an
A100, L4, H200 and B200, as `benchmarks.gpu_code --tilings` prints them (JAX 0.12.0.1); spilled bytes behind a +.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array

from jaxpaged.cache.kv_cache import LayerView
from jaxpaged.cache.quantize import is_quantized
from jaxpaged.cache.ragged import Partition, Ragged
from jaxpaged.ops.attention.options import AttentionOptions
from jaxpaged.ops.attention.partition import MAX_ROWS


class Tiling(NamedTuple):
    """A row of the table: what it is for, and the tile sizes that it gives.

    Attributes:
        rows: Query rows a program: `block_m`. More rows of a KV head are blocks of this size, which read K and V once
            each, from the L2 cache.
        width: head_dim up to the next power of two, at most this.
        itemsize: Bytes a value that is multiplied: 4 for float32 products, else that of the pages, 1 or 2.
        is_masked: Whether head_dim is less than the width, so that each load has a mask more. None: either.
        high_register_pressure: Whether the variant holds more in registers than the plain one. None: either.
        block_k: KV tokens a tile.
        num_warps: Warps a program. The accumulator sets them: it spills beyond 64 registers a thread. float32 products
            use no matrix unit, and keep their operands in registers too.
        num_stages: Software pipeline depth. Loading page ids is a level of it: 3 stages keep one K/V tile in flight, 5
            two, 7 three. Decoding needs two, where registers are left for them; prefill does with one, unless its tiles
            are so small that one, or two of 4 KiB, would not keep memory busy.
    """

    rows: int
    width: int
    itemsize: int
    is_masked: bool | None
    high_register_pressure: bool | None
    block_k: int
    num_warps: int
    num_stages: int


EITHER = None
# fmt: off
TILINGS = (
    # rows, width, itemsize, is_masked, high_register_pressure, block_k, num_warps, num_stages; A100 L4 H200 B200
    Tiling(16, 128, 2, False, False,  64, 4, 5),                # 128 128 128 128
    Tiling(16, 128, 2, True,  False,  32, 4, 5),                # 119 123  96  96
    Tiling(16, 256, 2, EITHER,     False,  32, 4, 5),           # 128 128 128 128
    Tiling(16, 128, 2, False, True,   64, 4, 3),                # 128 168 128 128
    Tiling(16, 256, 2, EITHER,     True,   32, 4, 3),           # 168 168 168 168
    Tiling(32,  64, 2, False, EITHER,      64, 4, 5),           # 128 131 125 126
    Tiling(32, 128, 2, False, EITHER,      64, 4, 3),           # 168 168 168 168
    Tiling(32, 128, 2, True,  EITHER,      32, 4, 5),           # 144 145 142 146
    Tiling(32, 256, 2, EITHER,     EITHER,      32, 4, 3),      # 168 168 168 168
    Tiling(64,  64, 2, False, False,  64, 4, 5),                # 182 188 127 128
    Tiling(64,  64, 2, False, True,   64, 4, 3),                # 201 203 153 128
    Tiling(64, 128, 2, False, False,  64, 4, 3),                # 255 255 206 201
    Tiling(64, 128, 2, EITHER,     EITHER,      32, 4, 5),      # 214 204 160 168
    Tiling(64, 256, 2, EITHER,     EITHER,      32, 8, 3),      # 174 169 166 217
    Tiling(16, 128, 1, False, EITHER,      64, 4, 3),           # 167 128 168 164
    Tiling(16, 256, 1, EITHER,     EITHER,      32, 4, 3),      # 165 167 168 168
    Tiling(32, 128, 1, False, EITHER,      64, 4, 5),           # 242 244 254 254
    Tiling(32, 256, 1, EITHER,     EITHER,      32, 4, 5),      # 234 177 194 194
    Tiling(64,  64, 1, EITHER,     EITHER,      32, 4, 7),      # 168 166 125 121
    Tiling(64, 128, 1, EITHER,     EITHER,      32, 4, 5),      # 213 196 167 168
    Tiling(64, 256, 1, EITHER,     EITHER,      32, 8, 5),      # 212 193 218 186
    Tiling(16,  64, 4, False, False,  64, 4, 5),                #  80  72  72  64
    Tiling(16, 128, 4, EITHER,     False,  32, 4, 5),           #  72  72  71  71
    Tiling(16, 256, 4, EITHER,     False,  16, 4, 5),           # 128  96  92  88
    Tiling(16,  64, 4, False, True,   64, 4, 3),                #  80  80  80  80
    Tiling(16, 128, 4, EITHER,     True,   32, 4, 3),           #  96  80  80  80
    Tiling(16, 256, 4, EITHER,     True,   16, 4, 3),           # 128 128 106 110
    Tiling(32,  64, 4, False, EITHER,      64, 8, 3),           #  80  80  80  73
    Tiling(32,  64, 4, True,  EITHER,      32, 8, 5),           #  70  62  62  66
    Tiling(32, 128, 4, EITHER,     EITHER,      32, 8, 3),      #  80  80  72  72
    Tiling(32, 256, 4, EITHER,     EITHER,      16, 8, 3),      # 106 109 105 113
)
# fmt: on


def compute_dtype(q, k_pages):
    """Return what products take in: quantised values become the type of the queries."""
    return q.dtype if is_quantized(k_pages.dtype) else jnp.promote_types(q.dtype, k_pages.dtype)


def find_tiling(rows: int, head_dim: int, itemsize: int, high_register_pressure: bool) -> Tiling:
    """Return the first row of the table that fits, for `rows` query rows a KV head."""
    width = pl.next_power_of_2(head_dim)
    block_m = min(max(16, pl.next_power_of_2(rows)), 32 if itemsize == 4 else MAX_ROWS)
    return next(
        tiling
        for tiling in TILINGS
        if (tiling.rows, tiling.itemsize) == (block_m, itemsize)
        and width <= tiling.width
        and tiling.is_masked in (None, head_dim < width)
        and tiling.high_register_pressure in (None, high_register_pressure)
    )


def choose_tiling(q: Array, view: LayerView, ragged: Ragged, options: AttentionOptions, partition: Partition) -> Tiling:
    """Return the tile sizes of a call, where its configuration leaves them open."""
    cache, config = view.cache, options.config or partition.config
    group = q.shape[1] // cache.num_kv_heads
    rows = partition.block_q * group
    itemsize = 4 if compute_dtype(q, cache.k_pages) == jnp.float32 else cache.dtype.itemsize
    # With the tiles of the plain variant, each of these would spill 8 bytes or more on one of the four.
    pressure = is_quantized(cache.dtype) or ragged.tree_mask is not None
    if partition.block_q > 1:  # the products of float32 rows; two masks a logit; a page id a key
        pressure |= itemsize == 4
        pressure |= options.alibi_slopes is not None and options.logits_soft_cap is not None
        pressure |= cache.page_size < 16
    if rows > 32 and q.shape[2] <= 64:
        pressure |= group > 4
    elif rows > 32:  # no loop over tiles, around which values could be computed anew
        pressure |= config.max_splits == 1
    found = find_tiling(rows, q.shape[2], itemsize, pressure)
    return found._replace(
        block_k=config.block_k or found.block_k,
        num_warps=config.num_warps or found.num_warps,
        num_stages=config.num_stages or found.num_stages,
    )
