import subprocess
import sys

import jaxpaged as jp


def test_import_loads_neither_flax_nor_a_model_nor_a_checkpoint_reader():
    code = """
import sys, jaxpaged
heavy = {"flax", "gguf", "tokenizers", "jinja2", "rich", "torch", "jaxpaged.models", "jaxpaged.nn", "jaxpaged.cli"}
assert not heavy & set(sys.modules), heavy & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_public_names_are_documented():
    for name in jp.__all__:
        value = getattr(jp, name)
        assert isinstance(value, int) or value.__doc__, name
    assert len(jp.__all__) == len(set(jp.__all__))
