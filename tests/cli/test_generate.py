"""`jaxpaged generate`, in process: what a person types, and what comes out on stdout, on stderr and as exit code.

Models are tiny and random; tests/models checks the built-in one. Most runs share shapes, and so their compilations.
"""

import io
import json
import os
import re
import sys
from pathlib import Path

import pytest

from jaxpaged import engine
from jaxpaged.cli import app
from jaxpaged.cli import generate as generate_command
from jaxpaged.cli.parser import make_parser
from jaxpaged.engine.handle import Mailbox
from jaxpaged.models.loading import load_model
from tests.cli.command import run
from tests.models.tiny_gguf import tiny_vocabulary, write_tiny_gguf

KEYS = ["prompt", "prompt_token_ids", "token_ids", "text", "finish_reason", "num_pages"]
PROMPTS = ["the hen", "in 123", "é!"]
NUM_NEW = 6
BASIC = ("--max-new-tokens", str(NUM_NEW), "--num-pages", "40", "--backend", "xla")
NBYTES_PER_TOKEN = 2 * 2 * 2 * 16 * 4  # K and V, 2 layers, 2 heads of 16, float32


@pytest.fixture
def generate(models, capfd):
    """Runs `jaxpaged generate ARGUMENTS`; returns exit code, stdout, stderr."""

    def generate(*arguments: str, model: str = "gpt2.gguf", basic: tuple[str, ...] = BASIC):
        return run(capfd, "generate", "--model", str(models / model), *basic, *arguments)

    return generate


@pytest.fixture
def records(generate):
    """Runs `jaxpaged generate ARGUMENTS --format json`; returns the objects."""

    def records(*arguments: str, **options) -> list[dict]:
        code, out, _ = generate("--format", "json", *arguments, **options)
        assert code == 0
        return [json.loads(line) for line in out.splitlines()]

    return records


@pytest.fixture
def refused(generate):
    """Runs a command that must fail as a mistake of the caller; returns the one line that says so."""

    def refused(*arguments: str, **options) -> str:
        code, out, err = generate(*arguments, **options)
        assert (code, out) == (2, "")
        assert re.fullmatch(r"jaxpaged: error: [^\n]+\n", err)
        return err.removeprefix("jaxpaged: error: ").rstrip()

    return refused


# What is printed


def test_generate_json_prints_one_object_a_prompt_in_order(generate, models):
    code, out, err = generate(*PROMPTS, "--format", "json")
    assert code == 0
    got = [json.loads(line) for line in out.splitlines()]
    assert [list(record) for record in got] == [KEYS] * 3
    assert [record["prompt"] for record in got] == PROMPTS
    _, tokenizer = load_model(models / "gpt2.gguf")
    for record in got:
        assert record["prompt_token_ids"] == tokenizer.encode(record["prompt"])
        assert 1 <= len(record["token_ids"]) <= NUM_NEW
        assert record["text"] == tokenizer.decode(record["token_ids"])
        stopped = record["token_ids"][-1] in tokenizer.stop_token_ids
        assert record["finish_reason"] == ("stop" if stopped else "length")
        assert record["num_pages"] == 1
    assert err.count("\n") == 1


def test_generate_text_prints_each_prompt_and_what_follows(generate, records):
    code, out, _ = generate(*PROMPTS)
    assert code == 0
    assert out == "".join(r["prompt"] + r["text"] + "\n" for r in records(*PROMPTS))


def test_generate_together_equals_alone(records):
    together = records(*PROMPTS)
    assert together == [record for prompt in PROMPTS for record in records(prompt)]
    assert len({tuple(record["token_ids"]) for record in together}) == 3


