"""Configuration: frozen, hashable, plain Python. Every other module may import this one; it imports none of them."""

import dataclasses
from typing import Literal, NamedTuple

NULL_PAGE = 0
"""The page id that is never allocated. Page tables are padded with it, so that a gather of padding stays in range."""

BACKENDS = ("auto", "reference", "xla", "triton", "interpret")
"""What can be named as `backend`, as long as nobody has registered more: see `jaxpaged.ops.dispatch`."""

SLOTS = {"a100": 108 * 2, "l4": 58, "h100": 132 * 3, "h200": 132 * 3, "b200": 148 * 3}
"""Attention programs that a GPU of each kind runs at once: its SMs, times the programs that fit one while decoding.

Compiled for head_dim 128 in bfloat16: registers allow an H200 three programs an SM, shared memory an A100 two and an L4
one. A table and not a question to a device, so that a step compiled elsewhere is the same step.
"""

DEFAULT_TARGET = "h200"
"""The kind of GPU that attention is cut for where nobody says which."""


def target_of(device_kind: str) -> str:
    """Return the name in `SLOTS` of a device, by `jax.Device.device_kind` ("NVIDIA A100-SXM4-80GB" say).

    A device that is not in the table gets `DEFAULT_TARGET`: results are the same, only shares are cut for another size.
    """
    words = device_kind.lower().replace("-", " ").split()
    return next((name for name in SLOTS if name in words), DEFAULT_TARGET)


def cdiv(a: int, b: int) -> int:
    """Return `a / b` rounded up, for non-negative integers."""
    return -(-a // b)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AttentionConfig:
    """How the Triton kernel cuts its work. Results differ by rounding only. The XLA path takes from it whether it is
    batch-invariant, and nothing else.

    Attributes:
        target: The kind of GPU whose size the work is cut for, one of `SLOTS`. None takes that of the cache, which the
            engine makes for the device that it lies on, or `DEFAULT_TARGET`.
        num_programs: Programs that share the stream of KV tokens, for each KV head and block of query rows. None takes
            as many as the target runs at once; more would run in two waves.
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
        ValueError: An unknown target, a size below its minimum, `block_k` no power of two, `max_splits` neither None
            nor 1, or a `split_size` where nothing is split.
    """

    target: str | None = None
    num_programs: int | None = None
    max_splits: Literal[1] | None = None
    split_size: int | None = None
    allow_tf32: bool = False
    block_q: int = 16
    block_k: int | None = None
    num_warps: int | None = None
    num_stages: int | None = None

    def __post_init__(self) -> None:
        if self.target is not None and self.target not in SLOTS:
            raise ValueError(f"`target` must be one of {', '.join(SLOTS)}; got {self.target!r}.")
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

    def for_target(self, target: str | None) -> "AttentionConfig":
        """Return the same, with this target where it names none."""
        return self if self.target is not None or target is None else dataclasses.replace(self, target=target)

    @property
    def is_batch_invariant(self) -> bool:
        """Whether a sequence's result has the same bits whatever else is in the batch."""
        return self.max_splits == 1 or self.split_size is not None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LayerSpec:
    """What a model declares of the attention of one layer, so that the layer can be given pages.

    Attributes:
        num_kv_heads: Heads of K and of V.
        head_dim: Values a head.
        sliding_window: How many tokens a token sees, itself included; None is all before it.
    """

    num_kv_heads: int
    head_dim: int
    sliding_window: int | None = None


class LayerPlace(NamedTuple):
    """Where a layer of a model keeps its K and V: `jaxpaged.paging.group_layers` says it of each layer.

    Attributes:
        group: Number of its page group, whose page table and slots it uses.
        row: Which row of the stacked pools is the layer's. Layers of different groups share rows, never pages.
    """

    group: int
    row: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """The arguments of `KVCache.create`, which documents them."""

    num_layers: int
    num_pages: int
    page_size: int = 16
    num_kv_heads: int
    head_dim: int
    dtype: str = "bfloat16"
