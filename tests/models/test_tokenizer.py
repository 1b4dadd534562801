"""The tokenizer: ids that the model was trained on, text that survives the way there and back, streamed or whole."""

import dataclasses
import datetime
import itertools
import json
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import decoders

from jaxpaged.models.gguf import read_gguf
from jaxpaged.models.tokenizer import Detokenizer, Tokenizer, TokenizerSpec
from tests.models.tiny_gguf import PIECES, WHOLE_WORD, tiny_vocabulary, write_tiny_gguf

DATA = Path(__file__).parents[1] / "data"
TOKENS = json.loads((DATA / "tokens_smollm2.json").read_text("utf-8"))
GREEDY = json.loads((DATA / "greedy_smollm2.json").read_text("utf-8"))


def tiny_spec(vocabulary: str = "gpt2", **changes) -> TokenizerSpec:
    values = {key.removeprefix("tokenizer.ggml."): value for key, value in tiny_vocabulary(vocabulary).items()}
    spec = TokenizerSpec(
        kind=values["model"],
        pre=values.get("pre"),
        tokens=tuple(values["tokens"]),
        token_types=tuple(values["token_type"]),
        scores=tuple(values.get("scores", ())),
        merges=tuple(values.get("merges", ())),
        bos_id=values["bos_token_id"],
        eos_id=values["eos_token_id"],
    )
    return dataclasses.replace(spec, **changes)


def tokens_of(tokenizer: Tokenizer, text: str) -> list[str]:
    return [tokenizer.spec.tokens[id_] for id_ in tokenizer.encode(text)]


def streamed(tokenizer: Tokenizer, ids: list[int], **options) -> str:
    stream = Detokenizer(tokenizer, **options)
    return "".join(map(stream.push, ids)) + stream.finish()


# The built-in model. The expected ids were made by `tokenizers` alone (Digits, then its own ByteLevel expression) from
# the gguf package's own reading of the file, the generations by transformers in float32 from the same prompt ids.


@pytest.mark.parametrize(("text", "ids"), TOKENS, ids=range(len(TOKENS)))
def test_encode_builtin_model_gives_known_ids(builtin_tokenizer, text, ids):
    assert builtin_tokenizer.encode(text) == ids
    assert builtin_tokenizer.decode(ids, skip_special_tokens=False) == text


@pytest.mark.parametrize("case", GREEDY, ids=range(len(GREEDY)))
def test_encode_and_decode_builtin_model_agree_with_the_reference_generation(builtin_tokenizer, case):
    text = case["prompt"]
    if case["chat"]:
        text = builtin_tokenizer.apply_chat_template([{"role": "user", "content": text}])
    assert builtin_tokenizer.encode(text) == case["prompt_token_ids"]
    assert builtin_tokenizer.decode(case["token_ids"]) == case["text"]
    assert streamed(builtin_tokenizer, case["token_ids"]) == case["text"]


def test_tokenizer_builtin_model_properties(builtin_tokenizer):
    assert builtin_tokenizer.vocab_size == 49152
    assert builtin_tokenizer.bos_token_id == 1
    assert builtin_tokenizer.stop_token_ids == {2}


def test_apply_chat_template_builtin_model_adds_its_system_prompt(builtin_tokenizer):
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes?"}]
    system = "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
    text = system + "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nYes?<|im_end|>\n"
    assert builtin_tokenizer.apply_chat_template(messages, add_generation_prompt=False) == text
    assert builtin_tokenizer.apply_chat_template(messages) == text + "<|im_start|>assistant\n"


@settings(max_examples=200, deadline=None)
@given(ids=st.lists(st.integers(0, 49151) | st.integers(0, 300), max_size=12), skip=st.booleans())
def test_detokenizer_of_any_ids_adds_up_to_decode(builtin_tokenizer, ids, skip):
    tokenizer = builtin_tokenizer
    kept = [tokenizer.spec.tokens[id_] for id_ in ids if not (skip and id_ < 17)]
    library = decoders.ByteLevel().decode(kept)
    assert tokenizer.decode(ids, skip) == streamed(tokenizer, ids, skip_special_tokens=skip) == library


def test_detokenizer_holds_a_character_back_until_its_last_byte(builtin_tokenizer):
    ids = builtin_tokenizer.encode("🎉é")
    stream = Detokenizer(builtin_tokenizer)
    pieces = [stream.push(id_) for id_ in ids]
    assert len(ids) > 2
    assert [piece for piece in pieces if piece] == ["🎉", "é"]
    assert pieces[0] == ""
    assert stream.finish() == ""


