import re
from pathlib import Path

import chex
import jax.numpy as jnp
import numpy as np

import jaxpaged as jp

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text("utf-8")


EXAMPLES = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def test_readme_example_of_page_memory_runs_and_explains(capsys):
    names: dict = {}
    exec(compile(EXAMPLES[1], "README.md", "exec"), names)
    assert len(names["swapped"]) == 3
    assert capsys.readouterr().out.count("hit") >= 2


def test_readme_example_runs_and_attends():
    example, _ = EXAMPLES
    names: dict = {}
    exec(compile(example, "README.md", "exec"), names)
    chex.assert_shape(names["out"], (23, 8, 64))
    # The first token of each sequence sees itself only.
    for first in (0, 18):
        expected = jnp.repeat(names["v"][first], 4, axis=0)
        np.testing.assert_allclose(np.float32(names["out"][first]), np.float32(expected), rtol=1e-2)
    pages: jp.PageAllocator = names["pages"]
    assert names["copies"] == []
    assert pages.seq_len("beam") == 19
    assert pages.num_free_pages == 63 - 2


def test_readme_tree_names_every_package_and_no_other():
    tree = README[README.index("    jaxpaged/\n") : README.index("## Backends")]
    named = set(re.findall(r"(\w+)/", tree)) - {"jaxpaged", "tests", "benchmarks"}
    assert named == {path.parent.name for path in (ROOT / "jaxpaged").glob("*/**/__init__.py")}


def test_readme_commands_are_those_of_the_command_line():
    from jaxpaged.cli.parser import make_parser

    for command in re.findall(r"^    (?:uv run )?jaxpaged (.*?)(?: +#.*)?$", README, re.MULTILINE):
        words = [a or b for a, b in re.findall(r'"([^"]*)"|(\S+)', command)]
        if words and words[0] != "/":
            make_parser().parse_args(words)
