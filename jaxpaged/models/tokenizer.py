"""Text to token ids and back, from the metadata that a checkpoint carries.

The `tokenizers` package does the merging; this module says with which vocabulary, merges and pre-tokenizer. It turns
ids back into text itself: a token is a run of bytes, and a text is those bytes read as UTF-8, at once or as they come.

Two kinds of vocabulary, by GGUF's names: `gpt2`, byte-level BPE, where the file names a pre-tokenizer; and `llama`,
SentencePiece BPE, where scores order the merges and a character outside the vocabulary falls back to its bytes.
"""

import codecs
import dataclasses
import datetime
import functools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn

try:
    import tokenizers
    from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "`jaxpaged.models.tokenizer` needs the package tokenizers. Install jaxpaged[models].", name=error.name
    ) from error

# GGUF token types. Those in _WHOLE are found in a text before it is cut, and never put together from its pieces.
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 1, 2, 3, 4, 6
_WHOLE = (_UNKNOWN, _CONTROL, _USER_DEFINED)

_SPACE = "\u2581"  # how SentencePiece writes a space

# Pre-tokenizers: each expression cuts the pieces that the one before it left.
# Source: llama.cpp, src/llama-vocab.cpp, which gave them their names.
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_DIGITS_THEN_GPT2 = (r"\p{N}", _GPT2)
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
_PRE_TOKENIZERS = {
    "default": (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"),
    "deepseek-coder": (
        r"[\r\n]",
        r"\s?\p{L}+",
        r"\s?\p{P}+",
        "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+",
        r"\p{N}",
    ),
    "falcon3": _LLAMA3,
    "gpt-2": (_GPT2,),
    "llama-bpe": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama3": _LLAMA3,
    "qwen2": (_LLAMA3[0].replace(r"\p{N}{1,3}", r"\p{N}"),),
    "refact": _DIGITS_THEN_GPT2,
    "smaug-bpe": _LLAMA3,
    "smollm": _DIGITS_THEN_GPT2,
    "starcoder": _DIGITS_THEN_GPT2,
    "tekken": (
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
        r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
        r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ),
}
# With these a word that is itself a token is that token, whatever the merges would make of it. Texts start with BOS.
_WHOLE_WORDS = frozenset({"falcon3", "llama-bpe", "llama-v3", "llama3", "tekken"})


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerSpec:
    """What a checkpoint says about its tokenizer, as plain data.

    Attributes:
        kind: "gpt2" or "llama".
        tokens: The vocabulary; a token's index is its id.
        pre: Name of the pre-tokenizer (gpt2 only), or None where the checkpoint names none.
        token_types: GGUF type of each token: 1 normal, 2 unknown, 3 control, 4 user defined, 5 unused, 6 byte. Empty
            means that all are normal.
        scores: Merge priority of each token, the higher the sooner (llama only).
        merges: Pairs "left right", the sooner the higher up (gpt2 only).
        bos_id, eos_id, eot_id: Begin of text, end of text, end of turn; None where the checkpoint has none.
        add_bos: Whether a text starts with BOS; None where the checkpoint does not say.
        add_space_prefix: Whether a space is put before a text (llama only); None where the checkpoint does not say.
        chat_template: A Jinja template.
    """

    kind: str
    tokens: tuple[str, ...]
    pre: str | None = None
    token_types: tuple[int, ...] = ()
    scores: tuple[float, ...] = ()
    merges: tuple[str, ...] = ()
    bos_id: int | None = None
    eos_id: int | None = None
    eot_id: int | None = None
    add_bos: bool | None = None
    add_space_prefix: bool | None = None
    chat_template: str | None = None


class Tokenizer:
    """Encodes, decodes, and fills in the chat template of one checkpoint.

    Raises:
        ValueError: The checkpoint names a kind or a pre-tokenizer that is not known here, or contradicts itself.
    """

    def __init__(self, spec: TokenizerSpec):
        self.spec = spec
        self._types = spec.token_types or (_NORMAL,) * len(spec.tokens)
        if spec.kind == "gpt2":
            self._encoder = _byte_level_bpe(spec)
        elif spec.kind == "llama":
            self._encoder = _sentencepiece_bpe(spec, self._types)
        else:
            raise ValueError(f"`tokenizer.ggml.model` must be 'gpt2' or 'llama'; got {spec.kind!r}.")
        adds_bos = spec.add_bos
        if adds_bos is None:
            adds_bos = spec.kind == "llama" or spec.pre in _WHOLE_WORDS
        self._prefix = [spec.bos_id] if adds_bos and spec.bos_id is not None else []

        whole = [id_ for id_, kind in enumerate(self._types) if kind in _WHOLE and spec.tokens[id_]]
        self._special = frozenset(id_ for id_ in whole if self._types[id_] != _USER_DEFINED)
        self._encoder.add_tokens(
            [AddedToken(spec.tokens[id_], normalized=False, special=id_ in self._special) for id_ in whole]
        )

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""
        return len(self.spec.tokens)

    @property
    def bos_token_id(self) -> int | None:
        """The token that begins a text, or None."""
        return self.spec.bos_id

    @property
    def stop_token_ids(self) -> frozenset[int]:
        """The tokens that end a generation: end of text and, where the checkpoint names one, end of turn."""
        return frozenset(id_ for id_ in (self.spec.eos_id, self.spec.eot_id) if id_ is not None)

    def encode(self, text: str) -> list[int]:
        """Return token ids of a text. Special tokens written out in it count as such.

        BOS comes first where the checkpoint says so, once: a chat template may have written it already. A byte that has
        no token is left out, as llama.cpp leaves it out (SmolLM2 lacks six control characters).

        Raises:
            ValueError: The text holds a lone surrogate, as a command-line argument does that was no UTF-8.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            got = f"{text[error.start]!r} at {error.start}"
            raise ValueError(f"`text` must be Unicode without lone surrogates; got {got}. Is it UTF-8?") from error
        ids = self._encoder.encode(text, add_special_tokens=False).ids
        return ids if ids[:1] == self._prefix else self._prefix + ids

    def decode(self, token_ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """Return text of token ids. Bytes that are no UTF-8 come out as U+FFFD.

        Raises:
            ValueError: An id outside the vocabulary.
        """
        detokenizer = self.detokenizer(skip_special_tokens=skip_special_tokens)
        return "".join([*map(detokenizer.push, token_ids), detokenizer.finish()])

    def detokenizer(self, prompt_token_ids: Iterable[int] = (), *, skip_special_tokens: bool = True) -> "Detokenizer":
        """Return one for token ids that come one by one.

        Args:
            prompt_token_ids: What they continue: it is read, and not part of the text. Unknown ids in it are left out.
            skip_special_tokens: Leave out what is markup of the model.
        """
        detokenizer = Detokenizer(self, skip_special_tokens)
        for token_id in prompt_token_ids:
            if 0 <= token_id < self.vocab_size:
                detokenizer.push(token_id)
        return detokenizer

    def apply_chat_template(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True) -> str:
        """Return messages, {"role": ..., "content": ...} each, as the text that the model was trained on.

        Args:
            messages: The conversation so far, oldest first.
            add_generation_prompt: End with the opening of the assistant's turn.

        Raises:
            ValueError: The checkpoint has no template, or its template refuses these messages.
        """
        import jinja2

        names = {"bos_token": self._text(self.spec.bos_id), "eos_token": self._text(self.spec.eos_id)}
        try:
            return self._template.render(messages=messages, add_generation_prompt=add_generation_prompt, **names)
        except (jinja2.TemplateError, TypeError) as error:  # TypeError: say a content that is no string
            raise ValueError(f"`messages` must fit the model's chat template; got its error: {error}.") from error

    @functools.cached_property
    def _template(self) -> Any:
        if not self.spec.chat_template:
            raise ValueError("the model must have a `tokenizer.chat_template`; got none. Prompt it without chat.")
        import jinja2
        import jinja2.sandbox

        # As in Hugging Face transformers, where templates are tried out. Sandboxed: a template is a stranger's program.
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = functools.partial(json.dumps, ensure_ascii=False)
        environment.globals["raise_exception"] = _raise_template_error
        environment.globals["strftime_now"] = lambda pattern: datetime.datetime.now().strftime(pattern)
        try:
            return environment.from_string(self.spec.chat_template)
        except jinja2.TemplateSyntaxError as error:
            got = f"an error in its line {error.lineno}: {error.message}"
            raise ValueError(f"`tokenizer.chat_template` must be a Jinja template; got {got}.") from error

    def _text(self, token_id: int | None) -> str:
        return "" if token_id is None else self.spec.tokens[token_id]

    def _bytes(self, token_id: int) -> bytes:
        """Return the bytes that a token stands for."""
        if not 0 <= token_id < self.vocab_size:
            raise ValueError(f"`token_ids` must be ids below the vocabulary size, {self.vocab_size}; got {token_id}.")
        token, kind = self.spec.tokens[token_id], self._types[token_id]
        if kind in _WHOLE:
            return token.encode()
        if self.spec.kind == "llama":
            return bytes([int(token[3:5], 16)]) if kind == _BYTE else token.replace(_SPACE, " ").encode()
        byte_of = _byte_of_char()
        return bytes(byte_of[char] for char in token) if byte_of.keys() >= set(token) else token.encode()


class Detokenizer:
    """Turns token ids into text as they come: what `push` and `finish` return adds up to `Tokenizer.decode` of all.

    A character is held back until its last byte is there: byte-level tokens cut characters in two.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True):
        self._tokenizer = tokenizer
        self._skipped = tokenizer._special if skip_special_tokens else frozenset()
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        # The space that was put before a text is no part of the text.
        self._drop_space = _adds_space(tokenizer.spec)

    def push(self, token_id: int) -> str:
        """Return the characters that this token completes: none, one or several."""
        if token_id in self._skipped:
            return ""
        piece = self._tokenizer._bytes(token_id)
        if self._drop_space:
            piece, self._drop_space = piece.removeprefix(b" "), False
        return self._utf8.decode(piece)

    def finish(self) -> str:
        """U+FFFD for a character that was begun and never completed, else nothing."""
        return self._utf8.decode(b"", final=True)


