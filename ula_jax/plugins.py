"""Looking up a registered class by name, or one from a file outside the tree."""

import importlib.util
from pathlib import Path
from typing import Any


def load(kind: str, known: dict[str, Any], name: str) -> Any:
    """`known[name]`, or the class of `path.py:Class`."""
    if name in known:
        return known[name]
    path, colon, attribute = name.rpartition(":")
    if not colon or not path.endswith(".py"):
        raise ValueError(
            f"{kind}: expected one of {', '.join(sorted(known))} or path.py:Class, found {name!r}; choose one of them"
        )
    file = Path(path)
    if not file.is_file():
        raise ValueError(f"{kind}: expected a Python file before the colon of {name!r}, found none at {path}")
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if not hasattr(module, attribute):
        raise ValueError(f"{kind}: expected a class {attribute} in {path}, found none; check the name")
    return getattr(module, attribute)
