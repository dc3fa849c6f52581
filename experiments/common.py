"""What every experiment shares: documents, the environment it ran in, and how it reports."""

import json
import platform
import sys
import sysconfig
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

import jax
from rich.console import Console
from rich.table import Table

stderr = Console(stderr=True)


class UserError(Exception):
    """Bad input: the message is one line and says what, expected, found, what to do."""


def read_documents(files: Sequence[Path], length: int, count: int) -> list[list[int]]:
    """`count` prompts of `length` bytes: the files' beginnings first, then their next windows, and so on.

    Without files: the longest modules of Python's own library, which every machine has.
    """
    chosen = list(files) or python_library()
    texts = []
    for file in chosen:
        if not file.is_file():
            raise UserError(f"documents: expected an existing file, found nothing at {file}; check the path")
        text = file.read_bytes()
        if not text:
            raise UserError(f"documents: expected text, found {file} empty; leave it out")
        texts.append(text)
    windows = max(len(text) for text in texts) // length
    prompts = [
        list(text[start : start + length])
        for start in range(0, windows * length, length)
        for text in texts
        if start + length <= len(text)
    ]
    if len(prompts) < count:
        raise UserError(
            f"documents: expected {count} prompts of {length} bytes, found {len(prompts)} in {len(texts)} files; "
            "give more or longer files, or shorten --prompt"
        )
    return prompts[:count]


def python_library() -> list[Path]:
    """Modules of Python's own library, longest first."""
    files = Path(sysconfig.get_path("stdlib")).glob("*.py")
    return sorted(files, key=lambda file: (-file.stat().st_size, file.name))


def environment() -> dict[str, Any]:
    """What produced a result: command, versions, hardware, date."""
    devices = jax.devices()
    return {
        "command": " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "date": date.today().isoformat(),
        "jax": jax.__version__,
        "python": platform.python_version(),
        "platform": devices[0].platform.upper(),
        "devices": f"{len(devices)} x {devices[0].device_kind}",
        "cpu": platform.processor() or platform.machine(),
    }


def print_table(table: Table) -> None:
    """On stdout, wide enough not to fold when piped."""
    Console(width=160).print(table)


def report(result: dict[str, Any], out: Path, name: str) -> None:
    """Write OUT/name.json and print the same document as the last line of stdout."""
    out.mkdir(parents=True, exist_ok=True)
    line = json.dumps(result)
    (out / f"{name}.json").write_text(line + "\n")
    sys.stdout.flush()
    print(line, flush=True)
