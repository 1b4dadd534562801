import subprocess
import sys

import pytest

import jaxpaged as jp


def test_import_loads_neither_jax_nor_flax_nor_a_model_nor_a_checkpoint_reader():
    code = """
import sys, jaxpaged
heavy = {"jax", "flax", "gguf", "tokenizers", "jinja2", "rich", "torch", "jaxpaged.models", "jaxpaged.nn",
    "jaxpaged.cli"}
assert not heavy & set(sys.modules), heavy & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_public_names_are_documented():
    for name in jp.__all__:
        value = getattr(jp, name)
        assert isinstance(value, int) or value.__doc__, name
    assert len(jp.__all__) == len(set(jp.__all__))


def test_public_names_load_when_they_are_used_and_no_other_is_there():
    for name in jp.__all__:
        assert name in dir(jp)
        assert getattr(jp, name) is getattr(jp, name)
    with pytest.raises(AttributeError, match="module 'jaxpaged' has no attribute 'paged_attentoin'"):
        jp.paged_attentoin  # noqa: B018


@pytest.mark.parametrize("arguments", [["--help"], ["bench", "--help"], ["generate", "--no-such-flag"]])
def test_help_and_mistyped_flags_do_not_wait_for_jax(arguments):
    code = f"""
import sys
from jaxpaged.cli import main
try:
    main({arguments})
except SystemExit:
    assert not {{"jax", "numpy", "rich"}} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
