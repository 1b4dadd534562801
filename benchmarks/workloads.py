"""Attention workloads to time on a GPU: sizes only, no arrays.

A workload says how many tokens each sequence has and how many of them are new; the sizes are those that libraries
publish (32 query heads over 8 KV heads of 128 in bfloat16, where nothing else is said).
"""

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workload:
    """One attention call.

    Attributes:
        seq_lens: KV tokens of each sequence, this step's included.
        q_lens: New tokens of each sequence; None for one each (decode).
    """

    name: str
    seq_lens: tuple[int, ...]
    q_lens: tuple[int, ...] | None = None
    num_q_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    page_size: int = 16
    sliding_window: int | None = None

    @property
    def num_tokens(self) -> int:
        """New tokens."""
        return len(self.seq_lens) if self.q_lens is None else sum(self.q_lens)

    def num_kv_read(self) -> int:
        """KV tokens that must be read: those that some query sees."""
        if self.sliding_window is None:
            return sum(self.seq_lens)
        q_lens = self.q_lens or (1,) * len(self.seq_lens)
        return sum(min(n, m + self.sliding_window - 1) for n, m in zip(self.seq_lens, q_lens, strict=True))

    def num_bytes(self, kv_itemsize: int) -> int:
        """What a call must move: K and V of one layer once, queries in and outputs out in 16 bits."""
        kv = self.num_kv_read() * self.num_kv_heads * 2 * (self.head_dim * kv_itemsize + 4 * (kv_itemsize == 1))
        return kv + 2 * self.num_tokens * self.num_q_heads * self.head_dim * 2

    def num_flops(self) -> int:
        """Of both products, masked keys left out."""
        q_lens, pairs = self.q_lens or (1,) * len(self.seq_lens), 0
        for n, m in zip(self.seq_lens, q_lens, strict=True):
            seen = np.arange(n - m + 1, n + 1)
            pairs += int(np.minimum(seen, self.sliding_window or n).sum())
        return 4 * pairs * self.num_q_heads * self.head_dim


@dataclasses.dataclass(frozen=True, kw_only=True)
class Append:
    """New K and V of all layers, written into the cache; a sequence of n tokens arrives whole."""

    name: str
    num_kv_heads: int
    num_layers: int
    seq_lens: tuple[int, ...]
    head_dim: int = 128
    page_size: int = 16

    def num_bytes(self) -> int:
        """Read once and written once, bfloat16, all layers."""
        return 2 * 2 * 2 * sum(self.seq_lens) * self.num_layers * self.num_kv_heads * self.head_dim


def _decode(batch: int, q_heads: int, kv_heads: int, head_dim: int, length: int, **sizes) -> Workload:
    heads = "" if (q_heads, kv_heads, head_dim) == (32, 8, 128) else f" {q_heads}/{kv_heads}/{head_dim}"
    window = f" window {w}" if (w := sizes.get("sliding_window")) else ""
    page = f" page {p}" if (p := sizes.get("page_size")) else ""
    return Workload(
        name=f"decode B{batch} S{length}{heads}{window}{page}",
        seq_lens=(length,) * batch,
        num_q_heads=q_heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        **sizes,
    )


def _queries(kind: str, batch: int, q_len: int, length: int) -> Workload:
    return Workload(name=f"{kind} B{batch} q{q_len} S{length}", seq_lens=(length,) * batch, q_lens=(q_len,) * batch)


def _skewed(length: int = 1024, batch: int = 16) -> list[Workload]:
    rng = np.random.default_rng(0)
    zipf = np.minimum(rng.zipf(1.5, batch) * 64, 8192)
    few_long = [8192] * (batch // 8) + [int(n) for n in rng.integers(length // 16, length // 8, batch - batch // 8)]
    lens = {
        "constant": [length] * batch,
        "uniform": rng.integers(length // 2, length + 1, batch),
        "zipf": zipf,
        "few long": few_long,
        "bimodal": [length if i % 2 else length // 8 for i in range(batch)],
    }
    return [Workload(name=f"skew {kind}", seq_lens=tuple(int(n) for n in ns)) for kind, ns in lens.items()]


DECODE = [
    *(_decode(1, 32, 8, 128, n) for n in (1024, 8192, 32768)),
    *(_decode(8, 32, 8, 128, n) for n in (1024, 4096, 16384, 32768)),
    _decode(16, 64, 8, 128, 1024),
    _decode(32, 32, 8, 128, 4096),
    _decode(64, 64, 8, 128, 1024),
    _decode(128, 32, 8, 128, 1024),
    _decode(16, 32, 32, 128, 2048),
    _decode(64, 32, 4, 128, 8192),
    _decode(64, 64, 8, 64, 4096),
    _decode(64, 8, 1, 128, 8192),
    _decode(8, 28, 4, 128, 4096),
]
OTHERS = [
    *_skewed(),
    _queries("speculative", 8, 8, 4096),
    *(_queries("speculative", 16, q, 1024) for q in (2, 4, 8)),
    *(_queries("prefill", 1, q, q) for q in (512, 1024, 2048, 4096, 8192)),
    _queries("prefill", 1, 1024, 2048),
    _queries("prefill", 2, 1024, 4096),
    Workload(name="mixed 2 x q2048, 8 x q1", seq_lens=(2048,) * 2 + (1024,) * 8, q_lens=(2048,) * 2 + (1,) * 8),
    *(_decode(8, 32, 8, 128, n, sliding_window=128) for n in (32, 128, 512, 2048, 8192, 16384)),
    *(_decode(32, 32, 8, 128, 4096, page_size=p) for p in (1, 64, 256)),
]
APPEND = [
    Append(name=f"append {heads}x{layers} {what}", num_kv_heads=heads, num_layers=layers, head_dim=dim, seq_lens=lens)
    for heads, layers, dim in ((8, 16, 64), (8, 28, 128), (8, 32, 128), (1, 80, 128))
    for what, lens in (
        ("[1]*8", (1,) * 8),
        ("[4993]+[1]*7", (4993, *(1,) * 7)),
        ("[5000]", (5000,)),
        ("[625]*8", (625,) * 8),
    )
]
# What has a reach, and one of each other kind.
SHORT = [
    w
    for w in DECODE + OTHERS
    if w.name
    in (
        *("decode B1 S1024", "decode B1 S32768", "decode B8 S16384", "decode B8 S32768", "decode B32 S4096"),
        *("decode B128 S1024", "skew few long", "speculative B8 q8 S4096", "prefill B1 q2048 S2048"),
    )
]
SHORT_APPEND = APPEND[8:10]
SMOKE = [
    Workload(name="decode", seq_lens=(40, 7), num_q_heads=4, num_kv_heads=2, head_dim=16),
    Workload(name="speculative", seq_lens=(40, 17), q_lens=(3, 3), num_q_heads=4, num_kv_heads=2, head_dim=16),
]
SMOKE_APPEND = [Append(name="append", num_kv_heads=2, num_layers=2, head_dim=16, seq_lens=(9, 1))]
