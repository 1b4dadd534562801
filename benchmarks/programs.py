"""What is compiled for GPUs that are not there: attention calls, JAX's own, and one decode step of a large model.

Shapes only: nothing here holds a value or needs a device. `tests/ops/attention/test_triton_aot.py` compiles the same
programs as `benchmarks/gpu_code.py`.
"""

import collections
import dataclasses
import functools
import importlib
import itertools
import re
import warnings

import jax
import jax.numpy as jnp
from flax import nnx

import jaxpaged as jp
from jaxpaged.cache.quantize import is_quantized
from jaxpaged.config import AttentionConfig
from jaxpaged.inspect.aot import GPUS, CompiledProgram, Launch, compile_for
from jaxpaged.inspect.sass import MATRIX, WIDE_COPY, Code, read_sass
from jaxpaged.models.config import LlamaConfig
from jaxpaged.models.llama import Llama
from jaxpaged.ops.attention.partition import make_partition
from jaxpaged.ops.attention.tilings import Tiling, choose_tiling
from jaxpaged.ops.attention.triton import paged_attention_triton

_shape = jax.ShapeDtypeStruct
DEFAULT = AttentionConfig()
NUM_SEQS, PAGE_SIZE, MAX_PAGES, NUM_PAGES = 64, 16, 128, 8192


@dataclasses.dataclass(frozen=True, kw_only=True)
class Attention:
    """One way to call the kernel: 64 sequences with tables of 128 pages, one layer of two.

    Attributes:
        dtype: Of the pages; queries over one-byte pages are bfloat16.
        q_len: Query tokens a sequence; of a decode step 1, without `cu_q_lens`.
        scale: Of one-byte pages: for each `"token"` and head, or for each `"head"`.
        sinks: A sink a head.
        tree: A tree mask, as wide as `q_len`.
    """

    dtype: str = "bfloat16"
    num_q_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    q_len: int = 1
    scale: str = "token"
    sliding_window: int | None = None
    logits_soft_cap: float | None = None
    sinks: bool = False
    alibi: bool = False
    tree: bool = False
    page_size: int = PAGE_SIZE
    config: AttentionConfig = DEFAULT

    @property
    def compute_dtype(self) -> jnp.dtype:
        """Of the queries, and of products."""
        return jnp.dtype("bfloat16" if is_quantized(self.dtype) else self.dtype)

    @property
    def num_launches(self) -> int:
        """Attention, and what merges the pieces of sequences that were cut."""
        return 1 if self.config.max_splits == 1 else 2


def _group(size: int) -> Attention:
    return Attention(num_q_heads=8 * size)


ATTENTION = {
    "decode": Attention(),
    "float16": Attention(dtype="float16"),
    "float32": Attention(dtype="float32"),
    "int8": Attention(dtype="int8"),
    "int8, scale a head": Attention(dtype="int8", scale="head"),
    "float8_e4m3fn": Attention(dtype="float8_e4m3fn"),
    "float8_e5m2": Attention(dtype="float8_e5m2"),
    "head_dim 64": Attention(head_dim=64),
    "head_dim 80": Attention(head_dim=80),
    "head_dim 80, page 24": Attention(head_dim=80, page_size=24),
    "head_dim 256": Attention(head_dim=256),
    "group 1": _group(1),
    "group 7": _group(7),
    "group 16": _group(16),
    "window": Attention(sliding_window=1024),
    "sinks, soft cap": Attention(sinks=True, logits_soft_cap=30.0),
    "alibi": Attention(alibi=True),
    "max_splits=1": Attention(config=AttentionConfig(max_splits=1)),
    "split_size=512": Attention(config=AttentionConfig(split_size=512)),
    "speculative 4": Attention(q_len=4),
    "speculative 8": Attention(q_len=8),
    "speculative 8, tree": Attention(q_len=8, tree=True),
    "prefill": Attention(q_len=256),
    "prefill, window, soft cap": Attention(q_len=256, sliding_window=1024, logits_soft_cap=30.0),
    "prefill, head_dim 256": Attention(q_len=256, head_dim=256),
    "prefill, float32": Attention(q_len=256, dtype="float32"),
    "prefill, int8": Attention(q_len=256, dtype="int8"),
    "prefill, int8, group 7": Attention(q_len=256, dtype="int8", num_q_heads=56),
}


@functools.cache
def compile_attention(call: Attention, gpu: str) -> CompiledProgram:
    """One call with a partition made before, as in a model: the partition is made once a step."""
    q, view, ragged, options = values_of(call, gpu)
    return compile_for(
        lambda q, cache, ragged, options: paged_attention_triton(q, cache.layer(1), ragged, options),
        *(q, view.cache, ragged, options),
        gpu=gpu,
    )


