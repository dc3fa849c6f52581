"""The throughput experiment in miniature, and the arithmetic of its full size."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from benchmarks import driven
from benchmarks.glm_slice import GLM, layer_slice
from experiments import throughput
from experiments.stage_times import scopes_of, stage_of
from experiments.throughput_report import bars
from ula_jax.parallel import Parallel
from ula_jax.placements import GpuOnly
from ula_jax.report import UserError
from ula_jax.traces import Trace, save

SMOKE = throughput.smoke(throughput.Config())
NAMES = throughput.Config.placements


@pytest.fixture(scope="module")
def smoke(tmp_path_factory):
    """One short run as a user starts it."""
    out = tmp_path_factory.mktemp("out")
    command = [sys.executable, "-m", "experiments.throughput", "--smoke", "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout, out


def test_last_line_is_the_result(smoke):
    stdout, out = smoke
    result = json.loads(stdout.splitlines()[-1])
    assert result == json.loads((out / "throughput.json").read_text())
    assert (out / "throughput.png").read_bytes().startswith(b"\x89PNG")
    assert [point["placement"] for point in result["points"]] == list(NAMES)
    assert len(list((out / "throughput").glob("*.json"))) == len(NAMES)


def test_every_placement_reads_the_same_and_moves_what_it_must(smoke):
    points = {point["placement"]: point for point in json.loads(smoke[0].splitlines()[-1])["points"]}
    assert {point["batch"] for point in points.values()} == {3}
    assert len({point["rows"]["selected"] for point in points.values()}) == 1
    assert points["gpu_only"]["hit_rate"] == 1
    assert points["gpu_only"]["h2d_bytes"] == points["gpu_only"]["d2h_bytes"] == 0
    for name in ("hisparse", "resident_hot", "ula"):
        assert points[name]["rows"]["unique"] == 3 * (16 - 1), "the newest row of each is not stored yet"
        assert 0.5 < points[name]["hit_rate"] < 1
        assert points[name]["h2d_bytes"] == points[name]["rows"]["host_fetches"] * points[name]["row_bytes"] > 0
    assert points["hisparse"]["rows"]["written_back"] == 3, "each new row once"
    assert points["ula"]["rows"]["written_back"] == points["ula"]["rows"]["evictions"] > 3
    for point in points.values():
        assert point["tokens_per_s"] == pytest.approx(3 / point["step_ms"] * 1e3)
        assert {"index_scores", "top_k", "resolve", "attend", "mlp"} <= set(point["stages_ms"])


def test_finished_points_are_not_measured_again(smoke, monkeypatch):
    out = smoke[1]
    monkeypatch.setattr(throughput, "measure", lambda *_: pytest.fail("measured again"))
    result = throughput.run(throughput.Config(smoke=True, out=out))
    assert len(result["points"]) == len(NAMES)
    assert result["admitted"]["ula"] > result["admitted"]["gpu_only"] == 3
    config = replace(SMOKE, out=out)
    assert throughput.finished(config, "ula", 3)
    for other in (replace(config, steps=4), replace(config, host_bytes=1e7)):
        assert throughput.finished(other, "ula", 3) is None


def test_a_point_runs_in_a_process_of_its_own(tmp_path):
    config = replace(SMOKE, out=tmp_path, in_process=False, placements=("gpu_only",), batches=(1,), profiled=0)
    throughput.selections(config)
    made = throughput.measured(config, "gpu_only", 1)
    assert made == throughput.finished(config, "gpu_only", 1)
    assert made["stages_ms"] == {}


def test_what_an_h200_admits():
    """As `notes` of the capacity model say for the whole model: 4.2, 25.4 and 28.4 requests of 96K."""
    config = throughput.Config()
    slice_ = {name: throughput.admits(config, name) for name in NAMES}
    whole = {name: throughput.admits(replace(config, first_layer=0, layers=78), name) for name in NAMES}
    assert slice_ == whole == {"gpu_only": 4, "hisparse": 25, "resident_hot": 25, "ula": 28}
    histories = throughput.histories(config)
    for batch in (2, 8, 14, 16, 24, 28):
        repeated = np.resize(histories, batch)
        assert np.mean(repeated) == pytest.approx(98_304 - config.steps_in_all, rel=0.01)
    assert throughput.plan(replace(config, batches=(1, 26), placements=("gpu_only", "ula"))) == [
        ("gpu_only", 1), ("gpu_only", 4), ("ula", 1), ("ula", 4), ("ula", 26), ("ula", 28),
    ]  # fmt: skip


def test_the_slice_is_one_gpu_of_glm():
    model = layer_slice(2, 8)
    assert model.layer_groups == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert model.sparse_layers == (False, *[True] * 7)
    assert (model.num_experts, model.num_experts_per_token, model.hidden_size) == (32, 8, 6144)
    spec = throughput.spec_of(throughput.Config())
    assert (spec.row_bytes, spec.index_bytes, spec.topk) == (8 * 656, 2 * 132, 2048)
    assert layer_slice(0, 6).layer_groups == ((0,), (1,), (2, 3, 4, 5))
    assert len(layer_slice(0, 78).layer_groups) == 21
    assert layer_slice(0, 78).vocab_size == GLM["vocab_size"]
    for first, layers in ((3, 4), (74, 5), (-1, 2), (2, 0)):
        with pytest.raises(UserError, match="layers: expected some of 78 that begin with one of"):
            layer_slice(first, layers)


def test_bars():
    speeds = {
        ("gpu_only", 1): 100.0, ("hisparse", 1): 80.0, ("ula", 1): 99.0, ("hisparse:buffer=9", 8): 400.0,
        ("resident_hot", 8): 410.0, ("ula", 8): 410.0, ("ula", 9): 500.0,
    }  # fmt: skip
    points = [{"placement": name, "batch": batch, "tokens_per_s": v} for (name, batch), v in speeds.items()]
    assert bars(points) == {"resident": 0.99, "equal_batch": {1: 0.99, 8: 1.0}, "peak": 1.25}
    assert bars(points[:1]) == {"equal_batch": {}}


def test_each_step_reads_its_round_of_the_trace_and_the_newest_token():
    rng = np.random.default_rng(0)
    streams = driven.Streams(rng.integers(0, 90, (2, 70, 3)).astype(np.int32), (100, 110))
    stream, starts = streams.schedule(3, 2)
    assert stream.tolist() == [0, 1, 0]
    assert starts.tolist() == [[0, 0, 32], [16, 16, 48]]
    assert driven.rounds_needed(5, 3, 2, 2) == 48 + 5
    histories = np.asarray(streams.histories)[stream].astype(np.int32)
    fixed = (np.ones((1, 3), np.int32), np.ones((1, 3, 2), np.int32), np.ones((1, 3), np.int32))
    batch = driven._batch(
        (streams.positions, stream, starts - histories), fixed, np.zeros((1, 3), np.int32), histories[None] + 4
    )
    assert batch.driven.shape == (1, 2, 3, 1, 4)
    for group, request in np.ndindex(2, 3):
        rest = streams.positions[stream[request], starts[group, request] + 4]
        assert batch.driven[0, group, request, 0].tolist() == [*rest.tolist(), histories[request] + 4]


def test_calibrated_streams_are_kept_and_stay_within_the_history(tmp_path):
    made = driven.calibrated((300, 250), 20, 16, tmp_path)
    assert made.positions.shape == (2, 20, 15)
    assert np.all(made.positions >= 0)
    assert np.all(made.positions.max(axis=(1, 2)) < made.histories)
    assert all(len(set(row)) == 15 for row in made.positions.reshape(-1, 15).tolist())
    (file,) = tmp_path.iterdir()
    np.save(file, made.positions + 1)
    assert np.array_equal(driven.calibrated((300, 250), 20, 16, tmp_path).positions, made.positions + 1)


def test_a_captured_trace_drives_too(tmp_path):
    positions = np.tile(np.arange(8, dtype=np.int32), (1, 12, 3, 1))
    positions[0, :, 1, 5:] = -1
    finished = np.zeros((1, 12, 3), bool)
    finished[0, 6, 2] = True
    path = tmp_path / "trace.parquet"
    save(Trace(positions, finished, 8, 150), path)
    streams = driven.captured(path, 10, 16)
    assert streams.positions[:, 3].tolist() == [[0, 1, 2, 3, 4, 5, 6], [-1, -1, -1, 0, 1, 2, 3]]
    assert streams.histories == (150, 150)
    with pytest.raises(UserError, match="expected at least 13 rounds and selections of at most 16, found 12 and 8"):
        driven.captured(path, 13, 16)
    config = replace(SMOKE, trace=path, warmup=1, profiled=0, out=tmp_path, placements=("ula",), batches=(1,))
    assert throughput.run(config)["points"][0]["rows"]["selected"] == 8


def test_stages_are_the_innermost_scopes_of_the_compiled_program():
    @jax.jit
    def step(x):
        with jax.named_scope("layer_0"), jax.named_scope("attention"):
            with jax.named_scope("top_k"):
                best = jax.lax.sort(x)
            return best.T @ x

    scopes = scopes_of(step.lower(np.ones((64, 64), np.float32)).compile().as_text())
    stages = {stage_of(scope) for scope in scopes.values()}
    assert {"top_k", "attention"} <= stages
    assert stage_of("jit(step)/layer_0/attention/resolve/exchange/gather") == "exchange"
    assert stage_of("jit(step)/layer_0/broadcast") == "other"


def test_rows_that_went_missing_are_noticed():
    class Lost:
        steps_done, histories = 0, np.array([3, 4])

        runner = SimpleNamespace(placement=GpuOnly(), state=SimpleNamespace(groups=[_group_with_rows(6)]))

    with pytest.raises(RuntimeError, match="expected 7 rows, found 6"):
        driven.Requests.check(Lost)


def test_several_ranks_are_refused():
    runner = SimpleNamespace(spec=None, capacity=None, placement=GpuOnly(Parallel(2, 2)))
    with pytest.raises(ValueError, match="expected a placement of one rank, found 2; use TP over all devices"):
        driven.Requests(runner, None, 1, 1)


def _group_with_rows(count):
    from ula_jax import mapping as maps
    from ula_jax import pool
    from ula_jax.rows import RowFormat

    group = pool.init(1, RowFormat("fp32", 4, 0), 16, 16, 0)
    rows = jax.numpy.arange(count)
    return replace(group, mapping=maps.put_on_device(group.mapping, rows, rows))
