"""`paged_attention`: validates its arguments, chooses a backend, calls it. The way in to every kernel."""

import functools
import math
from typing import get_args

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxpaged.batch import Batch
from jaxpaged.checks import require_arrays
from jaxpaged.config import AttentionConfig, Backend
from jaxpaged.kv_cache import KVCache, check_layer
from jaxpaged.ops import triton
from jaxpaged.ops.grad import attend_with_gradient
from jaxpaged.ops.plan import AttentionPlan, PlanKey, check_plan, find_plan
from jaxpaged.ops.reference import paged_attention_reference
from jaxpaged.ops.xla import paged_attention_xla
from jaxpaged.quantize import MAX_VALUE, is_quantized


def paged_attention(
    q: Float[Array, "num_tokens num_q_heads head_dim"],
    k_pages: Float[Array, "*num_layers num_pages num_kv_heads page_size head_dim"],
    v_pages: Float[Array, "*num_layers num_pages num_kv_heads page_size head_dim"],
    page_table: Int[Array, "num_seqs max_pages"],
    seq_lens: Int[Array, "num_seqs"],
    *,
    layer: int | Int[Array, ""] | None = None,
    cu_q_lens: Int[Array, "num_seqs_plus_1"] | None = None,
    sm_scale: float | None = None,
    logits_soft_cap: float | None = None,
    sliding_window: int | Int[Array, ""] | None = None,
    sinks: Float[Array, "num_q_heads"] | None = None,
    alibi_slopes: Float[Array, "num_q_heads"] | None = None,
    causal: bool = True,
    tree_mask: Bool[Array, "num_tokens max_q_len"] | None = None,
    k_scale: float | Float[Array, "*scales"] | None = None,
    v_scale: float | Float[Array, "*scales"] | None = None,
    plan: AttentionPlan | None = None,
    config: AttentionConfig | None = None,
    return_lse: bool = False,
    backend: Backend = "auto",
) -> Array | tuple[Array, Array]:
    """Attention of new tokens over the pages of their sequences.

    Query j of sequence i, which has m queries and `n = seq_lens[i]` KV tokens, stands at position `p = n - m + j`. With
    query head h and its KV head `h // (num_q_heads // num_kv_heads)`, over the keys x that it sees

        logit(x) = cap(sm_scale q . k(x)) + alibi_slopes[h] (x - p),  cap(y) = logits_soft_cap tanh(y / logits_soft_cap)
        out      = sum_x e^(logit(x) - lse) v(x),                     lse    = log(sum_x e^logit(x) + e^sinks[h])

    A causal query sees x <= p; a window leaves x > p - sliding_window; a tree leaves, of its sequence's new tokens
    x = n - m + i, those with `tree_mask[., i]`. The part of an option that is None is left out. k and v of quantised
    pages are the stored values times their scales.

    Args:
        q: Queries, sequence after sequence, in the dtype of the cache, or in any floating dtype if that is quantised.
        k_pages: Keys of all layers, with `layer`; or of one layer, without the first axis and without `layer`.
        v_pages: Values, of the same shape and dtype.
        page_table: int32 page ids of each sequence in order. Entries past its last page are never followed.
        seq_lens: int32 KV tokens of each sequence, this step's included. 0 is a padding row.
        layer: Which layer of stacked pages; an int or traced.
        cu_q_lens: int32 prefix sums of the queries of each sequence; None means one each (decode). Tokens from
            `cu_q_lens[-1]` on are padding.
        sm_scale: Factor of the logits; None means `head_dim ** -0.5`.
        logits_soft_cap: Bound of the scaled logits, > 0.
        sliding_window: Tokens that a query sees, itself included, >= 1; an int, or an int32 scalar array where layers
            of one compiled loop differ. Chunks of keys outside are not read.
        sinks: A logit a head that takes part in the denominator only. `lse` includes it.
        alibi_slopes: A slope a head.
        tree_mask: Which of its sequence's new tokens each query token sees, itself included: the ancestors in a tree of
            drafts. It narrows what causality leaves.
        k_scale: Of one-byte pages (int8, float8_e4m3fn, float8_e5m2), and then required: float32, a number,
            `[num_kv_heads]`, `[num_layers, num_kv_heads]`, or for each token, in the shape of `k_pages` without its
            last axis. `KVCache.k_scale` fits. `v_scale` likewise.
        plan: The cut of this step's work, from `make_plan`; None computes it. Only the Triton kernel has a use for it.
        config: Tile and partition of the Triton kernel; None takes those of the plan, or the defaults.
        return_lse: Return the log-sum-exp too.
        backend: `"reference"`, `"xla"`, `"triton"`, `"interpret"` (the Triton kernel under Pallas's interpreter), or
            `"auto"`: for the platform that the computation is lowered for, Triton on CUDA where the kernel covers the
            call (`jaxpaged.ops.triton.why_unsupported` says what it does not), XLA elsewhere.

    Returns:
        Output in the shape and dtype of `q`; with `return_lse` also `lse` `[num_tokens, num_q_heads]` float32, natural
        log. Rows of length 0 and padding tokens: 0 and -inf.

    Raises:
        ValueError: A shape or number does not fit.
        TypeError: A dtype does not fit.
        NotImplementedError: The named backend does not do this; the message says why.

    Gradients: `jax.grad` works on every backend, by one rule (`jaxpaged.ops.grad`), for `q`, pages, `sinks` and
        `alibi_slopes`. Of quantised pages and scales it is refused with NotImplementedError. There is no forward mode.

    Source: PagedAttention (Kwon et al., 2023, section 4.1); sinks: StreamingLLM (Xiao et al., 2024, section 3.2);
        ALiBi (Press et al., 2022, section 3).
    """
    require_arrays(q=q, k_pages=k_pages, v_pages=v_pages, page_table=page_table, seq_lens=seq_lens)
    require_arrays(cu_q_lens=cu_q_lens, sinks=sinks, alibi_slopes=alibi_slopes)
    require_arrays(tree_mask=tree_mask)
    if k_pages.ndim == 4 and v_pages.ndim == 4 and layer is None:
        k_pages, v_pages, layer = k_pages[None], v_pages[None], 0
        k_scale, v_scale = (None if s is None else jnp.asarray(s) for s in (k_scale, v_scale))
        k_scale, v_scale = (s if s is None or s.ndim != 3 else s[None] for s in (k_scale, v_scale))
    _validate(q, k_pages, v_pages, page_table, seq_lens, layer, cu_q_lens)
    _validate_options(q, sm_scale, logits_soft_cap, sliding_window, sinks, alibi_slopes, tree_mask, backend)
    k_scale, v_scale = _stacked_scale("k_scale", k_scale, k_pages), _stacked_scale("v_scale", v_scale, v_pages)
    if plan is not None:
        check_plan(plan, PlanKey.of(page_table, q, cu_q_lens, sliding_window, causal))
    arrays = tuple(jnp.asarray(x) for x in (q, k_pages, v_pages, page_table, seq_lens))
    cu_q_lens, sinks, alibi_slopes, tree_mask = (
        None if x is None else jnp.asarray(x) for x in (cu_q_lens, sinks, alibi_slopes, tree_mask)
    )
    options = {
        "layer": layer,
        "cu_q_lens": cu_q_lens,
        "sm_scale": q.shape[-1] ** -0.5 if sm_scale is None else sm_scale,
        "logits_soft_cap": logits_soft_cap,
        "sliding_window": sliding_window,
        "sinks": sinks,
        "alibi_slopes": alibi_slopes,
        "causal": causal,
        "tree_mask": tree_mask,
        "k_scale": k_scale,
        "v_scale": v_scale,
        "plan": plan,
    }
    unsupported = None
    if backend in ("auto", "triton", "interpret"):
        unsupported = triton.why_unsupported(q, k_pages, v_pages)
    if unsupported is not None and backend != "auto":
        raise NotImplementedError(f"`backend={backend!r}` cannot run this call: {unsupported}")

    attend = functools.partial(_call_backend, backend=backend, config=config, unsupported=unsupported)
    if backend == "reference" and not is_quantized(k_pages.dtype):
        out, lse = attend(*arrays, **options)  # JAX differentiates it
    else:
        out, lse = attend_with_gradient(attend, *arrays, **options)
    return (out, lse) if return_lse else out


