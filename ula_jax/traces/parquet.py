"""Traces as parquet files: one row for each (round, request, layer group, rank).

Columns, without nulls except where said:

    round        int32    from 0, none left out
    request      int32    one number for a request's whole life, in all layer groups
    device_rank  int16    data-parallel rank that decodes the request
    layer_group  int16    (device_rank, layer_group) is a stream of the trace
    position     int32    row of the request's history
    address      int32    seat * length + position; not read back
    score        float32  indexer score, may be NaN; null in every row if the source has none
    rank         int32    place in score order from 0 without gaps; below `k` means selected

Key-value metadata of the schema, each value JSON: `format`, `version`, `k`, `length` (above every position); and, if
known, `depth` (ranks kept), `device_ranks` and `layer_groups` (of the streams, in order), `streams` (names),
`row_bytes`, `meta`. Files of `write_trace` also have `seats` (then a request sits in seat `request % seats`) and
`finished` (flat places of the trace's flags). Without these two, requests are seated again: in order of their first
round (then number) each takes the lowest free seat, and leaves it in the round after its last row.
"""

import heapq
import json
import re
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from jaxtyping import Bool, Int32, Int64

from ula_jax.report import replacing
from ula_jax.traces.trace import Trace
from ula_jax.types import EMPTY

FORMAT, VERSION = "ula-jax trace", 1

SCHEMA = pa.schema(
    [
        ("round", pa.int32()),
        ("request", pa.int32()),
        ("device_rank", pa.int16()),
        ("layer_group", pa.int16()),
        ("position", pa.int32()),
        ("address", pa.int32()),
        ("score", pa.float32()),
        ("rank", pa.int32()),
    ]
)

_ENCODINGS = dict.fromkeys(("position", "address", "rank"), "DELTA_BINARY_PACKED") | {"score": "BYTE_STREAM_SPLIT"}
_RUNS = ["round", "request", "device_rank", "layer_group"]


def write_trace(trace: Trace, path: Path) -> None:
    """Write the trace; a file that exists is replaced when the new one is complete.

    Scores of padding are not kept. ValueError for a trace that no file can hold: a round in which nothing is selected,
    positions out of range, or padding before a position.
    """
    known = trace.positions >= 0
    _check_writable(trace, known, path)
    pairs = _pairs(trace)
    stream, now, seat, rank = (part.astype(np.int32) for part in np.nonzero(known))
    device_rank, layer_group = (part.astype(np.int16) for part in pairs.T)
    # Below every `seats` numbers stand as many lives, so that `request % seats` is the seat.
    lives = (
        np.cumsum(trace.finished, axis=1, dtype=np.int32) * (int(device_rank.max()) + 1) + device_rank[:, None, None]
    )
    requests = lives * trace.seats + np.arange(trace.seats, dtype=np.int32)
    columns = (
        now, requests[stream, now, seat], device_rank[stream], layer_group[stream], trace.positions[known],
        trace.addresses[known], pa.nulls(len(now), pa.float32()) if trace.scores is None else trace.scores[known], rank,
    )  # fmt: skip
    about = {
        "format": FORMAT, "version": VERSION, "k": trace.k, "length": trace.length, "depth": trace.positions.shape[3],
        "device_ranks": device_rank.tolist(), "layer_groups": layer_group.tolist(), "streams": trace.streams,
        "row_bytes": trace.row_bytes, "meta": trace.meta, "seats": trace.seats,
        "finished": np.flatnonzero(trace.finished).tolist(),
    }  # fmt: skip
    schema = SCHEMA.with_metadata({key: json.dumps(value, default=str) for key, value in about.items()})
    table = pa.Table.from_arrays([pa.array(column) for column in columns], schema=schema)
    with replacing(path) as scratch:
        pq.write_table(
            table,
            scratch,
            compression="zstd",
            use_dictionary=_RUNS,  # pyright: ignore[reportArgumentType]
            column_encoding=_ENCODINGS,
            write_page_checksum=True,
        )


