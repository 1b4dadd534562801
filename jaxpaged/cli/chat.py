"""`jaxpaged chat`: a conversation in a terminal, or piped in a line a turn.

Each turn's prompt is the whole conversation in the model's chat template. The engine finds the pages of what it has
seen in its prefix cache, so that a turn computes little more than what is new.
"""

import argparse
import contextlib
import dataclasses
import io
import signal
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from jaxpaged.cli.errors import UsageError, check_at_least
from jaxpaged.cli.setup import check_model_flags, check_profile, errors_by_flag, load, make_engine, profiled
from jaxpaged.config import cdiv
from jaxpaged.engine import Engine, FinishReason, SamplingParams, SchedulerConfig

if TYPE_CHECKING:
    from jaxpaged.models.tokenizer import Tokenizer

_DEFAULT_CONTEXT = 4096
_HELP = """/reset   begin a new conversation
/exit    leave (or Ctrl-D)
/help    this list
Ctrl-C stops an answer. A line that begins with a space is said as it stands, slash or not."""


def run(args: argparse.Namespace) -> None:
    """Talk until /exit or the end of the input, and sum up on stderr."""
    check_model_flags(args)
    check_at_least(args, 2, "context")
    check_profile(args)
    sampling = {name: getattr(args, name) for name in ("max_new_tokens", "temperature", "top_p", "top_k", "seed")}
    with errors_by_flag(args):
        SamplingParams(**sampling).check()
        model, tokenizer = load(args)
        context = min(args.context or _DEFAULT_CONTEXT, model.config.max_position)
        if args.num_pages is not None:  # the last token is never stored
            context = min(context, max(args.num_pages - 1, 1) * args.page_size + 1)
        limits = SchedulerConfig(max_num_seqs=1, max_model_len=context)
        engine = make_engine(args, model, limits, num_pages=1 + cdiv(context, args.page_size), tokenizer=tokenizer)
        params = SamplingParams(**sampling, stop_token_ids=tuple(tokenizer.stop_token_ids))
        chat = Chat(engine, tokenizer, params, context=context, system=args.system)
        chat.check()
        with profiled(args):
            _converse(chat, show_stats=args.stats)
    chat.summarise()
    if chat.num_failed:
        sys.exit(1)


def _converse(chat: "Chat", *, show_stats: bool) -> None:
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(encoding="utf-8-sig", errors="strict")  # as editors on Windows save it
    at_terminal = sys.stdin is not None and sys.stdin.isatty()
    if at_terminal:
        _note(f"The conversation may have {chat.context} tokens. /help lists what can be typed.")
    while (line := _read_line(at_terminal)) is not None:
        command = line.strip()
        if not command:
            continue
        if not line.startswith("/"):
            chat.say(command, show_stats=show_stats)
        elif command == "/exit":
            return
        elif command == "/reset":
            chat.reset()
        elif command == "/help":
            _note(_HELP)
        else:
            _note(f"There is no {command.split()[0]}; /help lists what there is.")


def _read_line(at_terminal: bool) -> str | None:
    """Return what was typed, or None at its end. At a terminal, Ctrl-C only gives up the line."""
    if sys.stdin is None:
        return None
    while True:
        try:
            if at_terminal and sys.stdout.isatty():
                with contextlib.suppress(ImportError):  # where Python has it, lines can be edited and recalled
                    import readline  # noqa: F401
                return input("> ")
            if at_terminal:
                print("> ", end="", file=sys.stderr, flush=True)
            return sys.stdin.readline() or None
        except EOFError:
            print(flush=True)
            return None
        except UnicodeDecodeError as error:
            raise UsageError(f"standard input must be UTF-8; got a byte {error.object[error.start]:#04x}.") from error
        except KeyboardInterrupt:
            if not at_terminal:
                raise
            print("\n(/exit or Ctrl-D leaves)", file=sys.stderr)


@dataclasses.dataclass(slots=True, kw_only=True)
class Turn:
    """What one answer took. Times in seconds; `first_s` is that to the first token, 0 where none came."""

    num_prompt_tokens: int
    num_reused_tokens: int = 0
    num_new_tokens: int = 0
    first_s: float = 0.0
    seconds: float = 0.0

    def __str__(self) -> str:
        reused = f"{self.num_reused_tokens} of {_count(self.num_prompt_tokens, 'prompt token')} reused"
        return f"{reused}; {_count(self.num_new_tokens, 'token')} in {self.seconds:.1f} s, first {self.first_s:.1f} s"


