"""`ula doctor`: what it says of this machine, and of machines on which things cannot run."""

import json

import jax
import pytest

from models import TINY, ModelConfig
from pallas_kernels import dispatch
from ula_jax import cli, doctor


@pytest.fixture(scope="module")
def found():
    return doctor.examine()


def test_every_kernel_runs_as_reference_on_a_cpu_and_says_why(found):
    assert found["problems"] == []
    kernels = {(row["kernel"], row["model"]) for row in found["kernels"]}
    for model in ("models/tiny", "GLM-5.x"):
        named = {kernel.partition(".")[0] for kernel, of in kernels if of == model}
        assert named >= {"paged_index_scores", "pb_lru", "sparse_gather", "sparse_mla"}
    for row in found["kernels"]:
        assert row["form"] == "reference"
        compiled = {form: reason for form, reason in row["others"].items() if not form.endswith("_interpret")}
        assert compiled
        for reason in compiled.values():  # the small model's rows may have one of their own
            assert not reason.startswith("it can run")
            assert row["model"] == "models/tiny" or reason == "it needs platform 'gpu', found 'cpu'"
    assert "fp32" in _one(found, "sparse_mla", "models/tiny")["others"]["triton"]


def _one(found, kernel, model):
    (row,) = (row for row in found["kernels"] if (row["kernel"], row["model"]) == (kernel, model))
    return row


def test_the_small_shape_is_the_shipped_model():
    config, tiny = ModelConfig.from_hub(TINY), doctor.SHAPES[0]
    assert tiny.name == "models/tiny"
    assert (tiny.heads, tiny.latent, tiny.rope) == (config.num_heads, config.kv_lora_rank, config.qk_rope_head_dim)
    assert (tiny.index_heads, tiny.index_dim) == (config.index_num_heads, config.index_head_dim)
    assert tiny.topk == config.index_topk


def test_the_command_prints_tables_and_one_document(found, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(doctor, "examine", lambda: found)
    cli.main(["doctor", "--out", str(tmp_path)])
    *tables, last = capsys.readouterr().out.splitlines()
    assert json.loads(last) == json.loads((tmp_path / "doctor.json").read_text()) == found
    text = "\n".join(tables)
    for word in ("sparse_mla", "pinned_host", "GLM-5.x", "64 GB unless it is set", jax.__version__):
        assert word in text
    machine = found["machine"]
    assert 0 < machine["host_free_bytes"] <= machine["host_bytes"]
    assert machine["jax"] == jax.__version__
    assert machine["jax-cuda13-plugin"] is None


def test_a_kernel_without_any_form_is_a_problem_and_the_others_are_still_named(monkeypatch, tmp_path, capsys):
    """Everything that asks for a form of sparse_mla is told that none can run."""
    inner = dispatch._choose

    def refusing(kernel, implementation, forms, prefer):
        forms = {name: "no such card" for name in forms} if kernel == "sparse_mla" else forms
        return inner(kernel, implementation, forms, prefer)

    monkeypatch.setattr(dispatch, "_choose", refusing)
    monkeypatch.setattr(doctor, "STEPS", doctor.STEPS[:1])
    monkeypatch.setattr(doctor, "SHAPES", doctor.SHAPES[:1])
    with pytest.raises(SystemExit, match="error: models/tiny, ula: NotImplementedError: sparse_mla: no form can run"):
        cli.main(["doctor", "--out", str(tmp_path)])
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert _one(found, "sparse_mla", "models/tiny")["form"] is None
    assert _one(found, "paged_index_scores", "models/tiny")["form"] == "reference"


def test_without_a_device_the_machine_is_still_described(monkeypatch):
    def nothing():
        raise RuntimeError("no GPU")

    monkeypatch.setattr("jax.devices", nothing)
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    found = doctor.examine()
    assert found["machine"]["python"]
    assert (found["devices"], found["kernels"]) == ([], [])
    assert "found none (no GPU)" in found["problems"][0]


def test_a_card_that_kernels_are_not_tuned_for_is_told_so(found, capsys):
    card = {"device": "NVIDIA A100", "platform": "gpu", "compute_capability": "8.0", "memories": ["device"]}
    hopper = {**card, "device": "NVIDIA H200", "compute_capability": "9.0"}
    for one in (card, hopper):
        one |= {"bytes": 75_000_000_000, "free_bytes": 74_000_000_000}
    doctor.show({**found, "devices": [card, hopper]})
    lines = {name: line for line in capsys.readouterr().out.splitlines() for name in ("A100", "H200") if name in line}
    assert "8.0 (kernels are tuned for 9.0, Hopper)" in lines["A100"]
    assert "75.0 GB" in lines["A100"]
    assert "tuned" not in lines["H200"]