def _call_backend(
    *arrays: Array,
    backend: Backend,
    plan: AttentionPlan | None,
    config: AttentionConfig | None,
    unsupported: str | None,
    **options,
) -> tuple[Array, Array]:
    chosen = config or (plan.config if plan is not None else AttentionConfig())
    by_xla = functools.partial(paged_attention_xla, **options, batch_invariant=chosen.is_batch_invariant)
    by_triton = functools.partial(triton.paged_attention_triton, **options, plan=plan, config=config, interpret=False)
    match backend:
        case "reference" if chosen.is_batch_invariant:
            why = "its sums are as long as the page table is wide, which follows the rest of the batch"
            raise NotImplementedError(f"`backend='reference'` has no batch-invariant mode: {why}.")
        case "reference":
            return paged_attention_reference(*arrays, **options)
        case "triton":
            return by_triton(*arrays)
        case "interpret":
            return functools.partial(by_triton, interpret=True)(*arrays)
        case "auto" if unsupported is None:
            return lax.platform_dependent(*arrays, cuda=by_triton, default=by_xla)
        case _:
            return by_xla(*arrays)


def write_and_attend(
    q: Float[Array, "num_tokens num_q_heads head_dim"],
    k: Float[Array, "num_tokens num_kv_heads head_dim"],
    v: Float[Array, "num_tokens num_kv_heads head_dim"],
    cache: KVCache,
    batch: Batch,
    layer: int | Int[Array, ""],
    **options,
) -> tuple[Float[Array, "num_tokens num_q_heads head_dim"], KVCache]:
    """One layer's attention over a cache: stores this step's K and V, then attends to all that is stored.

    What the Flax adapters do. `q` and `k` come with their positions in them (`jaxpaged.ops.rope`).

    Args:
        options: Of `paged_attention`.

    Returns:
        Output in the shape and dtype of `q`, and the cache after the write.
    """
    cache = cache.write(layer, k, v, batch.slot_mapping)
    return attend(q, cache, batch, layer, **options), cache


