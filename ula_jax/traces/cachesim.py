"""Traces in two formats of libCacheSim, for its simulators and for traces of other caches.

oracleGeneral: packed little-endian records of 24 bytes

    uint32 time, uint64 obj_id, uint32 obj_size, int64 next_access_vtime

where the last is the number, from 0, of the next record of the same object: -1 here if there is none, INT64_MAX in some
other files (libCacheSim turns the first into the second on reading, and only compares). CSV: the same four columns with
a header line; the last may be missing. Either is compressed with zstd if its name ends with `.zst`.

Written are selections alone: a record for each row that is selected, round after round; the time is the round. Read,
all records are one request's that never finishes: one stream, one seat, no scores.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NoReturn

import numpy as np
import pyarrow as pa
import pyarrow.csv as pa_csv
from jaxtyping import Int32, Int64, Shaped

from ula_jax.report import replacing
from ula_jax.traces.parquet import check_file, fail
from ula_jax.traces.statistics import consecutive, row_numbers
from ula_jax.traces.trace import Trace
from ula_jax.types import EMPTY

RECORD = np.dtype([("time", "<u4"), ("obj_id", "<u8"), ("obj_size", "<u4"), ("next_access_vtime", "<i8")])

Rounds = Literal["time", "record"]
"""What makes a round: all records of one time, or every record."""

Records = Shaped[np.ndarray, " records"]
"""Of dtype RECORD; for CSV with wider times and sizes."""

MOST_OBJECTS = 2**31 - 1
MOST_PLACES = 2**31 - 1
"""Rounds times records of the largest round: 8 GiB."""


def records(trace: Trace, stream: int = 0) -> Records:
    """Selections of one stream; an object is a row of one request's life, its size the bytes that move with it."""
    rows = row_numbers(trace)[stream]
    known = rows >= 0
    result = np.empty(int(known.sum()), RECORD)
    result["time"] = np.nonzero(known)[0]
    result["obj_id"] = rows[known]
    size = int(trace.stream_row_bytes[stream])
    if not 1 <= size < 2**32:
        raise ValueError(f"row_bytes: expected 1 to {2**32 - 1} for libCacheSim, found {size}; give other sizes")
    result["obj_size"] = size
    result["next_access_vtime"] = EMPTY
    now, later = consecutive(rows[known])
    result["next_access_vtime"][now] = later
    return result


def write_oracle_general(trace: Trace, path: Path, *, stream: int = 0) -> None:
    """One stream of the trace as oracleGeneral records."""
    _write(path, lambda file: file.write(records(trace, stream).tobytes()))


def read_oracle_general(path: Path, *, rounds: Rounds = "time") -> Trace:
    """A trace of oracleGeneral records.

    Objects are numbered by first appearance; what a round repeats is dropped, and so are records of size 0, which
    libCacheSim skips too. `next_access_vtime` is not used. `k` is the size of the largest round; `row_bytes` is the
    objects' size if all have the same.

    Raises:
      ValueError: no such file, damaged zstd, a part of a record, no records, times that decrease, or too many objects
        or rounds for a Trace; the record is named.
    """
    data = _read(path, "oracleGeneral records")
    if len(data) % RECORD.itemsize:
        fail(
            path, f"records of {RECORD.itemsize} bytes", f"{len(data)} bytes, {len(data) % RECORD.itemsize} too many",
            "copy it again, or name it .csv or .zst if it is",
        )  # fmt: skip
    return _trace(path, np.frombuffer(data, RECORD), rounds, "record", 0)


def write_csv(trace: Trace, path: Path, *, stream: int = 0) -> None:
    """One stream of the trace as `time,obj_id,obj_size,next_access_vtime` lines."""
    rows = records(trace, stream)
    table = pa.table({name: rows[name].copy() for name in RECORD.names or ()})

    def write(file: Any) -> None:
        file.write((",".join(table.column_names) + "\n").encode())
        pa_csv.write_csv(table, file, pa_csv.WriteOptions(include_header=False))

    _write(path, write)


def read_csv(path: Path, *, rounds: Rounds = "time") -> Trace:
    """A trace of CSV lines, as `read_oracle_general`; the ValueError names the line. Ids must be integers."""
    data = _read(path, "a CSV trace")
    names = list(RECORD.names or ())
    header = data.partition(b"\n")[0].decode(errors="replace").strip().split(",")
    if header not in (names, names[:3]):
        fail(path, f"the header {','.join(names)}, the last optional", ",".join(header)[:80], "add it")
    types = dict(zip(names, (pa.int64(), pa.uint64(), pa.int64(), pa.int64()), strict=True))
    try:
        table = pa_csv.read_csv(
            pa.BufferReader(data),
            parse_options=pa_csv.ParseOptions(ignore_empty_lines=False),
            convert_options=pa_csv.ConvertOptions(column_types=types, null_values=[]),
        )
    except pa.ArrowInvalid as wrong:
        _bad_line(path, data, len(header), wrong)
    columns = {name: table[name].to_numpy() for name in names[:3]}
    rows = np.empty(table.num_rows, [(name, column.dtype) for name, column in columns.items()])
    for name, column in columns.items():
        rows[name] = column
    return _trace(path, rows, rounds, "line", 2)


