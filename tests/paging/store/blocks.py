"""Blocks of pages for the tests of storage, in every dtype a cache may have."""

import ml_dtypes
import numpy as np

NUM_LAYERS, NUM_KV_HEADS, PAGE_SIZE, HEAD_DIM = 2, 3, 4, 5
DTYPES = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "int8": np.dtype(np.int8),
    "float8_e4m3fn": np.dtype(ml_dtypes.float8_e4m3fn),
    "float8_e5m2": np.dtype(ml_dtypes.float8_e5m2),
}


def make_block(num_pages: int, dtype: str = "float32", *, seed: int = 0, scales: bool = False) -> dict[str, np.ndarray]:
    """Every bit pattern is equally likely, so NaNs of all kinds are among them."""
    rng = np.random.default_rng(seed)

    def random(dtype: np.dtype, *shape: int) -> np.ndarray:
        values = rng.integers(0, 256, (*shape[:-1], shape[-1] * dtype.itemsize), np.uint8)
        return values.view(dtype)

    shape = (NUM_LAYERS, num_pages, NUM_KV_HEADS, PAGE_SIZE)
    block = {name: random(DTYPES[dtype], *shape, HEAD_DIM) for name in ("k", "v")}
    if scales:
        block |= {name: random(DTYPES["float32"], *shape) for name in ("k_scale", "v_scale")}
    return block


def assert_same_bits(got: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert sorted(got) == sorted(expected)
    for name, x in expected.items():
        assert got[name].dtype == x.dtype
        assert got[name].shape == x.shape
        assert got[name].tobytes() == x.tobytes(), name


def some_pages(block: dict[str, np.ndarray], index) -> dict[str, np.ndarray]:
    """The block with these pages only."""
    return {name: x[:, index] for name, x in block.items()}
