"""What eight GPUs are to run, rehearsed on eight forced CPU devices."""

import json
import subprocess
import sys

import pytest

from benchmarks import multi_gpu
from ula_jax.report import UserError


@pytest.mark.slow
def test_rehearsal(tmp_path):
    command = [sys.executable, "-m", "benchmarks.multi_gpu", "--rehearse", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found == json.loads((tmp_path / "multi_gpu.json").read_text())
    assert (tmp_path / "multi_gpu.png").stat().st_size > 10_000

    bits = {(row["mode"], row["placement"]): row for row in found["bits"]}
    assert {mode for mode, _ in bits} == {"tp", "dp"}
    assert all(row["largest_difference"] == 0 for row in bits.values() if row["exact"])
    assert bits["tp", "owner_computes"]["largest_difference"] > 0  # sums are split by owner: or nothing was compared
    assert bits["tp", "ula"]["peer_rows"] > 0
    assert bits["dp", "ula"]["host_fetches"] > 0

    (way,) = found["links"]["ways"]
    assert way["bytes_fetched"] == 7 * 4 * 1 * 164 * 4  # one row of four layers from each of seven
    assert way["bytes_of_owners"] == 4 * 64 * (576 + 513) * 7 / 8

    rows = {(row["placement"], row["batch"]): row for row in found["throughput"]}
    most = {row["placement"]: row["most"] for row in found["throughput"]}
    assert most["ula"] == most["owner_computes"] > 3 * most["hisparse"]
    assert all((name, 1) in rows and (name, n) in rows for name, n in most.items())
    sent = [rows[name, 1]["link_bytes"] for name in ("gpu_only", "owner_computes", "ula")]
    assert sent[0] == 0 < sent[1]
    assert sent[2] > 0
    assert rows["hisparse", most["hisparse"]]["h2d_bytes"] > 0


def test_one_device_is_refused():
    with pytest.raises(UserError, match="devices: expected at least 2, found 1"):
        multi_gpu.run(multi_gpu.Config(devices=1))
