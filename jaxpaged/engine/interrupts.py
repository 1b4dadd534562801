"""Ctrl-C only where it can do no harm: while the model runs, and never in the middle of bookkeeping."""

import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import Any


class Interrupts:
    """Holds SIGINT back in one place of a thread, and lets it through in another inside of that.

    Whatever handler was installed gets each signal, later. Python runs handlers in the main thread alone, so that in
    other threads there is nothing to hold back.
    """

    def __init__(self):
        self._handler: Any = None  # that gets what is held back; None while nothing is
        self._num_pending = 0

    @contextlib.contextmanager
    def deferred(self) -> Iterator[None]:
        """Inside, an interrupt waits for the end; or for `allowed`. May be nested."""
        handler = signal.getsignal(signal.SIGINT)
        if not _in_main_thread() or self._handler is not None or not callable(handler):
            yield
            return
        try:
            self._handler = handler
            signal.signal(signal.SIGINT, self._note)
            yield
        finally:
            self._handler = None
            signal.signal(signal.SIGINT, handler)
            self._hand_over(handler)

    @contextlib.contextmanager
    def allowed(self) -> Iterator[None]:
        """Inside of `deferred`: an interrupt comes at once, also one that has waited."""
        handler = self._handler
        if not _in_main_thread() or handler is None:
            yield
            return
        try:
            signal.signal(signal.SIGINT, handler)
            self._hand_over(handler)
            yield
        finally:
            if self._handler is not None:  # it is where an interrupt in `with` itself has left this to be closed later
                signal.signal(signal.SIGINT, self._note)

    def _note(self, number: int, frame: object) -> None:
        self._num_pending += 1

    def _hand_over(self, handler: Any) -> None:
        while self._num_pending:
            self._num_pending -= 1
            handler(signal.SIGINT, None)


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()