def read_trace(path: Path) -> Trace:
    """The trace in the file. ValueError, with the row where one is at fault, unless it is as the module says."""
    table, about = _open(path)
    columns = {name: table[name].to_numpy() for name in SCHEMA.names}
    _check_values(path, columns, about)
    pairs = _streams(path, columns, about)
    stream = np.searchsorted(np.sort(pairs), _code(columns["device_rank"], columns["layer_group"]))
    stream = np.argsort(pairs)[stream]
    rounds = int(columns["round"].max()) + 1
    seat, finished = _seats(path, columns, about, stream, (len(pairs), rounds))
    seats = finished.shape[2]

    cell = (stream * rounds + columns["round"]) * seats + seat
    sizes = np.bincount(cell, minlength=finished.size)
    depth = max(int(sizes.max()), about.get("depth", 1))
    if about["k"] > depth:
        fail(path, f"k of at most {depth}, the ranks of a round", str(about["k"]), "keep more ranks or lower k")
    gap = columns["rank"] >= sizes[cell]
    _check_rows(path, gap, "ranks without gaps", lambda i: f"{_where(columns, i)} of {sizes[cell[i]]} rows")
    place = cell * depth + columns["rank"]
    first = np.full(finished.size * depth, EMPTY, np.int64)
    first[place[::-1]] = np.arange(len(place))[::-1]
    twice = first[place] != np.arange(len(place))
    _check_rows(
        path, twice, "one row for each (round, request, layer group, rank)",
        lambda i: f"{_where(columns, i)} again, after row {first[place[i]]}",
    )  # fmt: skip

    shape = (*finished.shape, depth)
    positions = np.full(shape, EMPTY, np.int32)
    positions.reshape(-1)[place] = columns["position"]
    _check_distinct(path, positions, first)
    scores = None
    if table["score"].null_count == 0:
        scores = np.full(shape, -np.inf, np.float32)
        scores.reshape(-1)[place] = columns["score"]
    try:
        return Trace(
            positions, finished, about["k"], about["length"], scores, tuple(about.get("streams", ())),
            tuple(about.get("row_bytes", ())), about.get("meta", {}),
        )  # fmt: skip
    except ValueError as wrong:
        raise ValueError(f"{path}: {wrong}; correct the metadata") from wrong


def fail(path: Path, expected: str, found: str, advice: str) -> NoReturn:
    """ValueError in the words that all readers of files here use."""
    raise ValueError(f"{path}: expected {expected}, found {found}; {advice}")


def check_file(path: Path, what: str) -> None:
    """ValueError unless there is a file with something in it."""
    if not path.is_file():
        fail(path, what, "a directory" if path.is_dir() else "no file", "check the path")
    if not path.stat().st_size:
        fail(path, what, "an empty file", "copy or write it again")


def _check_writable(trace: Trace, known: Bool[np.ndarray, "..."], path: Path) -> None:
    idle = np.flatnonzero(~known.any(axis=(0, 2, 3)))
    if idle.size or not known.size:
        found = f"none in round {idle[0]}" if idle.size else "no rounds"
        fail(path, "a selection in every round", found, "leave such rounds out of the trace")
    if trace.positions.max() >= trace.length:
        fail(path, f"positions below length {trace.length}", str(trace.positions.max()), "raise length")
    if np.any(known[..., 1:] & ~known[..., :-1]):
        at = np.argwhere(known[..., 1:] & ~known[..., :-1])[0]
        fail(path, "padding after the last position only", f"it before rank {at[3] + 1} in round {at[1]}", "sort it")


def _pairs(trace: Trace) -> Int64[np.ndarray, "streams 2"]:
    """(device rank, layer group) of each stream: from names as the recorder gives them, else groups of rank 0."""
    found = [re.fullmatch(r"rank (\d+) group (\d+)", name) for name in trace.stream_names]
    pairs = [(int(m[1]), int(m[2])) for m in found if m]
    if len(set(pairs)) < len(found):
        pairs = [(0, i) for i in range(len(found))]
    return np.array(pairs, np.int64).reshape(-1, 2)


