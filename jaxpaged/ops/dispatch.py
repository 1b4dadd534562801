"""One registry an operation: its backends, which of them a call takes, and how a derivative goes through it.

Three rules are written here for all operations. A named backend runs or raises with its reason. `"auto"` follows the
platform that the computation is lowered for: the kernel on CUDA where it takes the call, the formula everywhere else.
A derivative does not depend on which backend ran.

    from jaxpaged.ops.attention import ATTENTION
    ATTENTION.register(Backend("mine", my_attend))          # jp.paged_attention(..., backend="mine")
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import lax

Run = Callable[..., Any]
"""Computes an operation. Which arguments it takes and what it returns is the operation's."""


def _takes_all(*_: Any) -> None:
    return None


class Backend(NamedTuple):
    """One way to compute an operation.

    Attributes:
        name: What `backend=` calls it.
        run: Takes the operation's arguments, validated, and returns its result. May be traced for any platform.
        why_unsupported: Takes the same arguments; the reason why `run` cannot take them, or None. It looks at shapes,
            dtypes and options, never at a device or a value.
        is_differentiable: Whether JAX differentiates `run` by itself, so that the operation's rule is not needed.
    """

    name: str
    run: Run
    why_unsupported: Callable[..., str | None] = _takes_all
    is_differentiable: bool = False


class Op:
    """An operation with its backends.

    Args:
        formula: Which of the backends takes every call on every device.
        kernel: Which of them is for NVIDIA GPUs.
        derivative: Called as `derivative(run, *arguments)`: `run(*arguments)`, with a rule for its derivative. None
            takes the derivative of the formula.
    """

    def __init__(self, *backends: Backend, formula: str, kernel: str, derivative: Run | None = None):
        self._backends = {backend.name: backend for backend in backends}
        self._formula, self._kernel = formula, kernel
        self._derivative = derivative or self._of_formula

    @property
    def names(self) -> tuple[str, ...]:
        """What `backend=` may be."""
        return ("auto", *self._backends)

    def register(self, backend: Backend) -> None:
        """Add a backend, which can then be named. A later one of the same name takes the place of the earlier.

        Raises:
            ValueError: It is called "auto".
        """
        if backend.name == "auto":
            raise ValueError("`backend` must have a name of its own; got 'auto', which chooses among the others.")
        self._backends[backend.name] = backend

    def check_name(self, backend: str) -> None:
        """Raise ValueError for a name that nobody has registered."""
        if backend not in self.names:
            raise ValueError(f"`backend` must be one of {', '.join(self.names)}; got {backend!r}.")

    def why_unsupported(self, *arguments: Any, backend: str) -> str | None:
        """Return the reason that a backend, by name, gives for not taking these arguments, or None."""
        self.check_name(backend)
        return None if backend == "auto" else self._backends[backend].why_unsupported(*arguments)

    def __call__(self, *arguments: Any, backend: str) -> Any:
        """Return the result by one of the backends.

        Raises:
            ValueError: Nobody has registered such a backend.
            NotImplementedError: The named backend does not do this; the message says why.
        """
        self.check_name(backend)
        chosen = self._backends[self._formula if backend == "auto" else backend]
        if backend == "auto":
            kernel = self._backends[self._kernel]
            # The branch for CUDA is traced wherever the program will run: what it cannot take must not reach it.
            if kernel.why_unsupported(*arguments) is None:
                return self._derivative(_by_platform(kernel.run, chosen.run), *arguments)
        elif reason := chosen.why_unsupported(*arguments):
            raise NotImplementedError(f"`backend={backend!r}` cannot run this call: {reason}")
        if chosen.is_differentiable:
            return chosen.run(*arguments)
        return self._derivative(chosen.run, *arguments)

    def _of_formula(self, run: Run, *arguments: Any) -> Any:
        arrays, rebuild = take_arrays(arguments)
        formula = self._backends[self._formula].run

        @jax.custom_jvp
        def call(*arrays: Any) -> Any:
            return run(*rebuild(arrays))

        @call.defjvp
        def _(primals: Any, tangents: Any) -> Any:
            return jax.jvp(lambda *arrays: formula(*rebuild(arrays)), primals, tangents)

        return call(*arrays)


def _by_platform(kernel: Run, formula: Run) -> Run:
    def run(*arguments: Any) -> Any:
        arrays, rebuild = take_arrays(arguments)
        return lax.platform_dependent(
            *arrays,
            cuda=lambda *arrays: kernel(*rebuild(arrays)),
            default=lambda *arrays: formula(*rebuild(arrays)),
        )

    return run


def take_arrays(tree: Any) -> tuple[list, Callable[[Any], Any]]:
    """Return the arrays of a tree, and what puts others in their places.

    What is no array (a layer given as an int, say) stays as it is, and with that a constant of the program.
    """
    leaves, treedef = jax.tree.flatten(tree)
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, jax.Array | np.ndarray)]

    # Held by rules that outlive a trace: the arrays themselves, which may be tracers, stay out.
    constants = [None if i in places else leaf for i, leaf in enumerate(leaves)]

    def rebuild(arrays: Any) -> Any:
        filled = list(constants)
        for place, array in zip(places, arrays, strict=True):
            filled[place] = array
        return jax.tree.unflatten(treedef, filled)

    return [leaves[place] for place in places], rebuild
