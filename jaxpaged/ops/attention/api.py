"""`attend` and `paged_attention`: validate their arguments, choose a backend, call it. The way in to every kernel."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxpaged.cache.kv_cache import KVCache, LayerView
from jaxpaged.cache.quantize import MAX_VALUE, is_quantized
from jaxpaged.cache.ragged import Partition, Ragged
from jaxpaged.checks import require_arrays
from jaxpaged.config import AttentionConfig
from jaxpaged.ops.attention.grad import attend_with_gradient, refuse_gradients
from jaxpaged.ops.attention.options import AttentionOptions, check_options
from jaxpaged.ops.attention.partition import check_partition, key_of
from jaxpaged.ops.attention.reference import paged_attention_reference, why_not_by_reference
from jaxpaged.ops.attention.triton import paged_attention_triton, why_unsupported
from jaxpaged.ops.attention.xla import paged_attention_xla
from jaxpaged.ops.dispatch import Backend, Op
from jaxpaged.ops.triton_util import why_no_triton

ATTENTION = Op(
    Backend("reference", paged_attention_reference, why_not_by_reference, is_differentiable=True),
    Backend("xla", paged_attention_xla),
    Backend("triton", paged_attention_triton, why_unsupported),
    Backend("interpret", functools.partial(paged_attention_triton, interpret=True), why_unsupported),
    formula="xla",
    kernel="triton",
    derivative=attend_with_gradient,
)
"""The backends of attention. Each takes `(q, view, ragged, options)`, as `attend` does, and returns what that does."""


def attend(
    q: Float[Array, "num_tokens num_q_heads head_dim"],
    view: LayerView,
    ragged: Ragged,
    options: AttentionOptions | None = None,
    *,
    backend: str = "auto",
) -> tuple[Float[Array, "num_tokens num_q_heads head_dim"], Float[Array, "num_tokens num_q_heads"]]:
    """Attend from the new tokens of a step to all that a layer of the cache holds, these tokens included.

    `jaxpaged.paged_attention` has the formula, the sources and the names of backends.

    Args:
        q: Queries, sequence after sequence, with their positions in them. They are cast to the dtype of the cache,
            unless that is quantised.
        view: The layer, after the write of this step's K and V.
        ragged: The sequences of the step. Of its partitions, the one that was made for such a call is used.
        options: How the layer attends; None for causal attention to all keys.

    Returns:
        Output in the shape and dtype of `q`, and its log-sum-exp `[num_tokens, num_q_heads]`, natural log, in float32.
        Rows of length 0 and padding tokens: 0 and -inf.

    Raises:
        ValueError: A shape or number does not fit.
        TypeError: A dtype does not fit.
        NotImplementedError: The named backend does not do this; the message says why.
    """
    options = options or AttentionOptions()
    ragged = view.ragged(_narrow(ragged))
    _validate(q, view, ragged)
    check_options(options, q.shape[1])
    config = options.config
    if config is None and (partition := ragged.partition_for(key_of(ragged, options, q.shape[0]))):
        config = partition.config
    options = dataclasses.replace(options, config=(config or AttentionConfig()).for_target(view.cache.target))
    dtype = q.dtype
    q, view, ragged, options = jax.tree.map(
        lambda x: jnp.asarray(x) if isinstance(x, np.ndarray) else x, (q, view, ragged, options)
    )
    q = q if is_quantized(view.cache.dtype) else q.astype(view.cache.dtype)
    if q.shape[0] == 0:  # a step in which nobody has a new token
        ATTENTION.check_name(backend)
        return jnp.zeros(q.shape, dtype), jnp.zeros(q.shape[:2], jnp.float32)
    out, lse = ATTENTION(q, refuse_gradients(view), ragged, options, backend=backend)
    return out.astype(dtype), lse


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
    partition: Partition | None = None,
    config: AttentionConfig | None = None,
    return_lse: bool = False,
    backend: str = "auto",
) -> Array | tuple[Array, Array]:
    """Attend from new tokens to the pages of their sequences.

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
        page_table: int32 page ids of each sequence in order; in numpy any integers that fit, as in the next and in
            `cu_q_lens`. Entries past its last page are never followed.
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
        partition: The cut of this step's work, one of those that `partition_batch` made; None makes one.
        config: How a kernel cuts its work; None takes the configuration of `partition`, or the defaults.
        return_lse: Return the log-sum-exp too.
        backend: `"reference"`, `"xla"`, `"triton"`, `"interpret"` (the Triton kernel under Pallas's interpreter), one
            that was registered with `jaxpaged.ops.attention.ATTENTION`, or `"auto"`: for the platform that the
            computation is lowered for, Triton on CUDA where the kernel covers the call, XLA elsewhere.

    Returns:
        Output in the shape and dtype of `q`; with `return_lse` also `lse` `[num_tokens, num_q_heads]` float32, natural
        log. Rows of length 0 and padding tokens: 0 and -inf.

    Raises:
        ValueError: A shape or number does not fit.
        TypeError: A dtype does not fit.
        NotImplementedError: The named backend does not do this; the message says why.

    Gradients: `jax.grad` works on every backend, by one rule (`ops/attention/grad.py`), for `q`, pages, `sinks` and
        `alibi_slopes`. Of quantised pages and scales, and a second time, it is refused with NotImplementedError. There
        is no forward mode: `jax.jvp` and `jax.linearize` raise JAX's TypeError.

    Source: PagedAttention (Kwon et al., 2023, section 4.1); sinks: StreamingLLM (Xiao et al., 2024, section 3.2);
        ALiBi (Press et al., 2022, section 3).
    """
    require_arrays(q=q, k_pages=k_pages, v_pages=v_pages, page_table=page_table, seq_lens=seq_lens)
    require_arrays(cu_q_lens=cu_q_lens, sinks=sinks, alibi_slopes=alibi_slopes, tree_mask=tree_mask)
    if k_pages.ndim == 4 and v_pages.ndim == 4 and layer is None:
        k_pages, v_pages, layer = k_pages[None], v_pages[None], 0
        k_scale, v_scale = (None if s is None else jnp.asarray(s) for s in (k_scale, v_scale))
        k_scale, v_scale = (s if s is None or s.ndim != 3 else s[None] for s in (k_scale, v_scale))
    if k_pages.ndim != 5 or layer is None:
        raise ValueError(
            "`k_pages` must have shape (num_layers, num_pages, num_kv_heads, page_size, head_dim) with `layer` given, "
            f"or that without num_layers and `layer=None`; got {k_pages.shape} and layer={layer}."
        )
    for name, pages in (("k_pages", k_pages), ("v_pages", v_pages)):
        if jnp.issubdtype(q.dtype, jnp.floating) and pages.dtype != q.dtype and not is_quantized(pages.dtype):
            raise TypeError(
                f"`{name}` must be of the dtype of `q`, {q.dtype}, or quantised ({', '.join(MAX_VALUE)}); got "
                f"{pages.dtype}. Cast `q` to the cache's."
            )
    k_scale, v_scale = _stacked_scale("k_scale", k_scale, k_pages), _stacked_scale("v_scale", v_scale, v_pages)
    cache = KVCache(k_pages=k_pages, v_pages=v_pages, k_scale=k_scale, v_scale=v_scale)
    options = AttentionOptions(
        sm_scale=sm_scale,
        logits_soft_cap=logits_soft_cap,
        sliding_window=sliding_window,
        causal=causal,
        config=config,
        sinks=sinks,
        alibi_slopes=alibi_slopes,
    )
    ragged = Ragged(page_table=page_table, seq_lens=seq_lens, cu_q_lens=cu_q_lens, tree_mask=tree_mask)
    if partition is not None:
        check_partition(partition, key_of(ragged, options, q.shape[0]))
        ragged = dataclasses.replace(ragged, partitions=(partition,))
    out, lse = attend(q, cache.layer(layer), ragged, options, backend=backend)
    return (out, lse) if return_lse else out


def why_not_on(platform: str, backend: str) -> str | None:
    """Return the reason why a backend cannot run on a platform (`jax.default_backend()`: cpu, gpu, ...), or None if it
    can.
    """
    if backend not in ("triton", "interpret"):
        return None
    if reason := why_no_triton():
        return f"{reason}."
    if backend == "triton" and platform != "gpu":
        return f"it needs an NVIDIA GPU, and JAX sees only a {platform}; `interpret` runs the same kernel anywhere."
    return None


def _narrow(ragged: Ragged) -> Ragged:
    """Return the sequences with numpy integers of any size, numpy's default 64 bits first of all, as int32 where they
    fit.
    """
    changed = {}
    for name in ("page_table", "seq_lens", "cu_q_lens"):
        x = getattr(ragged, name)
        if isinstance(x, np.ndarray) and np.issubdtype(x.dtype, np.integer):
            narrow = x.astype(np.int32)
            if np.array_equal(narrow, x):
                changed[name] = narrow
    return dataclasses.replace(ragged, **changed)


def _validate(q: Array, view: LayerView, ragged: Ragged) -> None:
    if q.ndim != 3:
        raise ValueError(f"`q` must have shape (num_tokens, num_q_heads, head_dim); got {q.shape}.")
    num_tokens, num_q_heads, head_dim = q.shape
    k_pages, v_pages, num_kv_heads = view.cache.k_pages, view.cache.v_pages, view.cache.num_kv_heads
    if v_pages.shape != k_pages.shape:
        raise ValueError(f"`v_pages` must have the shape of `k_pages` {k_pages.shape}; got {v_pages.shape}.")
    if v_pages.dtype != k_pages.dtype:
        raise TypeError(f"`v_pages` must be of the dtype of `k_pages`, {k_pages.dtype}; got {v_pages.dtype}.")
    if head_dim != k_pages.shape[4]:
        raise ValueError(f"`q` must have the head_dim of the pages, {k_pages.shape[4]}; got {head_dim}.")
    if num_q_heads % num_kv_heads or num_q_heads == 0:
        raise ValueError(
            f"`q` must have a multiple of num_kv_heads = {num_kv_heads} heads, as each KV head serves an equal group; "
            f"got {num_q_heads}."
        )
    if not jnp.issubdtype(q.dtype, jnp.floating):
        raise TypeError(f"`q` must be of a floating dtype; got {q.dtype}.")
    _validate_ragged(ragged, num_tokens)


def _validate_ragged(ragged: Ragged, num_tokens: int) -> None:
    page_table, seq_lens, cu_q_lens, tree_mask = (
        getattr(ragged, name) for name in ("page_table", "seq_lens", "cu_q_lens", "tree_mask")
    )
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
    if tree_mask is not None and (tree_mask.ndim != 2 or tree_mask.shape[0] != num_tokens or tree_mask.dtype != bool):
        raise ValueError(
            f"`tree_mask` must be bool (num_tokens, max_q_len) = ({num_tokens}, ...); got {tree_mask.dtype} "
            f"{tree_mask.shape}."
        )


def _stacked_scale(name: str, scale, pages) -> Array | None:
    """Return a scale as `[1 or num_layers, num_kv_heads]`, or one for each token in the shape of the pages."""
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
