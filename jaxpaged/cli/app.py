"""`main`: parses the arguments, runs the command, and ends the process as a command should end.

Nothing here imports JAX: help, and the refusal of a mistyped flag, do not wait for it.
"""

import argparse
import importlib
import io
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from jaxpaged.cli.errors import UsageError
from jaxpaged.cli.parser import make_parser


def main(argv: Sequence[str] | None = None) -> None:
    """Run a command, and exit with its code: 0, 1 for requests that failed, 2 for a mistake of the caller, 130
    interrupted, 141 unread.
    """
    _mend_streams()
    try:
        args = parse(argv)
        importlib.import_module(args.module).run(args)
        sys.stdout.flush()
    except UsageError as error:
        _complain(str(error))
    except KeyboardInterrupt:
        sys.stdout.flush()
        _leave(130)
    except OSError as error:  # of stdout: whatever reads a file has complained about it by name
        # Python flushes once more when it ends, and must not fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):  # the reader has seen enough, as `head` does
            sys.exit(141)
        _complain(f"the output cannot be written: {error.strerror}.")


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the arguments.

    Prompts may stand on both sides of a flag, which argparse does not allow behind a command.
    """
    parser = make_parser()
    args, rest = parser.parse_known_args(argv)
    if rest and ("prompts" not in args or any(word.startswith("-") and word != "-" for word in rest)):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:
        args.prompts += rest
    return args


def _leave(code: int) -> NoReturn:
    """End the process at once: Python's own way out would free arrays that the device is still computing."""
    if sys.stderr.isatty():
        sys.stderr.write("\x1b[?25h")  # the cursor, which a progress bar hides
    sys.stderr.flush()
    os._exit(code)


def _mend_streams() -> None:
    """Make stdout and stderr take any text, and any at all where whoever started this closed them."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, io.StringIO())
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding="utf-8", errors="backslashreplace")


def _complain(message: str) -> NoReturn:
    print(f"jaxpaged: error: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(2)
