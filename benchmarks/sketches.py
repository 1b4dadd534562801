"""How much faster is jaxpaged than the three sketches it grew from, at what they do? `python -m benchmarks.sketches`

The sketches' ways, written from their description: a deque of free blocks with a dict of reference counts; an integer
whose bits are the free blocks; a torch cache with a table padded with -1, a Python loop that writes one token at a
time, attention that gathers one sequence after another and applies softmax. Beside them runs the same cache used as
torch is best used. All rivals answer the same question, and the answers are compared before anything is timed, on the
CPU, with 8 heads of 64 and pages of 16, in float32 and in bfloat16, the usual type of a cache.

What to expect: allocation is bookkeeping and should cost a few passes over ids and counts (100,000 pages: 1.2 MB, about
1 ms). Writing and attention move memory (16 x 1,024 tokens: 64 MiB), so a plain copy or one pass over the same bytes is
timed beside them as the floor: no rival can be faster, and the ratio to the sketches ends where that of the floor does.
"""

import collections
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

import jaxpaged as jp
from benchmarks import harness
from jaxpaged.paging import PageAllocator, PagePool

NUM_HEADS, HEAD_DIM, PAGE_SIZE = 8, 64, 16
NUM_SEQS, SEQ_LEN = 16, 1024
POOL = 100_000
DTYPES = ("float32", "bfloat16")
TOLERANCE = {"float32": 2e-5, "bfloat16": 2e-2}


class DequeAllocator:
    """Sketch (a): a deque of free blocks, a dict of reference counts, a dict of block tables."""

    def __init__(self, num_blocks: int):
        self.free_blocks = collections.deque(range(num_blocks))
        self.ref_counts: dict[int, int] = {}
        self.tables: dict[int, list[int]] = {}

    def allocate(self, seq_id: int, num_tokens: int) -> list[int]:
        """A table of blocks for a new sequence."""
        needed = (num_tokens + PAGE_SIZE - 1) // PAGE_SIZE
        if needed > len(self.free_blocks):
            raise MemoryError("out of blocks")
        table = []
        for _ in range(needed):
            block = self.free_blocks.popleft()
            self.ref_counts[block] = 1
            table.append(block)
        self.tables[seq_id] = table
        return table

    def free(self, seq_id: int) -> None:
        """Gives a sequence's blocks back."""
        for block in self.tables.pop(seq_id):
            self.ref_counts[block] -= 1
            if self.ref_counts[block] == 0:
                del self.ref_counts[block]
                self.free_blocks.append(block)