def _trace(path: Path, rows: Records, rounds: Rounds, unit: str, start: int) -> Trace:
    """`unit` and the number of the first one are for messages."""
    if not len(rows):
        fail(path, f"at least one {unit}", "none", "copy or write it again")
    back = np.flatnonzero(rows["time"][1:] < rows["time"][:-1])
    if back.size:
        i = int(back[0])
        found = f"{rows['time'][i + 1]} after {rows['time'][i]} in {unit} {i + 1 + start}"
        fail(path, "times that do not decrease", found, "sort it by time")
    sizes = rows["obj_size"]
    negative = np.flatnonzero(sizes < 0)
    if negative.size:
        found = f"{sizes[negative[0]]} in {unit} {negative[0] + start}"
        fail(path, "obj_size of at least 0", found, "correct it")
    rows = rows[sizes > 0]
    if not len(rows):
        fail(path, "objects with a size", "obj_size 0 everywhere", "write sizes, 1 if unknown")
    objects, count = _by_first_appearance(rows["obj_id"])
    if count > MOST_OBJECTS:
        fail(path, f"at most {MOST_OBJECTS} objects", str(count), "read a part of it")
    positions = _positions(path, rows["time"], objects, count, rounds)
    size = int(rows["obj_size"][0])
    return Trace(
        positions=positions,
        finished=np.zeros(positions.shape[:3], bool),
        k=positions.shape[3],
        length=count,
        row_bytes=(size,) if np.all(rows["obj_size"] == size) else (),
        meta={"source": f"{path.name}, a round for each {rounds}"},
    )


def _positions(
    path: Path,
    times: Shaped[np.ndarray, " records"],
    objects: Int64[np.ndarray, " records"],
    count: int,
    rounds: Rounds,
) -> Int32[np.ndarray, "1 rounds 1 k"]:
    if rounds == "record":
        now = np.arange(len(times))
    else:
        now = np.cumsum(np.concatenate([[0], times[1:] != times[:-1]]))
        once = np.sort(np.unique(now * count + objects, return_index=True)[1])
        now, objects = now[once], objects[once]
    starts = np.flatnonzero(np.concatenate([[True], now[1:] != now[:-1]]))
    widths = np.diff(starts, append=len(now))
    places = len(starts) * int(widths.max())
    if places > MOST_PLACES:
        found = f"{len(starts)} rounds of up to {widths.max()}"
        fail(path, f"at most {MOST_PLACES} places", found, "read it with rounds='record', or a part of it")
    positions = np.full((1, len(starts), 1, int(widths.max())), EMPTY, np.int32)
    positions[0, now, 0, np.arange(len(now)) - starts[now]] = objects
    return positions


def _by_first_appearance(ids: Shaped[np.ndarray, " n"]) -> tuple[Int64[np.ndarray, " n"], int]:
    """Numbers from 0 in order of first appearance, and how many there are."""
    _, first, which = np.unique(ids, return_index=True, return_inverse=True)
    number = np.empty(len(first), np.int64)
    number[np.argsort(first)] = np.arange(len(first))
    return number[which], len(first)


def _bad_line(path: Path, data: bytes, columns: int, wrong: Exception) -> NoReturn:
    """Name the line that pyarrow could not read."""
    for number, line in enumerate(data.decode(errors="replace").splitlines()[1:], 2):
        try:
            values = [int(value) for value in line.split(",")]
        except ValueError:
            values = []
        if len(values) != columns or values[1] < 0:
            fail(path, f"{columns} integers, obj_id at least 0, in line {number}", repr(line[:80]), "correct the line")
    raise ValueError(f"{path}: expected lines of {columns} integers, found others ({wrong}); correct them") from wrong


def _write(path: Path, write: Callable[[Any], Any]) -> None:
    with replacing(path) as scratch, pa.OSFile(str(scratch), "wb") as file:
        if path.suffix == ".zst":
            with pa.CompressedOutputStream(file, "zstd") as packed:
                write(packed)
        else:
            write(file)


def _read(path: Path, what: str) -> bytes:
    check_file(path, what)
    if path.suffix != ".zst":
        return path.read_bytes()
    try:
        with pa.OSFile(str(path)) as file, pa.CompressedInputStream(file, "zstd") as unpacked:
            return unpacked.read()
    except (OSError, pa.ArrowException) as wrong:
        raise ValueError(
            f"{path}: expected zstd data, found it damaged or something else ({wrong}); copy it again or rename it"
        ) from wrong
