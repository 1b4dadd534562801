"""The command line: `jaxpaged generate` and `jaxpaged info`.

Text and JSON go to stdout and nothing else does; progress and the summary go to stderr. A mistake of the caller ends in
one line on stderr and exit code 2.
"""

import argparse
import contextlib
import importlib.metadata
import itertools
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, get_args

if TYPE_CHECKING:
    from jaxpaged.engine import Engine, NewToken, RequestOutput, SamplingParams
    from jaxpaged.models.llama import Llama
    from jaxpaged.models.tokenizer import Tokenizer


class UsageError(Exception):
    """What the caller asked for cannot be done; the message says why, in one line."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(message)


def main(argv: Sequence[str] | None = None) -> None:
    """Runs a command and exits with its code: 0, 2 for a mistake of the caller, 130 when interrupted."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError):  # a stream that somebody put there in place of the real one
            stream.reconfigure(encoding="utf-8")  # type: ignore[union-attr]
    try:
        args = _parser().parse_args(argv)
        args.run(args)
        sys.stdout.flush()
    except UsageError as error:
        print(f"jaxpaged: error: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:  # the reader has seen enough, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)


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
    generate.add_argument("--backend", choices=("auto", "reference", "xla", "triton", "interpret"), default="auto")
    generate.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    generate.add_argument("--format", choices=("text", "json"), default="text")

    info = commands.add_parser(
        "info", help="show the device and which attention backends run on it", allow_abbrev=False
    )
    info.set_defaults(run=_info)
    return parser


def _generate(args: argparse.Namespace) -> None:
    # Imported here: JAX takes a second to load, which `--help` and a mistyped flag need not wait for.
    import jax

    from jaxpaged.config import cdiv
    from jaxpaged.engine import Engine, SamplingParams, SchedulerConfig
    from jaxpaged.ops.attention import why_not_on
    from jaxpaged.paging import OutOfPagesError

    prompts = _read_prompts(args)
    if args.page_size < 1:
        raise UsageError(f"`--page-size` must be at least 1; got {args.page_size}.")
    if reason := why_not_on(jax.default_backend(), args.backend):
        raise UsageError(f"`--backend {args.backend}` cannot run here: {reason}")
    sampling = {name: getattr(args, name) for name in ("max_new_tokens", "temperature", "top_p", "top_k")}
    try:
        for index in range(len(prompts)):
            SamplingParams(**sampling, seed=args.seed + index).check()
        model, tokenizer = _load(args)
        texts = prompts
        if args.chat:
            texts = [tokenizer.apply_chat_template([{"role": "user", "content": p}]) for p in prompts]
        prompt_token_ids = [tokenizer.encode(text) for text in texts]
        stop = tuple(tokenizer.stop_token_ids)
        params = [SamplingParams(**sampling, seed=args.seed + i, stop_token_ids=stop) for i in range(len(prompts))]

        max_tokens = [min(len(ids) + args.max_new_tokens, model.config.max_position) for ids in prompt_token_ids]
        limits = SchedulerConfig(max_model_len=max(max_tokens))
        num_pages = args.num_pages
        if num_pages is None:  # what the longest ones that can run together take
            num_pages = 1 + sum(cdiv(n, args.page_size) for n in sorted(max_tokens)[-limits.max_num_seqs :])
        engine = Engine(model, model.cache_config(num_pages=num_pages, page_size=args.page_size), limits)

        begin = time.perf_counter()
        outputs = _run(args, engine, tokenizer, prompts, prompt_token_ids, params)
    except (OSError, ValueError, ModuleNotFoundError, NotImplementedError, OutOfPagesError) as error:
        if isinstance(error, BrokenPipeError):
            raise
        raise UsageError(str(error)) from error
    _summarise(engine, outputs, max(max_tokens), time.perf_counter() - begin)


def _read_prompts(args: argparse.Namespace) -> list[str]:
    prompts = []
    for prompt in args.prompts:
        prompts += _read_lines("-") if prompt == "-" else [prompt]
    if args.prompts_file is not None:
        prompts += _read_lines(args.prompts_file)
    if not prompts:
        raise UsageError("no prompt given: pass one, or --prompts-file FILE, or '-' for standard input.")
    for number, prompt in enumerate(prompts, 1):
        if not prompt:
            raise UsageError(f"prompt {number} of {len(prompts)} is empty: there is nothing to continue.")
    return prompts


def _read_lines(path: str) -> list[str]:
    try:
        data = sys.stdin.buffer.read() if path == "-" else Path(path).read_bytes()
        return data.decode("utf-8").removesuffix("\n").replace("\r\n", "\n").split("\n") if data else []
    except OSError as error:
        raise UsageError(f"`--prompts-file {path}` cannot be read: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"`--prompts-file {path}` must be UTF-8; byte {error.start} is not.") from error


def _load(args: argparse.Namespace) -> "tuple[Llama, Tokenizer]":
    from jaxpaged.models.loading import load_model

    with _progress("Loading", "bytes") as advance:
        return load_model(args.model, dtype=args.dtype, backend=args.backend, progress=advance)


@contextlib.contextmanager
def _progress(label: str, unit: str) -> Iterator[Callable[[int, int], None]]:
    """A bar on stderr, if that is a terminal. Yields a function of (done, total)."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    amount = DownloadColumn() if unit == "bytes" else MofNCompleteColumn()
    columns = (TextColumn("{task.description}"), BarColumn(), amount, TextColumn(unit), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task(label, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _run(
    args: argparse.Namespace,
    engine: "Engine",
    tokenizer: "Tokenizer",
    prompts: list[str],
    prompt_token_ids: list[list[int]],
    params: "list[SamplingParams]",
) -> "list[RequestOutput]":
    """Generates and prints: one prompt's text on a terminal as it comes, everything else when all is done."""
    from jaxpaged.models.tokenizer import TextStream

    heads = [""] * len(prompts) if args.chat else prompts
    if args.format == "text" and len(prompts) == 1 and sys.stdout.isatty():
        stream, heads = TextStream(tokenizer), iter(heads)

        def show(token: "NewToken") -> None:
            print(next(heads, "") + stream.push(token.token_id), end="", flush=True)

        outputs = engine.generate(prompt_token_ids, params, on_token=show)
        print(stream.finish())
        return outputs

    total, count = sum(p.max_new_tokens for p in params), itertools.count(1)
    with _progress("Generating", "tokens") as advance:
        outputs = engine.generate(prompt_token_ids, params, on_token=lambda _: advance(next(count), total))
    for prompt, head, output in zip(prompts, heads, outputs, strict=True):
        text = tokenizer.decode(output.token_ids)
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


def _summarise(engine: "Engine", outputs: "list[RequestOutput]", max_len: int, seconds: float) -> None:
    """What was done, and what paging saved, on stderr."""
    stats = engine.stats()
    num_tokens = sum(len(o.token_ids) for o in outputs)
    paged = stats.peak_num_pages * stats.nbytes_per_page
    contiguous = len(outputs) * max_len * stats.nbytes_per_page // engine.pages.page_size
    print(
        f"{num_tokens} tokens in {seconds:.1f} s, compilation included. "
        f"KV cache: {stats.peak_num_pages} pages of {engine.pages.page_size} tokens, {_mebibytes(paged)}; "
        f"a contiguous [{len(outputs)}, {max_len}] cache would take {_mebibytes(contiguous)}.",
        file=sys.stderr,
    )


def _mebibytes(nbytes: int) -> str:
    return f"{nbytes / 2**20:.1f} MiB"


def _info(args: argparse.Namespace) -> None:
    import jax

    import jaxpaged
    from jaxpaged.ops.attention import Backend, why_not_on

    device = jax.devices()[0]
    print(f"device    {device.device_kind} ({device.platform}), {jax.device_count()} in all")
    versions = (f"{name} {importlib.metadata.version(name)}" for name in ("jax", "jaxlib", "flax", "numpy"))
    print(f"versions  jaxpaged {jaxpaged.__version__}, {', '.join(versions)}, Python {platform.python_version()}")
    for backend in get_args(Backend):
        reason = why_not_on(jax.default_backend(), backend)
        print(f"backend   {backend:<10} {'runs here' if reason is None else f'cannot run here: {reason}'}")
