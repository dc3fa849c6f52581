"""Tensors of a hub checkpoint directory, read by slices.

The files are mapped, so that a slice costs its own bytes. (The safetensors package cannot slice F8 tensors
into numpy; the format is an 8-byte length, a JSON header and raw bytes.)
"""

import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

DTYPES: dict[str, Any] = {
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
}

Slices = tuple[slice, ...]


class CheckpointError(ValueError):
    """A checkpoint does not hold what its config promises."""


@dataclass(frozen=True)
class TensorEntry:
    """Where one tensor lies in its file."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int
    size: int


class TensorFiles:
    """All tensors of a directory: one model.safetensors, or many with model.safetensors.index.json."""

    def __init__(self, directory: str | Path):
        self.directory = Path(directory)
        index = self.directory / "model.safetensors.index.json"
        if index.is_file():
            weight_map = _parse(index, index.read_bytes(), "weight_map")
            files = {name: _read_header(self.directory / name) for name in sorted(set(weight_map.values()))}
            # A file may hold more than the index takes from it.
            self.entries = {name: files[file][name] for name, file in weight_map.items() if name in files[file]}
        else:
            self.entries = _read_header(self.directory / "model.safetensors")
        self._maps: dict[Path, np.memmap] = {}

    def __contains__(self, name: str) -> bool:
        return name in self.entries

    def entry(self, name: str, expected: tuple[int, ...]) -> TensorEntry:
        """The tensor's place, once it is known to exist with the expected shape and a readable type."""
        found = self.entries.get(name)
        if found is None:
            close = difflib.get_close_matches(name, self.entries, 1, 0) or ["no tensors at all"]
            raise CheckpointError(
                f"{self.directory}: expected tensor {name} of shape {list(expected)}, found {close[0]} as "
                "the nearest name; complete the download or use the config.json of this checkpoint"
            )
        if found.shape != expected:
            raise CheckpointError(
                f"{found.file}: expected tensor {name} of shape {list(expected)}, found {list(found.shape)}; "
                "use the config.json of this checkpoint"
            )
        if found.dtype not in DTYPES:
            raise CheckpointError(
                f"{found.file}: expected tensor {name} in one of {', '.join(DTYPES)}, found {found.dtype}; "
                "convert the checkpoint to bf16 or block-scaled fp8"
            )
        return found

    def read(self, name: str, slices: Slices) -> np.ndarray:
        """A slice of a tensor in its stored type; only its own bytes leave the disk."""
        entry = self.entries[name]
        if entry.file not in self._maps:
            self._maps[entry.file] = np.memmap(entry.file, np.uint8, "r")
        raw = self._maps[entry.file][entry.offset : entry.offset + entry.size]
        return np.array(raw.view(DTYPES[entry.dtype]).reshape(entry.shape)[slices])


def _read_header(file: Path) -> dict[str, TensorEntry]:
    """Entries of one file, checked against its length."""
    if not file.is_file():
        raise CheckpointError(f"{file}: expected a safetensors file, found none; complete the download")
    found = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if found < 8 + max(length, 2):
            raise CheckpointError(
                f"{file}: expected a header of {length} bytes, found a file of {found} bytes; "
                "it is cut short, download it again"
            )
        header = _parse(file, stream.read(length))
    entries = {}
    for name, fields in header.items():
        if name == "__metadata__":
            continue
        start, stop = (8 + length + offset for offset in fields["data_offsets"])
        if stop > found:
            raise CheckpointError(
                f"{file}: expected tensor {name} at bytes {start} to {stop}, found a file of {found} bytes; "
                "it is cut short, download it again"
            )
        entries[name] = TensorEntry(file, fields["dtype"], tuple(fields["shape"]), start, stop - start)
    return entries


def _parse(file: Path, text: bytes, key: str | None = None) -> Mapping[str, Any]:
    try:
        found = json.loads(text)
        return found[key] if key else found
    except (ValueError, KeyError) as error:
        raise CheckpointError(
            f"{file}: expected {key or 'a header'} in JSON, found {error!r}; download it again"
        ) from error
