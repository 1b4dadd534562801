"""Paged attention, and the write before it, on NVIDIA GPUs: three Pallas kernels, lowered through Triton.

Source: FlashAttention-2 (arXiv 2307.08691) for the running softmax; Stream-K (arXiv 2301.03598) for the partition that
`ops/plan.py` makes.

A program takes its share of the plan's stream of KV tokens for one KV head. All query heads of the group, times the
tile's query tokens, are the rows of one matrix tile, so each K and V byte is read once a call. A tile that the share
holds whole is finished at once; a piece of one leaves a float32 partial result, which the second kernel merges.
Both address q, pages and outputs where they lie: XLA has nothing to pad, cast, slice or transpose around them.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Bool, Float, Int32

from jaxpaged.config import AttentionConfig, cdiv
from jaxpaged.kv_cache import KVCache
from jaxpaged.ops.plan import AttentionPlan, PlanKey, Share, Tile, check_plan, make_plan
from jaxpaged.quantize import MAX_VALUE, is_quantized, measure_scale, quantize

try:
    from jax.experimental.pallas import triton
except ImportError:  # deprecated upstream since JAX 0.11: a later JAX may lack it
    triton = None
plgpu: Any = triton

LOG2E = math.log2(math.e)
# The running maximum starts finite: from -inf, a block whose keys are all masked would compute -inf - -inf = NaN. And
# below every logit: from 0, logits of -200 would all underflow.
LOWEST = -1e38


def _attention_kernel(
    layer_ref,  # [1]
    tiles_ref,  # [num_tiles, 8]
    shares_ref,  # [num_programs, 4]
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
    part_ref,  # [num_parts, num_q_heads, head_dim] float32, or None if no tile is split, as the next
    part_lse_ref,  # [num_parts, num_q_heads], base 2
    *,
    sm_scale: float,
    logits_soft_cap: float | None,
    sliding_window: Any,  # a static int, or None
    causal: bool,
    max_pieces: int | None,
    allow_tf32: bool,
    block_q: int,
    block_m: int,
    block_k: int,
):
    num_kv_heads, page_size, head_dim = k_ref.shape[2:]
    q_per_kv = q_ref.shape[1] // num_kv_heads
    dtype = _compute_dtype(q_ref, k_ref)
    row_blocks = cdiv(block_q * q_per_kv, block_m)
    kv_head, program = pl.program_id(0) // row_blocks, pl.program_id(1)
    layer = layer_ref[0]
    share = _read(Share, shares_ref, program)

    first_row = pl.program_id(0) % row_blocks * block_m

    def rows(count):
        # Places of rows take up to 32 registers, and computed once they would be held through the loop over K and V.
        # The sign of a count is a zero that no compiler knows: with it they are computed anew.
        row = first_row + jnp.arange(block_m) + lax.shift_right_arithmetic(count, 31)
        return row // q_per_kv, kv_head * q_per_kv + row % q_per_kv

    q_index, head = rows(jnp.int32(0))
    dim = jnp.arange(pl.next_power_of_2(head_dim))[None, :]
    in_dim = dim < head_dim
    sliding_window = sliding_window if window_ref is None else window_ref[0]
    k_scale, v_scale = (_fixed_scale(ref, layer, kv_head) for ref in (k_scale_ref, v_scale_ref))
    largest = MAX_VALUE.get(jnp.dtype(v_ref.dtype).name, 1.0)
    # Logits are in base 2 throughout: exp2 is one instruction, and log2(e) joins a factor that is there anyway.
    sink, slope = (
        None if ref is None else masked_load(ref.at[head], q_index < block_q).astype(jnp.float32) * LOG2E
        for ref in (sinks_ref, slopes_ref)
    )

    def attend(t, _):
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
            acc, peak, total = state  # [block_m, head_dim], [block_m], [block_m]
            key = begin + i * block_k + jnp.arange(block_k)
            live = key < end
            page = masked_load(page_table_ref.at[tile.seq, key // page_size], live)
            slot = layer, page, kv_head, key % page_size
            k = _load_rows(k_ref, slot, live).astype(dtype)

            logits = _dot(q, k.T, allow_tf32) * (sm_scale * LOG2E * k_scale)
            if _is_per_token(k_scale_ref):
                logits *= masked_load(k_scale_ref.at[slot], live)[None, :]
            if logits_soft_cap is not None:  # tanh(x) = 1 - 2 / (1 + e^2x)
                logits = logits_soft_cap * LOG2E * (1 - 2 / (1 + jnp.exp2(logits * (2 / logits_soft_cap))))
            if slope is not None:
                logits += slope[:, None] * (key[None, :] - position[:, None]).astype(jnp.float32)
            seen = live[None, :]
            if block_q > 1:  # the keys of a tile of one query are those that it sees
                if causal:
                    seen &= key[None, :] <= position[:, None]
                if sliding_window is not None:
                    seen &= key[None, :] > position[:, None] - sliding_window
            if tree_ref is not None:
                seen &= _in_tree(tree, (key - tile.num_old)[None, :])
            logits = jnp.where(seen, logits, -jnp.inf)

            next_peak = jnp.maximum(peak, jnp.max(logits, axis=1))
            p = jnp.exp2(logits - next_peak[:, None])
            alpha = jnp.exp2(peak - next_peak)
            # Masked V must be loaded as zero, not only weighed by zero: 0 * NaN from a stale slot is NaN.
            v = _load_rows(v_ref, slot, live).astype(dtype)
            weight = p
            if _is_per_token(v_scale_ref):
                # Tiny for a dtype with large values, and float16 would keep few bits of it: kept near 1 by `largest`.
                weight *= masked_load(v_scale_ref.at[slot], live)[None, :] * largest
            acc = acc * alpha[:, None] + _dot(weight.astype(dtype), v, allow_tf32)
            return acc, next_peak, total * alpha + jnp.sum(p, axis=1)

        state = (
            jnp.zeros((block_m, dim.shape[1]), jnp.float32),
            jnp.full((block_m,), LOWEST, jnp.float32),
            jnp.zeros((block_m,), jnp.float32),
        )
        num_blocks = pl.cdiv(jnp.maximum(end - begin, 0), block_k)
        acc, peak, total = lax.fori_loop(0, num_blocks, attend_block, state)

        def store(out, lse, begin, sink, log_base):
            q_index, head = rows(num_blocks)
            row, in_tile = begin + q_index, q_index < tile.num_q
            scale, value = _normalise(peak, total, sink)
            scale *= 1 / largest if _is_per_token(v_scale_ref) else v_scale
            # In this order: the other way round, tiles of 64 rows spill a few registers on an L4.
            masked_store(lse.at[row, head], value * log_base, in_tile)
            masked_store(out.at[row[:, None], head[:, None], dim], acc * scale[:, None], in_tile[:, None] & in_dim)

        if part_ref is None:
            store(out_ref, lse_ref, tile.token, sink, 1 / LOG2E)
            return
        starts_here = share.stream_begin <= tile.stream_begin
        whole = starts_here & (tile.stream_end <= share.stream_end)
        if max_pieces is None:
            # A share's first piece may lack its beginning, and only its last piece its end: two slots are enough.
            part_begin = (2 * program + starts_here.astype(jnp.int32)) * block_q
        else:
            part_begin = program % max_pieces * q_ref.shape[0] + tile.token
        pl.when(whole)(lambda: store(out_ref, lse_ref, tile.token, sink, 1 / LOG2E))
        pl.when(~whole)(lambda: store(part_ref, part_lse_ref, part_begin, None, 1.0))

    if part_ref is None:
        attend(program, None)
    else:
        lax.fori_loop(share.tile_begin, share.tile_end, attend, None)


def _combine_kernel(
    tiles_ref,  # [num_tiles, 8]
    shares_ref,  # [num_programs, 4]
    part_ref,  # [num_parts, num_q_heads, head_dim]
    part_lse_ref,  # [num_parts, num_q_heads], base 2
    sinks_ref,  # [num_q_heads] or None
    _out_ref,
    _lse_ref,
    out_ref,  # [num_tokens, num_q_heads, head_dim], whole tiles written by the first kernel, as the next
    lse_ref,  # [num_tokens, num_q_heads]
    *,
    max_pieces: int | None,
    split_size: Any,  # an int where there are pieces
    block_q: int,
    block_p: int,
):
    num_tokens, _, head_dim = out_ref.shape
    head, index, q_index = pl.program_id(0), pl.program_id(1) // block_q, pl.program_id(1) % block_q
    if max_pieces is None:
        # A tile that was cut is the last piece of the share in which it begins: a program a share finds them all.
        share = _read(Share, shares_ref, index)
        tile = _read(Tile, tiles_ref, jnp.maximum(share.tile_end - 1, 0))
        begins_here = (share.stream_begin <= tile.stream_begin) & (share.tile_begin < share.tile_end)
        was_cut = begins_here & (tile.stream_end > share.stream_end)
        # The first share begins at 0, and only the last may be shorter.
        first, last = index, (tile.stream_end - 1) // shares_ref[0, 1]
    else:
        tile = _read(Tile, tiles_ref, index)
        first = tile.kv_begin // split_size
        last = jnp.minimum((tile.kv_end - 1) // split_size, max_pieces - 1)
        was_cut = last > first
    dim = jnp.arange(pl.next_power_of_2(head_dim))

    def merge_block(i, state):
        acc, peak, total = state  # [head_dim], scalar, scalar
        piece = first + i * block_p + jnp.arange(block_p)
        live = piece <= last
        if max_pieces is None:
            row = (2 * piece + (piece == first)) * block_q + q_index
        else:
            row = piece * num_tokens + tile.token + q_index
        lse = plgpu.load(part_lse_ref.at[row, head], mask=live, other=-jnp.inf)
        part = masked_load(part_ref.at[row[:, None], head, dim[None, :]], live[:, None] & (dim < head_dim)[None, :])
        next_peak = jnp.maximum(peak, jnp.max(lse))
        p = jnp.exp2(lse - next_peak)
        alpha = jnp.exp2(peak - next_peak)
        return acc * alpha + jnp.sum(p[:, None] * part, axis=0), next_peak, total * alpha + jnp.sum(p)

    @pl.when(was_cut & (q_index < tile.num_q))
    def _():
        state = jnp.zeros((dim.shape[0],), jnp.float32), jnp.float32(LOWEST), jnp.float32(0)
        acc, peak, total = lax.fori_loop(0, pl.cdiv(last - first + 1, block_p), merge_block, state)
        sink = None if sinks_ref is None else sinks_ref[head].astype(jnp.float32) * LOG2E
        scale, lse = _normalise(peak, total, sink)
        masked_store(out_ref.at[tile.token + q_index, head, dim], acc * scale, dim < head_dim)
        lse_ref[tile.token + q_index, head] = lse / LOG2E


def _in_tree(words, draft):
    """Which of its sequence's new tokens, counted by `draft`, the query of each row sees; all of the old ones."""
    seen = draft < 0
    for i, word in enumerate(words):
        bit = draft - 32 * i
        inside = (bit >= 0) & (bit < 32)
        word, shift = jnp.broadcast_arrays(word[:, None], jnp.where(inside, bit, 0))
        seen |= inside & ((lax.shift_right_logical(word, shift) & 1) != 0)
    return seen


