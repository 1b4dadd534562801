"""What the tests of commands share: a command in process, and a terminal for it."""

import os
import pty
import sys

from jaxpaged import cli


def run(capfd, *arguments: str) -> tuple[int, str, str]:
    code = 0
    try:
        cli.main(arguments)
    except SystemExit as stop:
        code = stop.code
    return code, *capfd.readouterr()


class Terminal:
    """Puts a pseudo-terminal in the place of sys.stdout or sys.stderr."""

    def __init__(self, name, monkeypatch):
        self.ours, theirs = pty.openpty()
        self.stream = os.fdopen(theirs, "w")
        monkeypatch.setattr(sys, name, self.stream)

    def read(self) -> str:
        self.stream.flush()
        os.set_blocking(self.ours, False)
        text = b""
        try:
            while data := os.read(self.ours, 1 << 16):
                text += data
        except BlockingIOError:
            pass
        return text.decode().replace("\r\n", "\n")

    def close(self):
        self.stream.close()
        os.close(self.ours)
