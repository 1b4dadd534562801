"""Argument checks that several modules share. Plain Python: it may be imported where JAX may not."""

import operator
from typing import SupportsIndex

import numpy as np


def as_count(value: SupportsIndex, label: str, *names: object, minimum: int = 0) -> int:
    """Return `value` as an int >= `minimum`; numpy's integers pass, bools do not. Errors call it
    `label.format(*names)`.
    """
    if type(value) is int:  # the usual case, in a hot path
        count = value
    else:
        try:
            count = operator.index(value)
        except TypeError:
            count = None
        if count is None or isinstance(value, bool):
            got = f"{value!r} ({type(value).__name__})"
            raise TypeError(f"{label.format(*names)} must be an integer >= {minimum}; got {got}.")
    if count < minimum:
        raise ValueError(f"{label.format(*names)} must be an integer >= {minimum}; got {count}.")
    return count


def check_integer(name: str, value: object) -> None:
    """Raise TypeError for what is no integer, by name; numpy's pass, bools do not."""
    if not isinstance(value, int | np.integer) or isinstance(value, bool):
        raise TypeError(f"`{name}` must be an integer; got {value!r}.")


def check_number(name: str, value: object) -> None:
    """Raise TypeError for what is no real number, by name; numpy's pass, bools do not."""
    if not isinstance(value, int | float | np.integer | np.floating) or isinstance(value, bool):
        raise TypeError(f"`{name}` must be a number; got {value!r}.")


def require_arrays(**arrays: object) -> None:
    """Raise TypeError for a value that is neither None nor an array of numpy or JAX, by name."""
    for name, x in arrays.items():
        if x is not None and not (hasattr(x, "shape") and hasattr(x, "dtype")):
            raise TypeError(f"`{name}` must be an array; got {type(x).__name__}. Pass it through jnp.asarray.")
