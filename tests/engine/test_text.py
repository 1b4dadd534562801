"""Streamed text: pieces add up to `decode`, whatever tokens cut, and nothing of a stop string gets out."""

import itertools

import pytest
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st

from jaxpaged.engine.text import TextStream
from jaxpaged.models.gguf import _read_tokenizer, builtin_model_path
from jaxpaged.models.gguf_file import open_gguf
from jaxpaged.models.tokenizer import Tokenizer
from tests.models.test_tokenizer import tiny_spec

BYTES = Tokenizer(tiny_spec())  # byte-level, few merges: nearly every byte is a token of its own
PIECES = Tokenizer(tiny_spec("llama"))  # SentencePiece with byte tokens and a space before the text
TEXTS = [
    "plain words, and a number 123",
    "naïve café, e\u0301 in two code points",
    "日本語のテキスト、한국어, عربى",
    "👍🏽 and 👨‍👩‍👧‍👦 and 🇩🇪 and ❤️",
    "def f(x):\n\treturn {'a': [x, \"é\"]}  # ok\r\n",
    "a\ufffdb\ufffd\ufffd",  # replacement characters that are really there
    "",
]


@pytest.fixture(scope="module")
def builtin_tokenizer() -> Tokenizer:
    """Of the built-in model, without its weights."""
    return Tokenizer(_read_tokenizer(open_gguf(builtin_model_path())))


class Wordwise:
    """A tokenizer as others have it: no detokenizer, only `decode` of whole lists."""

    def __init__(self, tokenizer: Tokenizer):
        self.tokenizer = tokenizer
        self.longest = 0

    def decode(self, token_ids, skip_special_tokens=True) -> str:
        self.longest = max(self.longest, len(token_ids))
        return self.tokenizer.decode(token_ids, skip_special_tokens)


class Fixed:
    """Tokens that are the given texts: any cut of any text."""

    def __init__(self, pieces):
        self.pieces = pieces

    def decode(self, token_ids, skip_special_tokens=True) -> str:
        return "".join(self.pieces[i] for i in token_ids)


def streamed(tokenizer, ids, **options) -> tuple[list[str], TextStream]:
    stream = TextStream(tokenizer, **options)
    pieces = [stream.push([id_]) for id_ in ids]
    return [*pieces, stream.finish()], stream


def text_until(text: str, stops, include: bool = False) -> str:
    """By the definition: character after character, until the text ends with a stop string."""
    for end in range(1, len(text) + 1):
        found = [s for s in stops if text[:end].endswith(s)]
        if found:
            return text[:end] if include else text[: end - max(map(len, found))]
    return text


# Characters.


class Refusing:
    """A tokenizer that raises for ids past its vocabulary, as others do it."""

    def __init__(self, error: Exception):
        self.error = error

    def decode(self, token_ids, skip_special_tokens=True) -> str:
        if max(token_ids) >= BYTES.vocab_size:
            raise self.error
        return BYTES.decode(token_ids, skip_special_tokens)


@pytest.mark.parametrize(
    "tokenizer", [BYTES, Refusing(KeyError("no")), Refusing(OverflowError("no"))], ids=["bytes", "key", "overflow"]
)
def test_push_of_ids_that_the_tokenizer_does_not_know_gives_replacement_characters(tokenizer):
    unknown = BYTES.vocab_size
    first, last = BYTES.encode("né"), BYTES.encode("日本")
    begun = last[:1]  # half a character, which the unknown token ends
    ids = [unknown, *first, unknown, unknown, *begun, unknown, *last]
    pieces, stream = streamed(tokenizer, ids, stop=["本"])
    assert "".join(pieces) == "\ufffdné\ufffd\ufffd\ufffd\ufffd日"
    assert stream.stopped_by == "本"
    assert stream.num_tokens == len(ids)


@pytest.mark.parametrize("text", TEXTS, ids=range(len(TEXTS)))
@pytest.mark.parametrize("tokenizer", [BYTES, PIECES, Wordwise(BYTES)], ids=["bytes", "pieces", "window"])
def test_push_gives_whole_characters_and_together_the_text(tokenizer, text):
    inner = getattr(tokenizer, "tokenizer", tokenizer)
    ids = inner.encode(text)
    pieces, _ = streamed(tokenizer, ids, skip_special_tokens=False)
    assert "".join(pieces) == inner.decode(ids, False)
    assert all("\ufffd" not in piece for piece in pieces) or "\ufffd" in text


