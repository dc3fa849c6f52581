"""Cached decode through the engine equals HuggingFace's own outputs, on any number of devices, in both modes."""

import json

import numpy as np
import pytest

from tests.ula_jax.engines import ORACLE, Recorder, greedy, make_engine, oracle_model

FAMILIES = ["glm_moe_dsa", "glm_moe_dsa_share", "deepseek_v32", "deepseek_v3", "deepseek_v2"]
TOLERANCE = 2e-5


def run(
    family, mode, devices, placement, device_rows=200, host_rows=0, *, new=12, chunk=1, verify=False, model=None
):
    """Decode the oracle's prompts. Chunks of one token make prompt and output one compiled step, all from the cache."""
    oracle = np.load(ORACLE / family / "oracle.npz")
    per_rank = 2 if mode == "tp" or devices == 1 else 1
    engine = make_engine(
        model or oracle_model(family, mode, devices), placement, device_rows, host_rows, page_size=16,
        max_requests=per_rank, prefill_rows=per_rank, prefill_chunk=chunk, trace=True, verify=verify,
    )  # fmt: skip
    recorder = Recorder(engine)
    ids = [engine.submit(prompt.tolist(), greedy(new)) for prompt in oracle["input_ids"]]
    list(engine.run())
    return oracle, engine, recorder, ids


def check_prompt(oracle, engine, recorder, ids) -> None:
    """Logits and selected sets of every prompt position."""
    length = oracle["input_ids"].shape[1]
    for row, request in enumerate(ids):
        logits = recorder.stacked(request)[:length]
        np.testing.assert_allclose(logits, oracle["logits"][row], rtol=0, atol=TOLERANCE)
        check_selected(engine, recorder.selected[request], oracle, "topk", lambda of, row=row: of[row], 0)


def check(oracle, engine, recorder, ids) -> None:
    """Every position of prompt and output, and the greedy tokens."""
    check_prompt(oracle, engine, recorder, ids)
    length = oracle["input_ids"].shape[1]
    for row, request in enumerate(ids):
        logits = recorder.stacked(request)[length - 1 :]
        np.testing.assert_allclose(logits, oracle["greedy_logits"][row], rtol=0, atol=TOLERANCE)
        assert engine.requests[request].output == oracle["greedy_tokens"][row].tolist()
        check_selected(
            engine, recorder.selected[request], oracle, "topk_decode", lambda of, row=row: of[:, row], length
        )


def check_selected(engine, selected, oracle, kind, rows, start) -> None:
    groups = [layers[0] for layers in engine.spec.groups] if engine.spec.index_dim else []
    for group, layer in enumerate(groups):
        for position, expected in enumerate(rows(oracle[f"{kind}/model.layers.{layer}.self_attn.indexer"]), start):
            visible = {int(p) for p in expected if 0 <= p <= position}
            assert selected[position][group] == visible, (layer, position)


LAYOUTS = pytest.mark.parametrize(("mode", "devices"), [(m, n) for n in (1, 2, 4, 8) for m in ("tp", "dp")])


@pytest.mark.parametrize("family", FAMILIES)
@LAYOUTS
def test_full_forward(family, mode, devices):
    check_prompt(*run(family, mode, devices, "gpu_only", new=1, chunk=48))


@pytest.mark.parametrize("family", FAMILIES)
@LAYOUTS
def test_cached_decode(family, mode, devices):
    check(*run(family, mode, devices, "gpu_only"))


@pytest.mark.parametrize(("mode", "devices"), [("tp", 8), ("dp", 2)])
@pytest.mark.parametrize("placement", ["ula", "hisparse"])
def test_cached_decode_from_two_tiers(placement, mode, devices):
    check(*run("glm_moe_dsa_share", mode, devices, placement, 100, 120, verify=True))


def test_control_negated_index_scores_fail():
    """The parity test sees the selection: with the indexer's head weights negated it must not pass."""
    family = "glm_moe_dsa_share"
    model = oracle_model.__wrapped__(family, "tp", 1)
    for layer in model.layers:
        if layer.self_attn.indexer is not None:
            weights = layer.self_attn.indexer.weights_proj
            weights[...] = -weights[...]
    oracle, engine, recorder, ids = run(family, "tp", 1, "gpu_only", model=model)
    error = max(np.abs(recorder.stacked(r)[:48] - oracle["logits"][i]).max() for i, r in enumerate(ids))
    assert error > 1e-2
    with pytest.raises(AssertionError):
        check(oracle, engine, recorder, ids)


def test_golden_covers_every_family():
    for family in FAMILIES:
        assert json.loads((ORACLE / family / "config.json").read_text())["num_attention_heads"] == 8
