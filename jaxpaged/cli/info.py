"""`jaxpaged info`: the device, versions, and which backends run here."""

import argparse
import importlib.metadata
import platform

import jax

from jaxpaged import __version__
from jaxpaged.cli import setup
from jaxpaged.config import target_of
from jaxpaged.ops.attention import ATTENTION, why_not_on


def run(_: argparse.Namespace) -> None:
    """Print them."""
    here = setup.platform()
    device = jax.devices()[0]
    print(f"device    {device.device_kind} ({device.platform}), {jax.device_count()} in all")
    versions = (f"{name} {importlib.metadata.version(name)}" for name in ("jax", "jaxlib", "flax", "numpy"))
    print(f"versions  jaxpaged {__version__}, {', '.join(versions)}, Python {platform.python_version()}")
    for backend in ATTENTION.names:
        reason = why_not_on(here, backend)
        print(f"backend   {backend:<10} {'runs here' if reason is None else f'cannot run here: {reason}'}")
    print(f"target    {target_of(device.device_kind)}: the kind of GPU whose size attention is cut for")