@pytest.mark.parametrize("text", TEXTS, ids=range(len(TEXTS)))
def test_push_of_builtin_tokens_gives_whole_characters_and_together_the_text(builtin_tokenizer, text):
    ids = builtin_tokenizer.encode(text)
    for tokenizer in (builtin_tokenizer, Wordwise(builtin_tokenizer)):
        pieces, _ = streamed(tokenizer, ids)
        assert "".join(pieces) == text
        assert all("\ufffd" not in piece for piece in pieces) or "\ufffd" in text


@given(ids=st.lists(st.integers(0, BYTES.vocab_size - 1), max_size=60), data=st.data())
def test_push_of_any_ids_in_any_steps_adds_up_to_decode(ids, data):
    cuts = sorted(data.draw(st.lists(st.integers(0, len(ids)), max_size=5)))
    steps = [ids[a:b] for a, b in itertools.pairwise([0, *cuts, len(ids)])]
    for tokenizer in (BYTES, Wordwise(BYTES)):
        stream = TextStream(tokenizer)
        pieces = [*map(stream.push, steps), stream.finish()]
        assert "".join(pieces) == BYTES.decode(ids)
        assert stream.num_tokens == len(ids)


@settings(max_examples=50)
@given(ids=st.lists(st.integers(0, 49151) | st.integers(0, 300), max_size=30))
def test_push_of_any_builtin_ids_adds_up_to_decode(builtin_tokenizer, ids):
    for tokenizer in (builtin_tokenizer, Wordwise(builtin_tokenizer)):
        pieces, _ = streamed(tokenizer, ids)
        assert "".join(pieces) == builtin_tokenizer.decode(ids)


def test_push_holds_an_emoji_until_its_last_byte_and_finish_replaces_what_never_came():
    ids = BYTES.encode("x👍")
    assert len(ids) == 5
    for tokenizer in (BYTES, Wordwise(BYTES)):
        assert streamed(tokenizer, ids)[0] == ["x", "", "", "", "👍", ""]
        assert streamed(tokenizer, ids[:-1])[0] == ["x", "", "", "", "\ufffd"]


def test_push_of_a_zwj_sequence_gives_its_code_points_one_by_one():
    family = "👨‍👩‍👧"
    pieces, _ = streamed(BYTES, BYTES.encode(family))
    assert [piece for piece in pieces if piece] == list(family)


def test_push_through_decode_stays_in_a_window():
    tokenizer = Wordwise(BYTES)
    pieces, _ = streamed(tokenizer, BYTES.encode("word 👍 " * 100))
    assert "".join(pieces) == "word 👍 " * 100
    assert tokenizer.longest <= 17


def test_push_skips_special_tokens_unless_told():
    [special] = [id_ for id_, token in enumerate(BYTES.spec.tokens) if token == "<|im_end|>"]
    ids = [*BYTES.encode("a"), special]
    assert "".join(streamed(BYTES, ids)[0]) == "a"
    assert "".join(streamed(BYTES, ids, skip_special_tokens=False)[0]) == "a<|im_end|>"


def byte_fallback_tokenizer() -> tokenizers.Tokenizer:
    """A vocabulary of bytes alone, as a checkpoint's `tokenizer.json` has it for characters that are no token."""
    vocabulary = {"<unk>": 0} | {f"<0x{byte:02X}>": 1 + byte for byte in range(256)}
    model = tokenizers.models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>", byte_fallback=True)
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.decoder = tokenizers.decoders.Sequence([tokenizers.decoders.ByteFallback(), tokenizers.decoders.Fuse()])
    return tokenizer


@given(text=st.text("a日本é👍\u0915", max_size=20), num_prompt=st.integers(0, 12))
def test_push_of_byte_tokens_leaves_characters_as_they_came_out(text, num_prompt):
    """A character that is begun makes the library read those before it as U+FFFD, until it is complete."""
    tokenizer, ids = byte_fallback_tokenizer(), [1 + byte for byte in text.encode()]
    prompt, ids = ids[:num_prompt], ids[num_prompt:]
    stream = TextStream(tokenizer, prompt)
    pieces = [stream.push([id_]) for id_ in ids] + [stream.finish()]
    whole = text.encode()[:num_prompt].decode(errors="ignore")
    assert whole + "".join(pieces) == (text if ids else whole)
    assert all("\ufffd" not in piece for piece in pieces)


