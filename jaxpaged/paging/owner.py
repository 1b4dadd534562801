"""One owner: a call that begins while another thread is inside one raises, rather than work on what is half done."""

import functools
from collections.abc import Callable
from typing import Concatenate, ParamSpec, Protocol, TypeVar

P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S", bound="Owned")


class Owner:
    """Says whether a call is inside an object. The parts that an object is made of share its `Owner`.

    Attributes:
        busy: Whether a call is inside.
    """

    __slots__ = ("busy",)

    def __init__(self):
        self.busy = False


class Owned(Protocol):
    """An object that one thread at a time may call."""

    _owner: Owner


def verb(method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """Make a method refuse a call that begins while another one is inside its object.

    The owner may hand the object over to another thread between calls. Parts call the methods of each other that are
    no verbs.
    """

    @functools.wraps(method)
    def guarded(self: S, *args: P.args, **kwargs: P.kwargs) -> R:
        owner = self._owner
        if owner.busy:  # nothing lets another thread run between this line and the next
            raise second_thread(method.__name__)
        owner.busy = True
        try:
            return method(self, *args, **kwargs)
        finally:
            owner.busy = False

    return guarded


def second_thread(name: str) -> RuntimeError:
    """Return the refusal of a verb that began inside another one."""
    return RuntimeError(
        f"`{name}` was called while another thread was inside the page manager. It has one owner: let one thread make "
        "all calls, or put a lock around them."
    )
