"""Marks for tests that compile for a GPU that is not there, or read its machine code."""

import importlib.util
import shutil

import pytest

has_plugin = importlib.util.find_spec("jax_plugins") and importlib.util.find_spec("jax_plugins.xla_cuda13")
needs_plugin = pytest.mark.skipif(not has_plugin, reason="needs jax_plugins.xla_cuda13 (dependency group `aot`)")
needs_nvdisasm = pytest.mark.skipif(
    not (importlib.util.find_spec("triton") or shutil.which("nvdisasm")), reason="needs nvdisasm (CUDA, or `triton`)"
)