def _normalise(peak, total, sink):
    """From a running maximum and sum, the factor that finishes the output, and the log-sum-exp in base 2.

    A sink is one more logit without a value: it joins once, when a softmax is complete. Without keys: 0 and -inf.
    """
    empty = total == 0
    scale = 1.0
    if sink is not None:
        next_peak = jnp.maximum(peak, sink)
        scale = jnp.exp2(peak - next_peak)
        peak, total = next_peak, total * scale + jnp.exp2(sink - next_peak)
    total = jnp.where(empty, 1.0, total)
    return jnp.where(empty, 0.0, scale / total), jnp.where(empty, -jnp.inf, peak + jnp.log(total) * LOG2E)


def _read(record, ref, row):
    """One row of the plan as the named tuple that it was stacked from."""
    return record(*(ref[row, i] for i in range(len(record._fields))))


def _compute_dtype(q, k_pages):
    """What products take in: quantised values become the type of the queries."""
    return q.dtype if is_quantized(k_pages.dtype) else jnp.promote_types(q.dtype, k_pages.dtype)


def _is_per_token(scale_ref) -> bool:
    return scale_ref is not None and len(scale_ref.shape) == 4


def _fixed_scale(ref, layer, kv_head):
    """The scale of a head for all tokens; 1 where there is none, or one for each token."""
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
        dim = jnp.arange(width)[None, :]
        return masked_load(
            ref.at[layer, page[:, None], kv_head, offset[:, None], dim], live[:, None] & (dim < head_dim)
        )
    run = min(16, width)
    dim = (jnp.arange(width // run)[:, None] * run + jnp.arange(run))[None]
    index = layer, page[:, None, None], kv_head, offset[:, None, None], dim
    return masked_load(ref.at[index], live[:, None, None] & (dim < head_dim)).reshape(-1, width)


def masked_load(ref, mask):
    """What lies at `ref` where `mask` says so, else 0."""
    return plgpu.load(ref, mask=mask, other=jnp.zeros((), ref.dtype))


def masked_store(ref, value, mask):
    """Stores where `mask` says so, in the dtype of `ref`."""
    plgpu.store(ref, value.astype(ref.dtype), mask=mask)


def _dot(a, b, allow_tf32):
    """float32 stays IEEE float32 unless asked (the default is TF32); 16-bit types multiply exactly anyway."""
    return plgpu.dot(a, b, precision=lax.Precision.DEFAULT if allow_tf32 else lax.Precision.HIGHEST)


def paged_attention_triton(
    q: Float[Array, "num_tokens num_q_heads head_dim"],
    k_pages: Float[Array, "num_layers num_pages num_kv_heads page_size head_dim"],
    v_pages: Float[Array, "num_layers num_pages num_kv_heads page_size head_dim"],
    page_table: Int32[Array, "num_seqs max_pages"],
    seq_lens: Int32[Array, " num_seqs"],
    cu_q_lens: Int32[Array, " num_seqs_plus_one"] | None = None,
    *,
    layer: int | Int32[Array, ""],
    sm_scale: float,
    logits_soft_cap: float | None = None,
    sliding_window: int | Int32[Array, ""] | None = None,
    sinks: Float[Array, " num_q_heads"] | None = None,
    alibi_slopes: Float[Array, " num_q_heads"] | None = None,
    causal: bool = True,
    tree_mask: Bool[Array, "num_tokens max_q_len"] | None = None,
    k_scale: Float[Array, "layers *scales"] | None = None,
    v_scale: Float[Array, "layers *scales"] | None = None,
    plan: AttentionPlan | None = None,
    config: AttentionConfig | None = None,
    interpret: bool = False,
) -> tuple[Float[Array, "num_tokens num_q_heads head_dim"], Float[Array, "num_tokens num_q_heads"]]:
    """Attends from packed queries to paged keys and values, in one launch or two.

    The arguments are those of `jaxpaged.paged_attention`, which validates them; here pages are always stacked by layer.

    Args:
        plan: What `make_plan` returned for the same lengths and options; None makes one here.
        config: Tile sizes, and the partition if `plan` is None; None takes the plan's, else the defaults.
        interpret: Runs under Pallas's interpreter, on any device.

    Returns:
        Output in `q.dtype`, and natural log-sum-exp in float32; 0 and -inf for queries that see no key.

    Raises:
        ValueError: A plan that was made for other queries or options.
        NotImplementedError: What `why_unsupported` says.
    """
    if reason := why_unsupported(q, k_pages, v_pages):
        raise NotImplementedError(f"backend 'triton': {reason}")
    num_tokens, num_q_heads, head_dim = q.shape
    num_kv_heads = k_pages.shape[2]
    if plan is None:
        plan = make_plan(
            seq_lens,
            cu_q_lens,
            num_tokens=num_tokens,
            sliding_window=sliding_window,
            causal=causal,
            max_len=page_table.shape[1] * k_pages.shape[3],
            config=config,
        )
    check_plan(plan, PlanKey.of(seq_lens, q, cu_q_lens, sliding_window, causal))
    config = config or plan.config
    is_traced = isinstance(sliding_window, jax.Array)
    num_programs = plan.shares.shape[0]
    rows = plan.block_q * num_q_heads // num_kv_heads
    crowded = is_quantized(k_pages.dtype) or tree_mask is not None
    if plan.block_q > 1:  # two masks a logit; a page id a key
        crowded |= (alibi_slopes is not None and logits_soft_cap is not None) or k_pages.shape[3] < 16
    block_m, block_k, num_warps, num_stages = _tile_sizes(
        config, rows, head_dim, _compute_dtype(q, k_pages), k_pages.dtype.itemsize, crowded
    )

    out, lse = jax.ShapeDtypeStruct(q.shape, q.dtype), jax.ShapeDtypeStruct(q.shape[:2], jnp.float32)
    split = plan.config.max_splits != 1
    num_parts = 2 * num_programs * plan.block_q if plan.max_pieces is None else plan.max_pieces * num_tokens
    part_shape = num_parts, num_q_heads, head_dim
    part = jax.ShapeDtypeStruct(part_shape, jnp.float32) if split else None
    part_lse = jax.ShapeDtypeStruct(part_shape[:2], jnp.float32) if split else None
    out, lse, part, part_lse = pl.pallas_call(
        functools.partial(
            _attention_kernel,
            sm_scale=sm_scale,
            logits_soft_cap=logits_soft_cap,
            sliding_window=None if is_traced else sliding_window,
            causal=causal,
            max_pieces=plan.max_pieces,
            allow_tf32=config.allow_tf32,
            block_q=plan.block_q,
            block_m=block_m,
            block_k=block_k,
        ),
        # KV heads vary fastest: programs that run together then read one page, whose heads lie side by side.
        grid=(num_kv_heads * cdiv(rows, block_m), num_programs),
        out_shape=(out, lse, part, part_lse),
        compiler_params=plgpu.CompilerParams(num_warps=num_warps, num_stages=num_stages),
        interpret=interpret,
        name="paged_attention",
    )(
        jnp.asarray(layer, jnp.int32).reshape(1),
        plan.tiles,
        plan.shares,
        page_table,
        q,
        k_pages,
        v_pages,
        k_scale,
        v_scale,
        sinks,
        alibi_slopes,
        jnp.reshape(sliding_window, 1) if is_traced else None,
        None if tree_mask is None else _pack_bits(tree_mask),
    )
    if not split:
        return out, lse
    return pl.pallas_call(
        functools.partial(
            _combine_kernel,
            max_pieces=plan.max_pieces,
            split_size=plan.config.split_size,
            block_q=plan.block_q,
            block_p=2**11 // pl.next_power_of_2(head_dim),
        ),
        grid=(num_q_heads, num_programs // (plan.max_pieces or 1) * plan.block_q),
        out_shape=(out, lse),
        input_output_aliases={4 + (sinks is not None): 0, 5 + (sinks is not None): 1},
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=2),
        interpret=interpret,
        name="paged_attention_combine",
    )(plan.tiles, plan.shares, part, part_lse, sinks, out, lse)


def _pack_bits(mask: Bool[Array, "rows columns"]) -> Int32[Array, "rows words"]:
    """32 columns a word: a row of words stays in registers, where a mask would be loaded for every block of keys."""
    columns = jnp.pad(mask, ((0, 0), (0, -mask.shape[1] % 32))).reshape(mask.shape[0], -1, 32)
    words = jnp.sum(columns.astype(jnp.uint32) << jnp.arange(32, dtype=jnp.uint32), axis=2, dtype=jnp.uint32)
    return lax.bitcast_convert_type(words, jnp.int32)


def _tile_sizes(
    config: AttentionConfig, rows: int, head_dim: int, dtype, page_itemsize: int, crowded: bool
) -> tuple[int, int, int, int]:
    """(block_m, block_k, num_warps, num_stages) for `rows` query rows a KV head, where `config` leaves them open.

    Compiled for an A100, L4, H200 and B200: none asks for more shared memory than an L4 has, and none spills. `crowded`
    variants hold more in registers than the plain one, and with its tiles would spill 8 or 16 bytes on one of these.
    """
    width, is_float32 = pl.next_power_of_2(head_dim), dtype == jnp.float32
    # More rows than this (a group of 71, a prefill tile) read K and V once each block_m rows, from the L2 cache.
    block_m = min(max(16, pl.next_power_of_2(rows)), 32 if is_float32 else 64)
    # K and V tiles of at most 16 KiB: 3 programs fit an SM of an H200 (D 128, bfloat16: 128 registers, 72 KiB).
    block_k = min(64, max(16, 2**14 // (width * dtype.itemsize)))
    if head_dim != width or (crowded and block_m == 64) or (config.max_splits == 1 and block_m * width >= 8192):
        block_k = min(32, block_k)
    # The accumulator sets the warps: it spills beyond 64 registers a thread. float32 products use no matrix unit, and
    # keep their operands in registers too.
    num_warps = 8 if block_m * width > 8192 or (is_float32 and block_m == 32) else 4
    # Loading page ids is a pipeline level: 5 stages keep two K/V tiles in flight. Decoding needs them, but crowded
    # variants have no registers left for it; prefill does with one, unless its tiles are small.
    tile_bytes = 2 * block_k * width * page_itemsize
    if block_m == 16:
        num_stages = 3 if crowded else 5
    else:
        num_stages = 3 if tile_bytes > 2**14 else 5 if tile_bytes > 2**12 else 7
    return block_m, config.block_k or block_k, config.num_warps or num_warps, config.num_stages or num_stages


def why_unsupported(q: Array, k_pages: Array, v_pages: Array) -> str | None:
    """The reason why these kernels cannot take such arrays, or None. Looks at shapes and dtypes, never at a device."""
    if plgpu is None:
        return f"JAX {jax.__version__} has no Pallas Triton backend"
    if q.shape[-1] > 256:
        return f"head_dim is at most 256; got {q.shape[-1]}"
    if v_pages.shape[-1] != q.shape[-1]:
        return f"V must have K's head_dim {q.shape[-1]}; got {v_pages.shape[-1]}"
    for name, x in (("q", q), ("k_pages", k_pages), ("v_pages", v_pages)):
        known = ("float32", "bfloat16", "float16", *(MAX_VALUE if name != "q" else ()))
        if x.dtype.name not in known:
            return f"{name} must be {', '.join(known[:-1])} or {known[-1]}; got {x.dtype}"
    return None


def _rope_and_write_kernel(
    layer_ref,  # [1]
    slot_ref,  # [num_tokens]
    cos_ref,  # [num_tokens, head_dim / 2] float32, as the next
    sin_ref,
    qkv_ref,  # [num_tokens, num_q_heads + 2 num_kv_heads, head_dim]
    _k_pages_ref,
    _v_pages_ref,
    k_fixed_ref,  # [num_layers, num_kv_heads], as the next; else of no use
    v_fixed_ref,
    q_ref,  # [num_tokens, num_q_heads, head_dim]
    k_ref,  # [num_layers, num_pages, num_kv_heads, page_size, head_dim], as the next
    v_ref,
    k_scale_ref,  # [num_layers, num_pages, num_kv_heads, page_size] or None, as the next
    v_scale_ref,
    *,
    block_h: int,
):
    num_q_heads, num_kv_heads = q_ref.shape[1], k_ref.shape[2]
    num_pages, page_size, half = k_ref.shape[1], k_ref.shape[3], k_ref.shape[4] // 2
    token, layer = pl.program_id(0), layer_ref[0]
    slot = slot_ref[token]
    live = (slot >= 0) & (slot < num_pages * page_size)
    page, offset = slot // page_size, slot % page_size

    head = pl.program_id(1) * block_h + jnp.arange(block_h)  # of the packed ones: queries, then keys, then values
    k_head = head - num_q_heads
    v_head = k_head - num_kv_heads
    is_v = (v_head >= 0) & (v_head < num_kv_heads)
    # Values cannot be cut in a kernel, so each half of a head is an array of its own.
    dim = jnp.arange(pl.next_power_of_2(half))[None, :]
    in_half, dims = dim < half, (dim, dim + half)
    cos, sin = (masked_load(ref.at[token, dim], in_half) for ref in (cos_ref, sin_ref))
    in_qkv = (v_head < num_kv_heads)[:, None] & in_half
    first, second = (masked_load(qkv_ref.at[token, head[:, None], d], in_qkv).astype(jnp.float32) for d in dims)
    turned = first * cos - second * sin, second * cos + first * sin
    halves = [
        jnp.where(is_v[:, None], x, y).astype(qkv_ref.dtype) for x, y in zip((first, second), turned, strict=True)
    ]
    for x, d in zip(halves, dims, strict=True):
        masked_store(q_ref.at[token, head[:, None], d], x, (k_head < 0)[:, None] & in_half)

    def write(pages_ref, fixed_ref, scale_ref, kv_head, mine):
        # Where Pallas interprets, a lane that is masked stores what was there before: it needs an index of its own.
        kv_head = jnp.where(mine, kv_head, num_kv_heads + head)
        new = halves
        if is_quantized(pages_ref.dtype):
            if scale_ref is None:
                scale = masked_load(fixed_ref.at[layer, kv_head], mine)
            else:
                scale = jnp.maximum(*(measure_scale(x, pages_ref.dtype) for x in halves))
                masked_store(scale_ref.at[layer, page, kv_head, offset], scale, mine)
            new = [quantize(x, scale, pages_ref.dtype) for x in halves]
        for x, d in zip(new, dims, strict=True):
            masked_store(pages_ref.at[layer, page, kv_head[:, None], offset, d], x, mine[:, None] & in_half)

    write(k_ref, k_fixed_ref, k_scale_ref, k_head, (k_head >= 0) & (v_head < 0) & live)
    write(v_ref, v_fixed_ref, v_scale_ref, v_head, is_v & live)


def rope_and_write_triton(
    cache: KVCache,
    layer: int | Int32[Array, ""],
    qkv: Float[Array, "num_tokens num_heads head_dim"],
    cos: Float[Array, "num_tokens half_dim"],
    sin: Float[Array, "num_tokens half_dim"],
    slot_mapping: Int32[Array, " num_tokens"],
    *,
    interpret: bool = False,
) -> tuple[Float[Array, "num_tokens num_q_heads head_dim"], KVCache]:
    """Rotates, quantises and writes in one launch, in place where the cache is donated.

    The arguments are those of `jaxpaged.rope_and_write`, which validates them; here there is at least one token.

    Args:
        interpret: Runs under Pallas's interpreter, on any device.
    """
    num_tokens, num_heads, head_dim = qkv.shape
    # A quarter of the heads of a Llama: then a thread loads 16 bytes of each half, and one step fills the device.
    width = pl.next_power_of_2(head_dim // 2)
    block_h = min(pl.next_power_of_2(num_heads), max(1, 1024 // width))
    pools = cache.k_pages, cache.v_pages
    token_scales = (cache.k_scale, cache.v_scale) if cache.has_token_scales else (None, None)
    q = jax.ShapeDtypeStruct((num_tokens, num_heads - 2 * cache.num_kv_heads, head_dim), qkv.dtype)
    written = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (*pools, *token_scales))
    q, k_pages, v_pages, k_scale, v_scale = pl.pallas_call(
        functools.partial(_rope_and_write_kernel, block_h=block_h),
        grid=(num_tokens, cdiv(num_heads, block_h)),
        out_shape=(q, *written),
        input_output_aliases={5 + i: 1 + i for i in range(len(jax.tree.leaves(written)))},
        compiler_params=plgpu.CompilerParams(num_warps=max(1, min(4, block_h * width // 256)), num_stages=1),
        interpret=interpret,
        name="rope_and_write",
    )(
        jnp.asarray(layer, jnp.int32).reshape(1),
        slot_mapping,
        cos,
        sin,
        qkv,
        *pools,
        cache.k_scale,
        cache.v_scale,
    )
    if cache.has_token_scales:
        cache = dataclasses.replace(cache, k_scale=k_scale, v_scale=v_scale)
    return q, dataclasses.replace(cache, k_pages=k_pages, v_pages=v_pages)
