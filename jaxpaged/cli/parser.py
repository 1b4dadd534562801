"""The commands and their flags. Values are checked where they are used; here nothing is imported but `argparse`."""

import argparse
from typing import NoReturn

from jaxpaged.cli.errors import UsageError
from jaxpaged.config import BACKENDS, SLOTS


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(message)


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of `jaxpaged`. `module` of what it returns names the module whose `run` is the command."""
    parser = _Parser(prog="jaxpaged", description="Language models in JAX over a paged KV cache.", allow_abbrev=False)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def add(name: str, module: str, summary: str) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=summary, description=summary, allow_abbrev=False)
        command.set_defaults(module=f"jaxpaged.cli.{module}")
        return command

    _add_generate(add("generate", "generate", "continue prompts with a language model"))
    _add_chat(add("chat", "chat", "talk to a language model; /help lists what can be typed"))
    _add_bench(add("bench", "bench", "measure throughput and latencies of a mix of requests"))
    _add_memory_map(add("memory-map", "memory_map", "draw which sequence holds which page of a pool"))
    _add_replay(add("replay", "replay", "run the log of an engine again, and name the first step that differs"))
    add("info", "info", "show the device and which attention backends run on it")
    return parser


def _add_generate(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "prompts", nargs="*", metavar="PROMPT", help="a text to continue; '-' reads one a line from stdin"
    )
    command.add_argument("--prompts-file", metavar="FILE", help="more prompts, one a line; '-' is standard input")
    command.add_argument("--chat", action="store_true", help="put each prompt into the model's chat template")
    command.add_argument("--format", choices=("text", "json"), default="text")
    _add_sampling(command, max_new_tokens=64, seed="prompt i draws with seed N + i")
    _add_model(command)


def _add_chat(command: argparse.ArgumentParser) -> None:
    command.add_argument("--system", metavar="TEXT", help="the system message, which stands before the conversation")
    command.add_argument(
        "--context", type=int, metavar="N", help="tokens a conversation may have (default: the model's, up to 4096)"
    )
    command.add_argument("--stats", action="store_true", help="print tokens, reused tokens and times after each answer")
    _add_sampling(command, max_new_tokens=512, seed="answer i draws with seed N + i")
    _add_model(command)


def _add_bench(command: argparse.ArgumentParser) -> None:
    mix = command.add_argument_group(
        "the mix", "LENGTHS is N, or uniform:LOW,HIGH, or lognormal:MEDIAN,SIGMA (sigma of the logarithm), in tokens."
    )
    mix.add_argument("--num-requests", type=int, default=32, metavar="N", help="default: %(default)s")
    mix.add_argument(
        "--rate", type=float, metavar="R", help="requests a second, as a Poisson process (default: all at once)"
    )
    mix.add_argument("--prompt-len", default="uniform:16,256", metavar="LENGTHS", help="default: %(default)s")
    mix.add_argument("--output-len", default="uniform:16,64", metavar="LENGTHS", help="default: %(default)s")
    mix.add_argument(
        "--shared",
        type=float,
        default=0.0,
        metavar="SHARE",
        help="share of the requests that begin with a common prefix, from 0 to 1",
    )
    mix.add_argument(
        "--shared-len",
        type=int,
        default=256,
        metavar="N",
        help="tokens of a common prefix, which stand before the prompt's own",
    )
    mix.add_argument(
        "--num-prefixes",
        type=int,
        default=1,
        metavar="N",
        help="number of different common prefixes (default: %(default)s)",
    )
    mix.add_argument(
        "--num-priorities",
        type=int,
        default=1,
        metavar="N",
        help="give each request one of N priorities at random; 0 is served first",
    )
    mix.add_argument(
        "--seed",
        type=int,
        default=0,
        metavar="N",
        help="seed of the arrival times, lengths and token ids, and of sampling",
    )
    engine = command.add_argument_group("the engine")
    engine.add_argument(
        "--max-num-seqs",
        type=int,
        default=64,
        metavar="N",
        help="largest number of requests in a step (default: %(default)s)",
    )
    engine.add_argument(
        "--max-step-tokens",
        type=int,
        default=512,
        metavar="N",
        help="largest number of tokens in a step (default: %(default)s)",
    )
    engine.add_argument(
        "--no-prefix-caching", action="store_true", help="compute each prompt in full, even where its prefix is cached"
    )
    results = command.add_argument_group("results")
    results.add_argument("--json", metavar="FILE", help="write every figure, request and step to FILE")
    results.add_argument("--plot", metavar="FILE", help="draw latencies, requests and pages over time to FILE (PNG)")
    _add_draw(command)
    _add_model(command)


def _add_memory_map(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "trace", nargs="?", metavar="TRACE", help="a file that TraceRecorder wrote (default: a small demo workload)"
    )
    command.add_argument(
        "--step", type=int, metavar="N", help="draw the pool after the first N calls of the trace (default: after all)"
    )
    command.add_argument("--png", metavar="FILE", help="also draw a picture into FILE")


def _add_replay(command: argparse.ArgumentParser) -> None:
    command.add_argument("log", metavar="LOG", help="a file that `Engine.record` wrote")
    _add_model(command)


def _add_sampling(command: argparse.ArgumentParser, *, max_new_tokens: int, seed: str) -> None:
    command.add_argument("--max-new-tokens", type=int, default=max_new_tokens, metavar="N", help="default: %(default)s")
    command.add_argument("--seed", type=int, default=0, metavar="N", help=seed)
    _add_draw(command)


def _add_draw(command: argparse.ArgumentParser) -> None:
    group = command.add_argument_group("sampling")
    group.add_argument(
        "--temperature", type=float, default=0.0, metavar="T", help="0 takes the likeliest token (default)"
    )
    group.add_argument(
        "--top-p",
        type=float,
        default=1.0,
        metavar="P",
        help="sample from the likeliest tokens that together have probability P",
    )
    group.add_argument(
        "--top-k", type=int, default=0, metavar="K", help="sample from the K likeliest tokens; 0 means all"
    )


def _add_model(command: argparse.ArgumentParser) -> None:
    group = command.add_argument_group("model and cache")
    group.add_argument("--model", default="builtin", metavar="PATH", help="a Llama GGUF file (default: SmolLM2-135M)")
    group.add_argument("--page-size", type=int, default=16, metavar="N", help="tokens a page (default: %(default)s)")
    group.add_argument("--num-pages", type=int, metavar="N", help="pages of the pool, the null page included")
    group.add_argument("--backend", choices=BACKENDS, default="auto")
    group.add_argument(
        "--target", choices=SLOTS, help="kind of GPU whose size attention is cut for (default: this one)"
    )
    group.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    group.add_argument("--profile", metavar="DIR", help="write a trace for XProf and Perfetto into DIR")
