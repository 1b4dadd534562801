"""`jaxpaged chat`, in process, with a tiny random model: what is said, and what stdout and stderr then hold."""

import io
import os
import re
import signal
import sys

import pytest

from jaxpaged import Engine, SamplingParams, SchedulerConfig
from jaxpaged.cli import app
from jaxpaged.engine.handle import RequestHandle
from jaxpaged.models.loading import load_model
from tests.cli.command import Terminal, run
from tests.models.tiny_gguf import write_tiny_gguf

NUM_NEW = 12


@pytest.fixture
def chat(model_path, monkeypatch, capfd):
    """Says lines, and returns exit code, stdout, stderr."""

    def chat(said: str | bytes, *arguments: str, model=None):
        data = said if isinstance(said, bytes) else said.encode()
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
        basic = ("--model", str(model or model_path), "--max-new-tokens", str(NUM_NEW), "--backend", "xla")
        return run(capfd, "chat", *basic, *arguments)

    return chat


def solo_answers(model_path, said: list[str], system: str | None = None) -> list[str]:
    """Answers by an engine that caches nothing."""
    model, tokenizer = load_model(model_path, backend="xla")
    engine = Engine(model, model.cache_config(num_pages=20), SchedulerConfig(max_num_seqs=1), prefix_caching=False)
    params = SamplingParams(max_new_tokens=NUM_NEW, stop_token_ids=tuple(tokenizer.stop_token_ids))
    messages, answers = [{"role": "system", "content": system}] if system else [], []
    for text in said:
        messages.append({"role": "user", "content": text})
        [output] = engine.generate([tokenizer.encode(tokenizer.apply_chat_template(messages))], params)
        answers.append(tokenizer.decode(output.token_ids))
        messages.append({"role": "assistant", "content": answers[-1]})
    return answers


# What is answered