@pytest.mark.slow
def test_generate_from_a_sentencepiece_model_keeps_words_apart(generate, records, models):
    """Such a vocabulary drops the first space when it decodes, which is only right at the beginning of a text."""
    _, tokenizer = load_model(models / "llama.gguf")
    assert tokenizer.decode(tokenizer.encode("the")) == "the"
    prompts = [f"{word} the" for word in ("the", "in", "hen", "a", "rat", "tea", "this", "chin")]
    got = records(*prompts, model="llama.gguf")
    for record in got:
        assert record["prompt"] + record["text"] == tokenizer.decode(record["prompt_token_ids"] + record["token_ids"])
    assert generate(*prompts, model="llama.gguf")[1] == "".join(r["prompt"] + r["text"] + "\n" for r in got)


def test_generate_chat_applies_the_template_and_prints_the_reply_only(generate, records):
    [record] = records("the hen", "--chat")
    assert record["prompt"] == "the hen"
    assert len(record["prompt_token_ids"]) > 10
    assert record["prompt_token_ids"][0] == 1
    assert generate("the hen", "--chat")[1] == record["text"] + "\n"


@pytest.mark.slow
@pytest.mark.parametrize("page_size", [3, 1])
def test_generate_with_small_pages_gives_the_same_tokens(records, page_size):
    for small, usual in zip(records(*PROMPTS, "--page-size", str(page_size)), records(*PROMPTS), strict=True):
        assert small["token_ids"] == usual["token_ids"]
        stored = len(small["prompt_token_ids"]) + len(small["token_ids"]) - 1
        assert small["num_pages"] == -(-stored // page_size)


@pytest.mark.parametrize(
    ("backend", "prompt"),
    # A prompt of one token needs no prefill, which spares the interpreter half of its compilation.
    [("auto", "the hen"), ("reference", "the hen"), pytest.param("interpret", "a", marks=pytest.mark.slow)],
)
def test_generate_with_every_backend_gives_the_same_tokens(records, backend, prompt):
    few = ("--max-new-tokens", "3")
    assert records(prompt, *few, "--backend", backend) == records(prompt, *few)


@pytest.mark.slow
def test_generate_in_bfloat16_halves_the_cache(generate):
    code, out, err = generate("the hen", "--dtype", "bfloat16", "--format", "json", "--max-new-tokens", "2")
    assert code == 0
    assert len(json.loads(out)["token_ids"]) == 2
    assert f"1 page of 16 tokens, {16 * NBYTES_PER_TOKEN / 2 / 1024:.1f} KiB: " in err


def test_generate_sampled_follows_the_seed_and_prompt_i_draws_with_seed_plus_i(records):
    sampled = ("--temperature", "1.5", "--top-k", "50", "--top-p", "0.95")
    both = records("the hen", "the hen", *sampled, "--seed", "7")
    assert both == records("the hen", "the hen", *sampled, "--seed", "7")
    assert both[0]["token_ids"] != both[1]["token_ids"]
    assert [both[1]] == records("the hen", *sampled, "--seed", "8")
    [greedy] = records("the hen")
    for only_one in (("--top-k", "1"), ("--top-p", "1e-46"), ("--temperature", "1e-30")):
        assert records("the hen", *sampled, *only_one) == [greedy]
    [any_k] = records("the hen", *sampled, "--top-k", "99999999999")
    assert [any_k] == records("the hen", *sampled, "--top-k", "0")


def test_generate_with_a_huge_max_new_tokens_ends_with_the_context(records, models):
    write_tiny_gguf(models / "short.gguf", metadata={"llama.context_length": 16})
    [record] = records("the hen", "--max-new-tokens", "99999999999999999999", model="short.gguf")
    total = len(record["prompt_token_ids"]) + len(record["token_ids"])
    assert total == 16 or record["finish_reason"] == "stop"


def test_generate_summary_counts_pages_bytes_and_the_contiguous_cache(generate, records):
    arguments = (*PROMPTS, "--page-size", "3")
    got = records(*arguments)
    lengths = [len(r["prompt_token_ids"]) for r in got]
    assert all(r["finish_reason"] == "length" for r in got)  # so that all end, and hold most pages, at the same time
    num_pages = sum(r["num_pages"] for r in got)
    max_len = max(lengths) + NUM_NEW
    _, _, err = generate(*arguments)
    assert re.fullmatch(
        rf"{3 * NUM_NEW} tokens in \d+\.\d s, compilation included\. "
        rf"KV cache: {num_pages} pages of 3 tokens, {num_pages * 3 * NBYTES_PER_TOKEN / 1024:.1f} KiB: "
        rf"{(max_len - num_pages) * 3 * NBYTES_PER_TOKEN / 1024:.1f} KiB less than the "
        rf"{3 * max_len * NBYTES_PER_TOKEN / 1024:.1f} KiB of a contiguous \[3, {max_len}\] cache\.\n",
        err,
    )


def test_summarise_of_more_prompts_than_run_together_compares_with_one_batch(capsys):
    """Seventy prompts through batches of at most 64 never need a contiguous cache of 70 rows. 2 MiB a page here."""

    class Done:
        page_size, config = 16, engine.SchedulerConfig()

        def stats(self):
            return engine.EngineStats(num_steps=9, peak_num_pages=128, nbytes_per_page=2**21, num_preemptions=0)

    output = engine.RequestOutput(
        request_id=0, prompt_token_ids=(1,), token_ids=(2,), finish_reason=engine.FinishReason.LENGTH, num_pages=2
    )
    generate_command._summarise(Done(), [output] * 70, 48, 1.0)
    assert capsys.readouterr().err.endswith(
        "KV cache: 128 pages of 16 tokens, 256.0 MiB: "
        "128.0 MiB less than the 384.0 MiB of a contiguous [64, 48] cache.\n"
    )


def test_generate_summary_where_paging_takes_more_says_so(generate):
    """One token fills one slot of a page of 256."""
    _, _, err = generate("t", "--page-size", "256", "--max-new-tokens", "1")
    assert "KV cache: 1 page of 256 tokens, " in err
    assert re.search(r" KiB more than the \d+\.\d KiB of a contiguous \[1, \d\] cache\.\n$", err)


# Where prompts come from


@pytest.mark.parametrize("end", ["", "\n", "\r\n"])
@pytest.mark.parametrize("start", ["", "\ufeff"])
def test_read_prompts_from_a_file_takes_each_line_as_it_stands(tmp_path, start, end):
    newline = end or "\n"
    (tmp_path / "p.txt").write_bytes((start + newline.join(["café ☕ ", "\tthe\u2028hen", " "]) + end).encode())
    args = make_parser().parse_args(["generate", "first", "--prompts-file", str(tmp_path / "p.txt")])
    assert generate_command._read_prompts(args) == ["first", "café ☕ ", "\tthe\u2028hen", " "]


@pytest.mark.parametrize("arguments", [("--prompts-file", "-"), ("-",)])
def test_generate_from_standard_input_equals_arguments(records, monkeypatch, arguments):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("\n".join(PROMPTS).encode())))
    assert records(*arguments) == records(*PROMPTS)


