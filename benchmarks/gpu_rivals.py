"""Who answers a workload of `benchmarks/workloads.py`, and how a call is timed.

A lone call would measure its dispatch. So each rival is one jitted program of many calls, a single CUDA graph where XLA
can make one, several of which are dispatched before anybody waits. The output of a call is the query of the next one:
no two may run at once, and nothing has to be copied in between. Each call reads another layer, and layers together are
larger than any L2 cache.
"""

import dataclasses
import functools
import importlib
import itertools
import warnings
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

import jaxpaged as jp
from benchmarks.workloads import Append, Workload
from jaxpaged.cache.quantize import measure_scale, quantize
from jaxpaged.config import NULL_PAGE, AttentionConfig, cdiv
from jaxpaged.ops.attention.partition import make_partition

# What a rival says of what it cannot do. XLA's own errors are RuntimeErrors.
REFUSALS = (NotImplementedError, ValueError, TypeError, AssertionError, RuntimeError)
COLD_BYTES = 2**28  # of all layers together: twice the largest L2, that of a B200


@dataclasses.dataclass(frozen=True, kw_only=True)
class Program:
    """A rival's jitted calls: `fn(q, *arguments[i])` gives the first call's output and the last one's.

    Attributes:
        q: Of the first call; of programs that write, the cache.
        arguments: One tuple for each rotation of the layers.
    """

    fn: Callable
    q: jax.Array | jp.KVCache
    arguments: list[tuple]
    num_calls: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Inputs:
    """A workload's arrays: page ids are permuted, K and V independent everywhere."""

    workload: Workload
    q: jax.Array  # [num_tokens, num_q_heads, head_dim] bfloat16
    k_pages: jax.Array  # [num_layers, num_pages, num_kv_heads, page_size, head_dim]
    v_pages: jax.Array
    page_table: jax.Array
    seq_lens: jax.Array
    cu_q_lens: jax.Array | None

    @classmethod
    def draw(cls, workload: Workload, *, cold_bytes: int = COLD_BYTES, seed: int = 0) -> "Inputs":
        """Random values, in as many layers as `cold_bytes` asks for, from 2 to 64."""
        w, rng = workload, np.random.default_rng(seed)
        pages_of = [cdiv(n, w.page_size) for n in w.seq_lens]
        num_pages = sum(pages_of) + 1
        ids = iter(rng.permutation(np.arange(1, num_pages)))
        # JAX's own kernel cuts a table in 16, and each part into tiles of up to 8 pages.
        width = cdiv(max(pages_of), 16) * 16 if max(pages_of) <= 128 else cdiv(max(pages_of), 128) * 128
        table = np.full((len(pages_of), width), NULL_PAGE, np.int32)
        for row, num in zip(table, pages_of, strict=True):
            row[:num] = [next(ids) for _ in range(num)]
        a_layer = num_pages * w.num_kv_heads * w.page_size * w.head_dim
        num_layers = min(64, max(2, cdiv(cold_bytes, 4 * a_layer)))
        shape = (num_layers, num_pages, w.num_kv_heads, w.page_size, w.head_dim)
        normal = jax.jit(jax.random.normal, static_argnums=(1, 2))
        keys = jax.random.split(jax.random.key(seed), 3)
        q_lens = None if w.q_lens is None else np.cumsum([0, *w.q_lens], dtype=np.int32)
        return cls(
            workload=w,
            q=normal(keys[0], (w.num_tokens, w.num_q_heads, w.head_dim), jnp.bfloat16),
            k_pages=normal(keys[1], shape, jnp.bfloat16),
            v_pages=normal(keys[2], shape, jnp.bfloat16),
            page_table=jnp.asarray(table),
            seq_lens=jnp.asarray(w.seq_lens, jnp.int32),
            cu_q_lens=None if q_lens is None else jnp.asarray(q_lens),
        )

    def rotations(self, num_calls: int) -> list[list[int]]:
        """Layers of the calls of each rotation."""
        num_layers = self.k_pages.shape[0]
        turns = cdiv(num_layers, num_calls)
        return [[(turn * num_calls + i) % num_layers for i in range(num_calls)] for turn in range(turns)]


