"""What experiments on text share: where the documents come from."""

import sysconfig
from collections.abc import Sequence
from pathlib import Path

from ula_jax.report import UserError


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