def attend(
    q: Float[Array, "num_tokens num_q_heads head_dim"],
    cache: KVCache,
    batch: Batch,
    layer: int | Int[Array, ""],
    **options,
) -> Float[Array, "num_tokens num_q_heads head_dim"]:
    """One layer's attention to all that a cache holds, this step's K and V included: what follows a write.

    Args:
        options: Of `paged_attention`. Without a `plan`, that of the batch for this window, if it has one.

    Returns:
        Output in the shape and dtype of `q`.
    """
    if options.get("plan") is None:
        window, causal = options.get("sliding_window"), options.get("causal", True)
        options["plan"] = find_plan(batch.plans, PlanKey.of(batch.page_table, q, batch.cu_q_lens, window, causal))
    out, _ = paged_attention(
        q if is_quantized(cache.dtype) else q.astype(cache.dtype),
        cache.k_pages,
        cache.v_pages,
        batch.page_table,
        batch.seq_lens,
        layer=layer,
        cu_q_lens=batch.cu_q_lens,
        k_scale=cache.k_scale,
        v_scale=cache.v_scale,
        return_lse=True,
        **options,
    )
    return out.astype(q.dtype)


def why_not_on(platform: str, backend: Backend) -> str | None:
    """The reason why a backend cannot run on a platform (`jax.default_backend()`: cpu, gpu, ...), or None if it can."""
    if backend not in ("triton", "interpret"):
        return None
    if triton.plgpu is None:
        return f"JAX {jax.__version__} has no Pallas Triton backend."
    if backend == "triton" and platform != "gpu":
        return f"it needs an NVIDIA GPU, and JAX sees only a {platform}; `interpret` runs the same kernel anywhere."
    return None


def _validate(q, k_pages, v_pages, page_table, seq_lens, layer, cu_q_lens) -> None:
    if q.ndim != 3:
        raise ValueError(f"`q` must have shape (num_tokens, num_q_heads, head_dim); got {q.shape}.")
    if k_pages.ndim != 5 or layer is None:
        raise ValueError(
            "`k_pages` must have shape (num_layers, num_pages, num_kv_heads, page_size, head_dim) with `layer` given, "
            f"or that without num_layers and `layer=None`; got {k_pages.shape} and layer={layer}."
        )
    if v_pages.shape != k_pages.shape:
        raise ValueError(f"`v_pages` must have the shape of `k_pages` {k_pages.shape}; got {v_pages.shape}.")
    check_layer(layer, k_pages.shape[0])
    num_tokens, num_q_heads, head_dim = q.shape
    num_kv_heads = k_pages.shape[2]
    if head_dim != k_pages.shape[4]:
        raise ValueError(f"`q` must have the head_dim of the pages, {k_pages.shape[4]}; got {head_dim}.")
    if num_q_heads % num_kv_heads or num_q_heads == 0:
        raise ValueError(
            f"`q` must have a multiple of num_kv_heads = {num_kv_heads} heads, as each KV head serves an equal group; "
            f"got {num_q_heads}."
        )
    if not jnp.issubdtype(q.dtype, jnp.floating):
        raise TypeError(f"`q` must be of a floating dtype; got {q.dtype}.")
    for name, pages in (("k_pages", k_pages), ("v_pages", v_pages)):
        if pages.dtype != q.dtype and not is_quantized(pages.dtype):
            raise TypeError(
                f"`{name}` must be of the dtype of `q`, {q.dtype}, or quantised ({', '.join(MAX_VALUE)}); got "
                f"{pages.dtype}. Cast `q` to the cache's."
            )
    if k_pages.dtype != v_pages.dtype:
        raise TypeError(f"`v_pages` must be of the dtype of `k_pages`, {k_pages.dtype}; got {v_pages.dtype}.")
    if page_table.ndim != 2 or 0 in page_table.shape:
        raise ValueError(
            f"`page_table` must have shape (num_seqs, max_pages), neither of them 0; got {page_table.shape}. "
            "Pad missing pages with NULL_PAGE."
        )
    num_seqs = page_table.shape[0]
    if seq_lens.shape != (num_seqs,):
        raise ValueError(
            f"`seq_lens` must have shape (num_seqs,) = ({num_seqs},), a length for each row of `page_table`; got "
            f"{seq_lens.shape}. Padding rows have length 0."
        )
    if cu_q_lens is None and num_tokens != num_seqs:
        raise ValueError(
            f"`q` must have one token for each of the {num_seqs} rows of `page_table` where `cu_q_lens` is None; got "
            f"{num_tokens}. Pass `cu_q_lens` to say which tokens belong to which row."
        )
    if cu_q_lens is not None and cu_q_lens.shape != (num_seqs + 1,):
        raise ValueError(f"`cu_q_lens` must have shape (num_seqs + 1,) = ({num_seqs + 1},); got {cu_q_lens.shape}.")
    integers = {"page_table": page_table, "seq_lens": seq_lens, "cu_q_lens": cu_q_lens}
    for name, x in integers.items():
        if x is not None and x.dtype != jnp.int32:
            raise TypeError(f"`{name}` must be int32; got {x.dtype}.")


