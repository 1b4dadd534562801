"""The engine gives the same tokens whatever its user has set in JAX."""

import contextlib
import dataclasses
import functools
import os
import subprocess
import sys

import jax
import pytest
from flax import nnx

from jaxpaged.engine import SamplingParams
from jaxpaged.models.llama import Llama
from jaxpaged.paging.store.swap import SwapSpace
from jaxpaged.testing.conformance.calls import strict_promotion
from tests.engine.tiny import CONFIG, LIMITS, PROMPTS, make_engine

SETTINGS = {
    "x64": functools.partial(jax.enable_x64, True),
    "strict": strict_promotion,
    "no implicit transfers": functools.partial(jax.transfer_guard, "disallow"),
    "debug_nans": functools.partial(jax.debug_nans, True),
    "leaks": jax.checking_leaks,
    "precision": functools.partial(jax.default_matmul_precision, "highest"),
}
ALL = SamplingParams(
    max_new_tokens=6,
    min_new_tokens=2,
    temperature=1.0,
    top_k=9,
    top_p=0.9,
    min_p=0.05,
    seed=3,
    repetition_penalty=1.1,
    frequency_penalty=0.1,
    presence_penalty=0.2,
    logit_bias={3: 1.0},
    stop_token_ids=(63,),
    num_logprobs=2,
    prompt_logprobs=1,
)
KINDS = {
    "greedy": (SamplingParams(max_new_tokens=6), {}),
    "sampled": (ALL, {"limits": dataclasses.replace(LIMITS, max_num_seqs=1)}),  # few programs
    "swapped": (SamplingParams(max_new_tokens=24), {"num_pages": 26}),
}


@functools.cache
def generate(kind: str, setting: str | None) -> list[tuple[int, ...]]:
    params, options = KINDS[kind]
    options = options | ({"swap": SwapSpace(1 << 20)} if kind == "swapped" else {})
    model = Llama(CONFIG, layer_loop="calls", rngs=nnx.Rngs(0))
    with SETTINGS[setting]() if setting else contextlib.nullcontext():
        return [output.token_ids for output in make_engine(model, **options).generate(PROMPTS, params)]


@pytest.mark.parametrize("setting", [x if x == "x64" else pytest.param(x, marks=pytest.mark.slow) for x in SETTINGS])
@pytest.mark.parametrize("kind", ["sampled", *(pytest.param(x, marks=pytest.mark.slow) for x in ("greedy", "swapped"))])
def test_engine_under_a_setting_gives_the_same_tokens(kind, setting):
    assert generate(kind, setting) == generate(kind, None)


@pytest.mark.slow
def test_engine_with_another_random_generator_is_reproducible():
    with jax.default_prng_impl("rbg"):
        model = Llama(CONFIG, layer_loop="calls", rngs=nnx.Rngs(0))
        first, second = (make_engine(model).generate(PROMPTS, ALL) for _ in range(2))
    assert [x.token_ids for x in first] == [x.token_ids for x in second]


@pytest.mark.slow
@pytest.mark.parametrize(
    "variable",
    [
        "JAX_ENABLE_X64=1",
        "JAX_NUMPY_DTYPE_PROMOTION=strict",
        "JAX_NUMPY_RANK_PROMOTION=raise",
        "JAX_TRANSFER_GUARD=disallow",
        "JAX_DEFAULT_PRNG_IMPL=rbg",
        "JAX_DEBUG_NANS=1",
        "JAX_CHECK_TRACER_LEAKS=1",
        "JAX_DEFAULT_MATMUL_PRECISION=bfloat16",
    ],
)
def test_generate_under_a_setting_of_the_environment_prints_the_same_text(variable):
    name, value = variable.split("=")
    command = [sys.executable, "-m", "jaxpaged", "generate", "The capital of France is", "--max-new-tokens", "8"]
    done = subprocess.run(command, env=os.environ | {name: value}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("The capital of France is Paris.")