def test_detokenizer_cut_inside_a_character_finishes_with_a_replacement(builtin_tokenizer):
    ids = builtin_tokenizer.encode("ok 🎉")[:-1]
    stream = Detokenizer(builtin_tokenizer)
    assert "".join(map(stream.push, ids)) == "ok "
    assert stream.finish() == "\ufffd"
    assert builtin_tokenizer.decode(ids) == "ok \ufffd"


# Byte-level BPE.

_TINY = Tokenizer(tiny_spec())


@settings(max_examples=200, deadline=None)
@given(text=st.text(st.characters(exclude_categories=["Cs"])))
def test_encode_byte_level_text_comes_back_whole(text):
    tokenizer = _TINY
    ids = tokenizer.encode(text)
    assert streamed(tokenizer, ids, skip_special_tokens=False) == tokenizer.decode(ids, False) == text


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("smollm", ["Ġ", "1", "2", "3", "4"]),
        ("starcoder", ["Ġ", "1", "2", "3", "4"]),
        ("gpt-2", ["Ġ", "123", "4"]),
        ("llama-bpe", ["Ġ", "123", "4"]),
        ("qwen2", ["Ġ", "1", "2", "3", "4"]),
        ("tekken", ["Ġ", "1", "2", "3", "4"]),
        (None, ["Ġ", "123", "4"]),
    ],
)
def test_encode_digits_follow_the_named_pre_tokenizer(pre, pieces):
    assert tokens_of(Tokenizer(tiny_spec(pre=pre, add_bos=False)), " 1234") == pieces


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("gpt-2", ["don", "'t", "ĠGoGo", "!!", "Ċ"]),
        ("smollm", ["don", "'t", "ĠGoGo", "!!", "Ċ"]),
        ("llama-bpe", ["don", "'t", "ĠGoGo", "!!Ċ"]),
        ("qwen2", ["don", "'t", "ĠGoGo", "!!Ċ"]),
        ("tekken", ["don", "'t", "ĠGo", "Go", "!!Ċ"]),
        ("default", ["don", "'", "t", "ĠGoGo", "!!", "Ċ"]),
        ("deepseek-coder", ["don", "'", "t", "ĠGoGo", "!!", "Ċ"]),
    ],
)
def test_encode_words_are_cut_as_the_named_pre_tokenizer_cuts_them(pre, pieces):
    cutter = Tokenizer(tiny_spec(pre=pre))._encoder.pre_tokenizer
    assert [piece for piece, _ in cutter.pre_tokenize_str("don't GoGo!!\n")] == pieces


@pytest.mark.parametrize(("pre", "whole"), [("llama-bpe", True), ("tekken", True), ("gpt-2", False)])
def test_encode_word_that_is_a_token_is_kept_whole_where_the_model_ignores_merges(pre, whole):
    pieces = tokens_of(Tokenizer(tiny_spec(pre=pre, add_bos=False)), WHOLE_WORD)
    assert pieces == ([WHOLE_WORD] if whole else list(WHOLE_WORD))


def test_encode_merges_apply_in_their_order():
    assert tokens_of(Tokenizer(tiny_spec()), "the the ether") == ["the", "Ġthe", "Ġ", "e", "the", "r"]
    later = tiny_spec(merges=("t h", "e r", "th e", "Ġ the", "i n", "Ġ a", "1 2", "12 3", "Ã ©"))
    assert tokens_of(Tokenizer(later), "ther") == ["th", "er"]
    assert tokens_of(Tokenizer(tiny_spec()), "ther") == ["the", "r"]


@pytest.mark.parametrize(
    ("changes", "starts"),
    [
        ({}, False),
        ({"add_bos": True}, True),
        ({"pre": "llama-bpe"}, True),
        ({"pre": "llama-bpe", "add_bos": False}, False),
        ({"add_bos": True, "bos_id": None}, False),
    ],
)
def test_encode_bos_is_added_as_the_checkpoint_says(changes, starts):
    ids = Tokenizer(tiny_spec(**changes)).encode("a")
    assert (ids[0] == 1, len(ids)) == (starts, 1 + starts)


