"""What the commands that run a model share: model and engine from flags, errors by flag, the profiler."""

import argparse
import contextlib
import os
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, TypeVar

import jax

from jaxpaged.cli.errors import UsageError, check_at_least, with_flags
from jaxpaged.engine import Engine, EngineCore, SchedulerConfig
from jaxpaged.ops.attention import why_not_on
from jaxpaged.paging import OutOfPagesError
from jaxpaged.progress import progress_bar

E = TypeVar("E", Engine, EngineCore)

if TYPE_CHECKING:  # Flax and the model readers load when a model does: a bad flag need not wait for them
    from jaxpaged.models.llama import Llama
    from jaxpaged.models.tokenizer import Tokenizer


def platform() -> str:
    """Return what JAX computes on, "cpu" or "gpu" say. Raises UsageError where that is missing."""
    try:
        return jax.default_backend()
    except (RuntimeError, AssertionError) as error:  # JAX asserts that the plugin of JAX_PLATFORMS has loaded
        asked = os.environ.get("JAX_PLATFORMS", "")
        raise UsageError(f"JAX finds no device (JAX_PLATFORMS={asked!r}): {error or 'its plugin failed'}") from error


def check_model_flags(args: argparse.Namespace) -> None:
    """Raise UsageError for flags of model and cache that can be refused before anything is loaded."""
    check_at_least(args, 1, "page_size")
    if reason := why_not_on(platform(), args.backend):
        raise UsageError(f"`--backend {args.backend}` cannot run here: {reason}")


@contextlib.contextmanager
def errors_by_flag(args: argparse.Namespace) -> Iterator[None]:
    """Turn what the library refuses into a UsageError that names the flags."""
    try:
        yield
    except (ValueError, ModuleNotFoundError, NotImplementedError, OutOfPagesError, FloatingPointError) as error:
        raise UsageError(with_flags(str(error), args)) from error


def load(args: argparse.Namespace) -> "tuple[Llama, Tokenizer]":
    """Return the model of `--model` and its tokenizer, with a progress bar."""
    from jaxpaged.models.loading import load_model

    with progress_bar("Loading", "bytes") as advance:
        try:
            return load_model(args.model, dtype=args.dtype, backend=args.backend, target=args.target, progress=advance)
        except OSError as error:
            raise UsageError(str(error)) from error


def make_engine(
    args: argparse.Namespace, model: "Llama", limits: SchedulerConfig, *, num_pages: int, **options: Any
) -> Engine:
    """Return an engine as `make` makes it."""
    return make(Engine, args, model, limits, num_pages=num_pages, **options)


def make(
    kind: type[E], args: argparse.Namespace, model: "Llama", limits: SchedulerConfig, *, num_pages: int, **options: Any
) -> E:
    """Return an engine, or a core for who steps it, whose pool holds `--num-pages`, or else `num_pages`.

    Args:
        kind: `Engine` or `EngineCore`.
        options: Further arguments of it.
    """
    if args.page_size > model.config.max_position:
        raise UsageError(
            f"`--page-size` must be at most the context of {model.config.max_position} tokens; got {args.page_size}."
        )
    if args.num_pages is not None:
        num_pages = args.num_pages
    try:
        config = model.cache_config(num_pages=num_pages, page_size=args.page_size)
        return kind(model, config, limits, **options)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise UsageError(f"no memory for {num_pages} pages of {args.page_size} tokens: {error}") from error


@contextlib.contextmanager
def profiled(args: argparse.Namespace) -> Iterator[None]:
    """Trace what runs inside into the directory of `--profile`, if that is given."""
    if args.profile is None:
        yield
        return
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # each call of a Python function would slow what is measured, and fill the trace
    with jax.profiler.trace(args.profile, profiler_options=options):
        yield
    print(f"Trace written below {args.profile}: see it in XProf or Perfetto.", file=sys.stderr)


def check_profile(args: argparse.Namespace) -> None:
    """Raise UsageError where the directory of `--profile` cannot be made or written to."""
    if args.profile is None:
        return
    try:
        os.makedirs(args.profile, exist_ok=True)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise UsageError(f"`--profile {args.profile}` cannot be made: {reason}.") from error
    if not os.access(args.profile, os.W_OK | os.X_OK):
        raise UsageError(f"`--profile {args.profile}` cannot be written to: Permission denied.")


def size(nbytes: int) -> str:
    """Return a number of bytes for people."""
    return f"{nbytes / 2**20:.1f} MiB" if nbytes >= 2**20 else f"{nbytes / 2**10:.1f} KiB"
