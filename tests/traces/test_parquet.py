"""Traces in parquet: exact round trips, files of other programs, and every complaint about a bad file."""

import json
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.traces.test_statistics import random_trace
from ula_jax.traces import TraceConfig, generate
from ula_jax.traces.parquet import SCHEMA, read_trace, write_trace
from ula_jax.traces.trace import Trace
from ula_jax.types import EMPTY


def assert_same(found: Trace, expected: Trace):
    for name in ("positions", "finished", "scores"):
        np.testing.assert_array_equal(getattr(found, name), getattr(expected, name), err_msg=name, strict=True)
    for name in ("k", "length", "streams", "row_bytes", "meta"):
        assert getattr(found, name) == getattr(expected, name), name


def scored(trace: Trace, seed: int = 0) -> Trace:
    scores = np.random.default_rng(seed).standard_normal(trace.positions.shape, dtype=np.float32)
    scores[0, 0, 0, 0] = np.nan
    return replace(trace, scores=np.where(trace.positions >= 0, scores, np.float32(-np.inf)))


@pytest.mark.parametrize("seed", range(4))
def test_round_trip_of_traces_with_idle_seats_and_finished_requests(seed, tmp_path):
    trace = scored(random_trace(seed, streams=4))
    trace = replace(trace, row_bytes=(1, 2, 3, 4), meta={"model": "none", "versions": [1, 2.5], "mode": {"dp": 2}})
    write_trace(trace, tmp_path / "new" / "trace.parquet")
    assert_same(read_trace(tmp_path / "new" / "trace.parquet"), trace)
    write_trace(replace(trace, scores=None, streams=(), row_bytes=(), meta={}), tmp_path / "bare.parquet")
    bare = read_trace(tmp_path / "bare.parquet")
    assert_same(bare, replace(trace, scores=None, streams=(), row_bytes=(), meta={}))
    assert sorted(file.name for file in tmp_path.iterdir()) == ["bare.parquet", "new"], "no partial files"


def test_round_trip_of_a_generated_trace(tmp_path):
    trace = generate(TraceConfig(3, 200, rounds=40, k=8, overlap=None, churn=0.05, depth=2.0))
    write_trace(trace, tmp_path / "t.parquet")
    assert_same(read_trace(tmp_path / "t.parquet"), trace)


def test_one_request_number_for_a_life_in_all_groups(tmp_path):
    trace = random_trace(1, streams=4)
    finished = np.repeat(trace.finished[::2], 2, axis=0)
    write_trace(replace(trace, finished=finished), tmp_path / "t.parquet")
    table = pq.read_table(tmp_path / "t.parquet")
    assert table.schema.equals(SCHEMA)
    rows = {name: table[name].to_numpy() for name in SCHEMA.names}
    lives = np.cumsum(finished, axis=1)
    seats = rows["address"] // trace.length
    stream = rows["device_rank"] * 2 + rows["layer_group"]
    np.testing.assert_array_equal(rows["address"] - seats * trace.length, rows["position"])
    found = {}
    for request, rank, seat, life in zip(
        rows["request"], rows["device_rank"], seats, lives[stream, rows["round"], seats], strict=True
    ):
        assert found.setdefault(request, (rank, seat, life)) == (rank, seat, life)
    assert len(set(found.values())) == len(found)


def foreign(rows: list[tuple], **about) -> pa.Table:
    """(round, request, device rank, layer group, position, rank) as another program would write it."""
    now, request, device_rank, layer_group, position, rank = (list(column) for column in zip(*rows, strict=True))
    columns = [now, request, device_rank, layer_group, position, [0] * len(rows), [1.0] * len(rows), rank]
    arrays = [pa.array(column, field.type) for column, field in zip(columns, SCHEMA, strict=True)]
    about = {"format": "ula-jax trace", "version": 1, "k": 1, "length": 10, **about}
    metadata = {key: json.dumps(value) for key, value in about.items() if value is not None}
    return pa.Table.from_arrays(arrays, schema=SCHEMA.with_metadata({**metadata, "pandas": "not for us"}))