def test_generate_after_two_dashes_takes_a_prompt_that_looks_like_a_flag(records):
    assert [r["prompt"] for r in records("--", "--chat", "the hen", "é!")] == ["--chat", "the hen", "é!"]


def test_generate_with_prompts_on_both_sides_of_a_flag_takes_them_in_order(records):
    prompts = [r["prompt"] for r in records("the", "--max-new-tokens", "1", "hen", "--seed", "2", "in")]
    assert prompts == ["the", "hen", "in"]


# What is refused


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "no prompt given: pass one, or --prompts-file FILE, or '-' for standard input."),
        (("the", ""), "prompt 2 of 2 is empty: there is nothing to continue."),
        (("--bad", "the"), "unrecognized arguments: --bad"),
        (("the", "--max", "3"), "unrecognized arguments: --max 3"),
        (("the", "--seed", "one"), "argument --seed: invalid int value: 'one'"),
        (("the", "--page-size", "1.5"), "argument --page-size: invalid int value: '1.5'"),
        (("the", "--temperature"), "argument --temperature: expected one argument"),
        (("the", "--dtype", "int8"), "argument --dtype: invalid choice: 'int8'"),
        (("the", "--backend", "tpu"), "argument --backend: invalid choice: 'tpu'"),
        (
            ("the", "--backend", "triton"),
            "`--backend triton` cannot run here: it needs an NVIDIA GPU, and JAX sees only",
        ),
        (("the", "--max-new-tokens", "0"), "`--max-new-tokens` must be at least 1; got 0."),
        (("the", "--temperature", "-1"), "`--temperature` must be finite and not negative; got -1.0."),
        (("the", "--temperature", "nan"), "`--temperature` must be finite and not negative; got nan."),
        (("the", "--temperature", "1e39"), "`--temperature` must be finite and not negative; got 1e+39."),
        (("the", "--top-p", "0"), "`--top-p` must be above 0 and at most 1; got 0.0."),
        (("the", "--top-k", "-1"), "`--top-k` must be 0 (all tokens) or more; got -1."),
        (("the", "hen", "--seed", "4294967295"), "`--seed` must fit 32 bits without a sign; got 4294967296."),
        (("the", "--page-size", "0"), "`--page-size` must be at least 1; got 0."),
        (("the", "--page-size", "257"), "`--page-size` must be at most the context of 256 tokens; got 257."),
        (("the", "--num-pages", "1"), "`--num-pages`, the null page included, must be an integer >= 2; got 1."),
        (("the", "--num-pages", "-3"), "`--num-pages`, the null page included, must be an integer >= 2; got -3."),
        (("the", "--num-pages", "99999999999"), "no memory for 99999999999 pages of 16 tokens: RESOURCE_EXHAUSTED"),
        (
            ("the hen " * 8, "--num-pages", "3"),
            "`prompt` of 41 tokens with up to 6 new ones, in pages of 16, needs 3 pages; 2 are free. Free a "
            "sequence, or enlarge the pool (`--num-pages`).",
        ),
        (("the", "a" * 256), "prompt 2 of 2 must be shorter than the context of 256 tokens"),
        (
            ("a" * 10**6,),
            "prompt 1 of 1 must be shorter than the context of 256 tokens, to leave room for one more; got",
        ),
        (("a\udcff",), "`text` must be Unicode without lone surrogates; got '\\udcff' at 1."),
        (("--prompts-file", "no/such"), "`--prompts-file no/such` cannot be read: No such file or directory."),
        (("--prompts-file", "no\udcff"), "`--prompts-file no\\udcff` cannot be read: No such file or directory."),
        (("--prompts-file", "a\0b"), "cannot be read: embedded null byte."),
        (("--prompts-file", "."), "`--prompts-file .` cannot be read: Is a directory."),
        (("--prompts-file", os.devnull), "no prompt given"),
    ],
    ids=lambda value: None if isinstance(value, str) else " ".join(v[:12] for v in value).encode("ascii", "replace"),
)
def test_generate_refuses_in_one_line(refused, arguments, message):
    assert message in refused(*arguments)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"the\n\nhen\n", ": line 2 of 3 is empty, and each line is a prompt."),
        (b"the\r\n\r\n", ": line 2 of 2 is empty, and each line is a prompt."),
        (b"\n", ": line 1 of 1 is empty, and each line is a prompt."),
        (b"the\nh\xe9n\n", " must be UTF-8; byte 5 is not."),
    ],
)
def test_generate_refuses_a_prompts_file_by_its_line(refused, tmp_path, data, message):
    (tmp_path / "p.txt").write_bytes(data)
    assert refused("--prompts-file", str(tmp_path / "p.txt")) == f"`--prompts-file {tmp_path}/p.txt`{message}"