@pytest.mark.parametrize("system", ["a hen", pytest.param(None, marks=pytest.mark.slow)])
def test_chat_answers_each_line_as_without_the_cache_and_reuses_pages(chat, model_path, system):
    said = ["the hen", "in the chin", "é!"]
    flags = ("--stats",) if system is None else ("--stats", "--system", system)
    code, out, err = chat("\n".join(said), *flags)
    assert code == 0
    assert out == "".join(answer + "\n" for answer in solo_answers(model_path, said, system))
    turns = re.findall(r"\[(\d+) of (\d+) prompt tokens reused; (\d+) tokens? in \d+\.\d s, first \d+\.\d s\]", err)
    reused, prompt, new = zip(*(map(int, turn) for turn in turns), strict=True)
    assert reused[0] == 0
    assert all(n >= before // 16 * 16 for n, before in zip(reused[1:], prompt[:-1], strict=True))
    total = f"{sum(prompt)} prompt tokens, {sum(reused)} of them ({sum(reused) / sum(prompt):.0%}) reused"
    assert err.endswith(f"3 turns: {total} from earlier turns; {sum(new)} tokens answered.\n")


@pytest.mark.slow
def test_chat_after_reset_answers_as_at_first_out_of_cached_pages(chat):
    _, out, err = chat("the hen\nin 123\n/reset\nthe hen\n", "--stats")
    first, second, again = out.splitlines()
    assert first == again != second
    assert "A new conversation.\n" in err
    reused, prompt = map(int, re.findall(r"\[(\d+) of (\d+)", err)[-1])
    assert reused == (prompt - 1) // 16 * 16 > 0


def test_chat_sampled_draws_each_answer_with_the_next_seed(chat):
    flags = ("--temperature", "1.5", "--seed", "7")
    _, out, _ = chat("the hen\n/reset\nthe hen\n", *flags)
    first, second = out.splitlines()
    assert first != second
    assert chat("the hen\n", "--temperature", "1.5", "--seed", "8")[1] == second + "\n"


def test_chat_takes_commands_and_sends_none_to_the_model(chat):
    code, out, err = chat("/help\n\n  \n/sing a song\n/exit\nthe hen\n")
    assert (code, out) == (0, "")
    assert err.startswith("/reset   begin a new conversation\n")
    assert "There is no /sing; /help lists what there is.\n" in err
    assert err.endswith("0 turns: 0 prompt tokens, 0 of them (0%) reused from earlier turns; 0 tokens answered.\n")


def test_chat_line_that_begins_with_a_space_is_said_slash_or_not(chat, model_path):
    assert chat(" /exit\n")[1] == solo_answers(model_path, ["/exit"])[0] + "\n"


def test_chat_reads_utf8_with_a_byte_order_mark(chat, model_path):
    assert chat(b"\xef\xbb\xbfthe hen\r\n")[1] == solo_answers(model_path, ["the hen"])[0] + "\n"


# The context


@pytest.mark.slow
def test_chat_says_when_the_context_is_full_and_goes_on_after_reset(chat):
    code, out, err = chat("the hen\nin the chin\n/reset\nthe hen\n", "--context", "48")
    assert code == 0
    first, again = out.splitlines()
    assert first == again
    assert re.search(
        r"The context of 48 tokens is full: with this, the conversation has \d+\. /reset begins a new one; say less, ",
        err,
    )


def test_chat_says_why_an_answer_was_cut(chat):
    assert "[cut after 3 tokens: see --max-new-tokens]" in chat("the hen", "--max-new-tokens", "3")[2]
    _, _, err = chat("the hen", "--context", "33")
    assert "[cut: the context of 33 tokens is full; /reset begins a new conversation]" in err
    # Two pages of 16 hold 32 tokens, and the last is never stored.
    assert "[cut: the context of 33 tokens is full" in chat("the hen", "--num-pages", "3")[2]


# Interrupts and failures


@pytest.fixture
def interrupts(monkeypatch):
    """Makes the wait for token number n come with so many Ctrl-C."""

    def interrupts(at: dict[int, int]):
        take, count = RequestHandle.__next__, 0

        def interrupted(self):
            nonlocal count
            count += 1
            for _ in range(at.get(count, 0)):
                signal.raise_signal(signal.SIGINT)
            return take(self)

        monkeypatch.setattr(RequestHandle, "__next__", interrupted)

    return interrupts


def test_chat_interrupted_stops_the_answer_and_not_the_chat(chat, model_path, interrupts):
    before = signal.getsignal(signal.SIGINT)
    interrupts({5: 1})
    code, out, err = chat("the hen\nin the chin\n", "--stats")
    assert code == 0
    part, second = out.splitlines()
    [whole] = solo_answers(model_path, ["the hen"])
    assert whole.startswith(part)
    assert 0 < len(part) < len(whole)
    assert second
    assert err.count("[stopped]") == 1
    assert int(re.findall(r"\[(\d+) of", err)[1]) > 0  # the pages are still there
    assert signal.getsignal(signal.SIGINT) is before


def test_chat_interrupted_twice_while_it_waits_stops_at_once(chat, model_path, interrupts):
    interrupts({1: 2})
    code, out, err = chat("a rat\nthe hen\n")
    assert code == 0
    assert out == "\n" + solo_answers(model_path, ["the hen"])[0] + "\n"  # what had no answer is not part of it
    assert err.count("[stopped]") == 1


def test_chat_interrupted_while_it_reads_a_pipe_ends_with_130(chat, monkeypatch, model_path, capfd):
    class Interrupted(io.StringIO):
        def readline(self, *_):
            raise KeyboardInterrupt

    monkeypatch.setattr(app, "_leave", sys.exit)
    monkeypatch.setattr(sys, "stdin", Interrupted())
    assert run(capfd, "chat", "--model", str(model_path))[0] == 130


def test_chat_answer_that_fails_is_named_and_the_chat_goes_on(chat, model_path, monkeypatch):
    from jaxpaged.engine.runner import Runner

    dispatch, failures = Runner.dispatch, [RuntimeError("the device is gone.")]

    def failing(self, plan):
        if failures:
            raise failures.pop()
        return dispatch(self, plan)

    monkeypatch.setattr(Runner, "dispatch", failing)
    code, out, err = chat("a rat\nthe hen\n")
    assert code == 1
    assert out == "\n" + solo_answers(model_path, ["the hen"])[0] + "\n"
    assert "The answer failed: the device is gone. It is not part of the conversation.\n" in err


# A terminal


def test_chat_on_a_terminal_prompts_streams_and_survives_an_interrupt_of_the_line(model_path, monkeypatch, capfd):
    ours, theirs = os.openpty()
    stdout = Terminal("stdout", monkeypatch)
    with os.fdopen(theirs, "r") as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        lines = iter([KeyboardInterrupt, "the hen", EOFError])

        def typed(prompt):
            sys.stdout.write(prompt)
            line = next(lines)
            if isinstance(line, str):
                return line
            raise line

        monkeypatch.setattr("builtins.input", typed)
        code, _, err = run(capfd, "chat", "--model", str(model_path), "--max-new-tokens", str(NUM_NEW))
        shown = stdout.read()
    monkeypatch.undo()
    stdout.close()
    os.close(ours)
    assert code == 0
    assert shown == f"> > {solo_answers(model_path, ['the hen'])[0]}\n> \n"
    assert err.startswith("The conversation may have 256 tokens. /help lists what can be typed.\n")
    assert "(/exit or Ctrl-D leaves)" in err


# What is refused


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--context", "1"), "`--context` must be at least 2; got 1."),
        (("--temperature", "-1"), "`--temperature` must be finite and not negative; got -1.0."),
        (("--max-new-tokens", "0"), "`--max-new-tokens` must be at least 1; got 0."),
        (("--page-size", "0"), "`--page-size` must be at least 1; got 0."),
        (("--num-pages", "1"), "`--num-pages`, the null page included, must be an integer >= 2; got 1."),
        (("--backend", "triton"), "`--backend triton` cannot run here: it needs an NVIDIA GPU"),
        (("the hen",), "unrecognized arguments: the hen"),
        (("--profile", "/dev/null/x"), "`--profile /dev/null/x` cannot be made: Not a directory."),
        (("--system", "a\udcff"), "`text` must be Unicode without lone surrogates; got '\\udcff' at"),
    ],
)
def test_chat_refuses_in_one_line(chat, arguments, message):
    code, out, err = chat("the hen\n", *arguments)
    assert (code, out) == (2, "")
    assert re.fullmatch(r"jaxpaged: error: [^\n]+\n", err)
    assert message in err


def test_chat_refuses_a_model_without_a_template_and_input_that_is_no_text(chat, tmp_path):
    write_tiny_gguf(tmp_path / "bare.gguf", metadata={"tokenizer.chat_template": None})
    _, _, err = chat("the hen\n", model=tmp_path / "bare.gguf")
    assert (
        err == "jaxpaged: error: the model must have a `tokenizer.chat_template`; got none. Prompt it without chat.\n"
    )
    code, _, err = chat(b"the \xff hen\n")
    assert code == 2
    assert "jaxpaged: error: standard input must be UTF-8; got a byte 0xff.\n" in err
