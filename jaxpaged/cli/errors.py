"""Mistakes of the caller: one line each, by the name of the flag."""

import argparse
import os
from pathlib import Path


class UsageError(Exception):
    """What the caller asked for cannot be done; the message says why, in one line."""


def with_flags(message: str, args: argparse.Namespace) -> str:
    """Return a message of the library, with the flag in the place of an argument that it sets."""
    for name in vars(args):
        message = message.replace(f"`{name}`", f"`--{name.replace('_', '-')}`")
    return message


def check_at_least(args: argparse.Namespace, minimum: float, *names: str) -> None:
    """Raise UsageError for the first of these flags that is below `minimum`; one that was not given is let be."""
    for name in names:
        value = getattr(args, name)
        if value is not None and not value >= minimum:  # so that nan is refused
            raise UsageError(f"`--{name.replace('_', '-')}` must be at least {minimum}; got {value}.")


def check_writable(flag: str, path: str) -> None:
    """Raise UsageError where a file cannot be written: before the work whose result it is to hold, not after."""
    existed = os.path.exists(path)
    try:
        open(path, "ab").close()
        if not existed:
            Path(path).unlink()
    except OSError as error:
        raise UsageError(f"`{flag} {path}` cannot be written: {error.strerror}.") from error
    except ValueError as error:  # a path with a NUL in it
        raise UsageError(f"`{flag}` cannot be written: {error}.") from error
