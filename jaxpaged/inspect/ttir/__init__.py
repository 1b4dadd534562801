"""Runs the Triton IR of Pallas kernels on the CPU, with every memory access checked.

    result = ttir.run_function(f, *args)        # any JAX function with Pallas Triton calls in it
    result.outputs                              # what f returns: compare it with a reference
    assert result.problems == []                # races, uninitialised reads, unwritten outputs, ...
    print(result.runs[0].report)                # bytes loaded and stored, problems and hazards of the first call

Unlike `interpret=True` of Pallas it runs what Triton is given: pointers, masks, block offsets and the launch grid.
The README of `jaxpaged.inspect` says what a clean report does not prove.
"""

from jaxpaged.inspect.ttir.call import TritonCall, find_triton_calls
from jaxpaged.inspect.ttir.decode import UnsupportedOp
from jaxpaged.inspect.ttir.function import FunctionResult, run_function
from jaxpaged.inspect.ttir.machine import RunResult, cross_check, run
from jaxpaged.inspect.ttir.report import Event, KernelFault, Report

__all__ = [
    "Event",
    "FunctionResult",
    "KernelFault",
    "Report",
    "RunResult",
    "TritonCall",
    "UnsupportedOp",
    "cross_check",
    "find_triton_calls",
    "run",
    "run_function",
]
