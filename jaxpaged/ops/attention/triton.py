"""Paged attention on NVIDIA GPUs: two Pallas kernels, lowered through Triton.

Source: FlashAttention-2 (arXiv 2307.08691) for the running softmax; Stream-K (arXiv 2301.03598) for the partition that
`partition.py` makes.

A program takes its share of the stream of KV tokens for one KV head. All query heads of the group, times the tile's
query tokens, are the rows of one matrix tile, so each K and V byte is read once a call. A tile that the share
holds whole is finished at once; a part of one leaves a float32 partial result, which the second kernel merges.
Both address q, pages and outputs where they lie: XLA has nothing to pad, cast, slice or transpose around them.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Bool, Float, Int32

from jaxpaged.cache.kv_cache import LayerView
from jaxpaged.cache.quantize import MAX_VALUE
from jaxpaged.cache.ragged import Ragged, Share, Tile
from jaxpaged.config import cdiv
from jaxpaged.ops.attention.options import AttentionOptions
from jaxpaged.ops.attention.partition import key_of, make_partition
from jaxpaged.ops.attention.tilings import choose_tiling, compute_dtype
from jaxpaged.ops.triton_util import ceil_div, count, dot, launch, masked_load, masked_store, plgpu, why_no_triton

LOG2E = math.log2(math.e)
# The running maximum starts finite: from -inf, a block whose keys are all masked would compute -inf - -inf = NaN. And
# below every logit: from 0, logits of -200 would all underflow.
LOWEST = -1e38


def _attention_kernel(
    layer_ref,  # [1]
    tiles_ref,  # [num_tiles, len(Tile)]
    shares_ref,  # [num_shares, len(Share)]
    page_table_ref,  # [num_seqs, max_pages]
    q_ref,  # [num_tokens, num_q_heads, head_dim]
    k_ref,  # [num_layers, num_pages, num_kv_heads, page_size, head_dim]
    v_ref,
    k_scale_ref,  # [1 or num_layers, num_kv_heads] or [num_layers, num_pages, num_kv_heads, page_size], or None
    v_scale_ref,
    sinks_ref,  # [num_q_heads] or None, as the next
    slopes_ref,
    window_ref,  # [1] or None: a sliding window that is not static
    tree_ref,  # [num_tokens, num_words] or None: 32 columns of the tree mask a word, the first in the lowest bit
    out_ref,  # [num_tokens, num_q_heads, head_dim]
    lse_ref,  # [num_tokens, num_q_heads]
    part_ref,  # [num_part_rows, num_q_heads, head_dim] float32, or None if no tile is cut, as the next
    part_lse_ref,  # [num_part_rows, num_q_heads], base 2
    *,
    sm_scale: float,
    logits_soft_cap: float | None,
    sliding_window: Any,  # a static int, or None
    causal: bool,
    allow_tf32: bool,
    part_stride: int,
    block_q: int,
    block_m: int,
    block_k: int,
):
    num_kv_heads, page_size, head_dim = k_ref.shape[2:]
    q_per_kv = q_ref.shape[1] // num_kv_heads
    dtype = compute_dtype(q_ref, k_ref)
    row_blocks = cdiv(block_q * q_per_kv, block_m)
    kv_head, program = pl.program_id(0) // row_blocks, pl.program_id(1)
    layer = layer_ref[0]
    share = _read(Share, shares_ref, program)

    first_row = pl.program_id(0) % row_blocks * block_m

    def rows(number):
        # Places of rows take up to 32 registers, and computed once they would be held through the loop over K and V.
        # The sign of a count is a zero that no compiler knows: with it they are computed anew.
        row = first_row + count(block_m) + lax.shift_right_arithmetic(number, jnp.int32(31))
        return row // q_per_kv, kv_head * q_per_kv + row % q_per_kv

    q_index, head = rows(jnp.int32(0))
    dim = count(pl.next_power_of_2(head_dim))[None, :]
    in_dim = dim < head_dim
    sliding_window = sliding_window if window_ref is None else window_ref[0]
    k_scale, v_scale = (_fixed_scale(ref, layer, kv_head) for ref in (k_scale_ref, v_scale_ref))
    largest = MAX_VALUE.get(jnp.dtype(v_ref.dtype).name, 1.0)
    # Logits are in base 2 throughout: exp2 is one instruction, and log2(e) joins a factor that is there anyway.
    sink, slope = (
        None if ref is None else masked_load(ref.at[head], q_index < block_q).astype(jnp.float32) * LOG2E
        for ref in (sinks_ref, slopes_ref)
    )

    def attend_tile(t, _):
        tile = _read(Tile, tiles_ref, t)
        begin = tile.kv_begin + jnp.maximum(share.stream_begin - tile.stream_begin, 0)
        end = jnp.minimum(tile.kv_end, tile.kv_begin + share.stream_end - tile.stream_begin)
        end = jnp.minimum(end, page_table_ref.shape[1] * page_size)  # whatever seq_lens claims

        q_index, head = rows(tile.num_q)
        token, position = tile.token + q_index, tile.position + q_index
        in_tile = q_index < tile.num_q
        q_mask = in_tile[:, None] & in_dim
        q = masked_load(q_ref.at[token[:, None], head[:, None], dim], q_mask).astype(dtype)
        tree = (
            [] if tree_ref is None else [masked_load(tree_ref.at[token, i], in_tile) for i in range(tree_ref.shape[1])]
        )

        def attend_block(i, state):
            acc, running_max, total = state  # [block_m, head_dim], [block_m], [block_m]
            key = begin + i * block_k + count(block_k)
            live = key < end
            # Each key looks up its own page, so that a block may begin and end anywhere in a page of any size, and
            # nothing is read but live slots: the rest of a last page may hold NaN. A page's keys load the same id, from
            # a cache. Whole pages as vectors would save 17 to 25 registers, and read that rest.
            page = masked_load(page_table_ref.at[tile.seq, key // page_size], live)
            slot = layer, page, kv_head, key % page_size
            k = _load_rows(k_ref, slot, live).astype(dtype)

            logits = dot(q, k.T, allow_tf32) * (sm_scale * LOG2E * k_scale)
            if _is_per_token(k_scale_ref):
                logits *= masked_load(k_scale_ref.at[slot], live)[None, :]
            if logits_soft_cap is not None:
                logits = _cap(logits, logits_soft_cap)
            if slope is not None:
                logits += slope[:, None] * (key[None, :] - position[:, None]).astype(jnp.float32)
            seen = live[None, :]
            if block_q > 1:  # the keys of a tile of one query are those that it sees
                seen = _see(seen, key[None, :], position[:, None], causal, sliding_window)
            if tree_ref is not None:
                seen &= _in_tree(tree, (key - tile.num_old)[None, :])
            logits = jnp.where(seen, logits, -jnp.inf)

            p, decay, running_max = _softmax_step(running_max, logits)
            # Masked V must be loaded as zero, not only weighed by zero: 0 * NaN from a stale slot is NaN.
            v = _load_rows(v_ref, slot, live).astype(dtype)
            weight = p
            if _is_per_token(v_scale_ref):
                # Tiny for a dtype with large values, and float16 would keep few bits of it: kept near 1 by `largest`.
                weight *= masked_load(v_scale_ref.at[slot], live)[None, :] * largest
            acc = acc * decay[:, None] + dot(weight.astype(dtype), v, allow_tf32)
            return acc, running_max, total * decay + jnp.sum(p, axis=1)

        state = (
            jnp.zeros((block_m, dim.shape[1]), jnp.float32),
            jnp.full((block_m,), LOWEST, jnp.float32),
            jnp.zeros((block_m,), jnp.float32),
        )
        num_blocks = ceil_div(jnp.maximum(end - begin, 0), block_k)
        acc, running_max, total = lax.fori_loop(jnp.int32(0), num_blocks, attend_block, state)

        def store(out, lse, begin, sink, log_base):
            q_index, head = rows(num_blocks)
            row, in_tile = begin + q_index, q_index < tile.num_q
            scale, value = _normalise(running_max, total, sink)
            scale *= 1 / largest if _is_per_token(v_scale_ref) else v_scale
            # In this order: the other way round, tiles of 64 rows spill a few registers on an L4.
            masked_store(lse.at[row, head], value * log_base, in_tile)
            masked_store(out.at[row[:, None], head[:, None], dim], acc * scale[:, None], in_tile[:, None] & in_dim)

        if part_ref is None:
            store(out_ref, lse_ref, tile.token, sink, 1 / LOG2E)
            return

        def store_part():
            # Read here: before the loop over K and V, what only a part needs would be held through it.
            cut = _read(Tile, tiles_ref, t)
            store(part_ref, part_lse_ref, cut.first_part + (program - cut.first_share) * part_stride, None, 1.0)

        # Asked in this way: by `num_parts == 1`, or by where share and tile end, prefill's loop would be longer.
        is_cut = tile.num_parts > 1
        pl.when(is_cut)(store_part)
        pl.when(~is_cut)(lambda: store(out_ref, lse_ref, tile.token, sink, 1 / LOG2E))

    if part_ref is None:
        attend_tile(program, None)
    else:
        lax.fori_loop(share.tile_begin, share.tile_end, attend_tile, None)


def _combine_kernel(
    tiles_ref,  # [num_tiles, len(Tile)]
    cut_tiles_ref,  # [num_cuts]
    part_ref,  # [num_part_rows, num_q_heads, head_dim]
    part_lse_ref,  # [num_part_rows, num_q_heads], base 2
    sinks_ref,  # [num_q_heads] or None
    _out_ref,
    _lse_ref,
    out_ref,  # [num_tokens, num_q_heads, head_dim], whole tiles written by the first kernel, as the next
    lse_ref,  # [num_tokens, num_q_heads]
    *,
    part_stride: int,
    block_q: int,
    block_p: int,
):
    head_dim = out_ref.shape[2]
    head, q_index = pl.program_id(0), pl.program_id(1) % block_q
    t = cut_tiles_ref[pl.program_id(1) // block_q]
    tile = _read(Tile, tiles_ref, jnp.maximum(t, 0))
    dim = count(pl.next_power_of_2(head_dim))

    def merge_block(i, state):
        acc, running_max, total = state  # [head_dim], scalar, scalar
        part = i * block_p + count(block_p)
        live = part < tile.num_parts
        row = tile.first_part + part * part_stride + q_index
        lse = plgpu.load(part_lse_ref.at[row, head], mask=live, other=-jnp.inf)
        out = masked_load(part_ref.at[row[:, None], head, dim[None, :]], live[:, None] & (dim < head_dim)[None, :])
        # A part is one key whose logit is its log-sum-exp and whose value is its output.
        p, decay, running_max = _softmax_step(running_max, lse)
        return acc * decay + jnp.sum(p[:, None] * out, axis=0), running_max, total * decay + jnp.sum(p)

    @pl.when((t >= 0) & (tile.num_parts > 1) & (q_index < tile.num_q))
    def _():
        state = jnp.zeros((dim.shape[0],), jnp.float32), jnp.float32(LOWEST), jnp.float32(0)
        num_blocks = ceil_div(tile.num_parts, block_p)
        acc, running_max, total = lax.fori_loop(jnp.int32(0), num_blocks, merge_block, state)
        sink = None if sinks_ref is None else sinks_ref[head].astype(jnp.float32) * LOG2E
        scale, lse = _normalise(running_max, total, sink)
        masked_store(out_ref.at[tile.token + q_index, head, dim], acc * scale, dim < head_dim)
        lse_ref[tile.token + q_index, head] = lse / LOG2E


def _cap(logits, logits_soft_cap):
    """`logits_soft_cap * tanh(logits / logits_soft_cap)`, of logits in base e to logits in base 2."""
    # tanh(x) = 1 - 2 / (1 + e^2x)
    return logits_soft_cap * LOG2E * (1 - 2 / (1 + jnp.exp2(logits * (2 / logits_soft_cap))))


def _see(seen, key, position, causal, sliding_window):
    """Return which keys, of those seen, the query of each row sees by its position."""
    if causal:
        seen &= key <= position
    if sliding_window is not None:
        seen &= key > position - sliding_window
    return seen


def _in_tree(words, draft):
    """Return which of its sequence's new tokens, counted by `draft`, the query of each row sees.

    All of the old ones.
    """
    seen = draft < 0
    for i, word in enumerate(words):
        bit = draft - 32 * i
        inside = (bit >= 0) & (bit < 32)
        word, shift = jnp.broadcast_arrays(word[:, None], jnp.where(inside, bit, 0))
        seen |= inside & ((lax.shift_right_logical(word, shift) & 1) != 0)
    return seen


def _softmax_step(running_max, logits):
    """Take more logits of each row, along the last axis, into a running softmax in base 2.

    Returns their weights, the factor by which what was summed before decays, and the maximum with them.
    """
    next_max = jnp.maximum(running_max, jnp.max(logits, axis=-1))
    return jnp.exp2(logits - next_max[..., None]), jnp.exp2(running_max - next_max), next_max


def _normalise(running_max, total, sink):
    """From a running maximum and sum, the factor that finishes the output, and the log-sum-exp in base 2.

    A sink is one more logit without a value: it joins once, when a softmax is complete. Without keys: 0 and -inf.
    """
    empty = total == 0
    scale = 1.0
    if sink is not None:
        next_max = jnp.maximum(running_max, sink)
        scale = jnp.exp2(running_max - next_max)
        running_max, total = next_max, total * scale + jnp.exp2(sink - next_max)
    total = jnp.where(empty, 1.0, total)
    return jnp.where(empty, 0.0, scale / total), jnp.where(empty, -jnp.inf, running_max + jnp.log(total) * LOG2E)


def _read(record, ref, row):
    """Return one row of the partition as the named tuple that it was stacked from."""
    return record(*(ref[row, i] for i in range(len(record._fields))))


def _is_per_token(scale_ref) -> bool:
    return scale_ref is not None and len(scale_ref.shape) == 4


def _fixed_scale(ref, layer, kv_head):
    """Return the scale of a head for all tokens; 1 where there is none, or one for each token."""
    if ref is None or _is_per_token(ref):
        return 1.0
    return ref[0 if ref.shape[0] == 1 else layer, kv_head]


def _load_rows(ref, slot, live):
    """[block_k, head_dim] of `block_k` slots, 0 where they are not live or past head_dim.

    One-byte values take three index axes: with two, Triton loads 8 bytes at a time instead of 16.
    """
    head_dim = ref.shape[-1]
    width = pl.next_power_of_2(head_dim)
    layer, page, kv_head, offset = slot
    if ref.dtype.itemsize > 1:
        dim = count(width)[None, :]
        return masked_load(
            ref.at[layer, page[:, None], kv_head, offset[:, None], dim], live[:, None] & (dim < head_dim)
        )
    run = min(16, width)
    dim = (count(width // run)[:, None] * run + count(run)[None, :])[None]
    index = layer, page[:, None, None], kv_head, offset[:, None, None], dim
    return masked_load(ref.at[index], live[:, None, None] & (dim < head_dim)).reshape(-1, width)


def paged_attention_triton(
    q: Float[Array, "num_tokens num_q_heads head_dim"],
    view: LayerView,
    ragged: Ragged,
    options: AttentionOptions,
    *,
    interpret: bool = False,
) -> tuple[Float[Array, "num_tokens num_q_heads head_dim"], Float[Array, "num_tokens num_q_heads"]]:
    """Attend from packed queries to paged keys and values, in one launch or two.

    The arguments are those of `jaxpaged.ops.attention.attend`, which validates them. Where `ragged` has no partition
    for such a call, one is made here.

    Args:
        interpret: Runs under Pallas's interpreter, on any device.

    Returns:
        Output in `q.dtype`, and natural log-sum-exp in float32; 0 and -inf for queries that see no key.
    """
    cache = view.cache
    num_tokens, num_q_heads, head_dim = q.shape
    partition = ragged.partition_for(key_of(ragged, options, num_tokens))
    if partition is None:
        partition = make_partition(
            ragged,
            options,
            num_tokens=num_tokens,
            num_q_heads=num_q_heads,
            num_kv_heads=cache.num_kv_heads,
            page_size=cache.page_size,
        )
    config = options.config or partition.config
    tiling = choose_tiling(q, view, ragged, options, partition)
    window = options.traced_window
    row_blocks = cdiv(partition.block_q * num_q_heads // cache.num_kv_heads, tiling.rows)
    out, lse = jax.ShapeDtypeStruct(q.shape, q.dtype), jax.ShapeDtypeStruct(q.shape[:2], jnp.float32)
    part = part_lse = None
    if partition.num_part_rows:
        part_shape = partition.num_part_rows, num_q_heads, head_dim
        part, part_lse = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in (part_shape, part_shape[:2]))
    results = launch(
        functools.partial(
            _attention_kernel,
            sm_scale=options.scale(head_dim),
            logits_soft_cap=options.logits_soft_cap,
            sliding_window=options.static_window,
            causal=options.causal,
            allow_tf32=config.allow_tf32,
            part_stride=partition.part_stride,
            block_q=partition.block_q,
            block_m=tiling.rows,
            block_k=tiling.block_k,
        ),
        "paged_attention",
        {
            "layer": jnp.asarray(view.row, jnp.int32).reshape(1),
            "tiles": partition.tiles,
            "shares": partition.shares,
            "page_table": ragged.page_table,
            "q": q,
            "k": cache.k_pages,
            "v": cache.v_pages,
            "k_scale": cache.k_scale,
            "v_scale": cache.v_scale,
            "sinks": options.sinks,
            "slopes": options.alibi_slopes,
            "window": None if window is None else window.reshape(1),
            "tree": None if ragged.tree_mask is None else _pack_bits(ragged.tree_mask),
        },
        {"out": out, "lse": lse, "part": part, "part_lse": part_lse},
        # KV heads vary fastest: programs that run together then read one page, whose heads lie side by side.
        grid=(cache.num_kv_heads * row_blocks, partition.shares.shape[0]),
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
        interpret=interpret,
    )
    if part is None:
        return results["out"], results["lse"]
    merged = launch(
        functools.partial(
            _combine_kernel,
            part_stride=partition.part_stride,
            block_q=partition.block_q,
            # 2048 values of parts are 16 a thread, four loads of 16 bytes: most tiles have no more parts than that.
            block_p=2**11 // pl.next_power_of_2(head_dim),
        ),
        "paged_attention_combine",
        {
            "tiles": partition.tiles,
            "cut_tiles": partition.cut_tiles,
            "part": results["part"],
            "part_lse": results["part_lse"],
            "sinks": options.sinks,
            "out": results["out"],
            "lse": results["lse"],
        },
        {"out": out, "lse": lse},
        in_place={"out": "out", "lse": "lse"},
        grid=(num_q_heads, partition.cut_tiles.shape[0] * partition.block_q),
        # The loop mostly turns once: a deeper pipeline has nothing to load ahead.
        num_warps=4,
        num_stages=2,
        interpret=interpret,
    )
    return merged["out"], merged["lse"]


def _pack_bits(mask: Bool[Array, "rows columns"]) -> Int32[Array, "rows words"]:
    """32 columns a word: a row of words stays in registers, where a mask would be loaded for every block of keys."""
    columns = jnp.pad(mask, ((0, 0), (0, -mask.shape[1] % 32))).reshape(mask.shape[0], -1, 32)
    bits = columns.astype(jnp.uint32) << jnp.arange(32, dtype=jnp.uint32)[None, None, :]
    return lax.bitcast_convert_type(jnp.sum(bits, axis=2, dtype=jnp.uint32), jnp.int32)


def why_unsupported(q: Array, view: LayerView, _ragged: Ragged, _options: AttentionOptions) -> str | None:
    """Return the reason why these kernels cannot take such arrays, or None. Looks at shapes and dtypes, never at a
    device.
    """
    if reason := why_no_triton():
        return reason
    k_pages, v_pages = view.cache.k_pages, view.cache.v_pages
    if q.shape[-1] > 256:
        return f"head_dim is at most 256; got {q.shape[-1]}"
    if v_pages.shape[-1] != q.shape[-1]:
        return f"V must have K's head_dim {q.shape[-1]}; got {v_pages.shape[-1]}"
    for name, x in (("q", q), ("k_pages", k_pages), ("v_pages", v_pages)):
        known = ("float32", "bfloat16", "float16", *(MAX_VALUE if name != "q" else ()))
        if x.dtype.name not in known:
            return f"{name} must be {', '.join(known[:-1])} or {known[-1]}; got {x.dtype}"
    return None