@pytest.mark.parametrize("wrap", [lambda tokenizer: tokenizer, Wordwise], ids=["pieces", "window"])
def test_push_behind_a_prompt_continues_its_words(wrap):
    prompt, more = PIECES.encode("in"), PIECES.encode("the dog")
    pieces = streamed(wrap(PIECES), more, prompt_token_ids=prompt)[0]
    assert PIECES.decode(prompt) + "".join(pieces) == PIECES.decode([*prompt, *more]) == "in the dog"
    pieces, stream = streamed(wrap(PIECES), more, prompt_token_ids=prompt, stop=[" the"])
    assert ("".join(pieces), stream.stopped_by) == ("", " the")


# Stop strings.


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("text", ["one STOP two", "onSTOSTOP", "STOP", "ends in STO", "👍STOP👍", "SSTOP", "no"])
def test_push_stops_wherever_tokens_cut_the_stop_string(text, include):
    """Every cut of the text into tokens, up to 2^10 of them."""
    text = text[:11]
    for mask in range(2 ** (len(text) - 1)):
        cuts = [0, *(i + 1 for i in range(len(text) - 1) if mask >> i & 1), len(text)]
        parts = [text[a:b] for a, b in itertools.pairwise(cuts)]
        pieces, stream = streamed(Fixed(parts), range(len(parts)), stop=("STOP",), include_stop=include)
        assert "".join(pieces) == text_until(text, ("STOP",), include)
        assert stream.stopped_by == ("STOP" if "STOP" in text else None)
        if stream.stopped_by is not None:
            taken = "".join(parts[: stream.num_tokens])
            assert "STOP" in taken
            assert "STOP" not in "".join(parts[: stream.num_tokens - 1])


@given(
    text=st.text("ab👍", max_size=14),
    stops=st.lists(st.text("ab👍", min_size=1, max_size=5), max_size=4),
    include=st.booleans(),
)
@example(text="aab", stops=["ab", "aab", "b"], include=False)
def test_push_never_lets_out_what_a_stop_string_takes_back(text, stops, include):
    """Any stop strings, nested ones too: what is out is always the beginning of the result, and as much as can be."""
    ids = BYTES.encode(text)
    stream = TextStream(BYTES, stop=tuple(stops), include_stop=include)
    expected = text_until(text, stops, include)
    out = ""
    for id_ in ids:
        out += stream.push([id_])
        assert expected.startswith(out)
        if stream.stopped_by is None:
            read = BYTES.decode(ids[: stream.num_tokens]).rstrip("\ufffd")
            held = read[len(out) :]
            assert not held or any(s.startswith(held) for s in stops)
    assert out + stream.finish() == expected
    assert (stream.stopped_by is not None) == any(s in text for s in stops)


def test_push_takes_no_token_behind_the_stop_string():
    ids = BYTES.encode("ab.cd")
    stream = TextStream(BYTES, stop=(".",))
    assert stream.push(ids) == "ab"
    assert (stream.num_tokens, stream.stopped_by) == (3, ".")
    assert stream.push(ids) == stream.finish() == ""
    assert stream.num_tokens == 3


def test_push_lets_the_first_tokens_through_unread():
    ids = BYTES.encode("a.b.c")
    pieces, stream = streamed(BYTES, ids, stop=(".",), min_new_tokens=2)
    assert "".join(pieces) == "a.b"
    assert stream.num_tokens == 4
    assert "".join(streamed(BYTES, ids, stop=(".b",), min_new_tokens=2)[0]) == "a.b.c"


def test_finish_gives_back_what_only_began_a_stop_string():
    assert streamed(BYTES, BYTES.encode("no END"), stop=("END!",))[0][-1] == "END"
    pieces, stream = streamed(BYTES, BYTES.encode("x👍")[:-1], stop=("\ufffd",))  # found at the very end
    assert "".join(pieces) == "x"
    assert stream.stopped_by == "\ufffd"


def test_push_after_finish_raises():
    stream = TextStream(BYTES)
    stream.finish()
    with pytest.raises(ValueError, match="`push` must come before `finish`"):
        stream.push([1])


@pytest.mark.parametrize("stop", ["STOP", ("",), (1,)])
def test_text_stream_with_a_bad_stop_raises(stop):
    with pytest.raises(ValueError, match="`stop` must be strings, none of them empty"):
        TextStream(BYTES, stop=stop)


def test_text_stream_of_no_tokenizer_raises():
    with pytest.raises(TypeError, match="`tokenizer` must have a method `detokenizer` or `decode`; got int."):
        TextStream(3)