@pytest.mark.parametrize("add_bos", [False, True])
def test_generate_refuses_a_prompt_that_the_vocabulary_has_nothing_of(refused, models, add_bos):
    """A byte without a token leaves no trace, and a prompt of such bytes alone is as good as empty."""
    tokens = ["unused" if t == "q" else t for t in tiny_vocabulary()["tokenizer.ggml.tokens"]]
    metadata = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.add_bos_token": add_bos}
    write_tiny_gguf(models / "narrow.gguf", metadata=metadata)
    message = "prompt 2 of 2 is empty: the vocabulary has none of its characters."
    assert refused("the", "qq", model="narrow.gguf") == message


def test_generate_refuses_what_is_no_model(refused, models, tmp_path):
    whole = (models / "gpt2.gguf").read_bytes()
    (tmp_path / "text.gguf").write_text("this is no model")
    (tmp_path / "empty.gguf").touch()
    (tmp_path / "header.gguf").write_bytes(whole[:1000])
    (tmp_path / "weights.gguf").write_bytes(whole[:-100])
    write_tiny_gguf(tmp_path / "other.gguf", architecture="gpt2")
    for name, message in {
        "absent.gguf": "`path` must name a GGUF file; got .*absent.gguf, which does not exist",
        "": "`path` must name a GGUF file; got .*, a directory",
        "text.gguf": "`path` must name a GGUF file; got .*, which starts with b'this', not b'GGUF'",
        "empty.gguf": "`path` must name a GGUF file; got .*, which is empty",
        "header.gguf": "`path` must name a whole GGUF file; got .*, truncated or damaged",
        "weights.gguf": "`path` must name a whole GGUF file; got .*, truncated or damaged: tensor",
        "other.gguf": "`general.architecture` must be 'llama'; got 'gpt2'",
    }.items():
        assert re.search(message, refused("the", "--model", str(tmp_path / name)))


