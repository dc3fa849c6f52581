"""Replacement policies by name. To add one: a file beside these, and a line in POLICIES."""

import dataclasses
import importlib.util
from pathlib import Path
from typing import Any

from ula_jax.policies.base import Policy, Touch
from ula_jax.policies.lru import LRU
from ula_jax.policies.pb_lru import PBLRU

POLICIES: dict[str, type] = {
    "lru": LRU,
    "pb_lru": PBLRU,
}


def make_policy(spec: str) -> Policy:
    """A policy from `name` or `path.py:Class`, optionally followed by `:parameter=value,...`.

    Raises ValueError for an unknown name, class, parameter or value, TypeError for a class that is no policy.
    """
    name, _, rest = spec.partition(":")
    if name.endswith(".py"):
        class_name, _, rest = rest.partition(":")
        cls = _load(Path(name), class_name)
    elif name in POLICIES:
        cls = POLICIES[name]
    else:
        raise ValueError(
            f"policy: expected one of {sorted(POLICIES)} or 'path.py:Class', found {name!r} in {spec!r}; "
            f"add a line to ula_jax.policies.POLICIES to name a new one"
        )
    policy = cls(**_parameters(cls, rest, spec))
    if not isinstance(policy, Policy):
        raise TypeError(f"policy: {cls.__name__} in {spec!r} needs the methods init, touch, evict and forget")
    return policy


def _load(path: Path, class_name: str) -> type:
    if not path.is_file():
        raise ValueError(f"policy: expected a Python file, found nothing at {path}; check the path")
    module_spec = importlib.util.spec_from_file_location(path.stem, path)
    assert module_spec is not None
    assert module_spec.loader is not None
    module = importlib.util.module_from_spec(module_spec)
    module_spec.loader.exec_module(module)
    found = getattr(module, class_name, None)
    if not isinstance(found, type) or not dataclasses.is_dataclass(found):
        own = [c for c in vars(module).values() if isinstance(c, type) and c.__module__ == module.__name__]
        classes = sorted(c.__name__ for c in own if dataclasses.is_dataclass(c))
        raise ValueError(
            f"policy: expected a dataclass of {path} ({classes}), found {class_name!r}; write path.py:Class"
        )
    return found


def _parameters(cls: type, text: str, spec: str) -> dict[str, Any]:
    """`a=1,b=x` as keyword arguments, each value read as the type of the field's default."""
    defaults = {field.name: field.default for field in dataclasses.fields(cls)}
    values: dict[str, Any] = {}
    for item in filter(None, text.split(",")):
        name, _, value = item.partition("=")
        if name not in defaults or not value:
            raise ValueError(f"policy {spec!r}: expected parameter=value of {sorted(defaults)}, found {item!r}")
        try:
            values[name] = _read(value, defaults[name])
        except ValueError as error:
            kind = type(defaults[name]).__name__
            raise ValueError(f"policy {spec!r}: expected {name} to be of type {kind}, found {value!r}") from error
    return values


def _read(value: str, default: Any) -> Any:
    if isinstance(default, bool):
        if value.lower() not in ("true", "false"):
            raise ValueError(value)
        return value.lower() == "true"
    return type(default)(value) if isinstance(default, int | float | str) else value


__all__ = ["LRU", "PBLRU", "POLICIES", "Policy", "Touch", "make_policy"]
