"""Evaluates a whole JAX function on the CPU, its Triton calls by the machine."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxpaged.inspect.aot import lower_for
from jaxpaged.inspect.ttir.call import TritonCall, find_triton_calls
from jaxpaged.inspect.ttir.decode import UnsupportedOp
from jaxpaged.inspect.ttir.machine import RunResult, run


@dataclasses.dataclass(frozen=True, slots=True)
class FunctionResult:
    """What a function returned, and what its kernels did.

    Attributes:
        runs: One for each executed call, in order.
    """

    outputs: Any
    runs: list[RunResult]

    @property
    def problems(self) -> list[str]:
        """Problems of all calls; hazards are in the reports of `runs`."""
        return [problem for result in self.runs for problem in result.report.problems]


def run_function(
    f: Callable,
    *args,
    gpu: str = "h200",
    uninitialised: Mapping[str, Mapping[int, np.ndarray]] | None = None,
    **options,
) -> FunctionResult:
    """Evaluate `f(*args)`, every Triton call by `machine.run`, and all else by XLA on the CPU, operation by operation.

    Args:
        gpu: The kind in `aot.GPUS` that the kernels are lowered for.
        uninitialised: By the name of a kernel, what `machine.run` takes by that name.
        options: Of `machine.run`.

    Raises:
        KernelFault: An access is out of bounds or misaligned.
        UnsupportedOp: A Triton call lies in a loop or a branch of `f`, or needs an operation that is not known.
        ValueError: `uninitialised` names a kernel that did not run.
    """
    jaxpr, shapes = jax.make_jaxpr(f, return_shape=True)(*args)
    evaluator = _Evaluator(gpu, uninitialised or {}, options)
    flat = evaluator.evaluate(jaxpr, jax.tree.leaves(args))
    names = {result.report.kernel for result in evaluator.runs}
    if unknown := set(evaluator.uninitialised) - names:
        raise ValueError(f"`uninitialised` must name kernels that run ({', '.join(names)}); got {', '.join(unknown)}.")
    return FunctionResult(jax.tree.unflatten(jax.tree.structure(shapes), flat), evaluator.runs)


_CALLS = ("jit", "pjit", "closed_call", "remat2", "checkpoint", "custom_jvp_call", "custom_vjp_call")


class _Evaluator:
    def __init__(self, gpu: str, uninitialised: Mapping[str, Mapping[int, np.ndarray]], options: dict):
        self.gpu, self.uninitialised, self.options = gpu, uninitialised, options
        self.runs: list[RunResult] = []

    def evaluate(self, jaxpr, arguments: Sequence) -> list:
        consts, jaxpr = getattr(jaxpr, "consts", ()), getattr(jaxpr, "jaxpr", jaxpr)
        values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *arguments], strict=True))

        def read(atom):
            return atom.val if hasattr(atom, "val") else values[atom]

        for eqn in jaxpr.eqns:
            values.update(zip(eqn.outvars, self._equation(eqn, [read(v) for v in eqn.invars]), strict=True))
        return [read(v) for v in jaxpr.outvars]

    def _equation(self, eqn, inputs: list) -> Sequence:
        name, params = eqn.primitive.name, eqn.params
        if name == "pallas_call" and not params["interpret"]:
            return self._pallas_call(eqn, inputs)
        if not any(_contains_pallas_call(value) for value in params.values()):
            results = eqn.primitive.bind(*inputs, **eqn.primitive.get_bind_params(params))
            return results if eqn.primitive.multiple_results else [results]
        if name in _CALLS:
            return self.evaluate(params.get("jaxpr") or params["call_jaxpr"], inputs)
        raise UnsupportedOp(f"a Triton call inside {name}")

    def _pallas_call(self, eqn, inputs: list) -> Sequence:
        call = self._lower(eqn)
        arrays = [np.asarray(x).astype(dtype, copy=False) for x, (_, dtype) in zip(inputs, call.operands, strict=True)]
        self.runs.append(run(call, *arrays, uninitialised=self.uninitialised.get(call.name), **self.options))
        return [jax.numpy.asarray(x) for x in self.runs[-1]]

    def _lower(self, eqn) -> TritonCall:
        shapes = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in eqn.invars]
        lowered = lower_for(lambda *values: eqn.primitive.bind(*values, **eqn.params), *shapes, gpu=self.gpu)
        calls = find_triton_calls(lowered)
        if len(calls) != 1:
            raise UnsupportedOp("a pallas_call that is no Triton call: it needs compiler_params=plgpu.CompilerParams()")
        names = getattr(eqn.params["jaxpr"].debug_info, "arg_names", None) or ()
        if len(names) == len(calls[0].names):
            calls[0].names = [str(name) for name in names]
        return calls[0]


def _contains_pallas_call(value) -> bool:
    if isinstance(value, tuple | list):
        return any(_contains_pallas_call(v) for v in value)
    return any(
        (eqn.primitive.name == "pallas_call" and not eqn.params["interpret"])
        or any(_contains_pallas_call(v) for v in eqn.params.values())
        for eqn in getattr(getattr(value, "jaxpr", value), "eqns", ())
    )
