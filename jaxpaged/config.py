"""Configuration: frozen, hashable, plain Python. Every other module may import this one; it imports none of them."""

import dataclasses
from typing import Literal

NULL_PAGE = 0
"""The page id that is never allocated. Page tables are padded with it, so that a gather of padding stays in range."""

Backend = Literal["auto", "reference", "xla", "triton", "interpret"]
"""What computes attention: see `jaxpaged.ops.attention.paged_attention`."""


def cdiv(a: int, b: int) -> int:
    """`a / b` rounded up, for non-negative integers."""
    return -(-a // b)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AttentionConfig:
    """How the Triton kernel cuts its work. Results differ by rounding only. Of all this XLA's path has
    batch-invariant mode alone.

    Attributes:
        num_programs: Programs a KV head that share the stream of KV tokens. 396 / KV heads fill an H200 once (132 SMs,
            three programs each at head_dim 128); more would run in two waves. Static: it is never asked of a device, so
            that a step compiled elsewhere is the same step.
        max_splits: None cuts a sequence wherever a share ends. 1 never cuts: one program a tile, and a call is one
            launch instead of two, which suits many sequences of like length.
        split_size: None cuts the step's work evenly, wherever that falls, so that the rounding of a sequence's result
            depends on what else is in the batch. A number cuts each sequence at its multiples instead, in KV tokens:
            batch-invariant mode, in which a result has the same bits in any batch (as with `max_splits=1`), among calls
            with the same kind of queries (all decode, or all with `cu_q_lens`). 512 suits contexts up to some 32,768.
        allow_tf32: Let float32 products drop 13 of 23 bits of mantissa, as JAX does by default elsewhere, for several
            times the speed. Narrower dtypes have nothing to drop.
        block_q: Query tokens a tile where sequences have several; a decode step has one.
        block_k: KV tokens a tile, a power of two >= 16; None chooses by head_dim, dtype and rows, as the next two.
        num_warps: Warps a program.
        num_stages: Software pipeline depth, the page-id level included: 3 keeps one K/V tile in flight, 5 two.

    Raises:
        ValueError: A size below its minimum, `block_k` no power of two, `max_splits` neither None nor 1, or a
            `split_size` where nothing is split.
    """

    num_programs: int = 48
    max_splits: Literal[1] | None = None
    split_size: int | None = None
    allow_tf32: bool = False
    block_q: int = 16
    block_k: int | None = None
    num_warps: int | None = None
    num_stages: int | None = None

    def __post_init__(self) -> None:
        for name, minimum in (
            ("num_programs", 1),
            ("block_q", 1),
            ("block_k", 16),
            ("split_size", 16),
            ("num_warps", 1),
            ("num_stages", 1),
        ):
            value = getattr(self, name)
            if value is not None and value < minimum:
                raise ValueError(f"`{name}` must be at least {minimum}; got {value}.")
        if self.block_k is not None and self.block_k & (self.block_k - 1):
            raise ValueError(f"`block_k` must be a power of two; got {self.block_k}.")
        if self.max_splits not in (None, 1):
            raise ValueError(f"`max_splits` must be None (cut anywhere) or 1 (never); got {self.max_splits}.")
        if self.max_splits == 1 and self.split_size is not None:
            raise ValueError(f"`split_size` must be None with `max_splits=1`; got {self.split_size}.")

    @property
    def is_batch_invariant(self) -> bool:
        """Whether a sequence's result has the same bits whatever else is in the batch."""
        return self.max_splits == 1 or self.split_size is not None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LlamaConfig:
    """Shape of a Llama-family decoder, as the checkpoint states it.

    Attributes:
        rope_theta: Base of the rotary frequencies.
        rope_factor: Linear rotary scaling: positions are divided by it.
        rope_freq_factors: Divisor of each of the head_dim / 2 rotary frequencies (Llama 3.1 long context), or None.
        max_position: Context length the model was trained for, in tokens.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int
    rms_norm_eps: float
    rope_theta: float = 10000.0
    rope_factor: float = 1.0
    rope_freq_factors: tuple[float, ...] | None = None
    tie_embeddings: bool = True


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """The arguments of `KVCache.create`, which documents them."""

    num_layers: int
    num_pages: int
    page_size: int = 16
    num_kv_heads: int
    head_dim: int
    dtype: str = "bfloat16"