def _open(path: Path) -> tuple[pa.Table, dict[str, Any]]:
    """Table and metadata, with the right columns, not empty."""
    write = "write it with ula_jax.traces.parquet.write_trace"
    check_file(path, "a parquet trace")
    with path.open("rb") as file:
        head = file.read(4)
    if head != b"PAR1":
        fail(path, "a parquet trace", f"a file that begins with {head!r}", write)
    try:
        schema = pq.read_schema(path)
        table = pq.read_table(path, page_checksum_verification=True)
    except (pa.ArrowException, OSError) as wrong:
        reason = " ".join(str(wrong).split())
        raise ValueError(
            f"{path}: expected a whole parquet file, found it truncated or damaged ({reason}); copy or write it again"
        ) from wrong
    try:
        # The schema's other keys are those of other programs, such as pandas.
        about = {k.decode(): json.loads(v) for k, v in (schema.metadata or {}).items() if k in _KEYS}
    except ValueError as wrong:
        raise ValueError(f"{path}: expected metadata in JSON, found something else ({wrong}); {write}") from wrong
    if about.get("format") != FORMAT or about.get("version") != VERSION:
        found = f"format {about.get('format')!r} version {about.get('version')!r}"
        fail(path, f"metadata with format {FORMAT!r} version {VERSION}", found, write)
    for key in {"k", "length", *(about.keys() & {"depth", "seats"})}:
        if not isinstance(about.get(key), int) or about[key] < 1:
            fail(path, f"metadata {key}, a positive integer", repr(about.get(key)), "correct it")
    for keys, kind in ((("device_ranks", "layer_groups", "finished", "row_bytes"), int), (("streams",), str)):
        for key in about.keys() & set(keys):
            if not isinstance(about[key], list) or not all(type(item) is kind for item in about[key]):
                fail(path, f"metadata {key}, a list of {kind.__name__}", repr(about[key])[:80], "correct it")
    for field in SCHEMA:
        if field.name not in schema.names:
            fail(path, f"column {field.name} of type {field.type}", f"columns {', '.join(schema.names)}", "add it")
        if schema.field(field.name).type != field.type:
            found = str(schema.field(field.name).type)
            fail(path, f"column {field.name} of type {field.type}", found, "cast it")
        nulls = table[field.name].null_count
        if nulls and not (field.name == "score" and nulls == table.num_rows):
            _check_rows(
                path, table[field.name].is_null().to_numpy(), f"a value in column {field.name}", lambda i: "null"
            )
    if not table.num_rows:
        fail(path, "at least one row", "an empty table", "trace at least one round")
    return table.combine_chunks(), about


_KEYS = {
    name.encode()
    for name in (
        "format", "version", "k", "length", "depth", "device_ranks", "layer_groups", "streams", "row_bytes", "meta",
        "seats", "finished",
    )
}  # fmt: skip


def _check_values(path: Path, columns: dict[str, np.ndarray], about: dict[str, Any]) -> None:
    for name in ("round", "request", "device_rank", "layer_group", "position", "rank"):
        column = columns[name]
        _check_rows(path, column < 0, f"{name} of at least 0", lambda i, column=column: str(column[i]))
    position, length = columns["position"], about["length"]
    _check_rows(path, position >= length, f"position below length {length}", lambda i: str(position[i]))
    rounds = np.unique(columns["round"])
    missing = np.flatnonzero(rounds != np.arange(len(rounds)))
    if missing.size:
        fail(path, "rounds from 0 without gaps", f"none numbered {missing[0]}", "number them again")


def _streams(path: Path, columns: dict[str, np.ndarray], about: dict[str, Any]) -> Int64[np.ndarray, " streams"]:
    """Code of each stream's (device rank, layer group), in the order of the trace."""
    codes = _code(columns["device_rank"], columns["layer_group"])
    if "device_ranks" not in about:
        return np.unique(codes)
    ranks, groups = np.array(about["device_ranks"], np.int64), np.array(about.get("layer_groups", ()), np.int64)
    pairs = _code(ranks, groups) if ranks.shape == groups.shape else ranks[:0]
    if not pairs.size or np.unique(pairs).size < pairs.size:
        fail(
            path, "metadata device_ranks and layer_groups of distinct streams", f"{ranks} and {groups}", "correct them"
        )
    _check_rows(
        path, ~np.isin(codes, pairs), "device_rank and layer_group of a stream in the metadata",
        lambda i: f"rank {columns['device_rank'][i]} group {columns['layer_group'][i]}",
    )  # fmt: skip
    return pairs


