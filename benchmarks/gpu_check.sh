#!/usr/bin/env bash
# Correctness, then the short list of benchmarks, on a machine with an NVIDIA GPU, in under six minutes:
#
#     OUT=results bash benchmarks/gpu_check.sh
#
# Needs jax with CUDA, flax, chex, numpy, pytest and matplotlib; nothing is installed. Writes tests.txt, benchmark.txt,
# machine.txt, gpu_attention.json and gpu_attention.png to $OUT. Exit code 0 means that all results were right; what
# was reached is in benchmark.txt. SECONDS_FOR_TESTS and SECONDS_IN_ALL bound the time.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 2
out=${OUT:-benchmarks/results/gpu-check}
tests_limit=${SECONDS_FOR_TESTS:-150}
limit=${SECONDS_IN_ALL:-340}
mkdir -p "$out"

export JAX_PLATFORMS=${JAX_PLATFORMS:-cuda} PYTHONUNBUFFERED=1 XLA_PYTHON_CLIENT_PREALLOCATE=false
# The benchmark compiles again what the tests compiled before.
JAX_COMPILATION_CACHE_DIR=$(mktemp -d)
trap 'rm -rf "$JAX_COMPILATION_CACHE_DIR"' EXIT
export JAX_COMPILATION_CACHE_DIR JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS=0
python=${PYTHON:-python3}
if ! "$python" -c "import jaxtyping" 2>/dev/null; then
    export PYTHONPATH="${PYTHONPATH:+$PYTHONPATH:}$PWD/benchmarks/bare"
fi

{
    date -u
    nvidia-smi --query-gpu=name,driver_version,clocks.max.sm,memory.total --format=csv 2>&1
    "$python" -c "import jax; print('jax', jax.__version__, jax.devices())" 2>&1
} | tee "$out/machine.txt"

# Without the project's own options and conftest, which want pytest-xdist and hypothesis.
timeout --kill-after=10 "$tests_limit" "$python" -m pytest tests/ops/attention/test_triton_gpu.py -q -p no:cacheprovider \
    --noconftest -o addopts="--import-mode=importlib" -o filterwarnings=default --durations=5 -rs 2>&1 |
    tee "$out/tests.txt"
tests=${PIPESTATUS[0]}

timeout --kill-after=10 $((limit - SECONDS)) "$python" -m benchmarks.gpu_attention --short --out "$out" \
    --budget $((limit - SECONDS - 60)) "$@" 2>&1 | tee "$out/benchmark.txt"
benchmark=${PIPESTATUS[0]}

# A suite that skipped everything has shown nothing.
if [ "$tests" -eq 0 ] && ! grep -qE '[0-9]+ passed' "$out/tests.txt"; then tests=5; fi
echo "tests: exit code $tests; benchmark: exit code $benchmark; $SECONDS s" | tee -a "$out/machine.txt"
[ "$tests" -eq 0 ] && [ "$benchmark" -eq 0 ]