# Terminals, pipes, interrupts


def test_generate_one_prompt_on_a_terminal_streams_it(generate, records, terminal, monkeypatch):
    [record] = records("the hen")
    stdout = terminal("stdout")
    pieces = []
    get = Mailbox.get

    def watched(self):
        pieces.append(stdout.read())
        return get(self)

    monkeypatch.setattr(Mailbox, "get", watched)
    code, _, err = generate("the hen")
    pieces.append(stdout.read())
    assert code == 0
    assert "".join(pieces) == record["prompt"] + record["text"] + "\n"
    assert pieces[1].startswith("the hen")  # with the first token, while the second is waited for
    assert sum(map(bool, pieces)) > 3  # some tokens complete no character
    assert err.count("\n") == 1


def test_generate_shows_progress_on_a_terminal_only(generate, terminal, monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    assert "Generating" not in generate(*PROMPTS)[2]
    stderr = terminal("stderr")
    code, out, _ = generate(*PROMPTS)
    shown = stderr.read()
    assert code == 0
    assert out.count("\n") == 3
    assert "Loading" in shown
    assert "Generating" in shown


def test_generate_into_a_pipe_that_nobody_reads_ends_quietly(generate, monkeypatch):
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        code, _, err = generate(*PROMPTS)
    assert code == 141
    assert "error" not in err
    assert "Traceback" not in err


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_generate_onto_a_full_disk_says_so(generate, monkeypatch):
    with open("/dev/full", "w") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        code, _, err = generate("the hen")
    assert code == 2
    assert err.endswith("jaxpaged: error: the output cannot be written: No space left on device.\n")


def test_generate_with_closed_streams_ends_well(generate, monkeypatch):
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, None)
    assert generate("the hen") == (0, "", "")


def test_generate_interrupted_exits_with_130_and_no_traceback(generate, monkeypatch):
    def interrupted(self):
        raise KeyboardInterrupt

    monkeypatch.setattr(Mailbox, "get", interrupted)
    monkeypatch.setattr(app, "_leave", sys.exit)
    assert generate("the hen") == (130, "", "")
