"""`cascade_attention`: sequences with a common prefix read its keys and values once, not once each."""

import jax.core
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxpaged.cache.ragged import locate_tokens
from jaxpaged.checks import require_arrays
from jaxpaged.config import AttentionConfig
from jaxpaged.ops.attention import paged_attention
from jaxpaged.ops.attention.merge import merge_attention


def cascade_attention(
    q: Float[Array, "num_tokens num_q_heads head_dim"],
    k_pages: Float[Array, "*num_layers num_pages num_kv_heads page_size head_dim"],
    v_pages: Float[Array, "*num_layers num_pages num_kv_heads page_size head_dim"],
    prefix_page_table: Int[Array, "num_groups max_prefix_pages"],
    prefix_lens: Int[Array, "num_groups"],
    page_table: Int[Array, "num_seqs max_pages"],
    seq_lens: Int[Array, "num_seqs"],
    *,
    group_of_seq: Int[Array, "num_seqs"],
    layer: int | Int[Array, ""] | None = None,
    cu_q_lens: Int[Array, "num_seqs_plus_1"] | None = None,
    sm_scale: float | None = None,
    logits_soft_cap: float | None = None,
    sinks: Float[Array, "num_q_heads"] | None = None,
    tree_mask: Bool[Array, "num_tokens max_q_len"] | None = None,
    k_scale: float | Float[Array, "*scales"] | None = None,
    v_scale: float | Float[Array, "*scales"] | None = None,
    config: AttentionConfig | None = None,
    return_lse: bool = False,
    backend: str = "auto",
) -> Array | tuple[Array, Array]:
    """`paged_attention` of sequences in groups, each sequence being its group's prefix and then a part of its own.

    Two calls, whose results `merge_attention` joins. In the first the groups are the sequences: all queries of a group
    attend to its prefix together, without a mask, so that a tile of them reads it once. In the second each sequence
    attends to its own part. Worth it where a prefix is long and its group has several queries.

    There is no `sliding_window` and there are no `alibi_slopes`: both count tokens from a query back into the prefix,
    and the first call knows its queries as a group, not where each of them stands.

    Args:
        q: Queries, sequence after sequence. Arguments that are not named here are as in `paged_attention`.
        prefix_page_table: int32 page ids of each group's prefix, in the same pool.
        prefix_lens: int32 KV tokens of each prefix, which may end inside a page. 0 is a group without one.
        page_table: int32 page ids of each sequence's own part, which begins in a page of its own.
        seq_lens: int32 KV tokens of each sequence's own part, this step's included, the prefix not. 0 is a padding row.
        group_of_seq: int32 row of the prefixes for each sequence, from 0 to num_groups - 1, never falling: a group's
            sequences are neighbours. Values are checked unless they are traced; then the caller must see to it. A
            group may have no sequence.
        sinks: As in `paged_attention`; they count once.
        config: Of both calls. `block_q` is the tile of queries that reads a prefix once.

    Returns:
        Output in the shape and dtype of `q`; with `return_lse` also `lse` `[num_tokens, num_q_heads]` float32. Padding
        rows give 0 and -inf, also in a group that has a prefix.

    Raises:
        ValueError: A shape or number does not fit.
        TypeError: A dtype does not fit.
        NotImplementedError: The named backend does not do this; the message says why.

    Numerics: Each part is rounded to the dtype of `q` before the two are merged in float32 and rounded again: in 16
        bits, up to one unit in the last place of the larger part more error than of one call. `lse` is float32.

    Source: Cascade inference (FlashInfer, Ye et al., 2025, section 2.2); Hydragen (Juravsky et al., 2024, section 3).
    """
    require_arrays(prefix_page_table=prefix_page_table, prefix_lens=prefix_lens)
    require_arrays(group_of_seq=group_of_seq, page_table=page_table)
    _validate(prefix_page_table, prefix_lens, page_table, group_of_seq)
    options = {
        "layer": layer,
        "sm_scale": sm_scale,
        "logits_soft_cap": logits_soft_cap,
        "k_scale": k_scale,
        "v_scale": v_scale,
        "config": config,
        "return_lse": True,
        "backend": backend,
    }
    # A live row sees at least itself in its own part: the sinks are counted there, and only there.
    own, own_lse = paged_attention(
        q,
        k_pages,
        v_pages,
        page_table,
        seq_lens,
        cu_q_lens=cu_q_lens,
        sinks=sinks,
        tree_mask=tree_mask,
        **options,
    )
    num_tokens, num_seqs, num_groups = q.shape[0], page_table.shape[0], prefix_page_table.shape[0]
    first_row = jnp.arange(num_seqs + 1, dtype=jnp.int32) if cu_q_lens is None else jnp.asarray(cu_q_lens)
    group = jnp.arange(num_groups + 1, dtype=jnp.int32)[:, None]
    cu_group_lens = first_row[jnp.sum(jnp.asarray(group_of_seq)[None, :] < group, axis=1)]
    shared, shared_lse = paged_attention(
        q, k_pages, v_pages, prefix_page_table, prefix_lens, cu_q_lens=cu_group_lens, causal=False, **options
    )
    seq_lens = jnp.asarray(seq_lens)
    row, _, live = locate_tokens(seq_lens, cu_q_lens, num_tokens)
    live &= seq_lens[row] > 0
    out, lse = merge_attention(shared, jnp.where(live[:, None], shared_lse, -jnp.inf), own, own_lse)
    return (out, lse) if return_lse else out


def _validate(prefix_page_table, prefix_lens, page_table, group_of_seq) -> None:
    if prefix_page_table.ndim != 2 or 0 in prefix_page_table.shape:
        raise ValueError(
            "`prefix_page_table` must have shape (num_groups, max_prefix_pages), neither of them 0; got "
            f"{prefix_page_table.shape}. A group without a prefix has prefix length 0."
        )
    num_groups = prefix_page_table.shape[0]
    if prefix_lens.shape != (num_groups,):
        raise ValueError(
            f"`prefix_lens` must have shape (num_groups,) = ({num_groups},), a length for each row of "
            f"`prefix_page_table`; got {prefix_lens.shape}."
        )
    if group_of_seq.shape != page_table.shape[:1]:
        raise ValueError(
            f"`group_of_seq` must have shape (num_seqs,) = {page_table.shape[:1]}, a group for each row of "
            f"`page_table`; got {group_of_seq.shape}. A sequence that shares nothing has a group of its own."
        )
    integers = {"prefix_page_table": prefix_page_table, "prefix_lens": prefix_lens, "group_of_seq": group_of_seq}
    for name, x in integers.items():
        if x.dtype != jnp.int32:
            raise TypeError(f"`{name}` must be int32; got {x.dtype}.")
    if isinstance(group_of_seq, jax.core.Tracer):
        return
    groups = np.asarray(group_of_seq)
    if groups.min() < 0 or groups.max() >= num_groups or np.any(np.diff(groups) < 0):
        raise ValueError(
            f"`group_of_seq` must hold groups from 0 to num_groups - 1 = {num_groups - 1}, none smaller than the one "
            f"before it; got {groups.tolist()}. Sort the sequences of a step by group."
        )
