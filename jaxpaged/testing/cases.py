"""`make_case`: one ragged batch over a paged cache, whose mistakes show."""

import dataclasses
from collections.abc import Sequence
from typing import Literal

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jaxpaged.cache.quantize import MAX_VALUE
from jaxpaged.config import NULL_PAGE, cdiv


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One ragged batch over a paged cache, in numpy. Pass `**case.arguments()` to `paged_attention`.

    Attributes:
        q: `[num_tokens, num_q_heads, head_dim]`, sequence after sequence.
        k_pages: `[num_layers, num_pages, num_kv_heads, page_size, head_dim]`, NaN in every slot without an owner (127
            in int8, which has no NaN).
        k_scale: Scale of quantised pages, as `v_scale`: a number, `[num_kv_heads]`, or one for each token, NaN in slots
            without an owner. None where pages are not quantised.
        page_table: `[num_seqs, max_pages]`.
        cu_q_lens: `[num_seqs + 1]`, or None for one query token a sequence.
        dense_k: `[seq_lens[i], num_kv_heads, head_dim]` of each sequence, as stored at `layer`, times its scale.
    """

    q: np.ndarray
    k_pages: np.ndarray
    v_pages: np.ndarray
    page_table: np.ndarray
    seq_lens: np.ndarray
    cu_q_lens: np.ndarray | None
    layer: int
    k_scale: np.ndarray | float | None
    v_scale: np.ndarray | float | None
    dense_k: list[np.ndarray]
    dense_v: list[np.ndarray]

    def arguments(self) -> dict:
        """The arguments of `paged_attention` that hold the batch."""
        arrays = dataclasses.asdict(self)
        del arrays["dense_k"], arrays["dense_v"]
        return {name: jnp.asarray(x) if isinstance(x, np.ndarray) else x for name, x in arrays.items()}


def make_case(
    seq_lens: Sequence[int],
    q_lens: Sequence[int] | None = None,
    *,
    num_q_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 16,
    page_size: int = 4,
    dtype: DTypeLike = np.float32,
    q_dtype: DTypeLike | None = None,
    scale_per: Literal["tensor", "head", "token"] = "token",
    num_layers: int = 2,
    layer: int = 1,
    max_pages: int | None = None,
    unused_entry: int = NULL_PAGE,
    padding_tokens: int = 0,
    seed: int = 0,
) -> Case:
    """Draws a batch of sequences of `seq_lens` KV tokens, N(0, 1) values, in a shuffled pool.

    Args:
        seq_lens: KV tokens of each sequence, this step's included; 0 is a padding row.
        q_lens: Query tokens of each sequence, at most its KV tokens; None is one each, a decode step.
        dtype: Dtype of the pages, and of the queries unless it is a quantised one.
        q_dtype: Dtype of the queries over quantised pages; None means float32.
        scale_per: What has one scale in quantised pages: all that is stored, a KV head, or a token and KV head.
        max_pages: Width of the page table; None leaves two columns unused.
        unused_entry: What page-table entries past a sequence's last page hold. Nobody may follow them.
        padding_tokens: Query tokens after those of the last sequence; needs `q_lens`.
    """
    if len(seq_lens) == 0 or min(seq_lens) < 0:
        raise ValueError(f"`seq_lens` must hold at least one length, none negative; got {list(seq_lens)}.")
    rng = np.random.default_rng(seed)
    dtype = jnp.dtype(dtype)
    largest = MAX_VALUE.get(dtype.name)
    pages_of = [cdiv(n, page_size) for n in seq_lens]
    width = max(pages_of) + 2 if max_pages is None else max_pages
    num_pages = sum(pages_of) + 3
    ids = iter(rng.permutation(np.arange(1, num_pages)))

    pool_shape = (num_layers, num_pages, num_kv_heads, page_size, head_dim)
    poison = 127 if dtype == np.int8 else np.nan
    k_pages, v_pages = np.full(pool_shape, poison, dtype), np.full(pool_shape, poison, dtype)
    k_scale = v_scale = None
    if largest is not None:
        # Fixed scales fit N(0, 1) up to six standard deviations, and differ from each other.
        shape = {"tensor": (), "head": (num_kv_heads,), "token": pool_shape[:4]}[scale_per]
        k_scale, v_scale = (rng.uniform(6, 7, (2, *shape)) / largest).astype(np.float32)
        if scale_per == "token":
            k_scale, v_scale = np.full_like(k_scale, np.nan), np.full_like(v_scale, np.nan)
    page_table = np.full((len(seq_lens), width), unused_entry, np.int32)
    dense_k, dense_v = [], []
    for row, (n, num) in enumerate(zip(seq_lens, pages_of, strict=True)):
        page_table[row, :num] = [next(ids) for _ in range(num)]
        new_k, new_v = rng.standard_normal((2, num_layers, n, num_kv_heads, head_dim))
        page, offset = page_table[row, np.arange(n) // page_size], np.arange(n) % page_size
        for x, pages, scale, dense in ((new_k, k_pages, k_scale, dense_k), (new_v, v_pages, v_scale, dense_v)):
            if largest is None or scale is None:
                stored = x.astype(dtype)
                dense.append(stored[layer])
            else:
                if scale_per == "token":
                    factor = (np.abs(x).max(-1) / largest).astype(np.float32)  # [num_layers, n, num_kv_heads]
                    scale[:, page, :, offset] = factor.swapaxes(0, 1)
                else:
                    factor = np.broadcast_to(scale, x.shape[:3])
                stored = x / factor[..., None]
                stored = (np.round(stored) if dtype == np.int8 else stored).clip(-largest, largest).astype(dtype)
                dense.append((stored.astype(np.float64) * factor[..., None])[layer])
            pages[:, page, :, offset] = stored.swapaxes(0, 1)

    cu_q_lens = None if q_lens is None else np.cumsum([0, *q_lens], dtype=np.int32)
    num_tokens = len(seq_lens) if cu_q_lens is None else int(cu_q_lens[-1]) + padding_tokens
    return Case(
        q=rng.standard_normal((num_tokens, num_q_heads, head_dim)).astype(q_dtype or (dtype if not largest else "f4")),
        k_pages=k_pages,
        v_pages=v_pages,
        page_table=page_table,
        seq_lens=np.asarray(seq_lens, np.int32),
        cu_q_lens=cu_q_lens,
        layer=layer,
        k_scale=k_scale,
        v_scale=v_scale,
        dense_k=dense_k,
        dense_v=dense_v,
    )