def values_of(call: Attention, gpu: str) -> tuple[jax.ShapeDtypeStruct, jp.LayerView, jp.Ragged, jp.AttentionOptions]:
    """What a backend takes, in shapes. The step is cut for the GPU."""
    dtype = jnp.dtype(call.dtype)
    pages = _shape((2, NUM_PAGES, call.num_kv_heads, call.page_size, call.head_dim), dtype)
    scale = None
    if is_quantized(dtype):
        scale = _shape(pages.shape[:4] if call.scale == "token" else (2, call.num_kv_heads), jnp.float32)
    cache = jp.KVCache(k_pages=pages, v_pages=pages, k_scale=scale, v_scale=scale)
    num_tokens, per_head = NUM_SEQS * call.q_len, _shape((call.num_q_heads,), jnp.float32)
    options = jp.AttentionOptions(
        logits_soft_cap=call.logits_soft_cap,
        sliding_window=call.sliding_window,
        config=dataclasses.replace(call.config, target=gpu),
        sinks=per_head if call.sinks else None,
        alibi_slopes=per_head if call.alibi else None,
    )
    ragged = jp.Ragged(
        page_table=_shape((NUM_SEQS, MAX_PAGES), jnp.int32),
        seq_lens=_shape((NUM_SEQS,), jnp.int32),
        cu_q_lens=_shape((NUM_SEQS + 1,), jnp.int32) if call.q_len > 1 else None,
        tree_mask=_shape((num_tokens, call.q_len), jnp.bool_) if call.tree else None,
    )
    sizes = {"num_q_heads": call.num_q_heads, "num_kv_heads": call.num_kv_heads, "page_size": call.page_size}
    partition = jax.eval_shape(functools.partial(make_partition, num_tokens=num_tokens, **sizes), ragged, options)
    q = _shape((num_tokens, call.num_q_heads, call.head_dim), call.compute_dtype)
    return q, cache.layer(1), dataclasses.replace(ragged, partitions=(partition,)), options


def tiling_of(call: Attention) -> Tiling:
    """The tiles that the kernel takes for a call."""
    q, view, ragged, options = values_of(call, "h200")
    return choose_tiling(q, view, ragged, options, ragged.partitions[0])


