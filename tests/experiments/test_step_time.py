"""The model of a step: beside stages measured on one H200, and bytes by hand."""

import json

import pytest

from experiments import step_time as experiment
from ula_jax.capacity import Config, architecture
from ula_jax.parallel import Parallel
from ula_jax.placements import make_placement
from ula_jax.report import UserError
from ula_jax.roofline import H200, step_time
from ula_jax.spec import Budget, KVSpec

GLM, K = architecture("glm-5.3"), 1024


def parts(name, parallel, context, requests, *, device=40e9, host=100e9, spec=None, **rates):
    spec = spec or GLM.spec(Config(), context)
    placement = make_placement(name, parallel)
    held = placement.capacity(spec, Budget(int(device), int(host)))
    return step_time(H200, GLM, placement, spec, held, requests, context, **({"hit_rate": 0.956} | rates)), held


def test_stages_that_one_h200_took():
    """Eight layers in two groups, 28 requests of 96K, 95.59 % hits (`docs/results/h200.md`): within a fifth."""
    whole = GLM.spec(Config(draft=False), 96 * K)
    spec = KVSpec(((0, 1, 2, 3), (4, 5, 6, 7)), whole.row, 2048, whole.index_dim, 64, 96 * K)
    found, _ = parts("ula", Parallel(), 96 * K, 28, device=2.3e9, host=13.1e9, spec=spec, hit_rate=0.9559)
    measured = {"attend": 0.34, "index scores": 0.22, "top-k": 0.10, "resolve": 0.08, "host": 0.37}
    assert {name: found[name] * 1e3 for name in measured} == pytest.approx(measured, rel=0.2)
    assert found["links"] == found["floors"] == 0


def test_links_by_hand():
    """Two all-reduces a layer and the logits; and of each placement what it sends to attend."""
    requests, away = 32, 7 / 8
    model = (2 * 78 * 2 * 4 * requests * 6144 + 4 * requests * 154_880) * away
    scores = 21 * 4 * requests * 128 * K * away
    ula = 78 * requests * 2048 * 656 * 2 * away
    owner = 78 * requests * 64 * 4 * (576 + 513) * away
    for name, history, collectives in (
        ("gpu_only", 0, 157),
        ("ula", scores + ula, 157 + 21 + 78),
        ("owner_computes", scores + owner, 157 + 21 + 2 * 78),
    ):  # fmt: skip
        found, _ = parts(name, Parallel(tp=8), 128 * K, requests)
        assert found["links"] == pytest.approx((model + history) / 450e9)
        assert found["floors"] == pytest.approx(collectives * 10e-6)
    found, held = parts("ula:buffer=6144", Parallel(tp=8), 128 * K, requests, kept=0.9)
    assert held.buffer_slots
    assert found["links"] == pytest.approx((model + scores + 0.1 * 78 * requests * 2048 * 656 * away) / 450e9)


def test_weights_that_are_read_are_those_of_experts_that_tokens_chose():
    """At most all but the input embedding; a lone token reads eight of the experts, an eighth of them here."""
    one, _ = parts("gpu_only", Parallel(tp=8), 96 * K, 1)
    many, _ = parts("gpu_only", Parallel(tp=8), 96 * K, 4096)
    sizes = GLM.parts(Parallel(tp=8), True)
    always = sum(sizes.values()) - sizes["embedding"] - sizes["experts"]
    assert one["weights"] == pytest.approx((always + sizes["experts"] * 8 / 256) / 4.25e12)
    assert many["weights"] > (always + sizes["experts"]) / 4.25e12  # so many tokens are bound by products
    dp, _ = parts("gpu_only", Parallel(dp=8), 96 * K, 1)
    assert dp["weights"] > one["weights"]


def test_rows_that_never_leave_the_device_cost_no_move():
    roomy, _ = parts("ula", Parallel(tp=8), 96 * K, 4)
    full, held = parts("ula", Parallel(tp=8), 96 * K, 100)
    assert "host" not in roomy
    assert held.resident
    assert full["host"] == pytest.approx(100 * 2048 * 0.044 / 8 * 78 * 656 / 36.2e9)


def test_command(tmp_path, capsys, monkeypatch):
    arguments = ["--hardware", "8xH200", "--contexts", "98304", "--batches", "1", "64", "--out", str(tmp_path)]
    monkeypatch.setattr("sys.argv", ["step_time", *arguments])
    experiment.main()
    out = capsys.readouterr().out
    found = json.loads(out.splitlines()[-1])
    assert "not measured" in out
    assert (tmp_path / "step_time.png").stat().st_size > 10_000
    for row in found["rows"]:
        assert row["seconds"] == pytest.approx(sum(row["parts"].values()))
        assert row["batch"] <= row["most"]
        assert row["tokens_per_second"] == pytest.approx(row["batch"] / row["seconds"])
    most = {row["placement"]: row["most"] for row in found["rows"]}
    assert most["ula"] == most["owner_computes"] > 5 * most["hisparse"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hardware": ("8xA100",)}, r"hardware: expected .*found '(8x)?A100'"),
        ({"placements": ("mine",)}, "placements: expected those of .*found 'mine'"),
        ({"gather": "all"}, "gather: expected 'scores' or 'candidates', found 'all'"),
        ({"mode": "3x3"}, "mode: expected one of .*found '3x3'"),
        ({"model": "mixtral-8x7b"}, "model: expected one with an indexer, found 'mixtral-8x7b'"),
        ({"hardware": ("1xH200",)}, "hardware: expected room beside the weights"),
    ],
)
def test_bad_input(changes, message):
    with pytest.raises((UserError, ValueError), match=message):
        experiment.run(experiment.Config(**changes))
