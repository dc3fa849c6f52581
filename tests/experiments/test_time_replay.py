"""The timing script, small; and its plug-in against libCacheSim's own LRU where both are the same."""

import numpy as np
import pytest

from experiments import time_replay
from ula_jax.report import UserError
from ula_jax.traces import Trace, save


def test_rows_and_ratio():
    pytest.importorskip("libcachesim")
    config = time_replay.Config(rounds=20, positions=1000, k=32, sizes=(1.0, 4.0), plug_in_rounds=20)
    ours, plug_in = time_replay.run(config)["rows"]
    assert ours["accesses"] == 2 * plug_in["accesses"] == 2 * 20 * 32
    assert ours["ratio"] == pytest.approx(ours["per_second"] / plug_in["per_second"])
    assert ours["miss_ratios"][1] == pytest.approx(plug_in["miss_ratios"][0], abs=0.05)


def test_one_row_a_round_is_lru(tmp_path):
    libcachesim = pytest.importorskip("libcachesim")
    path = tmp_path / "one.oracleGeneral"
    rows = np.random.default_rng(0).zipf(1.3, 800).clip(max=60).astype(np.int32) - 1
    save(Trace(rows.reshape(1, 800, 1, 1), np.zeros((1, 800, 1), bool), 1, 60), path)

    def ratio(make):
        reader = libcachesim.TraceReader(str(path), libcachesim.TraceType.ORACLE_GENERAL_TRACE)
        return make(reader).process_trace(reader)[0]

    expected = ratio(lambda reader: libcachesim.LRU(8, reader=reader))
    assert 0.1 < expected < 0.95
    assert ratio(lambda reader: time_replay.plug_in(8, reader)) == expected


def test_without_the_package(monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "libcachesim", None)
    with pytest.raises(UserError, match="libcachesim: expected the package for the comparison"):
        time_replay.run(time_replay.Config(rounds=4, positions=200, k=8, sizes=(1.0,), plug_in_rounds=4))
