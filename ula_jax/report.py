"""How commands and experiments report: progress on stderr, tables on stdout, one JSON document as its last line."""

import json
import os
import platform
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import date
from pathlib import Path
from typing import Any, TypeVar

import jax
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

C = TypeVar("C")
T = TypeVar("T")

stderr = Console(stderr=True)


class UserError(Exception):
    """Bad input: the message is one line and says what, expected, found, what to do."""


def or_exit(run: Callable[[C], T], config: C, *also: type[Exception]) -> T:
    """`run(config)`. Bad input (UserError, ValueError and `also`) ends the program with one line on stderr."""
    try:
        return run(config)
    except (UserError, ValueError, *also) as wrong:
        sys.exit(f"error: {wrong}")


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A scratch file to write, which takes the place of `path` once it is whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(path.name + ".partial")
    yield scratch
    os.replace(scratch, path)


def progress_bar(unit: str) -> Progress:
    """A progress display on stderr; tasks count in `unit`."""
    return Progress(
        TextColumn("{task.description:<24}"), BarColumn(), MofNCompleteColumn(), TextColumn(unit), TimeElapsedColumn(),
        console=stderr,
    )  # fmt: skip


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
