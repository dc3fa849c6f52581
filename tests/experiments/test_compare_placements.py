"""The demo: what it shows, how it reports, and what it says of bad input."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from experiments import compare_placements as demo
from models import TINY, ModelConfig, init_model, save_checkpoint
from ula_jax.parallel import Parallel, make_mesh
from ula_jax.placements import make_placement
from ula_jax.report import UserError
from ula_jax.spec import Budget, KVSpec

CONFIG = ModelConfig.from_hub(TINY, index_topk=16)
"""The shipped model as the demo serves it."""

ROW = {
    "placement", "mode", "devices", "admitted", "capacity_requests", "distinct_share", "duplicate_bytes",
    "device_hit_rate", "h2d_bytes", "d2h_bytes", "peer_bytes", "steps", "tokens_identical",
}  # fmt: skip


@pytest.fixture(scope="module")
def smoke(tmp_path_factory):
    """One short run as a user starts it, with a policy from outside the tree."""
    out = tmp_path_factory.mktemp("out")
    command = [sys.executable, "-m", "experiments.compare_placements", "--smoke", "--out", str(out)]
    command += ["--policy", "docs/examples/fifo.py:Fifo"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout, out


def test_last_line_is_the_result(smoke):
    stdout, out = smoke
    result = json.loads(stdout.splitlines()[-1])
    assert result == json.loads((out / "compare_placements.json").read_text())
    assert all(set(row) >= ROW for row in result["rows"])
    assert (out / "compare_placements.png").read_bytes().startswith(b"\x89PNG")
    assert "tokens" in stdout.splitlines()[0]
    assert result["context"] >= 4 * result["topk"]


def test_striping_holds_more_history_without_copies_and_changes_no_token(smoke):
    rows = json.loads(smoke[0].splitlines()[-1])["rows"]
    assert [(row["placement"], bool(row["budget_host"])) for row in rows] == [
        ("gpu_only", False), ("hisparse", True), ("resident_hot", True), ("ula", False), ("ula", True),
    ]  # fmt: skip
    plain, hisparse, resident, striped, tiered = rows
    assert plain["distinct_share"] == pytest.approx(1 / 4)
    assert striped["distinct_share"] == tiered["distinct_share"] == 1
    assert striped["duplicate_bytes"] == tiered["duplicate_bytes"] == 0
    assert hisparse["duplicate_bytes"] > 0
    assert striped["admitted"] >= 4 * plain["admitted"]
    assert tiered["admitted"] > max(hisparse["admitted"], resident["admitted"])
    assert resident["distinct_share"] < 1
    for row in rows:
        assert row["admitted"] == row["capacity_requests"]
        assert row["tokens_identical"] is True
    assert min(hisparse["h2d_bytes"], resident["h2d_bytes"]) > 0
    assert striped["peer_bytes"] > plain["peer_bytes"] == 0


def test_full_size_plan_says_what_the_readme_says():
    """Admission of the full demo, by arithmetic alone: the claims hold in both modes."""
    config = demo.Config()
    context = config.prompt + config.new_tokens
    spec = KVSpec.of(CONFIG, max_context=context)
    held = {
        (row.mode, row.placement, bool(row.budget_host)): demo.capacity(row, spec, config).requests(context)
        for row in demo.plan(config)
    }
    assert context >= 4 * spec.topk
    assert held["tp", "ula", False] >= 4 * held["tp", "gpu_only", False]
    for mode in ("tp", "dp"):
        assert held[mode, "ula", True] > held[mode, "hisparse", True]


def test_budgets_are_kept():
    """What a placement allocates is no more than it was given, rows and index keys counted."""
    spec = KVSpec.of(CONFIG, max_context=384)
    for name in ("gpu_only", "hisparse", "resident_hot", "ula"):
        for mode in ("tp", "dp"):
            for host in (0, 1_400_000, 18_000_000):
                if name == "hisparse" and not host:
                    continue
                size = make_placement(name, Parallel.of(mode, 8)).capacity(spec, Budget(2_400_000, host))
                keys = size.addresses // size.striping.devices * spec.index_bytes
                assert size.device_slots * spec.row_bytes + keys <= 2_400_000
                assert size.host_slots * spec.row_bytes <= host


def fails(message: str, **changes):
    with pytest.raises((UserError, ValueError), match=message) as error:
        demo.run(demo.Config(**{**vars(demo.smoke(demo.Config())), **changes}))
    assert "\n" not in str(error.value)


def test_bad_input_is_one_line(tmp_path):
    empty = tmp_path / "empty.py"
    empty.touch()
    short = tmp_path / "short.py"
    short.write_text("x = 1\n")
    fails(r"expected an existing file, found nothing at .*missing.py; check the path", documents=(Path("missing.py"),))
    fails(r"expected text, found .*empty.py empty; leave it out", documents=(empty,))
    fails("expected 10 prompts of 144 bytes, found 0 in 1 files; give more", documents=(short,))
    fails("experts: expected a multiple of the 3 devices, found 8", devices=3)
    fails("budget too small for one request's selection", budget_device=40_000)
    fails("expected room for one request of 152 tokens, found", budget_device=300_000)
    fails("placement: expected one of .*found 'nothing'", placements=("nothing",))
    fails("policy: expected one of .*found 'nothing'", policy="nothing")


def test_devices_that_do_not_divide_the_heads(tmp_path):
    config = {**json.loads((TINY / "config.json").read_text()), "n_routed_experts": 9}
    (tmp_path / "config.json").write_text(json.dumps(config))
    fails("heads: expected a multiple of the 3 devices that share it, found 8", devices=3, model=tmp_path)


def test_a_byte_outside_the_vocabulary(tmp_path):
    config = replace(CONFIG, vocab_size=128)
    save_checkpoint(init_model(config, make_mesh(), Parallel(), seed=0), tmp_path / "model")
    document = tmp_path / "latin.txt"
    document.write_bytes(b"caf\xe9 " * 1000)
    message = "expected bytes below the model's vocabulary of 128, found 233"
    fails(message, model=tmp_path / "model", documents=(document,))


def test_the_command_line_reports_an_error_and_fails(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["compare_placements", "--smoke", "--documents", "missing.py"])
    with pytest.raises(SystemExit) as stop:
        demo.main()
    assert str(stop.value).startswith("error: documents: expected an existing file")
