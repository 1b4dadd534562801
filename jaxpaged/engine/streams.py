"""The tokens of one request as they come, for a reader that waits and for one that awaits."""

import sys
from collections import deque
from typing import TYPE_CHECKING

from jaxpaged.engine.request import NewToken

if TYPE_CHECKING:
    from jaxpaged.engine.engine import Engine


class TokenStream:
    """An iterator, and an async iterator, over the `NewToken`s of a request; `Engine.stream` makes one.

    The last token has a finish reason. One that is closed, or collected as garbage, before that aborts its request.
    """

    def __init__(self, engine: "Engine", request_id: int, mailbox: deque[NewToken]):
        self.request_id = request_id
        self._engine = engine
        self._mailbox = mailbox
        self._ended = False

    def __iter__(self) -> "TokenStream":
        return self

    def __next__(self) -> NewToken:
        while not self._mailbox and not self._ended:
            self._engine.advance()
        if self._ended:
            raise StopIteration
        return self._take()

    def __aiter__(self) -> "TokenStream":
        return self

    async def __anext__(self) -> NewToken:
        while not self._mailbox and not self._ended:
            await self._engine.advance_async()
        if self._ended:
            raise StopAsyncIteration
        return self._take()

    def close(self) -> None:
        """Aborts the request, if it has not ended; nothing comes any more."""
        if not self._ended:
            self._ended = True
            self._engine.close_stream(self.request_id)

    def __enter__(self) -> "TokenStream":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def __aenter__(self) -> "TokenStream":
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if not sys.is_finalizing():
            self.close()

    def _take(self) -> NewToken:
        token = self._mailbox.popleft()
        if token.finish_reason is not None:
            self.close()
        return token