def test_encode_bos_that_the_text_has_already_is_not_doubled():
    tokenizer = Tokenizer(tiny_spec(add_bos=True))
    assert tokenizer.encode("<|im_start|>a") == tokenizer.encode("a")
    assert tokenizer.encode("") == [1]


def test_encode_user_defined_token_is_whole_and_stays_in_the_text():
    spec = tiny_spec()
    tokenizer = Tokenizer(dataclasses.replace(spec, tokens=(*spec.tokens, "  é"), token_types=(*spec.token_types, 4)))
    ids = tokenizer.encode("a  éb")
    assert ids[1:2] == [len(spec.tokens)]
    assert tokenizer.decode(ids) == "a  éb"


def test_decode_special_tokens_are_skipped_unless_asked_for():
    ids = _TINY.encode("<|im_start|>a<|im_end|>")
    assert _TINY.decode(ids) == "a"
    assert _TINY.decode(ids, skip_special_tokens=False) == "<|im_start|>a<|im_end|>"


@pytest.mark.parametrize("token_id", [-1, 269, 10**9])
def test_decode_id_outside_the_vocabulary_is_refused(token_id):
    with pytest.raises(ValueError, match=rf"`token_ids` must be ids below the vocabulary size, 269; got {token_id}\."):
        _TINY.decode([5, token_id])


def test_encode_lone_surrogate_is_refused():
    with pytest.raises(ValueError, match=r"`text` must be Unicode without lone surrogates; got '\\udcff' at 1"):
        _TINY.encode("a\udcff")


def test_stop_token_ids_hold_end_of_turn_where_the_checkpoint_names_it():
    assert Tokenizer(tiny_spec()).stop_token_ids == {2}
    assert Tokenizer(tiny_spec(eot_id=0)).stop_token_ids == {0, 2}
    assert Tokenizer(tiny_spec(eos_id=None)).stop_token_ids == frozenset()


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"kind": "bert"}, "`tokenizer.ggml.model` must be 'gpt2' or 'llama'; got 'bert'"),
        ({"pre": "newest"}, "`tokenizer.ggml.pre` must be one of default, .*, smollm, .*; got 'newest'"),
        ({"merges": ()}, "`tokenizer.ggml.merges` must be in the file"),
        ({"merges": ("t h", "th")}, "must hold pairs 'left right'; got 'th' at 1"),
        ({"merges": ("t h", "q u")}, "must join two tokens of the vocabulary into a third; got 'q' \\+ 'u' at 1"),
        ({"kind": "llama"}, "`tokenizer.ggml.scores` must hold one number for each of the 269 tokens; got 0"),
        ({"kind": "llama", "scores": (0.0,) * 269, "token_types": (6,) * 269}, "must write a byte as '<0x0A>'; got"),
    ],
)
def test_tokenizer_bad_spec_is_refused_by_name(changes, complaint):
    with pytest.raises(ValueError, match=complaint):
        Tokenizer(tiny_spec(**changes))


# SentencePiece BPE.

_SENTENCEPIECE = Tokenizer(tiny_spec("llama", add_bos=False))
_NO_SPACE = Tokenizer(tiny_spec("llama", add_bos=False, add_space_prefix=False))


def sentencepiece(text: str) -> list[str]:
    """The algorithm itself: join the best pair until none is a piece, then spell out what has none."""
    score = {piece: -rank for rank, piece in enumerate(PIECES)}
    symbols = list(("▁" + text).replace(" ", "▁")) if text else []
    while True:
        pairs = [(score[a + b], -i) for i, (a, b) in enumerate(itertools.pairwise(symbols)) if a + b in score]
        if not pairs:
            break
        at = -max(pairs)[1]
        symbols[at : at + 2] = ["".join(symbols[at : at + 2])]
    spelled = ([s] if s in score else [f"<0x{byte:02X}>" for byte in s.encode()] for s in symbols)
    return [token for tokens in spelled for token in tokens]


@settings(max_examples=300, deadline=None)
@example(text="che her there")  # pairs that overlap: the better score wins, not the first or the longest
@given(
    text=st.lists(st.sampled_from([*PIECES, " ", "\n"]), max_size=12).map("".join)
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
)
def test_encode_sentencepiece_follows_the_scores(text):
    if "▁" not in text:
        assert tokens_of(_SENTENCEPIECE, text) == sentencepiece(text)


