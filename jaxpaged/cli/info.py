"""`jaxpaged info`: the device, versions, and which backends run here."""

import argparse
import importlib.metadata
import platform
from typing import get_args

import jax

from jaxpaged import __version__
from jaxpaged.cli import setup
from jaxpaged.config import Backend
from jaxpaged.ops.attention import why_not_on


def run(_: argparse.Namespace) -> None:
    """Prints them."""
    here = setup.platform()
    device = jax.devices()[0]
    print(f"device    {device.device_kind} ({device.platform}), {jax.device_count()} in all")
    versions = (f"{name} {importlib.metadata.version(name)}" for name in ("jax", "jaxlib", "flax", "numpy"))
    print(f"versions  jaxpaged {__version__}, {', '.join(versions)}, Python {platform.python_version()}")
    for backend in get_args(Backend):
        reason = why_not_on(here, backend)
        print(f"backend   {backend:<10} {'runs here' if reason is None else f'cannot run here: {reason}'}")
