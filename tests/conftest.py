import os

import hypothesis

# Before JAX is imported: where CUDA plugins are installed without a GPU, JAX would look for one.
os.environ.setdefault("JAX_PLATFORMS", "cpu")

# Time depends on who else uses the machine; CI repeats the same examples.
hypothesis.settings.register_profile("local", deadline=None)
hypothesis.settings.register_profile("ci", deadline=None, derandomize=True)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "local")


def pytest_addoption(parser):
    parser.addoption("--soak", action="store_true", help="run the page manager's state machine for a million steps")
