"""Tables and colours on stdout."""

import rich.console


class Console(rich.console.Console):
    """rich's console, but for a pipe that nobody reads: `main` ends the command, with the exit code of all commands."""

    def __init__(self):
        super().__init__(highlight=False)

    def on_broken_pipe(self) -> None:
        """Let the error that is being handled pass on; rich would exit with code 1."""
        raise