def _code(device_rank: np.ndarray, layer_group: np.ndarray) -> Int64[np.ndarray, " n"]:
    return (device_rank.astype(np.int64) << 16) + layer_group


class _Stay(NamedTuple):
    """A request's time in the system, on one device rank."""

    first: int
    last: int
    request: int


def _seats(
    path: Path, columns: dict[str, np.ndarray], about: dict[str, Any], stream: np.ndarray, shape: tuple[int, int]
) -> tuple[Int64[np.ndarray, " rows"], Bool[np.ndarray, "streams rounds seats"]]:
    """Seat of each row, and the flags."""
    request = columns["request"].astype(np.int64)
    if "seats" in about:
        finished = np.zeros((*shape, about["seats"]), bool)
        flags = np.array(about.get("finished", ()), np.int64)
        if np.any((flags < 0) | (flags >= finished.size)):
            fail(path, f"metadata finished below {finished.size}", str(flags.max()), "correct it")
        finished.reshape(-1)[flags] = True
        return request % about["seats"], finished
    seat = np.empty(len(request), np.int64)
    leaves = []
    for rank in np.unique(columns["device_rank"]):
        mine = columns["device_rank"] == rank
        numbers, which = np.unique(request[mine], return_inverse=True)
        first, last = np.full(len(numbers), shape[1]), np.zeros(len(numbers), int)
        np.minimum.at(first, which, columns["round"][mine])
        np.maximum.at(last, which, columns["round"][mine])
        taken = _color(first.tolist(), last.tolist())
        seat[mine] = taken[which]
        leaves.append((np.unique(stream[mine]), last, taken))
    finished = np.zeros((*shape, int(seat.max()) + 1), bool)
    for streams, last, taken in leaves:
        left = last + 1 < shape[1]
        finished[streams[:, None], last[left] + 1, taken[left]] = True
    return seat, finished


def _color(first: list[int], last: list[int]) -> Int64[np.ndarray, " requests"]:
    """Lowest free seat for each request, in order of first rounds, then of the list."""
    result = np.empty(len(first), np.int64)
    free, busy, seats = [], [], 0
    for i in sorted(range(len(first)), key=first.__getitem__):
        while busy and busy[0][0] < first[i]:
            heapq.heappush(free, heapq.heappop(busy)[1])
        if not free:
            heapq.heappush(free, seats)
            seats += 1
        result[i] = heapq.heappop(free)
        heapq.heappush(busy, (last[i], result[i]))
    return result


def _check_distinct(path: Path, positions: Int32[np.ndarray, "..."], first: Int64[np.ndarray, " places"]) -> None:
    """No position may have two ranks."""
    ordered = np.sort(positions, axis=-1)
    if not np.any((ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] >= 0)):
        return
    order = np.argsort(positions, axis=-1, kind="stable")
    again = np.zeros(positions.shape, bool)
    same = (ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] >= 0)
    np.put_along_axis(again, order[..., 1:], same, axis=-1)
    at = np.flatnonzero(again)[0]
    found = f"position {positions.reshape(-1)[at]} under two ranks"
    fail(path, "every position once in a round of a request", f"{found} (row {first[at]})", "remove one")


def _where(columns: dict[str, np.ndarray], row: int) -> str:
    return ", ".join(f"{name} {columns[name][row]}" for name in ("round", "request", "layer_group", "rank"))


def _check_rows(path: Path, bad: np.ndarray, expected: str, found: Any) -> None:
    if bad.any():
        row = int(np.argmax(bad))
        fail(path, expected, f"{found(row)} in row {row}", "correct the row or write the file again")
