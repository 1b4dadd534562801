"""All arrays of a step in one: a host that uploads a dozen small arrays waits a dozen times."""

import dataclasses
from typing import Any

import jax
import numpy as np
from jax import lax


@dataclasses.dataclass(frozen=True, slots=True)
class Layout:
    """How to find a tree of arrays in the vector that `pack` made of it. Static: it is part of a compiled program."""

    treedef: Any
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[np.dtype, ...]


def pack(tree: Any) -> tuple[np.ndarray, Layout]:
    """Return the bits of all arrays of a tree, four bytes a value, as one int32 vector.

    Raises:
        TypeError: An array has another size of value.
    """
    leaves, treedef = jax.tree.flatten(tree)
    for leaf in leaves:
        if leaf.dtype.itemsize != 4:
            raise TypeError(f"`tree` must hold arrays of four bytes a value; got {leaf.dtype}.")
    shapes, dtypes = tuple(x.shape for x in leaves), tuple(x.dtype for x in leaves)
    flat = [x.reshape(-1).view(np.int32) for x in leaves]
    return np.concatenate(flat), Layout(treedef, shapes, dtypes)


def unpack(packed: jax.Array, layout: Layout) -> Any:
    """Return the tree again, inside `jit`."""
    leaves, begin = [], 0
    for shape, dtype in zip(layout.shapes, layout.dtypes, strict=True):
        size = int(np.prod(shape))
        values = packed[begin : begin + size].reshape(shape)
        leaves.append(values if dtype == np.int32 else lax.bitcast_convert_type(values, dtype))
        begin += size
    return jax.tree.unflatten(layout.treedef, leaves)
