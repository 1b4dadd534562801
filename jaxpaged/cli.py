"""The command line: `jaxpaged generate`, `jaxpaged memory-map` and `jaxpaged info`.

Text and JSON go to stdout and nothing else does; progress and the summary go to stderr. A mistake of the caller ends in
one line on stderr and exit code 2.
"""

import argparse
import importlib.metadata
import io
import itertools
import json
import os
import platform
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, get_args

import jax

from jaxpaged import __version__
from jaxpaged.config import cdiv
from jaxpaged.engine import Engine, NewToken, RequestOutput, SamplingParams, SchedulerConfig
from jaxpaged.engine.progress import progress_bar
from jaxpaged.ops.attention import Backend, why_not_on
from jaxpaged.paging import OutOfPagesError

if TYPE_CHECKING:  # Flax and the model readers load when a model does: a mistyped flag need not wait for them
    from jaxpaged.models.llama import Llama
    from jaxpaged.models.tokenizer import TextStream, Tokenizer


class UsageError(Exception):
    """What the caller asked for cannot be done; the message says why, in one line."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(message)


def main(argv: Sequence[str] | None = None) -> None:
    """Runs a command and exits with its code: 0, 2 for a mistake of the caller, 130 interrupted, 141 unread."""
    _mend_streams()
    try:
        args = _parse(argv)
        args.run(args)
        sys.stdout.flush()
    except UsageError as error:
        _complain(str(error))
    except KeyboardInterrupt:
        sys.stdout.flush()
        _leave(130)
    except OSError as error:  # of stdout: whatever reads a file has complained about it by name
        # Python flushes once more when it ends, and must not fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):  # the reader has seen enough, as `head` does
            sys.exit(141)
        _complain(f"the output cannot be written: {error.strerror}.")


def _leave(code: int) -> NoReturn:
    """Ends the process at once: Python's own way out would free arrays that the device is still computing."""
    if sys.stderr.isatty():
        sys.stderr.write("\x1b[?25h")  # the cursor, which a progress bar hides
    sys.stderr.flush()
    os._exit(code)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The arguments; prompts may stand on both sides of a flag, which argparse does not allow behind a command."""
    parser = _parser()
    args, rest = parser.parse_known_args(argv)
    if rest and ("prompts" not in args or any(word.startswith("-") and word != "-" for word in rest)):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:
        args.prompts += rest
    return args


def _mend_streams() -> None:
    """Makes stdout and stderr take any text, and any at all where whoever started this closed them."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, io.StringIO())
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding="utf-8", errors="backslashreplace")


