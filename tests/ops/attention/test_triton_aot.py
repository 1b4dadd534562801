"""Machine code of the kernels for each GPU: no spill, loads wide and ahead, tensor cores, no op around them."""

import pytest

from benchmarks.programs import (
    ATTENTION,
    LLAMA_8B,
    NUM_SEQS,
    Attention,
    compile_attention,
    compile_jax_attention,
    compile_step,
    launches_per_layer,
    read_attention,
    tiling_of,
)
from jaxpaged.config import AttentionConfig
from jaxpaged.inspect.aot import GPUS
from tests.inspect.needs import needs_nvdisasm, needs_plugin

pytestmark = [pytest.mark.aot, needs_plugin, needs_nvdisasm]

WHOLE, FIXED = AttentionConfig(max_splits=1), AttentionConfig(split_size=512)
# Every option, dtype, head_dim and group, and most pairs of them; each costs a second or two on each of four GPUs.
CALLS = {
    "decode": ATTENTION["decode"],
    "group 7, head_dim 80, float16": Attention(
        dtype="float16", num_q_heads=56, head_dim=80, sinks=True, logits_soft_cap=30.0, config=FIXED
    ),
    "group 1, head_dim 64, float32": Attention(
        dtype="float32", num_q_heads=8, head_dim=64, sliding_window=1024, config=WHOLE
    ),
    "int8": ATTENTION["int8"],
    "int8, scale a head": Attention(dtype="int8", scale="head", num_q_heads=128, head_dim=64, alibi=True),
    "float8_e4m3fn": Attention(dtype="float8_e4m3fn", sliding_window=1024, sinks=True),
    "float8_e5m2": Attention(dtype="float8_e5m2", num_q_heads=56, head_dim=256, config=FIXED),
    "head_dim 80, page 24": ATTENTION["head_dim 80, page 24"],
    "speculative 4": ATTENTION["speculative 4"],
    "speculative 8, tree": ATTENTION["speculative 8, tree"],
    "speculative 8, head_dim 64, float16": Attention(
        dtype="float16", q_len=8, num_q_heads=128, head_dim=64, logits_soft_cap=30.0, config=WHOLE
    ),
    "prefill, window, soft cap": ATTENTION["prefill, window, soft cap"],
    "prefill, head_dim 256": ATTENTION["prefill, head_dim 256"],
    "prefill, float32": Attention(dtype="float32", q_len=256, num_q_heads=8, sinks=True),
    "prefill, int8": ATTENTION["prefill, int8"],
    # Each of these spilled once: groups that are no power of two, and variants that hold much in registers.
    "prefill, int8, group 7": ATTENTION["prefill, int8, group 7"],
    "prefill, float8_e5m2, head_dim 64": Attention(dtype="float8_e5m2", scale="head", q_len=256, head_dim=64),
    "speculative 16, tree, group 6, head_dim 96": Attention(
        dtype="float16", q_len=16, num_q_heads=48, head_dim=96, sliding_window=1024, sinks=True, alibi=True, tree=True
    ),
    "speculative 4, tree, int8, group 5, head_dim 256": Attention(
        dtype="int8", q_len=4, num_q_heads=40, head_dim=256, tree=True
    ),
    "prefill, group 16, alibi, soft cap": Attention(
        dtype="float16", q_len=256, num_q_heads=128, logits_soft_cap=30.0, alibi=True
    ),
    "speculative 8, group 5, head_dim 64, sinks": Attention(
        dtype="float16", q_len=8, num_q_heads=40, head_dim=64, sinks=True
    ),
    "prefill, group 17, window, page 1": Attention(q_len=64, num_q_heads=136, sliding_window=1024, page_size=1),
}
REFUSED = {("a100", "float8_e4m3fn")}  # its registers know no such type: compute capability 8.9 and later do
PAIRS = [(gpu, name) for name in CALLS for gpu in GPUS if (gpu, name) not in REFUSED]


def compiled(gpu, name):
    return compile_attention(CALLS[name], gpu)


def code_of(gpu, name):
    return read_attention(compiled(gpu, name), CALLS[name], gpu)


