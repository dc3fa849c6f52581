"""The command `ula` as users run it: results, resuming, policies from files, and one-line errors."""

import json
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from ula_jax import cli
from ula_jax.policies import POLICIES
from ula_jax.traces import TraceConfig, generate, load, save

FIFO = Path(__file__).parents[2] / "docs" / "examples" / "fifo.py"


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    path = tmp_path_factory.mktemp("trace") / "small.parquet"
    save(generate(TraceConfig(2, 300, 40, 16, None, depth=4.0, churn=0.02, seed=5)), path)
    return path


def ula(capsys, *arguments):
    """The JSON document on the last line of stdout."""
    cli.main([str(a) for a in arguments])
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def test_replay_reports_draws_and_does_not_repeat_itself(trace, tmp_path, capsys, monkeypatch):
    arguments = ("replay", trace, "--sizes", "1k", "2k", "100", "--out", tmp_path)
    result = ula(capsys, *arguments, "--policies", "lru", f"{FIFO}:Fifo", "fifo", "belady")
    rows = result["rows"]
    assert all(set(row) >= {"policy", "size", "miss_ratio", "fetch_bytes", "gap_to_belady"} for row in rows)
    assert [row["size"] for row in rows if row["policy"] == "lru"] == [32, 64, 100]
    assert all(row["gap_to_belady"] >= 0 for row in rows)
    ours = {row["size"]: row["miss_ratio"] for row in rows if row["policy"] == "fifo"}
    assert {row["size"]: row["miss_ratio"] for row in rows if row["policy"].endswith(":Fifo")} == ours
    assert (tmp_path / "replay-small.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((tmp_path / "replay.json").read_text()) == result
    stored = pq.read_table(tmp_path / "replay-small.parquet")
    assert stored.num_rows == len(rows)
    assert all(json.loads(about)["jax"] for about in stored["about"].to_pylist())

    played = []
    monkeypatch.setattr(cli, "replay", lambda policy, trace, sizes, **_: played.append((policy, sizes)) or 1 / 0)
    again = ula(capsys, *arguments, "--policies", "lru", f"{FIFO}:Fifo", "fifo", "belady")
    assert again["rows"] == rows
    assert not played
    with pytest.raises(ZeroDivisionError):
        ula(capsys, "replay", trace, "--sizes", "2k", "3k", "--policies", "lru", "--out", tmp_path)
    assert [sizes for _, sizes in played] == [[96]], "only what is new"


def test_a_changed_policy_file_is_played_again(trace, tmp_path, capsys):
    """And one inside a wrapper is found; sizes and policies given twice count once."""
    file = tmp_path / "mine.py"
    spec = f"prefetch:policy={file}:Fifo"
    arguments = ("replay", trace, "--sizes", "2k", "64", "--policies", spec, spec, "--out", tmp_path)
    file.write_text(FIFO.read_text())
    first, belady = ula(capsys, *arguments)["rows"]
    assert belady["policy"] == "belady"
    assert first["prefetch_bytes"] > 0
    file.write_text(FIFO.read_text().replace("books.round - state.arrived", "books.age * 0 + state.arrived"))
    second = ula(capsys, *arguments)["rows"][0]
    assert second["miss_ratio"] != first["miss_ratio"], "last in, first out is another policy"


def test_traces_are_made_converted_and_described(tmp_path, capsys):
    made = tmp_path / "made.parquet"
    sizes = ("--requests", "2", "--positions", "200", "--rounds", "30", "--k", "16")
    facts = ula(capsys, "trace", "synthetic", made, *sizes, "--overlap", "None", "--depth", "2", "--out", tmp_path)
    assert (facts["rounds"], facts["seats"], facts["k"], facts["depth"]) == (30, 2, 16, 2.0)
    assert facts["meta"]["source"] == "synthetic"
    for name in ("made.oracleGeneral.zst", "made.csv"):
        ula(capsys, "trace", "convert", made, tmp_path / name, "--out", tmp_path)
        foreign = load(tmp_path / name)
        assert foreign.num_rounds == 30
        assert foreign.scores is None
        assert np.sum(foreign.selected >= 0) == 30 * 2 * 16
    assert ula(capsys, "trace", "stats", tmp_path / "made.csv", "--out", tmp_path)["accesses"] == 960


def test_curves_and_the_list_of_policies(trace, tmp_path, capsys):
    rows = ula(capsys, "mrc", trace, "--policies", "lru", "--points", "4", "--out", tmp_path)["rows"]
    ratios = [row["miss_ratio"] for row in rows if row["policy"] == "lru"]
    assert len(ratios) == 4
    assert ratios == sorted(ratios, reverse=True)
    assert (tmp_path / "mrc-small.png").exists()
    assert [row["policy"] for row in ula(capsys, "policies", "--out", tmp_path)["rows"]] == list(POLICIES)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--sizes", "31"), "expected at least the 32 slots that one round selects"),
        (("--sizes", "2q"), "expected slots (4096) or multiples of a selection (2k), found '2q'"),
        (("--policies", "lrv"), "policy: expected one of"),
        (("--policies", "nothing.py:Lru"), "expected a Python file, found nothing at nothing.py"),
        (("--policies", "score_now:depth=8.0"), "depth=8.0: expected a trace with ranks up to 8 k, found 4 k"),
        (("--warmup", "40"), "warmup: expected 0 to 39 rounds, found 40"),
    ],
)
def test_errors_are_one_line(trace, tmp_path, arguments, message):
    with pytest.raises(SystemExit) as stop:
        cli.main(["replay", str(trace), *arguments, "--out", str(tmp_path)])
    assert message in str(stop.value)
    assert str(stop.value).startswith("error: ")
    assert "\n" not in str(stop.value)


def test_files_that_are_no_traces_are_named(tmp_path):
    noise = tmp_path / "noise.parquet"
    noise.write_bytes(b"PAR1 is not enough")
    for name, message in (("noise.parquet", "noise.parquet"), ("none.csv", "none.csv"), ("x.doc", "'.doc'")):
        with pytest.raises(SystemExit, match=message):
            cli.main(["trace", "stats", str(tmp_path / name), "--out", str(tmp_path)])