def _complain(message: str) -> NoReturn:
    print(f"jaxpaged: error: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(2)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="jaxpaged", description="Language models in JAX over a paged KV cache.", allow_abbrev=False)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    generate = commands.add_parser("generate", help="continue prompts with a language model", allow_abbrev=False)
    generate.set_defaults(run=_generate)
    generate.add_argument(
        "prompts", nargs="*", metavar="PROMPT", help="a text to continue; '-' reads one a line from stdin"
    )
    generate.add_argument("--prompts-file", metavar="FILE", help="more prompts, one a line; '-' is standard input")
    generate.add_argument(
        "--model", default="builtin", metavar="PATH", help="a Llama GGUF file (default: SmolLM2-135M)"
    )
    generate.add_argument("--max-new-tokens", type=int, default=64, metavar="N", help="default: %(default)s")
    generate.add_argument(
        "--temperature", type=float, default=0.0, metavar="T", help="0 takes the likeliest token (default)"
    )
    generate.add_argument("--top-p", type=float, default=1.0, metavar="P", help="draw from this much probability")
    generate.add_argument("--top-k", type=int, default=0, metavar="K", help="draw from the K likeliest; 0 is all")
    generate.add_argument("--seed", type=int, default=0, metavar="N", help="prompt i draws with seed N + i")
    generate.add_argument("--chat", action="store_true", help="put each prompt into the model's chat template")
    generate.add_argument("--page-size", type=int, default=16, metavar="N", help="tokens a page (default: %(default)s)")
    generate.add_argument("--num-pages", type=int, metavar="N", help="pages of the pool, the null page included")
    generate.add_argument("--backend", choices=get_args(Backend), default="auto")
    generate.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    generate.add_argument("--format", choices=("text", "json"), default="text")

    memory_map = commands.add_parser("memory-map", help="draw which page of a pool is whose", allow_abbrev=False)
    memory_map.set_defaults(run=_memory_map)
    memory_map.add_argument(
        "trace", nargs="?", metavar="TRACE", help="a file by TraceRecorder (default: a small demo workload)"
    )
    memory_map.add_argument("--step", type=int, metavar="N", help="after the first N verbs (default: after all)")
    memory_map.add_argument("--png", metavar="FILE", help="also draw a picture into FILE")

    info = commands.add_parser(
        "info", help="show the device and which attention backends run on it", allow_abbrev=False
    )
    info.set_defaults(run=_info)
    return parser


def _generate(args: argparse.Namespace) -> None:
    prompts = _read_prompts(args)
    if args.page_size < 1:
        raise UsageError(f"`--page-size` must be at least 1; got {args.page_size}.")
    if reason := why_not_on(_platform(), args.backend):
        raise UsageError(f"`--backend {args.backend}` cannot run here: {reason}")
    sampling = {name: getattr(args, name) for name in ("max_new_tokens", "temperature", "top_p", "top_k")}
    try:
        for index in range(len(prompts)):
            SamplingParams(**sampling, seed=args.seed + index).check()
        model, tokenizer = _load(args)
        prompt_token_ids = _encode(args, tokenizer, prompts, model.config.max_position)
        stop = tuple(tokenizer.stop_token_ids)
        params = [SamplingParams(**sampling, seed=args.seed + i, stop_token_ids=stop) for i in range(len(prompts))]
        max_tokens = [min(len(ids) + args.max_new_tokens, model.config.max_position) for ids in prompt_token_ids]
        engine = _make_engine(args, model, max_tokens)
        begin = time.perf_counter()
        outputs = _run(args, engine, tokenizer, prompts, prompt_token_ids, params)
    except (ValueError, ModuleNotFoundError, NotImplementedError, OutOfPagesError, FloatingPointError) as error:
        raise UsageError(_with_flags(str(error), args)) from error
    _summarise(engine, outputs, max(max_tokens), time.perf_counter() - begin)


def _with_flags(message: str, args: argparse.Namespace) -> str:
    """A message of the library, with the flag in the place of an argument that it sets."""
    for name in vars(args):
        message = message.replace(f"`{name}`", f"`--{name.replace('_', '-')}`")
    return message


def _read_prompts(args: argparse.Namespace) -> list[str]:
    prompts = []
    for prompt in args.prompts:
        prompts += _read_lines("-") if prompt == "-" else [prompt]
    if args.prompts_file is not None:
        prompts += _read_lines(args.prompts_file)
    if not prompts:
        raise UsageError("no prompt given: pass one, or --prompts-file FILE, or '-' for standard input.")
    if "" in prompts:
        raise UsageError(f"prompt {prompts.index('') + 1} of {len(prompts)} is empty: there is nothing to continue.")
    return prompts


def _read_lines(path: str) -> list[str]:
    name = "standard input" if path == "-" else f"`--prompts-file {path}`"
    try:
        data = Path(path).read_bytes() if path != "-" else sys.stdin.buffer.read() if sys.stdin else b""
        text = data.decode("utf-8-sig").replace("\r\n", "\n")  # as editors on Windows save it
    except OSError as error:
        raise UsageError(f"{name} cannot be read: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{name} must be UTF-8; byte {error.start} is not.") from error
    except ValueError as error:  # a path with a NUL in it
        raise UsageError(f"{name} cannot be read: {error}.") from error
    lines = text.removesuffix("\n").split("\n") if text else []
    if "" in lines:
        raise UsageError(f"{name}: line {lines.index('') + 1} of {len(lines)} is empty, and each line is a prompt.")
    return lines


def _platform() -> str:
    try:
        return jax.default_backend()
    except (RuntimeError, AssertionError) as error:  # JAX asserts that the plugin of JAX_PLATFORMS has loaded
        asked = os.environ.get("JAX_PLATFORMS", "")
        raise UsageError(f"JAX finds no device (JAX_PLATFORMS={asked!r}): {error or 'its plugin failed'}") from error


def _load(args: argparse.Namespace) -> "tuple[Llama, Tokenizer]":
    from jaxpaged.models.loading import load_model

    with progress_bar("Loading", "bytes") as advance:
        try:
            return load_model(args.model, dtype=args.dtype, backend=args.backend, progress=advance)
        except OSError as error:
            raise UsageError(str(error)) from error


def _encode(args: argparse.Namespace, tokenizer: "Tokenizer", prompts: list[str], max_position: int) -> list[list[int]]:
    """Token ids of each prompt. One that has none, or that fills the context, is refused by its number."""
    texts = prompts
    if args.chat:
        texts = [tokenizer.apply_chat_template([{"role": "user", "content": prompt}]) for prompt in prompts]
    nothing = tokenizer.encode("")
    prompt_token_ids = []
    for number, text in enumerate(texts, 1):
        ids = tokenizer.encode(text)
        if ids == nothing:
            raise UsageError(f"prompt {number} of {len(prompts)} is empty: the vocabulary has none of its characters.")
        if len(ids) >= max_position:
            raise UsageError(
                f"prompt {number} of {len(prompts)} must be shorter than the context of {max_position} tokens, to "
                f"leave room for one more; got {len(ids)} tokens. Shorten it."
            )
        prompt_token_ids.append(ids)
    return prompt_token_ids


def _make_engine(args: argparse.Namespace, model: "Llama", max_tokens: list[int]) -> Engine:
    """An engine whose pool holds `--num-pages`, or else what the longest prompts that can run together may need."""
    limits = SchedulerConfig(max_model_len=max(max_tokens))
    if args.page_size > model.config.max_position:
        raise UsageError(
            f"`--page-size` must be at most the context of {model.config.max_position} tokens; got {args.page_size}."
        )
    num_pages = args.num_pages
    if num_pages is None:
        num_pages = 1 + sum(cdiv(n, args.page_size) for n in sorted(max_tokens)[-limits.max_num_seqs :])
    try:
        return Engine(model, model.cache_config(num_pages=num_pages, page_size=args.page_size), limits)
    except jax.errors.JaxRuntimeError as error:
        raise UsageError(f"no memory for {num_pages} pages of {args.page_size} tokens: {error}") from error


def _run(
    args: argparse.Namespace,
    engine: Engine,
    tokenizer: "Tokenizer",
    prompts: list[str],
    prompt_token_ids: list[list[int]],
    params: list[SamplingParams],
) -> list[RequestOutput]:
    """Generates and prints: one prompt's text on a terminal as it comes, everything else when all is done."""
    heads = [""] * len(prompts) if args.chat else prompts
    # A reply stands alone; a continuation may begin with a space, which only what came before can tell.
    streams = [_text_after([] if args.chat else ids, tokenizer) for ids in prompt_token_ids]
    if args.format == "text" and len(prompts) == 1 and sys.stdout.isatty():
        [stream], heads = streams, iter(heads)

        def show(token: NewToken) -> None:
            if token.token_id is not None:
                print(next(heads, "") + stream.push(token.token_id), end="", flush=True)

        outputs = engine.generate(prompt_token_ids, params, on_token=show)
        print(stream.finish())
        return outputs

    total, count = sum(p.max_new_tokens for p in params), itertools.count(1)
    with progress_bar("Generating", "tokens") as advance:
        outputs = engine.generate(prompt_token_ids, params, on_token=lambda _: advance(next(count), total))
    for prompt, head, stream, output in zip(prompts, heads, streams, outputs, strict=True):
        text = "".join([*map(stream.push, output.token_ids), stream.finish()])
        record = {
            "prompt": prompt,
            "prompt_token_ids": output.prompt_token_ids,
            "token_ids": output.token_ids,
            "text": text,
            "finish_reason": output.finish_reason.value,
            "num_pages": output.num_pages,
        }
        print(json.dumps(record) if args.format == "json" else head + text)
    return outputs


def _text_after(token_ids: Iterable[int], tokenizer: "Tokenizer") -> "TextStream":
    """A stream that has seen `token_ids`."""
    from jaxpaged.models.tokenizer import TextStream

    stream = TextStream(tokenizer)
    for token_id in token_ids:
        stream.push(token_id)
    return stream


def _summarise(engine: Engine, outputs: list[RequestOutput], max_len: int, seconds: float) -> None:
    """What was done, and what paging saved, on stderr."""
    stats, page_size = engine.stats(), engine.pages.page_size
    num_tokens = sum(len(o.token_ids) for o in outputs)
    num_pages, batch = stats.peak_num_pages, min(len(outputs), engine.scheduler.config.max_num_seqs)
    paged, contiguous = num_pages * stats.nbytes_per_page, batch * max_len * stats.nbytes_per_page // page_size
    saved = f"{_size(contiguous - paged)} less" if paged <= contiguous else f"{_size(paged - contiguous)} more"
    print(
        f"{num_tokens} token{'s' * (num_tokens != 1)} in {seconds:.1f} s, compilation included. "
        f"KV cache: {num_pages} page{'s' * (num_pages != 1)} of {page_size} tokens, "
        f"{_size(paged)}: {saved} than the {_size(contiguous)} of a contiguous [{batch}, {max_len}] cache.",
        file=sys.stderr,
    )


def _size(nbytes: int) -> str:
    return f"{nbytes / 2**20:.1f} MiB" if nbytes >= 2**20 else f"{nbytes / 2**10:.1f} KiB"


def _memory_map(args: argparse.Namespace) -> None:
    from rich.console import Console

    from jaxpaged.paging.plot import pool_text, save_png
    from jaxpaged.paging.trace import TraceError, demo_trace, read_trace

    try:
        trace = demo_trace() if args.trace is None else read_trace(args.trace)
        snapshot = trace.replay(args.step).snapshot()
    except OSError as error:
        raise UsageError(f"TRACE `{args.trace}` cannot be read: {error.strerror}.") from error
    except TraceError as error:
        raise UsageError(str(error)) from error
    except ValueError as error:
        raise UsageError(_with_flags(str(error), args)) from error
    num_steps = len(trace.steps) if args.step is None else args.step
    of_what = "A built-in demo workload" if args.trace is None else str(args.trace)
    title = f"{of_what}, after {num_steps} of {len(trace.steps)} verbs"
    if args.png is not None:
        try:
            save_png(snapshot, args.png, title=title)
        except OSError as error:
            raise UsageError(f"`--png {args.png}` cannot be written: {error.strerror}.") from error
        except ModuleNotFoundError as error:
            raise UsageError(f"`--png` needs {error.name}: install jaxpaged[plot].") from error
    console = Console(highlight=False)
    console.print(pool_text(snapshot, title=title, width=min(console.width, 80)), soft_wrap=True)


def _info(args: argparse.Namespace) -> None:
    here = _platform()
    device = jax.devices()[0]
    print(f"device    {device.device_kind} ({device.platform}), {jax.device_count()} in all")
    versions = (f"{name} {importlib.metadata.version(name)}" for name in ("jax", "jaxlib", "flax", "numpy"))
    print(f"versions  jaxpaged {__version__}, {', '.join(versions)}, Python {platform.python_version()}")
    for backend in get_args(Backend):
        reason = why_not_on(here, backend)
        print(f"backend   {backend:<10} {'runs here' if reason is None else f'cannot run here: {reason}'}")