@pytest.mark.parametrize(("gpu", "name"), PAIRS)
def test_attention_compiled_is_its_launches_alone_without_copies(gpu, name):
    program, call = compiled(gpu, name), CALLS[name]
    names = ["paged_attention", "paged_attention_combine"][: call.num_launches]
    if call.tree:  # packs the mask into bits, once for all layers
        assert not program.launches[0].name.startswith("paged")
        names.insert(0, program.launches[0].name)
    assert [launch.name for launch in program.launches] == names
    assert program.copies(1) == []
    if call.num_launches == 1:
        assert program.temp_bytes == 0


@pytest.mark.parametrize(("gpu", "name"), PAIRS)
def test_attention_compiled_does_not_spill(gpu, name):
    assert {x.name: x.kernel.spill_bytes for x in compiled(gpu, name).launches if x.kernel.spill_bytes} == {}


@pytest.mark.parametrize(("gpu", "name"), PAIRS)
def test_attention_compiled_copies_16_bytes_ahead_and_multiplies_on_tensor_cores(gpu, name):
    code, call = code_of(gpu, name), CALLS[name]
    # What is copied a turn, 16 bytes an instruction, is the whole K and V tile: nothing of it is loaded otherwise.
    assert code.tokens_per_turn == tiling_of(call).block_k
    # Page ids and scales are copied ahead as well: a load here would stop the loop for as long as memory takes.
    assert code.code.hot_loop.count("LDG") == 0
    assert code.tiles_in_flight >= 1
    assert bool(code.matrix) == (call.dtype != "float32")


@pytest.mark.parametrize(("gpu", "name"), PAIRS)
def test_attention_compiled_keeps_30_kilobytes_in_flight_an_sm(gpu, name):
    assert code_of(gpu, name).bytes_in_flight >= 30_000


def test_attention_compiled_decode_on_an_h200_takes_24_instructions_a_token():
    assert code_of("h200", "decode").instructions_per_token <= 24


@pytest.mark.parametrize("allowed", [False, True])
def test_attention_compiled_of_float32_uses_tensor_cores_where_tf32_is_allowed(allowed):
    call = Attention(dtype="float32", config=AttentionConfig(allow_tf32=allowed))
    assert bool(read_attention(compile_attention(call, "h200"), call, "h200").matrix) == allowed


def test_jax_attention_compiled_reads_as_other_tools_do():
    """26.75 warp-instructions a token where its tile is 64 tokens: 214 in the loop, by 8 warps."""
    call = ATTENTION["decode"]
    program = compile_jax_attention(call, "h200", 64)
    code = read_attention(program, call, "h200")
    assert (len(program.launches), code.tokens_per_turn) == (6, 64)
    assert 26 <= code.instructions_per_token <= 27
    assert program.copies(1) != []


@pytest.mark.parametrize(("gpu", "name"), sorted(REFUSED))
def test_attention_compiled_of_e4m3_on_an_a100_is_refused_by_name(gpu, name):
    with pytest.raises(NotImplementedError, match="float8_e4m3fn"):
        compiled(gpu, name)


def test_decode_step_of_8b_on_an_h200_is_one_graph_without_large_copies():
    program = compile_step()
    assert program.command_buffers == 1
    assert "kWhile" not in program.thunks
    assert all(launch.graph for launch in program.launches)
    # Neither the cache nor a weight: the smallest matrix of a layer is that of O.
    assert program.copies(2 * LLAMA_8B.hidden_size * LLAMA_8B.num_q_heads * LLAMA_8B.head_dim) == []
    assert program.temp_bytes < 64 * 2**20
    a_layer = launches_per_layer(program, LLAMA_8B.num_layers)
    assert a_layer["paged_attention"] == a_layer["paged_attention_combine"] == 1
    # Of K and V, both; in place.
    pool = 8192 * 16 * LLAMA_8B.num_kv_heads * LLAMA_8B.head_dim * 2 * LLAMA_8B.num_layers
    assert program.alias_bytes >= 2 * pool
    assert program.temp_bytes >= NUM_SEQS * LLAMA_8B.vocab_size * 2  # the logits: the step is a whole one
    # Norms, residual adds and activation are in the four products.
    assert a_layer == {"linear": 4, "rope_and_write": 1, "paged_attention": 1, "paged_attention_combine": 1}
