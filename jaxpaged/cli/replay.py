"""`jaxpaged replay`: runs the log of an engine again, and names the first step that is not as it was."""

import argparse
import sys

from jaxpaged.cli.errors import UsageError
from jaxpaged.cli.setup import check_model_flags, errors_by_flag, load
from jaxpaged.config import CacheConfig
from jaxpaged.engine import EngineCore, NgramSpeculation, SchedulerConfig
from jaxpaged.engine.log import read_log, replay
from jaxpaged.paging.store.swap import SwapSpace


def run(args: argparse.Namespace) -> None:
    """Replay and report. Exit code 1 where a step differs."""
    check_model_flags(args)
    try:
        header, items = read_log(args.log)
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise UsageError(f"`{args.log}` cannot be replayed: {error}") from error
    if header["speculation"] is not None and "type" in header["speculation"]:
        raise UsageError(f"`{args.log}` cannot be replayed: its drafts came from {header['speculation']['type']}.")
    with errors_by_flag(args):
        model, tokenizer = load(args)
        core = EngineCore(
            model,
            CacheConfig(**header["cache"]),
            SchedulerConfig(**header["scheduler"]),
            prefix_caching=header["prefix_caching"],
            tokenizer=tokenizer,
            swap=SwapSpace(header["num_swap_pages"]) if header["num_swap_pages"] else None,
            speculation=None if header["speculation"] is None else NgramSpeculation(**header["speculation"]),
        )
        num_equal, difference = replay(core, items)
    if difference is None:
        print(f"{num_equal} steps, each as it was recorded.")
        return
    print(f"{num_equal} steps as recorded; step {difference.step} differs:")
    for name in ("plan", "token_ids", "errors", "outcomes"):
        recorded, replayed = getattr(difference.recorded, name), getattr(difference.replayed, name)
        if recorded != replayed:
            print(f"  {name}: recorded {recorded}, replayed {replayed}")
    sys.exit(1)
