"""Stands in for jaxtyping where that is not installed: shapes in annotations are for readers, nothing here reads them.

`benchmarks/gpu_check.sh` appends this folder to the path of a machine that has JAX and Flax and little else. Whatever
is named, `Float[Array, "a b"]` is `Array`.
"""

from jax import Array as Array


class _Annotation:
    def __class_getitem__(cls, item: tuple[type, str]) -> type:
        return item[0]


def __getattr__(name: str) -> type[_Annotation]:
    if name.startswith("_"):
        raise AttributeError(name)
    return _Annotation
