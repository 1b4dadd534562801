"""What a caller holds of a request: its tokens as they come, its output at the end, and the way to abort it."""

import asyncio
import contextlib
import os
import queue
from collections.abc import Callable
from typing import Any

from jaxpaged.engine.outputs import NewToken, RequestOutput


class Mailbox:
    """Carries what the engine's thread says to those who wait, in one thread or one event loop at a time.

    `put` may be called anywhere, also while Python collects garbage.
    """

    def __init__(self):
        self._items: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._sleeper: tuple[asyncio.AbstractEventLoop, asyncio.Event] | None = None
        self._pid = os.getpid()

    def put(self, item: Any) -> None:
        """Leave something, and wake who waits for it."""
        self._items.put(item)
        if self._sleeper is not None:
            loop, event = self._sleeper
            with contextlib.suppress(RuntimeError):  # the loop has been closed meanwhile
                loop.call_soon_threadsafe(event.set)

    def get(self) -> Any:
        """Wait for the next thing. Ctrl-C interrupts it."""
        self._check_process()
        return _opened(self._items.get())

    async def get_async(self) -> Any:
        """Wait for the next thing, and let the event loop run."""
        self._check_process()
        event = asyncio.Event()
        self._sleeper = (asyncio.get_running_loop(), event)  # first, or what comes in between would wake nobody
        try:
            while True:
                with contextlib.suppress(queue.Empty):
                    return _opened(self._items.get_nowait())
                await event.wait()
                event.clear()
        finally:
            self._sleeper = None

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise forked()


def forked() -> RuntimeError:
    """Return the error of an engine in a process that was forked: its thread is not there."""
    return RuntimeError("An engine works in the process that made it; this one was forked. Make an engine here.")


def _opened(item: Any) -> Any:
    if isinstance(item, Exception):
        raise item
    return item


class RequestHandle:
    """A request: an iterator, and an async iterator, over its `NewToken`s. `Engine.add_request` makes one.

    The last token has a finish reason. A handle that is closed, or collected as garbage, before that aborts its
    request; so does `with` at its end.

    Args:
        abort: Called with the id to abort the request.
    """

    def __init__(self, request_id: int, mailbox: Mailbox, abort: Callable[[int], None]):
        self.request_id = request_id
        self._mailbox = mailbox
        self._abort = abort
        self._has_all = False  # tokens
        self._output: RequestOutput | None = None

    def result(self) -> RequestOutput:
        """Wait for the end, and return the output. Tokens that nobody has taken by then are in it alone.

        Raises:
            RuntimeError: The engine was closed before, or the process was forked.
        """
        while self._output is None:
            self._take(self._mailbox.get())
        return self._output

    def abort(self) -> None:
        """End the request, wherever it is, unless it has ended. What came before stays to be read."""
        if not self._has_all:
            self._abort(self.request_id)

    def close(self) -> None:
        """Abort the request, if it has not ended; no token comes any more."""
        self.abort()
        self._has_all = True

    def __iter__(self) -> "RequestHandle":
        return self

    def __next__(self) -> NewToken:
        while not self._has_all:
            token = self._take(self._mailbox.get())
            if token is not None:
                return token
        raise StopIteration

    def __aiter__(self) -> "RequestHandle":
        return self

    async def __anext__(self) -> NewToken:
        while not self._has_all:
            token = self._take(await self._mailbox.get_async())
            if token is not None:
                return token
        raise StopAsyncIteration

    def _take(self, item: NewToken | RequestOutput) -> NewToken | None:
        if isinstance(item, RequestOutput):
            self._output, self._has_all = item, True
            return None
        self._has_all = item.finish_reason is not None
        return item

    def __enter__(self) -> "RequestHandle":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def __aenter__(self) -> "RequestHandle":
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()
