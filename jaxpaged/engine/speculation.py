"""Guesses at the next tokens, which one step then checks all together. Plain Python."""

import dataclasses
import weakref

from jaxpaged.checks import as_count
from jaxpaged.engine.request import Request


class _Seen:
    """Where each run of n tokens of a request was followed by what, up to `num_tokens`."""

    __slots__ = ("ends", "num_tokens", "tokens")

    def __init__(self):
        self.tokens: list[int] = []
        self.num_tokens = 0
        self.ends: dict[tuple[int, ...], int] = {}


@dataclasses.dataclass(frozen=True, kw_only=True)
class NgramSpeculation:
    """Prompt lookup: where the last tokens stood before, what followed them then is the guess.

    Any object with the method `propose` can take its place: a draft model, for example. Guesses change no output: a
    step draws each token as it would have without, and keeps the guesses that are equal.

    Attributes:
        num_drafts: Tokens to guess at most.
        max_ngram, min_ngram: Lengths of the runs that are looked for, the longest first.
    """

    num_drafts: int = 4
    max_ngram: int = 3
    min_ngram: int = 2
    _seen: "weakref.WeakKeyDictionary[Request, _Seen]" = dataclasses.field(
        default_factory=weakref.WeakKeyDictionary, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        as_count(self.num_drafts, "`num_drafts`", minimum=1)
        as_count(self.min_ngram, "`min_ngram`", minimum=1)
        as_count(self.max_ngram, "`max_ngram`", minimum=self.min_ngram)

    def propose(self, request: Request, limit: int) -> tuple[int, ...]:
        """Return up to `limit` tokens to follow those known; none if nothing stood before. O(tokens since the last
        call).
        """
        seen = self._seen.setdefault(request, _Seen())
        known = request.known_tokens()
        seen.tokens += known[len(seen.tokens) :].tolist()
        tokens, end = seen.tokens, len(seen.tokens)
        for place in range(seen.num_tokens + 1, end):  # runs that something follows
            for n in range(self.min_ngram, min(self.max_ngram, place) + 1):
                seen.ends[tuple(tokens[place - n : place])] = place
        seen.num_tokens = end - 1
        for n in range(min(self.max_ngram, end), self.min_ngram - 1, -1):
            place = seen.ends.get(tuple(tokens[end - n :]))
            if place is not None:
                return tuple(tokens[place : place + min(limit, self.num_drafts)])
        return ()