class BitmaskAllocator:
    """Sketch (b): bit b of one integer is set while block b is free."""

    def __init__(self, num_blocks: int):
        self.mask = (1 << num_blocks) - 1
        self.tables: dict[int, list[int]] = {}

    def allocate(self, seq_id: int, num_tokens: int) -> list[int]:
        """A table of blocks for a new sequence, the lowest free ones."""
        table = []
        for _ in range((num_tokens + PAGE_SIZE - 1) // PAGE_SIZE):
            if not self.mask:
                raise MemoryError("out of blocks")
            lowest = self.mask & -self.mask
            self.mask ^= lowest
            table.append(lowest.bit_length() - 1)
        self.tables[seq_id] = table
        return table

    def free(self, seq_id: int) -> None:
        """Gives a sequence's blocks back."""
        for block in self.tables.pop(seq_id):
            self.mask |= 1 << block


def time_allocation(pages_per_call: int, reach: float | None) -> harness.Question:
    """A pool of 100,000 pages allocated to the last one in equal calls, then freed in the same calls."""
    num_calls = POOL // pages_per_call
    num_tokens = pages_per_call * PAGE_SIZE

    def by_sequence(allocate: Callable[[int, int], object], free: Callable[[int], None]) -> None:
        for seq_id in range(num_calls):
            allocate(seq_id, num_tokens)
        for seq_id in range(num_calls):
            free(seq_id)

    def by_pages(pool: PagePool) -> None:
        for page_ids in [pool.allocate(pages_per_call) for _ in range(num_calls)]:
            pool.release(page_ids)

    pages, blocks, bits = PageAllocator(POOL + 1, PAGE_SIZE), DequeAllocator(POOL), BitmaskAllocator(POOL)
    rivals = {
        "jaxpaged PageAllocator": functools.partial(by_sequence, pages.add, pages.free),
        "jaxpaged PagePool": functools.partial(by_pages, PagePool(POOL + 1)),
        "deque and dict": functools.partial(by_sequence, blocks.allocate, blocks.free),
    }
    timings = harness.compare(rivals, warmups=2, runs=15)
    # Its cost a page grows with the pool, to seconds here: two runs are enough to place it.
    timings |= harness.compare(
        {"integer bitmask": functools.partial(by_sequence, bits.allocate, bits.free)}, warmups=0, runs=2
    )
    return harness.Question(
        name=f"allocate and free {POOL:,} pages, {pages_per_call:,} a call",
        ours="jaxpaged PageAllocator",
        theirs="deque and dict",
        reach=reach,
        timings=timings,
    )


def make_pages(num_tokens: int) -> PageAllocator:
    """`NUM_SEQS` sequences of `num_tokens`, grown a page at a time in turn, so that their pages interleave."""
    pages = PageAllocator(NUM_SEQS * SEQ_LEN // PAGE_SIZE + 1, PAGE_SIZE)
    for seq_id in range(NUM_SEQS):
        pages.add(seq_id, 0)
    for start in range(0, num_tokens, PAGE_SIZE):
        for seq_id in range(NUM_SEQS):
            pages.append(seq_id, min(PAGE_SIZE, num_tokens - start))
    return pages


def make_kv(num_tokens: int, dtype: str, seed: int) -> tuple[jax.Array, jax.Array]:
    """K and V [num_tokens, NUM_HEADS, HEAD_DIM] of new tokens."""
    rng = np.random.default_rng(seed)
    k, v = rng.standard_normal((2, num_tokens, NUM_HEADS, HEAD_DIM), np.float32)
    return jnp.asarray(k, dtype), jnp.asarray(v, dtype)


def to_torch(torch, x: jax.Array):
    """The same values in torch, which knows no bfloat16 of numpy's."""
    return torch.from_numpy(np.array(x, np.float32)).to(getattr(torch, x.dtype.name))


def copy_both(sources: tuple[np.ndarray, ...], targets: tuple[np.ndarray, ...]) -> None:
    for source, target in zip(sources, targets, strict=True):
        np.copyto(target, source)


class JaxpagedCache:
    """What a jaxpaged user does: host tables to the device, one jitted call that owns the cache."""

    def __init__(self, pages: PageAllocator, dtype: str):
        self.pages = pages
        self.seq_ids = range(NUM_SEQS)
        self.cache = jp.KVCache.create(
            num_layers=1,
            num_pages=pages.num_pages,
            page_size=PAGE_SIZE,
            num_kv_heads=NUM_HEADS,
            head_dim=HEAD_DIM,
            dtype=dtype,
        )
        self._write = jax.jit(lambda cache, k, v, slots: cache.write(0, k, v, slots), donate_argnums=0)
        self._attend = jax.jit(
            lambda q, cache, table, lens: jp.paged_attention(q, cache.k_pages, cache.v_pages, table, lens, layer=0)
        )

    def write(self, k: jax.Array, v: jax.Array, num_new: int) -> None:
        """Stores the last `num_new` tokens of every sequence."""
        slots = self.pages.slot_mapping(self.seq_ids, np.full(NUM_SEQS, num_new))
        self.cache = jax.block_until_ready(self._write(self.cache, k, v, slots))

    def attend(self, q: jax.Array) -> jax.Array:
        """One query token of every sequence over all of its tokens."""
        table = self.pages.page_table(self.seq_ids)
        lens = np.array([self.pages.seq_len(i) for i in self.seq_ids], np.int32)
        return jax.block_until_ready(self._attend(q, self.cache, table, lens))


class TorchPagedCache:
    """The sketches' PagedKVCache and PagedAttention, on one layer.

    Blocks `[num_blocks, block_size, num_heads, head_dim]`, a stack of free blocks, a table of blocks as a tensor padded
    with -1. A write looks up one token after another; attention walks a sequence's blocks, joins what it finds and
    applies softmax, one sequence after another.
    """

    def __init__(self, torch, num_blocks: int, dtype: str):
        self.torch = torch
        max_blocks = SEQ_LEN // PAGE_SIZE
        shape = (num_blocks, PAGE_SIZE, NUM_HEADS, HEAD_DIM)
        self.k_cache, self.v_cache = (torch.zeros(shape, dtype=getattr(torch, dtype)) for _ in range(2))
        self.free_blocks = list(range(num_blocks))
        self.block_tables = torch.full((NUM_SEQS, max_blocks), -1, dtype=torch.int32)
        self.seq_lens = torch.zeros(NUM_SEQS, dtype=torch.int32)

    def grow(self, seq_id: int, num_tokens: int) -> None:
        """Makes room for tokens, a block at a time off the stack."""
        begin = int(self.seq_lens[seq_id])
        for index in range(-(-begin // PAGE_SIZE), -(-(begin + num_tokens) // PAGE_SIZE)):
            self.block_tables[seq_id, index] = self.free_blocks.pop()
        self.seq_lens[seq_id] = begin + num_tokens

    def write(self, k, v, num_new: int) -> None:
        """Stores the last `num_new` tokens of every sequence."""
        for seq_id in range(NUM_SEQS):
            start = self.seq_lens[seq_id].item() - num_new
            for t in range(num_new):
                block = self.block_tables[seq_id, (start + t) // PAGE_SIZE].item()
                offset = (start + t) % PAGE_SIZE
                self.k_cache[block, offset] = k[seq_id * num_new + t]
                self.v_cache[block, offset] = v[seq_id * num_new + t]

    def gather(self, seq_id: int):
        """K and V `[seq_len, num_heads, head_dim]` of a sequence, block by block to the first -1."""
        keys, values = [], []
        left = self.seq_lens[seq_id].item()
        for index in range(self.block_tables.shape[1]):
            block = self.block_tables[seq_id, index].item()
            if block == -1:
                break
            filled = min(left, PAGE_SIZE)
            keys.append(self.k_cache[block, :filled])
            values.append(self.v_cache[block, :filled])
            left -= filled
        return self.torch.cat(keys), self.torch.cat(values)

    def attend(self, q):
        """One query token of every sequence over all of its tokens."""
        outputs = []
        for seq_id in range(NUM_SEQS):
            k, v = self.gather(seq_id)
            scores = self.torch.einsum("hd,khd->hk", q[seq_id], k) * HEAD_DIM**-0.5
            outputs.append(self.torch.einsum("hk,khd->hd", self.torch.softmax(scores, dim=-1), v))
        return self.torch.stack(outputs)


class VectorisedTorchCache(TorchPagedCache):
    """The same blocks used as torch is best used: one indexed store a write, one indexed load and sdpa a batch."""

    def write(self, k, v, num_new: int) -> None:
        """Stores the last `num_new` tokens of every sequence."""
        tokens = self.seq_lens[:, None] - num_new + self.torch.arange(num_new)
        blocks = self.block_tables.gather(1, (tokens // PAGE_SIZE).long()).flatten()
        offsets = (tokens % PAGE_SIZE).flatten()
        self.k_cache[blocks, offsets] = k
        self.v_cache[blocks, offsets] = v

    def attend(self, q):
        """One query token of every sequence over all of its tokens."""
        width = -(-int(self.seq_lens.max()) // PAGE_SIZE)
        tables = self.block_tables[:, :width].clamp(min=0)
        k, v = (
            cache[tables].reshape(NUM_SEQS, -1, NUM_HEADS, HEAD_DIM).transpose(1, 2)
            for cache in (self.k_cache, self.v_cache)
        )
        live = self.torch.arange(k.shape[2]) < self.seq_lens[:, None]
        attend = self.torch.nn.functional.scaled_dot_product_attention
        return attend(q[:, :, None], k, v, attn_mask=live[:, None, None])[:, :, 0]


def make_torch_caches(torch, num_tokens: int, dtype: str) -> tuple[TorchPagedCache, VectorisedTorchCache]:
    """Both torch caches with `NUM_SEQS` sequences of `num_tokens`, their blocks interleaved as in `make_pages`."""
    caches = []
    for make in (TorchPagedCache, VectorisedTorchCache):
        cache = make(torch, NUM_SEQS * SEQ_LEN // PAGE_SIZE, dtype)
        for start in range(0, num_tokens, PAGE_SIZE):
            for seq_id in range(NUM_SEQS):
                cache.grow(seq_id, min(PAGE_SIZE, num_tokens - start))
        caches.append(cache)
    return tuple(caches)


def time_write(torch, num_new: int, dtype: str, runs: int, reach: float | None) -> harness.Question:
    """`num_new` tokens a sequence into their pages."""
    pages = make_pages(SEQ_LEN)
    ours, (theirs, vectorised) = JaxpagedCache(pages, dtype), make_torch_caches(torch, SEQ_LEN, dtype)
    jax_kv = make_kv(NUM_SEQS * num_new, dtype, seed=0)
    k, v = (np.asarray(x) for x in jax_kv)
    torch_kv = [to_torch(torch, x) for x in jax_kv]
    ours.write(*jax_kv, num_new)
    table = pages.page_table(ours.seq_ids)
    lens = np.full(NUM_SEQS, SEQ_LEN, np.int32)
    for cache in (theirs, vectorised):
        cache.write(*torch_kv, num_new)
        for mine, blocks in zip(ours.cache.gather(0, table, lens), (cache.k_cache, cache.v_cache), strict=True):
            mine = mine.reshape(-1, PAGE_SIZE, *mine.shape[2:]).astype(jnp.float32)
            np.testing.assert_array_equal(mine, blocks[cache.block_tables.flatten()].float())
    rivals = {
        "jaxpaged": functools.partial(ours.write, *jax_kv, num_new),
        "torch, a token at a time": functools.partial(theirs.write, *torch_kv, num_new),
        "torch, vectorised": functools.partial(vectorised.write, *torch_kv, num_new),
        "floor: plain copy of K and V": functools.partial(copy_both, (k, v), (np.empty_like(k), np.empty_like(v))),
    }
    return harness.Question(
        name=f"write {NUM_SEQS} x {num_new:,} tokens, {dtype}",
        ours="jaxpaged",
        theirs="torch, a token at a time",
        reach=reach,
        timings=harness.compare(rivals, warmups=2, runs=runs),
    )


def time_attention(torch, seq_len: int, dtype: str, reach: float | None) -> harness.Question:
    """One query token of each sequence over all of its tokens."""
    pages = make_pages(seq_len)
    ours, (theirs, vectorised) = JaxpagedCache(pages, dtype), make_torch_caches(torch, seq_len, dtype)
    k, v = make_kv(NUM_SEQS * seq_len, dtype, seed=1)
    ours.write(k, v, seq_len)
    jax_q, _ = make_kv(NUM_SEQS, dtype, seed=2)
    torch_q = to_torch(torch, jax_q)
    tolerance = TOLERANCE[dtype]
    for cache in (theirs, vectorised):
        cache.write(to_torch(torch, k), to_torch(torch, v), seq_len)
        expected, actual = cache.attend(torch_q).float(), ours.attend(jax_q).astype(jnp.float32)
        np.testing.assert_allclose(actual, expected, rtol=5 * tolerance, atol=tolerance)
    k, v = (np.asarray(x).view(f"u{x.dtype.itemsize}") for x in (k, v))  # numpy reads bfloat16 slowly
    rivals = {
        "jaxpaged": lambda: ours.attend(jax_q),
        "torch, a sequence at a time": lambda: theirs.attend(torch_q),
        "torch, vectorised": lambda: vectorised.attend(torch_q),
        "floor: one pass over K and V": lambda: (k.max(), v.max()),
    }
    return harness.Question(
        name=f"decode attention, batch {NUM_SEQS}, {seq_len:,} tokens, {dtype}",
        ours="jaxpaged",
        theirs="torch, a sequence at a time",
        reach=reach,
        timings=harness.compare(rivals),
    )


def main() -> None:
    torch = harness.import_torch("benchmarks.sketches")
    jax.config.update("jax_platforms", "cpu")
    questions = [
        time_allocation(POOL, reach=10),
        time_allocation(64, reach=1),
        time_allocation(8, reach=None),
        *(time_write(torch, SEQ_LEN, dtype, runs=5, reach=50) for dtype in DTYPES),
        *(time_write(torch, 64, dtype, runs=15, reach=None) for dtype in DTYPES),
        *(time_write(torch, 1, dtype, runs=30, reach=None) for dtype in DTYPES),
        *(time_attention(torch, SEQ_LEN, dtype, reach=5) for dtype in DTYPES),
        *(time_attention(torch, 100, dtype, reach=None) for dtype in DTYPES),
    ]
    harness.report("sketches", questions)


if __name__ == "__main__":
    main()
