"""Frozen dataclasses as pytrees whose rebuilding is not type-checked.

JAX rebuilds pytrees with shardings, shapes or batched arrays in place of their leaves, as in tree.map and vmap. Field
types then hold for objects that code constructs, and not for those that JAX rebuilds.
"""

from collections.abc import Callable
from dataclasses import fields
from typing import Any, TypeVar

import jax

T = TypeVar("T")


def pytree(*, meta: tuple[str, ...] = ()) -> Callable[[type[T]], type[T]]:
    """Class decorator, put above `@dataclass(frozen=True)`; `meta` fields are static and must be hashable."""

    def register(cls: type[T]) -> type[T]:
        names = [f.name for f in fields(cls) if f.name not in meta]  # pyright: ignore[reportArgumentType]

        def flatten(tree: Any):
            children = [(jax.tree_util.GetAttrKey(name), getattr(tree, name)) for name in names]
            return children, tuple(getattr(tree, name) for name in meta)

        def unflatten(static: tuple[Any, ...], children: Any) -> T:
            tree = object.__new__(cls)
            for name, value in zip([*names, *meta], [*children, *static], strict=True):
                object.__setattr__(tree, name, value)
            return tree

        jax.tree_util.register_pytree_with_keys(cls, flatten, unflatten)
        return cls

    return register