def _validate_options(q, sm_scale, logits_soft_cap, sliding_window, sinks, alibi_slopes, tree_mask, backend) -> None:
    if sm_scale is not None and not math.isfinite(sm_scale):
        raise ValueError(f"`sm_scale` must be finite, or None for head_dim ** -0.5; got {sm_scale}.")
    if logits_soft_cap is not None and not 0 < logits_soft_cap < math.inf:
        raise ValueError(f"`logits_soft_cap` must be > 0 and finite, or None for no cap; got {logits_soft_cap}.")
    scalar = isinstance(sliding_window, jax.Array) and sliding_window.shape == () and sliding_window.dtype == jnp.int32
    if not (sliding_window is None or scalar or (isinstance(sliding_window, int) and 1 <= sliding_window < 2**31)):
        raise ValueError(
            "`sliding_window` must be an int >= 1, the tokens that a query sees, itself included, or such an int32 "
            f"scalar of JAX, or None; got {sliding_window!r}."
        )
    if tree_mask is not None and (tree_mask.ndim != 2 or tree_mask.shape[0] != q.shape[0] or tree_mask.dtype != bool):
        raise ValueError(
            f"`tree_mask` must be bool (num_tokens, max_q_len) = ({q.shape[0]}, ...); got {tree_mask.dtype} "
            f"{tree_mask.shape}."
        )
    for name, x in (("sinks", sinks), ("alibi_slopes", alibi_slopes)):
        if x is not None and jnp.shape(x) != (q.shape[1],):
            raise ValueError(f"`{name}` must have shape (num_q_heads,) = ({q.shape[1]},); got {jnp.shape(x)}.")
    if backend not in get_args(Backend):
        raise ValueError(f"`backend` must be one of {', '.join(get_args(Backend))}; got {backend!r}.")


def _stacked_scale(name: str, scale, pages) -> Array | None:
    """A scale as `[1 or num_layers, num_kv_heads]`, or a scale for each token in the shape of the stacked pages."""
    if not is_quantized(pages.dtype):
        if scale is not None:
            raise ValueError(
                f"`{name}` must be None for pages of {pages.dtype}; got one. Only quantised pages have it."
            )
        return None
    if scale is None:
        raise ValueError(
            f"`{name}` must be given for pages of {pages.dtype}; got None. A cache holds it: cache.{name}."
        )
    scale, (num_layers, _, num_kv_heads) = jnp.asarray(scale, jnp.float32), pages.shape[:3]
    if scale.shape in ((), (num_kv_heads,)):
        return jnp.broadcast_to(scale, (1, num_kv_heads))
    if scale.shape not in ((num_layers, num_kv_heads), pages.shape[:4]):
        raise ValueError(
            f"`{name}` must be a number, (num_kv_heads,) = ({num_kv_heads},), (num_layers, num_kv_heads) = "
            f"({num_layers}, {num_kv_heads}), or for each token {pages.shape[:4]}; got {scale.shape}."
        )
    return scale