def _chain(attend: Callable[..., jax.Array], num_calls: int) -> Callable[..., tuple[jax.Array, jax.Array]]:
    """`attend(q, i, ...)` for i = 0, 1, ..., each on the output of the one before, as one jitted program."""

    @jax.jit
    def fn(q, *args):
        first = last = attend(q, 0, *args)
        for i in range(1, num_calls):
            last = attend(last, i, *args)
        return first, last

    return fn


def jaxpaged(
    inputs: Inputs,
    num_calls: int,
    *,
    backend: str,
    dtype: str = "bfloat16",
    config: AttentionConfig | None = None,
) -> Program:
    """This package. The partition is made once a program, as a model makes it once a step."""
    w, scales, pages = inputs.workload, (None, None), (inputs.k_pages, inputs.v_pages)
    if dtype != "bfloat16":
        encode = jax.jit(lambda x: (quantize(x, scale := measure_scale(x, dtype), dtype), scale))
        pages, scales = zip(*(encode(x) for x in pages), strict=True)
    shared = (*pages, *scales, inputs.page_table, inputs.seq_lens, inputs.cu_q_lens)

    @jax.jit
    def fn(q, layers, k, v, k_scale, v_scale, table, lens, cu):
        partition = None
        if backend in ("triton", "interpret"):
            partition = make_partition(
                jp.Ragged(page_table=table, seq_lens=lens, cu_q_lens=cu),
                jp.AttentionOptions(sliding_window=w.sliding_window, config=config),
                num_tokens=w.num_tokens,
                num_q_heads=q.shape[1],
                num_kv_heads=k.shape[2],
                page_size=k.shape[3],
            )
        outs = []
        for layer in layers:
            q = jp.paged_attention(
                q,
                k,
                v,
                table,
                lens,
                layer=layer,
                cu_q_lens=cu,
                k_scale=k_scale,
                v_scale=v_scale,
                sliding_window=w.sliding_window,
                partition=partition,
                backend=backend,
            )
            outs.append(q)
        return outs[0], outs[-1]

    turns = [tuple(jnp.int32(x) for x in layers) for layers in inputs.rotations(num_calls)]
    return Program(fn=fn, q=inputs.q, arguments=[(layers, *shared) for layers in turns], num_calls=num_calls)


def jax_own(inputs: Inputs, num_calls: int, *, interpret: bool = False) -> Program:
    """`jax.experimental.pallas.ops.gpu.paged_attention` with its defaults, on pages in its own layout."""
    w = inputs.workload
    if w.q_lens is not None:
        raise NotImplementedError("it takes one query token a sequence")
    if w.sliding_window is not None:
        raise NotImplementedError("it has no sliding window")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of that module
        theirs = importlib.import_module("jax.experimental.pallas.ops.gpu.paged_attention")
    by_head = jax.jit(lambda pages, layer: pages[layer].swapaxes(0, 1))
    k, v = ([by_head(x, i) for i in range(x.shape[0])] for x in (inputs.k_pages, inputs.v_pages))

    def attend(q, i, k, v, table, lens):
        return theirs.paged_attention(q, k[i], v[i], table, lens, interpret=interpret)

    turns = inputs.rotations(num_calls)
    arguments = [
        (tuple(k[i] for i in turn), tuple(v[i] for i in turn), inputs.page_table, inputs.seq_lens) for turn in turns
    ]
    # It has no sm_scale. Only the first call's output is looked at; the others are spared the product.
    q = inputs.q * jnp.bfloat16(w.head_dim**-0.5)
    return Program(fn=_chain(attend, num_calls), q=q, arguments=arguments, num_calls=num_calls)


