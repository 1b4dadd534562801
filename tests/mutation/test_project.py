import pytest

from tests.mutation.project import JAXPAGED, Project

MODULES = [module for package in JAXPAGED.packages for module in JAXPAGED.modules(package)]


@pytest.mark.parametrize("module", MODULES)
def test_every_module_has_tests_that_must_notice(module):
    killers = JAXPAGED.killers(module)
    assert killers
    assert all((JAXPAGED.root / file).is_file() for file in killers)


def test_more_killers_are_of_modules_that_exist():
    assert set(JAXPAGED.more_killers) <= set(MODULES)


def test_killers_are_the_tests_of_the_package_and_some_more(tmp_path):
    for file in ("lib/test_a.py", "lib/sub/test_b_fast.py", "lib/sub/test_b.py", "other/test_b.py", "lib/case.py"):
        (tmp_path / "tests" / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "tests" / file).touch()
    module, more = "source/lib/sub/b.py", "tests/other/test_b.py"
    project = Project(root=tmp_path, source="source", packages=("lib",), more_killers={module: (more,)})
    killers = project.killers(module)
    assert killers == ["tests/lib/sub/test_b.py", "tests/lib/sub/test_b_fast.py", "tests/lib/test_a.py", more]
    assert [file for file in killers if project.mirrors(file, module)] == killers[:2]
    assert project.killers("source/lib/a.py") == killers[:3]
    assert [file for file in killers if project.mirrors(file, "source/lib/a.py")] == ["tests/lib/test_a.py"]
