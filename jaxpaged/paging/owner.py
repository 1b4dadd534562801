"""One owner: a call that begins while another thread is inside one raises, rather than work on what is half done."""

import functools
from collections.abc import Callable
from typing import Concatenate, ParamSpec, Protocol, TypeVar

P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S", bound="Owned")


class Owned(Protocol):
    """What one thread owns: `_busy` while it is inside."""

    _busy: bool


def verb(method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """Refuses a call that begins while another thread is inside one: one owner, who may hand over between calls."""

    @functools.wraps(method)
    def guarded(self: S, *args: P.args, **kwargs: P.kwargs) -> R:
        if self._busy:  # nothing lets another thread run between this line and the next
            raise second_thread(method.__name__)
        self._busy = True
        try:
            return method(self, *args, **kwargs)
        finally:
            self._busy = False

    return guarded


def second_thread(name: str) -> RuntimeError:
    """The refusal of a verb that began inside another one."""
    return RuntimeError(
        f"`{name}` was called while another thread was inside the page manager. It has one owner: let one thread make "
        "all calls, or put a lock around them."
    )