def cudnn(inputs: Inputs, num_calls: int) -> Program:
    """cuDNN's attention through `jax.nn`, on contiguous K and V `[num_seqs, longest, num_kv_heads, head_dim]`."""
    w = inputs.workload
    q_lens = set(w.q_lens or (1,))
    if len(q_lens) > 1:
        raise NotImplementedError("it takes as many query tokens for each sequence")
    q_len = q_lens.pop()
    if q_len > 1 and set(w.seq_lens) != {q_len}:
        raise NotImplementedError("its causal mask counts from the first key, not from the last")
    if w.sliding_window is not None:
        raise NotImplementedError("its window counts from the first key, not from the last")
    longest, num_seqs = max(w.seq_lens), len(w.seq_lens)

    @jax.jit
    def dense(pages, layer):
        x = pages[layer, inputs.page_table].swapaxes(2, 3)
        return x.reshape(num_seqs, -1, w.num_kv_heads, w.head_dim)[:, :longest]

    k, v = ([dense(x, i) for i in range(x.shape[0])] for x in (inputs.k_pages, inputs.v_pages))

    def attend(q, i, k, v, lens):
        return jax.nn.dot_product_attention(
            q, k[i], v[i], key_value_seq_lengths=lens, is_causal=q_len > 1, implementation="cudnn"
        )

    turns = inputs.rotations(num_calls)
    return Program(
        fn=_chain(attend, num_calls),
        q=inputs.q.reshape(num_seqs, q_len, w.num_q_heads, w.head_dim),
        arguments=[(tuple(k[i] for i in turn), tuple(v[i] for i in turn), inputs.seq_lens) for turn in turns],
        num_calls=num_calls,
    )


def append(workload: Append, num_calls: int, *, by: str) -> Program:
    """Writes all layers: by `KVCache.write`, or by one indexed store a layer, `.at[...].set`."""
    w = workload
    num_tokens, rng = sum(w.seq_lens), np.random.default_rng(0)
    pages_of = [cdiv(n, w.page_size) for n in w.seq_lens]
    ids = iter(rng.permutation(np.arange(1, sum(pages_of) + 1)))
    slots = [page * w.page_size + np.arange(w.page_size) for page in ids]
    ends = np.cumsum(pages_of)
    slots = [np.concatenate(slots[e - p : e])[:n] for e, p, n in zip(ends, pages_of, w.seq_lens, strict=True)]
    slots = jnp.asarray(np.concatenate(slots), jnp.int32)
    cache = jp.KVCache.create(
        num_layers=w.num_layers,
        num_pages=sum(pages_of) + 1,
        page_size=w.page_size,
        num_kv_heads=w.num_kv_heads,
        head_dim=w.head_dim,
    )
    kv = jax.random.normal(jax.random.key(0), (2, num_tokens, w.num_kv_heads, w.head_dim), jnp.bfloat16)

    def store(cache: jp.KVCache, layer: int, kv: jax.Array, slots: jax.Array) -> jp.KVCache:
        k, v = kv
        if by == "jaxpaged":
            return cache.write(layer, k, v, slots)
        where = (layer, slots // w.page_size, slice(None), slots % w.page_size)
        return dataclasses.replace(
            cache, k_pages=cache.k_pages.at[where].set(k), v_pages=cache.v_pages.at[where].set(v)
        )

    @functools.partial(jax.jit, donate_argnums=0)
    def fn(cache, kv, slots):
        for layer in list(range(w.num_layers)) * num_calls:
            cache = store(cache, layer, kv, slots)
        return cache.k_pages[0, 1, 0, 0, 0], cache

    return Program(fn=fn, q=cache, arguments=[(kv, slots)], num_calls=num_calls)


def copy(num_bytes: int, num_calls: int) -> Program:
    """Reads and writes `num_bytes` a call: what the memory can do, as a program of this kind sees it."""
    x = jnp.zeros(num_bytes // 4, jnp.int32)
    fn = _chain(lambda x, i: jax.lax.optimization_barrier(x ^ (i + 1)), num_calls)

    # Its first output would be another GiB to keep: nobody wants it.
    return Program(fn=jax.jit(lambda x: (x[0], fn(x)[1])), q=x, arguments=[()], num_calls=num_calls)


def runner(program: Program, num_dispatches: int) -> Callable[[], None]:
    """Dispatches the program several times on its own output, then waits: what `harness.compare` times."""
    turn, state = itertools.cycle(program.arguments), [program.q]

    def run() -> None:
        for _ in range(num_dispatches):
            _, state[0] = program.fn(state[0], *next(turn))
        jax.block_until_ready(state[0])

    return run
