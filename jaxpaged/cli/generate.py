"""`jaxpaged generate`: continues prompts, all in one engine."""

import argparse
import itertools
import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from jaxpaged.cli.errors import UsageError
from jaxpaged.cli.setup import check_model_flags, check_profile, errors_by_flag, load, make_engine, profiled, size
from jaxpaged.config import cdiv
from jaxpaged.engine import Engine, RequestOutput, SamplingParams, SchedulerConfig
from jaxpaged.progress import progress_bar

if TYPE_CHECKING:  # Flax and the model readers load when a model does: a bad flag need not wait for them
    from jaxpaged.models.tokenizer import Tokenizer


def run(args: argparse.Namespace) -> None:
    """Generate, print, and sum up on stderr."""
    prompts = _read_prompts(args)
    check_model_flags(args)
    check_profile(args)
    sampling = {name: getattr(args, name) for name in ("max_new_tokens", "temperature", "top_p", "top_k")}
    with errors_by_flag(args):
        for index in range(len(prompts)):
            SamplingParams(**sampling, seed=args.seed + index).check()
        model, tokenizer = load(args)
        prompt_token_ids = _encode(args, tokenizer, prompts, model.config.max_position)
        stop = tuple(tokenizer.stop_token_ids)
        params = [SamplingParams(**sampling, seed=args.seed + i, stop_token_ids=stop) for i in range(len(prompts))]
        max_tokens = [min(len(ids) + args.max_new_tokens, model.config.max_position) for ids in prompt_token_ids]
        limits = SchedulerConfig(max_model_len=max(max_tokens))
        # What the longest prompts that can run together may need.
        num_pages = 1 + sum(cdiv(n, args.page_size) for n in sorted(max_tokens)[-limits.max_num_seqs :])
        engine = make_engine(args, model, limits, num_pages=num_pages, tokenizer=tokenizer)
        with profiled(args):
            begin = time.perf_counter()
            outputs = _generate(args, engine, prompts, prompt_token_ids, params)
            seconds = time.perf_counter() - begin
    _summarise(engine, outputs, max(max_tokens), seconds)


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


def _encode(args: argparse.Namespace, tokenizer: "Tokenizer", prompts: list[str], max_position: int) -> list[list[int]]:
    """Return token ids of each prompt. One that has none, or that fills the context, is refused by its number."""
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


def _generate(
    args: argparse.Namespace,
    engine: Engine,
    prompts: list[str],
    prompt_token_ids: list[list[int]],
    params: list[SamplingParams],
) -> list[RequestOutput]:
    """Generate and print: one prompt's text on a terminal as it comes, everything else when all is done."""
    heads = [""] * len(prompts) if args.chat else prompts
    if args.format == "text" and len(prompts) == 1 and sys.stdout.isatty():
        parts = iter(heads)
        outputs = engine.generate(
            prompt_token_ids, params, on_token=lambda token: print(next(parts, "") + token.text, end="", flush=True)
        )
        print()
        return outputs

    total, count = sum(p.max_new_tokens for p in params), itertools.count(1)
    with progress_bar("Generating", "tokens") as advance:
        outputs = engine.generate(prompt_token_ids, params, on_token=lambda _: advance(next(count), total))
    for prompt, head, output in zip(prompts, heads, outputs, strict=True):
        record = {
            "prompt": prompt,
            "prompt_token_ids": output.prompt_token_ids,
            "token_ids": output.token_ids,
            "text": output.text,
            "finish_reason": output.finish_reason.value,
            "num_pages": output.num_pages,
        }
        print(json.dumps(record) if args.format == "json" else head + output.text)
    return outputs


def _summarise(engine: Engine, outputs: list[RequestOutput], max_len: int, seconds: float) -> None:
    """Print on stderr what was done, and what paging saved."""
    stats, page_size = engine.stats(), engine.page_size
    num_tokens = sum(len(o.token_ids) for o in outputs)
    num_pages, batch = stats.peak_num_pages, min(len(outputs), engine.config.max_num_seqs)
    paged, contiguous = num_pages * stats.nbytes_per_page, batch * max_len * stats.nbytes_per_page // page_size
    saved = f"{size(contiguous - paged)} less" if paged <= contiguous else f"{size(paged - contiguous)} more"
    print(
        f"{num_tokens} token{'s' * (num_tokens != 1)} in {seconds:.1f} s, compilation included. "
        f"KV cache: {num_pages} page{'s' * (num_pages != 1)} of {page_size} tokens, "
        f"{size(paged)}: {saved} than the {size(contiguous)} of a contiguous [{batch}, {max_len}] cache.",
        file=sys.stderr,
    )
