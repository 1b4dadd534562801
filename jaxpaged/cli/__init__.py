"""The command line: `jaxpaged generate`, `chat`, `bench`, `memory-map` and `info`.

Text and JSON go to stdout and nothing else does; progress, notes and summaries go to stderr. A mistake of the caller
ends in one line on stderr and exit code 2.
"""

from jaxpaged.cli.app import main

__all__ = ["main"]