@settings(max_examples=200, deadline=None)
@given(text=st.text(st.characters(exclude_categories=["Cs"], exclude_characters="▁")), add_space=st.booleans())
def test_encode_sentencepiece_text_comes_back_whole(text, add_space):
    tokenizer = _SENTENCEPIECE if add_space else _NO_SPACE
    ids = tokenizer.encode(text)
    assert streamed(tokenizer, ids) == tokenizer.decode(ids) == text


def test_encode_sentencepiece_prefix_and_bos_follow_the_checkpoint():
    assert tokens_of(Tokenizer(tiny_spec("llama")), "the in") == ["<s>", "▁the", "▁in"]
    assert tokens_of(_SENTENCEPIECE, "the") == ["▁the"]
    assert tokens_of(_NO_SPACE, "the") == ["the"]
    assert tokens_of(_SENTENCEPIECE, "</s>in") == ["</s>", "▁in"]


def test_encode_sentencepiece_unused_piece_is_never_made():
    spec = tiny_spec("llama", add_bos=False)
    longer = {"tokens": (*spec.tokens, "tin"), "scores": (*spec.scores, 1.0)}
    normal = Tokenizer(dataclasses.replace(spec, **longer, token_types=(*spec.token_types, 1)))
    unused = Tokenizer(dataclasses.replace(spec, **longer, token_types=(*spec.token_types, 5)))
    assert tokens_of(normal, "tin") == ["▁", "tin"]
    assert tokens_of(unused, "tin") == ["▁", "t", "in"]


def test_encode_sentencepiece_without_byte_tokens_gives_one_unknown_for_a_run():
    spec = tiny_spec("llama", add_bos=False)
    kept = [id_ for id_, kind in enumerate(spec.token_types) if kind != 6]
    parts = {name: tuple(getattr(spec, name)[id_] for id_ in kept) for name in ("tokens", "token_types", "scores")}
    tokenizer = Tokenizer(dataclasses.replace(spec, **parts))
    assert tokens_of(tokenizer, "in日本 in") == ["▁in", "<unk>", "▁in"]


# Chat templates.


def test_apply_chat_template_tiny_file_renders_as_transformers_would(tmp_path):
    write_tiny_gguf(tmp_path / "m.gguf")
    tokenizer = Tokenizer(read_gguf(tmp_path / "m.gguf").tokenizer)
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    text = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
    assert tokenizer.apply_chat_template(messages, add_generation_prompt=False) == text
    assert tokenizer.apply_chat_template(messages) == text + "<|im_start|>assistant\n"
    with pytest.raises(ValueError, match="must fit the model's chat template; got its error: no such role: wizard"):
        tokenizer.apply_chat_template([{"role": "wizard", "content": ""}])


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{{ strftime_now('%Y') }}", str(datetime.datetime.now().year)),
        ("{{ messages[0] | tojson }}", '{"role": "user", "content": "<é>"}'),
        ("{% for m in [1, 2, 3] %}{% if m == 2 %}{% break %}{% endif %}{{ m }}{% endfor %}", "1"),
        ("{{ bos_token }}{{ eos_token }}", "<|im_start|><|im_end|>"),
    ],
)
def test_apply_chat_template_knows_what_templates_use(template, text):
    tokenizer = Tokenizer(tiny_spec(chat_template=template))
    assert tokenizer.apply_chat_template([{"role": "user", "content": "<é>"}]) == text


@pytest.mark.parametrize(
    ("template", "complaint"),
    [
        (None, "the model must have a `tokenizer.chat_template`; got none"),
        ("{% for %}", "`tokenizer.chat_template` must be a Jinja template; got an error in its line 1"),
        ("{{ messages.append(1) }}", "must fit the model's chat template; got its error: .*unsafe|not safely callable"),
        ("{{ ''.__class__.__mro__ }}", "must fit the model's chat template; got its error: .*unsafe"),
        ("{{ messages[0]['text'] + 'x' }}", "must fit the model's chat template; got its error: .*no attribute 'text'"),
        ("{{ messages[0]['content'] + 1 }}", "must fit the model's chat template; got its error: can only concatenate"),
    ],
)
def test_apply_chat_template_bad_template_or_messages_are_value_errors(template, complaint):
    tokenizer = Tokenizer(tiny_spec(chat_template=template))
    with pytest.raises(ValueError, match=complaint):
        tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}])