def call_of(tiling: Tiling) -> Attention:
    """A call that takes a row of the table of tiles: a decode step for 16 rows, else prefill."""
    is_prefill = tiling.rows > 16
    plain = Attention(
        dtype={1: "int8", 2: "bfloat16", 4: "float32"}[tiling.itemsize],
        num_q_heads=8 * (tiling.rows // DEFAULT.block_q if is_prefill else 4),
        q_len=64 if is_prefill else 1,
    )
    tried = itertools.product((tiling.width, tiling.width * 3 // 4), (False, True))
    calls = (dataclasses.replace(plain, head_dim=head_dim, tree=tree) for head_dim, tree in tried)
    return next(call for call in calls if tiling_of(call) == tiling)


def why_not_jax(call: Attention) -> str | None:
    """What of a call JAX's own kernel has no argument for, or None."""
    if call.q_len > 1:
        return "one query token a sequence only"
    for name, given in (
        ("window", call.sliding_window),
        ("sinks", call.sinks),
        ("ALiBi", call.alibi),
        ("scale a head", call.scale == "head"),
        ("such a partition", call.config != DEFAULT),
    ):
        if given:
            return f"no {name}"
    return None


@functools.cache
def compile_jax_attention(call: Attention, gpu: str, max_pages: int = MAX_PAGES) -> CompiledProgram:
    """The same call through `jax.experimental.pallas.ops.gpu.paged_attention`, with its defaults.

    Args:
        max_pages: Width of the page table. Its tile is a sixteenth of that, at most 8 pages.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of that module
        theirs = importlib.import_module("jax.experimental.pallas.ops.gpu.paged_attention")
    pages = _shape((call.num_kv_heads, NUM_PAGES, call.page_size, call.head_dim), call.dtype)
    scale = _shape(pages.shape[:3], jnp.float32) if is_quantized(call.dtype) else None
    return compile_for(
        lambda *args: theirs.paged_attention(*args, attn_logits_soft_cap=call.logits_soft_cap),
        _shape((NUM_SEQS, call.num_q_heads, call.head_dim), call.compute_dtype),
        pages,
        pages,
        _shape((NUM_SEQS, max_pages), jnp.int32),
        _shape((NUM_SEQS,), jnp.int32),
        scale,
        scale,
        gpu=gpu,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionCode:
    """Machine code of an attention kernel.

    Attributes:
        bytes_per_token: K and V of one head, in the kernel's padding of head_dim.
        blocks_per_sm: Programs that run on an SM at once.
    """

    launch: Launch
    code: Code
    bytes_per_token: int
    blocks_per_sm: int

    @property
    def copied_per_turn(self) -> int:
        """Bytes of K and V that the hot loop copies a turn, 16 a thread and instruction."""
        return self.code.hot_loop.count(WIDE_COPY) * 16 * self.launch.threads

    @property
    def tokens_per_turn(self) -> int | None:
        """KV tokens that a program takes a turn, by what it copies; None if it copies otherwise."""
        return self.copied_per_turn // self.bytes_per_token or None

    @property
    def instructions_per_token(self) -> float | None:
        """Warp-instructions of the hot loop, of all warps of a program, for each KV token."""
        tokens = self.tokens_per_turn
        return tokens and len(self.code.hot_loop.names) * (self.launch.threads // 32) / tokens

    @property
    def tiles_in_flight(self) -> float:
        """K/V tiles asked for ahead: what is copied before the hot loop, in units of what it copies a turn.

        Less what was multiplied by then: for tensor cores of a B200 the compiler takes a turn out of the loop and puts
        it before it, and the next turn's product by K with it, which is half of its tile.
        """
        before, loop = self.code.prologue, self.code.hot_loop
        turns, rest = divmod(before.count(*MATRIX), max(1, loop.count(*MATRIX)))
        return before.count(WIDE_COPY) / max(1, loop.count(WIDE_COPY)) - turns - (rest > 0) / 2

    @property
    def bytes_in_flight(self) -> int:
        """Of K and V, asked for ahead by all programs of an SM together."""
        return int(self.tiles_in_flight * self.copied_per_turn * self.blocks_per_sm)

    @property
    def matrix(self) -> dict[str, int]:
        """Tensor-core instructions of the hot loop."""
        return {name: n for name in MATRIX if (n := self.code.hot_loop.count(name))}


def read_attention(program: CompiledProgram, call: Attention, gpu: str) -> AttentionCode:
    """Of the program's attention kernel. Raises FileNotFoundError without `nvdisasm`."""
    launch = next(x for x in program.launches if x.name.startswith("paged_attention"))
    if launch.kernel is None:
        raise ValueError(f"`program` must hold the machine code of {launch.name}; got none.")
    width = 1 << (call.head_dim - 1).bit_length()
    return AttentionCode(
        launch=launch,
        code=read_sass(launch.kernel.sass()),
        bytes_per_token=2 * width * jnp.dtype(call.dtype).itemsize,
        blocks_per_sm=launch.blocks_per_sm(GPUS[gpu]),
    )


LLAMA_8B = LlamaConfig(
    vocab_size=128256,
    hidden_size=4096,
    intermediate_size=14336,
    num_layers=32,
    num_q_heads=32,
    num_kv_heads=8,
    head_dim=128,
    max_position=8192,
    rms_norm_eps=1e-5,
    rope_theta=500000.0,
    tie_embeddings=False,
)


@functools.cache
def compile_step(config: LlamaConfig = LLAMA_8B, gpu: str = "h200") -> CompiledProgram:
    """A greedy decode step of `NUM_SEQS` sequences in bfloat16, the cache donated."""

    def array(*dims: int):
        return _shape((NUM_SEQS, *dims), jnp.int32)

    model = nnx.eval_shape(lambda: Llama(config, dtype=jnp.bfloat16, layer_loop="unroll", rngs=nnx.Rngs(0)))
    cache_config = dataclasses.asdict(model.cache_config(num_pages=NUM_PAGES, page_size=PAGE_SIZE))
    cache = jax.eval_shape(lambda: jp.KVCache.create(**cache_config))
    ragged = jp.Ragged(page_table=array(MAX_PAGES), seq_lens=array(), slot_mapping=array())
    batch = jp.Batch(token_ids=array(), positions=array(), ragged=ragged)

    def step(model, cache, batch):
        logits, cache = model(cache, batch)
        return jnp.argmax(logits, axis=-1).astype(jnp.int32), cache

    return compile_for(step, model, cache, batch, gpu=gpu, donate_argnums=1)


def base_name(launch: Launch) -> str:
    """The kernel's name without the numbers that XLA appends."""
    return re.sub(r"(_+\d+)+$", "", launch.name)


def launches_per_layer(program: CompiledProgram, num_layers: int) -> dict[str, int]:
    """How often each kernel runs a layer, by `base_name`; what runs once a step is left out."""
    names = collections.Counter(map(base_name, program.launches))
    return {name: a_layer for name, n in names.items() if (a_layer := round(n / num_layers))}
