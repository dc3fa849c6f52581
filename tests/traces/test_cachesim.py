"""libCacheSim's formats: round trips, its own reader's view of our files, and every complaint about a bad file."""

import struct

import numpy as np
import pytest

from tests.traces.test_statistics import flat, random_trace, rows
from ula_jax.traces import cachesim, statistics
from ula_jax.traces.cachesim import read_csv, read_oracle_general, records, write_csv, write_oracle_general

FORMATS = [
    (write_oracle_general, read_oracle_general, "t.oracleGeneral"),
    (write_oracle_general, read_oracle_general, "t.oracleGeneral.zst"),
    (write_csv, read_csv, "t.csv"),
    (write_csv, read_csv, "t.csv.zst"),
]


def test_records_are_the_accesses_in_order():
    trace = random_trace(3)
    found = records(trace, 1)
    accesses = flat(rows(trace, 1))
    assert [len(seats) for seats in map(flat, ([h] for h in rows(trace, 1)))] == np.bincount(found["time"]).tolist()
    objects = dict(zip(found["obj_id"], accesses, strict=True))
    assert [objects[number] for number in found["obj_id"]] == accesses
    assert len(set(objects.values())) == len(objects)
    for i, row in enumerate(accesses):
        later = [j for j in range(i + 1, len(accesses)) if accesses[j] == row]
        assert found["next_access_vtime"][i] == min(later, default=-1)
    assert set(found["obj_size"]) == {1}


@pytest.mark.parametrize(("write", "read", "name"), FORMATS, ids=[f[2] for f in FORMATS])
def test_round_trip_keeps_rounds_and_reuse(write, read, name, tmp_path):
    """Addresses change (one seat, numbered by first appearance), but nothing that a cache can tell."""
    trace = random_trace(4)
    write(trace, tmp_path / name, stream=1)
    found = read(tmp_path / name)
    assert found.positions.shape[0] == found.seats == 1
    assert found.scores is None
    assert found.row_bytes == (1,)
    expected = statistics.next_use(trace)[1][trace.selected[1] >= 0]
    np.testing.assert_array_equal(statistics.next_use(found)[found.selected >= 0], expected)
    busy = [len(flat([seats])) for seats in rows(trace, 1)]
    np.testing.assert_array_equal(np.sum(found.selected >= 0, axis=(0, 2, 3)), [n for n in busy if n])
    assert found.k == max(busy)
    assert found.length == found.selected.max() + 1
    seen = np.maximum.accumulate(found.selected[found.selected >= 0])
    assert np.all(np.diff(seen, prepend=-1) <= 1), "numbered by first appearance"
    again = read(tmp_path / name, rounds="record")
    assert again.positions.shape == (1, sum(busy), 1, 1)
    np.testing.assert_array_equal(again.selected.reshape(-1), found.selected[found.selected >= 0])
    assert [file.name for file in tmp_path.iterdir()] == [name]


def packed(*rows: tuple[int, int, int, int]) -> bytes:
    return b"".join(struct.pack("<IQIq", *row) for row in rows)


def test_a_file_of_another_program(tmp_path):
    """Pauses between times, an object twice in one, sizes that differ, one of 0, large ids and no next access."""
    path, none = tmp_path / "t.bin", 2**63 - 1
    path.write_bytes(
        packed((5, 2**64 - 1, 10, 1), (5, 2**64 - 1, 10, 5), (5, 7, 30, none), (9, 8, 0, -1), (90, 9, 1, -1))
        + packed((90, 2**64 - 1, 10, none))
    )
    trace = read_oracle_general(path)
    assert trace.selected.tolist() == [[[[0, 1]], [[2, 0]]]]
    assert (trace.k, trace.length, trace.row_bytes) == (2, 3, ())
    text = tmp_path / "t.csv"
    text.write_text("time,obj_id,obj_size\n5,18446744073709551615,10\n5,7,30\n9,18446744073709551615,10\n")
    assert read_csv(text).selected.tolist() == [[[[0, 1]], [[0, -1]]]]
    text.write_bytes(text.read_bytes().replace(b"\n", b"\r\n"))
    assert read_csv(text).selected.tolist() == [[[[0, 1]], [[0, -1]]]]


