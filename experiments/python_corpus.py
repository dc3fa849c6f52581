"""Python's own library as a corpus of bytes: what the tiny model is trained on, and the modules it never sees."""

import hashlib
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ula_jax.report import UserError

HELD_OUT = (
    "_pydecimal", "argparse", "inspect", "ipaddress", "mailbox", "pdb", "shutil", "statistics", "tarfile", "typing",
)  # fmt: skip
"""Modules of more than 30 kB in every Python from 3.11."""

SEPARATOR = 0
"""Between documents; no source file holds it."""


@dataclass(frozen=True)
class Corpus:
    train: np.ndarray
    """uint8, documents one after another."""
    documents: int
    """How many are in `train`."""
    held_out: dict[str, np.ndarray]
    """uint8 by module."""


def python_corpus(limit: int | None = None) -> Corpus:
    """All Python sources below the standard library's directory, of which tests make up at most half.

    Args:
      limit: bytes to stop after, for a quick look.
    """
    root = Path(sysconfig.get_path("stdlib"))
    held = {file.stem: _read(file) for file in held_out_files()}
    seen = {hashlib.sha1(text).digest() for text in held.values()}
    texts: dict[bool, list[bytes]] = {False: [], True: []}
    files = [file.relative_to(root) for file in root.rglob("*.py")]
    # By hash of the name: what a limit leaves out is then spread over the library.
    for file in sorted(files, key=lambda file: hashlib.sha1(file.as_posix().encode()).digest()):
        # encodings and _sysconfigdata are tables that a program wrote.
        if {"site-packages", "encodings"} & set(file.parts) or file.name.startswith("_sysconfigdata"):
            continue
        text = (root / file).read_bytes()
        digest = hashlib.sha1(text).digest()
        if text and SEPARATOR not in text and digest not in seen:
            seen.add(digest)
            texts[bool({"test", "tests", "idle_test"} & set(file.parts))].append(text)
    room = sum(map(len, texts[False]))
    chosen, size = [], 0
    for text in [*texts[False], *texts[True]]:
        size += len(text)
        if size > (2 * room if limit is None else limit) and chosen:
            break
        chosen.append(text)
    joined = bytes([SEPARATOR]).join([b"", *chosen, b""])
    arrays = {name: np.frombuffer(text, np.uint8) for name, text in held.items()}
    return Corpus(np.frombuffer(joined, np.uint8), len(chosen), arrays)


def held_out_files() -> tuple[Path, ...]:
    """Sources of the held-out modules, on this machine."""
    return tuple(Path(sysconfig.get_path("stdlib")) / f"{name}.py" for name in HELD_OUT)


def _read(file: Path) -> bytes:
    if not file.is_file():
        raise UserError(f"corpus: expected the library's source {file}, found none; use a Python with its sources")
    return file.read_bytes()


def draw_windows(corpus: Corpus, seed: int, step: int, count: int, length: int) -> np.ndarray:
    """int32 [count, length], a function of seed and step alone, so that a resumed run sees what it would have seen."""
    if length > len(corpus.train):
        raise UserError(f"corpus: expected {length} bytes or more, found {len(corpus.train)}; shorten the context")
    starts = np.random.default_rng((seed, step)).integers(0, len(corpus.train) - length + 1, count)
    return corpus.train[starts[:, None] + np.arange(length)].astype(np.int32)


def held_out_windows(corpus: Corpus, context: int, count: int) -> np.ndarray:
    """int32 [count or fewer, context + 2]: windows of which `context` bytes do not overlap, spread over the modules."""
    starts = {name: range(0, len(text) - context - 1, context) for name, text in corpus.held_out.items()}
    most = max(map(len, starts.values()))
    picks = [(name, own[turn]) for turn in range(most) for name, own in starts.items() if turn < len(own)]
    if not picks:
        raise UserError(f"held-out modules: expected one of {context} bytes, found none; shorten the context")
    windows = [corpus.held_out[name][start : start + context + 2] for name, start in picks[:count]]
    return np.stack(windows).astype(np.int32)
