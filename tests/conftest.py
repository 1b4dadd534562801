import os

# Before JAX is imported: where CUDA plugins are installed without a GPU, JAX would look for one.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