def test_requests_of_other_programs_are_seated_in_order(tmp_path):
    rows = [(t, 70, 0, 3, 1, 0) for t in (0, 1, 2)]  # seat 1
    rows += [(t, 50, 0, 3, 2, 0) for t in (0, 2)]  # seat 0 also in round 1, where it selects nothing
    rows += [(t, 60, 0, 3, 3, 0) for t in (3, 4)]  # seat 0 again, at once
    rows += [(t, 40, 0, 3, 4, 0) for t in (4, 5, 6)]  # seat 1 after a pause
    rows += [(t, 80, 0, 5, 5, 0) for t in (1, 4)]  # a third seat, in another group
    rows += [(t, 90, 1, 3, 6, 0) for t in (5, 6)]  # another rank has seats of its own
    rng = np.random.default_rng(0)
    pq.write_table(foreign([rows[i] for i in rng.permutation(len(rows))]), tmp_path / "t.parquet")
    trace = read_trace(tmp_path / "t.parquet")
    assert trace.positions.shape == (3, 7, 3, 1)
    by_seat = [[2, EMPTY, 2, 3, 3, EMPTY, EMPTY], [1, 1, 1, EMPTY, 4, 4, 4], [EMPTY] * 7]
    np.testing.assert_array_equal(trace.positions[0, :, :, 0].T, by_seat)
    np.testing.assert_array_equal(trace.positions[1, :, 2, 0], [EMPTY, 5, EMPTY, EMPTY, 5, EMPTY, EMPTY])
    np.testing.assert_array_equal(trace.positions[2, :, 0, 0], [EMPTY] * 5 + [6, 6])
    for stream in (0, 1):
        np.testing.assert_array_equal(np.argwhere(trace.finished[stream]), [[3, 0], [3, 1], [5, 0], [5, 2]])
    assert not trace.finished[2].any()


GOOD = [(t, r, 0, 0, p, p) for t in (0, 1) for r in (5, 6) for p in (0, 1)]
"""Two rounds of two requests with positions 0 and 1 at ranks 0 and 1."""


def changed(row: int, column: int, value: int) -> list[tuple]:
    rows = [list(r) for r in GOOD]
    rows[row][column] = value
    return [tuple(r) for r in rows]


