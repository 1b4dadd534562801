"""Adapters for the neural-network libraries: `jaxpaged.nn.nnx` and `jaxpaged.nn.linen`."""