def _byte_level_bpe(spec: TokenizerSpec) -> tokenizers.Tokenizer:
    pre = spec.pre or "default"
    if pre not in _PRE_TOKENIZERS:
        raise ValueError(
            f"`tokenizer.ggml.pre` must be one of {', '.join(_PRE_TOKENIZERS)}; got {pre!r}. "
            "Cut by another rule, words become ids that the model was not trained on."
        )
    if not spec.merges:
        raise ValueError("`tokenizer.ggml.merges` must be in the file for a gpt2 vocabulary; got nothing.")
    merges = []
    for index, merge in enumerate(spec.merges):
        left, _, right = merge.partition(" ")
        if not (left and right):
            raise ValueError(f"`tokenizer.ggml.merges` must hold pairs 'left right'; got {merge!r} at {index}.")
        merges.append((left, right))
    encoder = _bpe(spec, merges, ignore_merges=pre in _WHOLE_WORDS)
    cuts = [pre_tokenizers.Split(Regex(expression), "isolated") for expression in _PRE_TOKENIZERS[pre]]
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    encoder.pre_tokenizer = pre_tokenizers.Sequence([*cuts, to_bytes])
    return encoder


def _sentencepiece_bpe(spec: TokenizerSpec, types: Sequence[int]) -> tokenizers.Tokenizer:
    """SentencePiece joins the neighbours whose joint token scores highest: merges are the tokens' cuts, best first."""
    if len(spec.scores) != len(spec.tokens):
        expected = f"hold one number for each of the {len(spec.tokens)} tokens"
        raise ValueError(f"`tokenizer.ggml.scores` must {expected}; got {len(spec.scores)}.")
    for id_, (token, kind) in enumerate(zip(spec.tokens, types, strict=True)):
        if kind == _BYTE and not re.fullmatch("<0x[0-9A-F]{2}>", token):
            raise ValueError(f"`tokenizer.ggml.tokens` must write a byte as '<0x0A>'; got {token!r} at {id_}.")
    pieces = {token: id_ for id_, token in enumerate(spec.tokens) if types[id_] == _NORMAL}
    best_first = sorted(pieces, key=lambda token: (-spec.scores[pieces[token]], pieces[token]))
    merges = [
        (token[:cut], token[cut:])
        for token in best_first
        for cut in range(1, len(token))
        if token[:cut] in pieces and token[cut:] in pieces
    ]
    unknown = next((token for token, kind in zip(spec.tokens, types, strict=True) if kind == _UNKNOWN), None)
    encoder = _bpe(spec, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    prefix = [normalizers.Prepend(_SPACE)] if _adds_space(spec) else []
    encoder.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", _SPACE)])
    return encoder


def _bpe(spec: TokenizerSpec, merges: list[tuple[str, str]], **options: Any) -> tokenizers.Tokenizer:
    vocabulary = {token: id_ for id_, token in enumerate(spec.tokens)}
    for index, (left, right) in enumerate(merges):
        if not {left, right, left + right} <= vocabulary.keys():
            expected = "join two tokens of the vocabulary into a third"
            raise ValueError(f"`tokenizer.ggml.merges` must {expected}; got {left!r} + {right!r} at {index}.")
    return tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=merges, **options))


def _adds_space(spec: TokenizerSpec) -> bool:
    return spec.kind == "llama" and spec.add_space_prefix is not False


@functools.cache
def _byte_of_char() -> dict[str, int]:
    """Return the GPT-2 alphabet: printable Latin-1 stands for its own bytes, U+0100 and on for the 68 other bytes in
    order.
    """
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


def _raise_template_error(message: str) -> NoReturn:
    import jinja2

    raise jinja2.TemplateError(message)