BAD_TABLES = {
    "no metadata": (foreign(GOOD).replace_schema_metadata(None), r"metadata with format .* found format None"),
    "version": (foreign(GOOD, version=2), r"version 1, found format 'ula-jax trace' version 2; write it"),
    "not json": (foreign(GOOD).replace_schema_metadata({"format": "{"}), r"expected metadata in JSON"),
    "k": (foreign(GOOD, k="two"), r"metadata k, a positive integer, found 'two'"),
    "no length": (foreign(GOOD, length=None), r"metadata length, a positive integer, found None"),
    "seats": (foreign(GOOD, seats=0), r"metadata seats, a positive integer, found 0"),
    "flags": (foreign(GOOD, seats=2, finished=[4]), r"metadata finished below 4, found 4"),
    "one seat": (foreign(GOOD, seats=1), r"one row for each .* rank 0 again, after row 0 in row 2"),
    "streams": (foreign(GOOD, device_ranks=[0, 0], layer_groups=[1, 1]), r"of distinct streams, found \[0 0\] and"),
    "stream": (foreign(GOOD, device_ranks=[0], layer_groups=[1]), r"in the metadata, found rank 0 group 0 in row 0"),
    "names": (foreign(GOOD, streams=["a", "b"]), r"expected 1 streams, found 2; correct the metadata"),
    "column": (foreign(GOOD).drop_columns("rank"), r"column rank of type int32, found columns round, request"),
    "type": (
        foreign(GOOD).set_column(4, "position", pa.array([0.0, 1.0] * 4)),
        r"column position of type int32, found double; cast it",
    ),
    "null": (
        foreign(GOOD).set_column(4, SCHEMA.field(4), pa.array([0, None] * 4, pa.int32())),
        r"a value in column position, found null in row 1",
    ),
    "some scores": (
        foreign(GOOD).set_column(6, SCHEMA.field(6), pa.array([0.0, None] * 4, pa.float32())),
        r"a value in column score, found null in row 1",
    ),
    "empty": (foreign(GOOD).slice(0, 0), r"at least one row, found an empty table"),
    "negative position": (foreign(changed(3, 4, -1)), r"position of at least 0, found -1 in row 3; correct the row"),
    "position": (foreign(changed(6, 4, 10)), r"position below length 10, found 10 in row 6"),
    "negative rank": (foreign(changed(2, 5, -1)), r"rank of at least 0, found -1 in row 2"),
    "rank gap": (foreign(changed(5, 5, 2)), r"without gaps, found round 1, request 5, .* rank 2 of 2 rows in row 5"),
    "huge rank": (foreign(changed(5, 5, 2**31 - 1)), r"without gaps, found .* 2147483647 of 2 rows in row 5"),
    "duplicate": (foreign(changed(5, 5, 0)), r"one row for each .* rank 0 again, after row 4 in row 5"),
    "position twice": (foreign(changed(5, 4, 0)), r"every position once .* found position 0 under two ranks \(row 5\)"),
    "k above depth": (foreign(GOOD, k=3), r"k of at most 2, the ranks of a round, found 3"),
    "round gap": (foreign([r for r in GOOD if r[0]]), r"rounds from 0 without gaps, found none numbered 0"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_TABLES)
def test_a_bad_table_is_refused(case, tmp_path):
    table, message = BAD_TABLES[case]
    path = tmp_path / "bad.parquet"
    pq.write_table(table, path)
    with pytest.raises(ValueError, match=rf"bad\.parquet: .*{message}"):
        read_trace(path)


def test_the_good_table_is_good(tmp_path):
    pq.write_table(foreign(GOOD), tmp_path / "good.parquet")
    assert read_trace(tmp_path / "good.parquet").positions.tolist() == [[[[0, 1], [0, 1]]] * 2]


def test_a_bad_file_is_refused(tmp_path):
    path = tmp_path / "bad.parquet"
    with pytest.raises(ValueError, match=r"bad\.parquet: expected a parquet trace, found no file; check the path"):
        read_trace(path)
    with pytest.raises(ValueError, match=r"expected a parquet trace, found a directory"):
        read_trace(tmp_path)
    path.write_bytes(b"")
    with pytest.raises(ValueError, match=r"expected a parquet trace, found an empty file; copy or write it again"):
        read_trace(path)
    path.write_bytes(b"time,obj_id\n1,2\n")
    with pytest.raises(
        ValueError,
        match=r"expected a parquet trace, found a file that begins with b'time'; write it with .*write_trace",
    ):
        read_trace(path)
    write_trace(scored(random_trace(0)), path)
    whole = path.read_bytes()
    for part in (whole[:4], whole[:-1], whole[: len(whole) // 2], whole[:300] + bytes(40) + whole[340:]):
        path.write_bytes(part)
        with pytest.raises(ValueError, match=r"expected a whole parquet file, found it truncated or damaged"):
            read_trace(path)


def test_a_trace_that_no_file_can_hold_is_refused(tmp_path):
    trace, path = random_trace(0), tmp_path / "t.parquet"
    idle = trace.positions.copy()
    idle[:, 7] = EMPTY
    with pytest.raises(ValueError, match=r"expected a selection in every round, found none in round 7; leave such"):
        write_trace(replace(trace, positions=idle), path)
    with pytest.raises(ValueError, match=r"expected a selection in every round, found no rounds"):
        write_trace(replace(trace, positions=idle[:, :0], finished=trace.finished[:, :0]), path)
    with pytest.raises(ValueError, match=r"positions below length 5, found 11"):
        write_trace(replace(trace, length=5), path)
    holes = trace.positions.copy()
    holes[:, 3, :, 1] = EMPTY
    with pytest.raises(ValueError, match=r"padding after the last position only, found it before rank 2 in round 3"):
        write_trace(replace(trace, positions=holes), path)
    assert not path.exists()