class Chat:
    """A conversation: its messages, and the engine that answers.

    Args:
        params: Sampling parameters of the first answer; answer i is sampled with seed + i.
        context: Tokens that prompt and answer may have together.
        system: What the model is told first; None leaves that to its template.
    """

    def __init__(
        self, engine: Engine, tokenizer: "Tokenizer", params: SamplingParams, *, context: int, system: str | None
    ):
        self.context = context
        self.turns: list[Turn] = []
        self.num_failed = 0
        self._engine = engine
        self._tokenizer = tokenizer
        self._params = params
        self._first = [] if system is None else [{"role": "system", "content": system}]
        self._messages = list(self._first)

    def check(self) -> None:
        """Raise ValueError where the model has no template, or its template refuses a system message."""
        self._prompt("Hi")

    def reset(self) -> None:
        """Begin anew. Pages of what was said stay in the prefix cache, as long as there is room."""
        self._messages = list(self._first)
        _note("A new conversation.")

    def say(self, text: str, *, show_stats: bool = False) -> None:
        """Print the answer as it comes. What was answered stays part of the conversation, however it ended."""
        try:
            prompt = self._prompt(text)
        except ValueError as error:  # a lone surrogate, say: that line is not said
            _note(f"That cannot be said: {error}")
            return
        if len(prompt) >= self.context:
            _note(
                f"The context of {self.context} tokens is full: with this, the conversation has {len(prompt)}. "
                "/reset begins a new one; say less, or start with more --context, if the model has more."
            )
            return
        self.turns.append(turn := Turn(num_prompt_tokens=len(prompt)))
        answer = self._answer(prompt, turn)
        if answer is not None:
            self._messages += [{"role": "user", "content": text}, {"role": "assistant", "content": answer}]
        if show_stats:
            _note(f"[{turn}]")

    def summarise(self) -> None:
        """Print on stderr what all turns took."""
        prompt, reused, new = (
            sum(getattr(turn, name) for turn in self.turns)
            for name in ("num_prompt_tokens", "num_reused_tokens", "num_new_tokens")
        )
        _note(
            f"{_count(len(self.turns), 'turn')}: {_count(prompt, 'prompt token')}, {reused} of them "
            f"({reused / max(prompt, 1):.0%}) reused from earlier turns; {_count(new, 'token')} answered."
        )

    def _prompt(self, text: str) -> list[int]:
        messages = [*self._messages, {"role": "user", "content": text}]
        return self._tokenizer.encode(self._tokenizer.apply_chat_template(messages))

    def _answer(self, prompt: list[int], turn: Turn) -> str | None:
        """Stream an answer to stdout; None where it failed, or was stopped before it began."""
        params = dataclasses.replace(self._params, seed=(self._params.seed + len(self.turns) - 1) % 2**32)
        begin = time.perf_counter()
        pieces, reason, error = [], FinishReason.ABORT, None
        # An interrupt between two tokens ends the answer with what it has; a second one does not wait for a token.
        with (
            _interrupts() as interrupted,
            self._engine.stream(prompt, params) as stream,
            contextlib.suppress(KeyboardInterrupt),
        ):
            for token in stream:
                turn.first_s = turn.first_s or time.perf_counter() - begin
                turn.num_new_tokens += token.token_id is not None
                pieces.append(token.text)
                print(token.text, end="", flush=True)
                if token.finish_reason is not None:
                    reason, error = token.finish_reason, token.error
                elif interrupted:
                    break
        print(flush=True)
        turn.seconds = time.perf_counter() - begin
        turn.num_reused_tokens = stream.result().num_cached_tokens
        if error is not None:
            self.num_failed += 1
            _note(f"The answer failed: {error} It is not part of the conversation.")
            return None
        if reason is FinishReason.ABORT:
            _note("[stopped]")
            if not any(pieces):
                return None
        elif reason is FinishReason.LENGTH:
            self._note_length(turn)
        return "".join(pieces)

    def _note_length(self, turn: Turn) -> None:
        if turn.num_prompt_tokens + turn.num_new_tokens < self.context:
            _note(f"[cut after {_count(turn.num_new_tokens, 'token')}: see --max-new-tokens]")
        else:
            _note(f"[cut: the context of {self.context} tokens is full; /reset begins a new conversation]")


@contextlib.contextmanager
def _interrupts() -> Iterator[list[int]]:
    """Collect Ctrl-C in a list that is yielded; a second one raises KeyboardInterrupt."""
    seen: list[int] = []

    def take(number: int, _: object) -> None:
        if seen:
            raise KeyboardInterrupt
        seen.append(number)

    before = signal.signal(signal.SIGINT, take)
    try:
        yield seen
    finally:
        signal.signal(signal.SIGINT, before)


def _note(text: str) -> None:
    sys.stdout.flush()
    print(text, file=sys.stderr, flush=True)


def _count(n: int, what: str) -> str:
    return f"{n} {what}{'s' * (n != 1)}"
