"""`jaxpaged memory-map`: who holds which page of a pool, after a recorded run. It needs no JAX."""

import argparse

from jaxpaged.cli.console import Console
from jaxpaged.cli.errors import UsageError, with_flags
from jaxpaged.paging.observe.plot import pool_text, save_png
from jaxpaged.paging.observe.trace import TraceError, demo_trace, read_trace


def run(args: argparse.Namespace) -> None:
    """Draw it."""
    try:
        trace = demo_trace() if args.trace is None else read_trace(args.trace)
        snapshot = trace.replay(args.step).snapshot()
    except OSError as error:
        raise UsageError(f"TRACE `{args.trace}` cannot be read: {error.strerror}.") from error
    except TraceError as error:
        raise UsageError(str(error)) from error
    except ValueError as error:
        raise UsageError(with_flags(str(error), args)) from error
    num_steps = len(trace.steps) if args.step is None else args.step
    of_what = "A built-in demo workload" if args.trace is None else str(args.trace)
    title = f"{of_what}, after {num_steps} of {len(trace.steps)} verbs"
    if args.png is not None:
        try:
            save_png(snapshot, args.png, title=title)
        except OSError as error:
            raise UsageError(f"`--png {args.png}` cannot be written: {error.strerror}.") from error
        except ModuleNotFoundError as error:
            raise UsageError(f"`--png` needs {error.name}: install jaxpaged[plot].") from error
    console = Console()
    console.print(pool_text(snapshot, title=title, width=min(console.width, 80)), soft_wrap=True)
