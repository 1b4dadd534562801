"""Text from token ids as they come: only what is final, and nothing of a stop string.

Bytes become characters in the tokenizer's own detokenizer where it has one (`Tokenizer.detokenizer`), and else through
its `decode` over a short window. Stop strings are matched here, on characters: tokens may cut them anywhere.
"""

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

_NUM_CONTEXT = 8
"""Last tokens of the prompt that the first tokens of the output are read after: a character is cut into 4 at most."""
_MAX_HELD = 64
"""Tokens whose text may wait for a character to be completed; bytes that never make one come out after so many."""
_UNKNOWN = (ValueError, LookupError, TypeError, OverflowError)
"""What tokenizers raise for an id that is none of theirs: models pad their vocabulary with such ids."""


class Detokenizer(Protocol):
    """Characters from tokens: what `push` and `finish` return adds up to the text of all.

    `push` of an id that it does not know raises ValueError, LookupError, TypeError or OverflowError and takes nothing
    in. After `finish`, which ends a character that was begun, more may come.
    """

    def push(self, token_id: int) -> str: ...  # noqa: D102
    def finish(self) -> str: ...  # noqa: D102


class TextStream:
    """The text of one request, piece by piece.

    All pieces together are the text that the tokens add to the prompt, up to the first stop string: the one that is
    complete first and, of several that end at the same character, the longest. How tokens cut the text changes nothing.

    A piece never ends inside a character (bytes of one are held until the last is there), and never holds a part of
    what may still become a stop string. The cost of a token is its own and that of the stop strings' length, whatever
    came before. A token id that the tokenizer does not know is U+FFFD.

    Args:
        tokenizer: With a method `detokenizer(skip_special_tokens) -> Detokenizer`, as
            `jaxpaged.models.tokenizer.Tokenizer` has, or else with `decode(token_ids, skip_special_tokens) -> str`, as
            others have.
        prompt_token_ids: What the tokens continue: a word behind it begins with a space, and a character that it begins
            is completed.
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
        prompt_token_ids: Sequence[int] = (),
        *,
        stop: Sequence[str] = (),
        include_stop: bool = False,
        min_new_tokens: int = 0,
        skip_special_tokens: bool = True,
    ):
        if isinstance(stop, str) or not all(isinstance(text, str) and text for text in stop):
            raise ValueError(f"`stop` must be strings, none of them empty; got {stop!r}.")
        self._detokenizer = _detokenizer_of(tokenizer, prompt_token_ids[-_NUM_CONTEXT:], skip_special_tokens)
        self._stop = tuple(stop)
        self._include_stop = include_stop
        self._min_new_tokens = min_new_tokens
        self._held = ""  # final characters that may begin a stop string
        self._finished = False
        self.num_tokens = 0
        self.stopped_by: str | None = None

    def push(self, token_ids: Iterable[int]) -> str:
        """Return the text that these tokens make final. Tokens behind a stop string are not taken.

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
                characters = self._detokenizer.push(token_id)
            except _UNKNOWN:
                characters = self._detokenizer.finish() + "\ufffd"
            self.num_tokens += 1
            pieces.append(self._released(characters))
        return "".join(pieces)

    def finish(self) -> str:
        """Return what was held back, when no more tokens come. A character begun and not completed is U+FFFD."""
        if self._finished or self.stopped_by is not None:
            self._finished = True
            return ""
        self._finished = True
        text = self._released(self._detokenizer.finish())
        held, self._held = self._held, ""
        return text + held

    def _released(self, characters: str) -> str:
        """Take characters in, and let out those that no stop string can claim any more."""
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
    """Return the length of the longest end of `text` with which a stop string begins; none is in it whole."""
    longest = min(len(text), max(map(len, stop)) - 1)
    for length in range(longest, 0, -1):
        end = text[len(text) - length :]
        if any(s.startswith(end) for s in stop):
            return length
    return 0


def _detokenizer_of(tokenizer: object, prompt_token_ids: Sequence[int], skip_special_tokens: bool) -> Detokenizer:
    detokenizer, decode = getattr(tokenizer, "detokenizer", None), getattr(tokenizer, "decode", None)
    if detokenizer is not None:
        return detokenizer(prompt_token_ids, skip_special_tokens=skip_special_tokens)
    if decode is not None:
        return _WindowDetokenizer(
            lambda token_ids: decode(token_ids, skip_special_tokens=skip_special_tokens), prompt_token_ids
        )
    raise TypeError(f"`tokenizer` must have a method `detokenizer` or `decode`; got {type(tokenizer).__name__}.")


class _WindowDetokenizer:
    """Characters through a `decode` that knows only whole lists of ids, O(1) a token.

    The text of a token depends on tokens before it (a leading space) and behind it: a run of byte tokens that ends
    inside a character may be U+FFFD altogether, characters included that were complete before. So a text that ends in
    U+FFFD waits, and new characters are what `decode` gives beyond the text of the tokens that came out last. Those are
    the only ones that are decoded again.

    `tokenizers.decoders.DecodeStream` works alike, but keeps what it holds back for ever: nothing ends its text.
    """

    def __init__(self, decode: Callable[[list[int]], str], prompt_token_ids: Sequence[int]):
        self._decode = decode
        self._token_ids: list[int] = []  # those that came out last, and those that wait
        self._num_out = 0  # of the first kind
        self._text = ""  # of these
        self._waiting = ""  # what those that wait add, as it reads now
        self._read(list(prompt_token_ids))

    def _read(self, token_ids: list[int]) -> None:
        """Take the last tokens of the prompt, from the begin of a character on, as having come out.

        A character is up to four byte tokens, so that up to three belong to one begun before, and up to three to one
        that the output completes.
        """
        for begin, num_begun in itertools.product(range(4), range(4)):
            end = len(token_ids) - num_begun
            if end < begin:
                continue
            try:
                text = self._decode(token_ids[begin:end])
            except _UNKNOWN:
                continue
            if not text.startswith("\ufffd") and not text.endswith("\ufffd"):
                self._token_ids, self._num_out, self._text = token_ids[begin:], end - begin, text
                return

    def push(self, token_id: int) -> str:
        text = self._decode([*self._token_ids, token_id])
        self._token_ids.append(token_id)
        self._waiting = text[len(self._text) :]
        num_waiting = len(self._token_ids) - self._num_out
        if not self._waiting or (text.endswith("\ufffd") and num_waiting < _MAX_HELD):
            return ""
        new, self._waiting = self._waiting, ""
        del self._token_ids[: self._num_out]
        self._num_out = len(self._token_ids)
        self._text = self._decode(self._token_ids)
        return new

    def finish(self) -> str:
        waiting, self._waiting = self._waiting, ""
        if waiting:  # its last character is no beginning of the next
            self._token_ids, self._num_out, self._text = [], 0, ""
        return waiting
