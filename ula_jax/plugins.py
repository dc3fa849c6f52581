"""Policies and placements by name, or from a file outside the tree, with parameters."""

import dataclasses
import importlib.util
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any


def make(kind: str, known: dict[str, type], spec: str, if_taken: Mapping[str, Any] | None = None, **given: Any) -> Any:
    """An object from `name`, `path.py:Class`, or either followed by `:parameter=value,...`; `given` goes along.

    `if_taken` goes along too, as far as the class has fields of these names.

    Raises ValueError for an unknown name, file, class, parameter or value.
    """
    name, _, rest = spec.partition(":")
    if name.endswith(".py"):
        class_name, _, rest = rest.partition(":")
        cls = _from_file(kind, Path(name), class_name)
    elif name in known:
        cls = known[name]
    else:
        raise ValueError(
            f"{kind}: expected one of {sorted(known)} or 'path.py:Class', found {name!r} in {spec!r}; "
            "choose one of them"
        )
    fields = {field.name for field in dataclasses.fields(cls)}
    given |= {name: value for name, value in (if_taken or {}).items() if name in fields}
    return cls(**_parameters(kind, cls, rest, spec, given), **given)


def _from_file(kind: str, path: Path, class_name: str) -> type:
    if not path.is_file():
        raise ValueError(f"{kind}: expected a Python file, found nothing at {path}; check the path")
    module = _module(path.resolve(), path.stat().st_mtime_ns)
    found = getattr(module, class_name, None)
    if not isinstance(found, type) or not dataclasses.is_dataclass(found):
        own = [c for c in vars(module).values() if isinstance(c, type) and c.__module__ == module.__name__]
        classes = sorted(c.__name__ for c in own if dataclasses.is_dataclass(c))
        raise ValueError(
            f"{kind}: expected a dataclass of {path} ({classes}), found {class_name!r}; write path.py:Class"
        )
    return found


@cache
def _module(path: Path, changed_at: int) -> ModuleType:
    """The file's module. One object as long as the file stays as it is: states made by two of them do not mix."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _parameters(kind: str, cls: type, text: str, spec: str, given: dict[str, Any]) -> dict[str, Any]:
    """`a=1,b=x` as keyword arguments, each value read as the type of the field's default."""
    defaults = {field.name: field.default for field in dataclasses.fields(cls)}  # pyright: ignore[reportArgumentType]
    bare = [name for name, default in defaults.items() if default is dataclasses.MISSING and name not in given]
    if bare:
        raise ValueError(f"{kind} {spec!r}: expected a default for every field, found none for {bare}; give them one")
    values: dict[str, Any] = {}
    for item in filter(None, text.split(",")):
        name, _, value = item.partition("=")
        if name not in defaults or not value:
            raise ValueError(f"{kind} {spec!r}: expected parameter=value of {sorted(defaults)}, found {item!r}")
        try:
            values[name] = _read(value, defaults[name])
        except ValueError as error:
            wanted = type(defaults[name]).__name__
            raise ValueError(f"{kind} {spec!r}: expected {name} to be of type {wanted}, found {value!r}") from error
    return values


def _read(value: str, default: Any) -> Any:
    if isinstance(default, bool):
        if value.lower() not in ("true", "false"):
            raise ValueError(value)
        return value.lower() == "true"
    if default is None:  # an optional number
        return int(value)
    if not isinstance(default, int | float | str):
        raise ValueError(value)
    return type(default)(value)