GOOD = "time,obj_id,obj_size\n1,2,3\n"

BAD = {
    "part.bin": (packed((0, 1, 1, -1)) + b"abc", r"records of 24 bytes, found 27 bytes, 3 too many; copy it again"),
    "back.bin": (
        packed((4, 1, 1, -1), (3, 2, 1, -1)),
        r"times that do not decrease, found 3 after 4 in record 1; sort",
    ),
    "zero.bin": (packed((4, 1, 0, -1)), r"objects with a size, found obj_size 0 everywhere"),
    "empty.bin": (b"", r"oracleGeneral records, found an empty file"),
    "none.bin": (None, r"oracleGeneral records, found no file; check the path"),
    "foreign.bin.zst": (b"not zstd at all", r"zstd data, found it damaged or something else .*copy it again"),
    "none.csv": (None, r"a CSV trace, found no file; check the path"),
    "header.csv": (
        "1,2,3\n",
        r"the header time,obj_id,obj_size,next_access_vtime, the last optional, found 1,2,3; add",
    ),
    "short.csv": (GOOD + "1,2\n", r"3 integers, obj_id at least 0, in line 3, found '1,2'; correct the line"),
    "text.csv": (GOOD + "1,two,3\n4,5,6\n", r"in line 3, found '1,two,3'"),
    "negative.csv": (GOOD + GOOD[-6:] + "1,-2,3\n", r"obj_id at least 0, in line 4, found '1,-2,3'"),
    "blank.csv": (GOOD + "\n1,2,3\n", r"in line 3, found ''"),
    "missing.csv": (GOOD + "1,2,\n", r"in line 3, found '1,2,'"),
    "back.csv": (GOOD + "0,2,3\n", r"times that do not decrease, found 0 after 1 in line 3"),
    "size.csv": (GOOD + "1,2,-3\n", r"obj_size of at least 0, found -3 in line 3"),
    "only.csv": ("time,obj_id,obj_size\n", r"at least one line, found none"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_file_is_refused(name, tmp_path):
    content, message = BAD[name]
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(ValueError, match=rf"{name}: expected .*{message}"):
        (read_csv if ".csv" in name else read_oracle_general)(path)


def test_a_truncated_zstd_file_is_refused(tmp_path):
    path = tmp_path / "t.zst"
    write_oracle_general(random_trace(0), path)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(ValueError, match=r"t\.zst: expected zstd data, found it damaged"):
        read_oracle_general(path)


def test_what_no_trace_can_hold_is_refused(tmp_path, monkeypatch):
    path = tmp_path / "t.bin"
    path.write_bytes(packed((0, 1, 1, -1), (0, 2, 1, -1), (1, 3, 1, -1)))
    monkeypatch.setattr(cachesim, "MOST_PLACES", 3)
    with pytest.raises(ValueError, match=r"at most 3 places, found 2 rounds of up to 2; read it with rounds='record'"):
        read_oracle_general(path)
    assert read_oracle_general(path, rounds="record").num_rounds == 3
    monkeypatch.setattr(cachesim, "MOST_OBJECTS", 2)
    with pytest.raises(ValueError, match=r"at most 2 objects, found 3; read a part of it"):
        read_oracle_general(path)


@pytest.mark.parametrize("name", ["t.oracleGeneral", "t.oracleGeneral.zst"])
def test_libcachesim_reads_what_was_written(name, tmp_path):
    libcachesim = pytest.importorskip("libcachesim")
    trace, path = random_trace(2, rounds=60), tmp_path / name
    write_oracle_general(trace, path)
    expected = records(trace)
    reader = libcachesim.TraceReader(str(path), libcachesim.TraceType.ORACLE_GENERAL_TRACE)
    found = [reader.read_one_req() for _ in range(len(expected))]
    none = 2**63 - 1
    for request, record in zip(found, expected, strict=True):
        assert request.clock_time == record["time"]
        assert request.obj_id == record["obj_id"]
        assert request.obj_size == record["obj_size"]
        vtime = request.next_access_vtime
        assert vtime == (none if record["next_access_vtime"] == -1 else record["next_access_vtime"])
        if vtime != none:
            assert found[vtime].obj_id == request.obj_id
