"""Text from token ids as they come: only what is final, and nothing of a stop string.

Bytes become characters in the tokenizer's own stream where it has one (`Tokenizer.stream`), and else through its
`decode` over a short window. Stop strings are matched here, on characters: tokens may cut them anywhere.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

_WINDOW = 8  # tokens of context that `_WindowDecoder` keeps; a character is cut into 4 at most
_UNKNOWN = (ValueError, LookupError, TypeError, OverflowError)
"""What tokenizers raise for an id that is none of theirs: models pad their vocabulary with such ids."""


class Decoder(Protocol):
    """Characters from tokens: what `push` and `finish` return adds up to the text of all.

    `push` of an id that it does not know raises ValueError, LookupError, TypeError or OverflowError and takes nothing
    in. After `finish`, which ends a character that was begun, more may come.
    """

    def push(self, token_id: int) -> str: ...  # noqa: D102
    def finish(self) -> str: ...  # noqa: D102


class TextStream:
    """The text of one request, piece by piece.

    All pieces together are the decoded text of all tokens, up to the first stop string: the one that is complete
    first and, of several that end at the same character, the longest. How tokens cut the text changes nothing.

    A piece never ends inside a character (bytes of one are held until the last is there), and never holds a part of
    what may still become a stop string. Of a step's tokens the cost is theirs and the stop strings' length, whatever
    came before. A token id that the tokenizer does not know is U+FFFD.

    Args:
        tokenizer: With a method `stream() -> Decoder`, as `jaxpaged.models.tokenizer.Tokenizer` has, or else with
            `decode(token_ids) -> str`, as others have.
        stop: `SamplingParams.stop`.
        include_stop: End the text with the stop string instead of before it.
        min_new_tokens: The text of so many tokens is let through unread.
        skip_special_tokens: Leave out what is markup of the model: end of text, turns.

    Attributes:
        num_tokens: Taken so far; when stopped, the one that completed the stop string is the last.
        stopped_by: The stop string that was found, or None.
    """

    def __init__(
        self,
        tokenizer: object,
        *,
        stop: Sequence[str] = (),
        include_stop: bool = False,
        min_new_tokens: int = 0,
        skip_special_tokens: bool = True,
    ):
        if isinstance(stop, str) or not all(isinstance(text, str) and text for text in stop):
            raise ValueError(f"`stop` must be strings, none of them empty; got {stop!r}.")
        self._decoder = _decoder_of(tokenizer, skip_special_tokens)
        self._stop = tuple(stop)
        self._include_stop = include_stop
        self._min_new_tokens = min_new_tokens
        self._held = ""  # final characters that may begin a stop string
        self._finished = False
        self.num_tokens = 0
        self.stopped_by: str | None = None

    def push(self, token_ids: Iterable[int]) -> str:
        """The text that these tokens make final. Tokens behind a stop string are not taken.

        Raises:
            ValueError: The stream is finished.
        """
        if self._finished:
            raise ValueError("`push` must come before `finish`; got tokens for a text that has ended.")
        pieces = []
        for token_id in token_ids:
            if self.stopped_by is not None:
                break
            try:
                characters = self._decoder.push(token_id)
            except _UNKNOWN:
                characters = self._decoder.finish() + "\ufffd"
            self.num_tokens += 1
            pieces.append(self._released(characters))
        return "".join(pieces)

    def finish(self) -> str:
        """What was held back, when no more tokens come. A character begun and not completed is U+FFFD."""
        if self._finished or self.stopped_by is not None:
            self._finished = True
            return ""
        self._finished = True
        text = self._released(self._decoder.finish())
        held, self._held = self._held, ""
        return text + held

    def _released(self, characters: str) -> str:
        """Takes characters in, and lets out those that no stop string can claim any more."""
        if not self._stop or self.num_tokens <= self._min_new_tokens:
            return characters
        text = self._held + characters
        ends = [(at + len(stop), at, stop) for stop in self._stop if (at := text.find(stop)) >= 0]
        if ends:
            end, begin, self.stopped_by = min(ends)
            self._held = ""
            return text[: end if self._include_stop else begin]
        keep = _num_that_may_begin(text, self._stop)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


def _num_that_may_begin(text: str, stop: Sequence[str]) -> int:
    """Length of the longest end of `text` that is the beginning of a stop string, none of which is in it whole."""
    longest = min(len(text), max(map(len, stop)) - 1)
    for length in range(longest, 0, -1):
        end = text[len(text) - length :]
        if any(s.startswith(end) for s in stop):
            return length
    return 0


def _decoder_of(tokenizer: object, skip_special_tokens: bool) -> Decoder:
    stream, decode = getattr(tokenizer, "stream", None), getattr(tokenizer, "decode", None)
    if stream is not None:
        return stream(skip_special_tokens=skip_special_tokens)
    if decode is not None:
        return _WindowDecoder(lambda token_ids: decode(token_ids, skip_special_tokens=skip_special_tokens))
    raise TypeError(f"`tokenizer` must have a method `stream` or `decode`; got {type(tokenizer).__name__}.")


class _WindowDecoder:
    """Characters through a `decode` that knows only whole lists of ids, O(1) a token.

    A token's text may depend on those before it (a leading space, half a character), so each is decoded behind the last
    few. U+FFFD at the end may be a character begun: up to three of them, its bytes, wait until more comes. One that the
    tokenizer refuses is none of those.
    """

    def __init__(self, decode: Callable[[list[int]], str]):
        self._decode = decode
        self._token_ids: list[int] = []
        self._text = ""  # of these
        self._num_held = 0  # characters at its end that are not out

    def push(self, token_id: int) -> str:
        if len(self._token_ids) >= 2 * _WINDOW:
            self._token_ids = self._token_ids[-_WINDOW:]
            self._text = self._decode(self._token_ids)
        text = self._decode([*self._token_ids, token_id])
        num_out = max(0, len(self._text) - self._num_held)
        self._token_ids.append(token_id)
        self._text = text
        new = self._text[num_out:]
        self._num_held = min(3, len(new) - len(new.rstrip("\ufffd")))
        return new[: len(new) - self._num_held]

    def finish(self) -> str:
        held = self._text[len(self._text) - self._num_held :]
        self._num_held = 0
        return held
