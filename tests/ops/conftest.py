import importlib.util
import pathlib
import sys

import pytest

TOOL = pathlib.Path(__file__).parents[3] / "shared" / "tools" / "ttir_interp.py"


@pytest.fixture(scope="session")
def interpreter():
    """The checked interpreter of Triton IR, which is kept beside this repository and not in it."""
    if not TOOL.exists():
        pytest.skip(f"needs {TOOL.name} in ../{TOOL.parent.parent.name}/{TOOL.parent.name}")
    spec = importlib.util.spec_from_file_location(TOOL.stem, TOOL)
    module = sys.modules[TOOL.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
