"""Cached decode through the engine equals HuggingFace's own outputs, on any number of devices, in both modes."""

import json

import numpy as np
import pytest

from tests.ula_jax.engines import ORACLE, Recorder, greedy, make_engine, oracle_model

FAMILIES = ["glm_moe_dsa", "glm_moe_dsa_share", "deepseek_v32", "deepseek_v3", "deepseek_v2"]
TOLERANCE = 2e-5


def decode(family: str, mode: str, devices: int, placement: str, device_rows: int, host_rows: int, verify=False):
    """Prompt and output one token a step: a single compiled step computes every position from the cache."""
    oracle = np.load(ORACLE / family / "oracle.npz")
    per_rank = 2 if mode == "tp" or devices == 1 else 1
    engine = make_engine(
        oracle_model(family, mode, devices), placement, device_rows, host_rows, page_size=16,
        max_requests=per_rank, prefill_rows=per_rank, prefill_chunk=1, trace=True, verify=verify,
    )  # fmt: skip
    recorder = Recorder(engine)
    new = oracle["greedy_tokens"].shape[1]
    ids = [engine.submit(prompt.tolist(), greedy(new)) for prompt in oracle["input_ids"]]
    list(engine.run())
    return oracle, engine, recorder, ids


def check(oracle, engine, recorder, ids) -> None:
    length = oracle["input_ids"].shape[1]
    for row, request in enumerate(ids):
        logits = recorder.stacked(request)
        np.testing.assert_allclose(logits[:length], oracle["logits"][row], rtol=0, atol=TOLERANCE)
        np.testing.assert_allclose(logits[length - 1 :], oracle["greedy_logits"][row], rtol=0, atol=TOLERANCE)
        assert engine.requests[request].output == oracle["greedy_tokens"][row].tolist()
        for group, layers in enumerate(engine.spec.groups):
            name = f"model.layers.{layers[0]}.self_attn.indexer"
            if f"topk/{name}" not in oracle.files:
                continue
            prefill, after = oracle[f"topk/{name}"][row], oracle[f"topk_decode/{name}"][:, row]
            for position, expected in enumerate([*prefill, *after]):
                visible = {int(p) for p in expected if 0 <= p <= position}
                assert recorder.selected[request][position][group] == visible, (name, position)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("mode", "devices"), [(m, n) for n in (1, 2, 4, 8) for m in ("tp", "dp")])
def test_cached_decode(family, mode, devices):
    found = decode(family, mode, devices, "gpu_only", 200, 0)
    check(*found)
    if found[1].spec.index_dim:
        assert any(f.startswith("topk_decode/") for f in found[0].files)


@pytest.mark.parametrize(("mode", "devices"), [("tp", 8), ("dp", 2)])
@pytest.mark.parametrize("placement", ["ula", "hisparse"])
def test_cached_decode_from_two_tiers(placement, mode, devices):
    found = decode("glm_moe_dsa_share", mode, devices, placement, 100, 120, verify=True)
    check(*found)


def test_control_negated_index_scores_fail():
    """The parity test sees the selection: with the indexer's head weights negated it must not pass."""
    family = "glm_moe_dsa_share"
    model = oracle_model.__wrapped__(family, "tp", 1)
    for layer in model.layers:
        if layer.self_attn.indexer is not None:
            weights = layer.self_attn.indexer.weights_proj
            weights[...] = -weights[...]
    oracle = np.load(ORACLE / family / "oracle.npz")
    engine = make_engine(
        model, "gpu_only", 200, 0, page_size=16, max_requests=2, prefill_rows=2, prefill_chunk=1, trace=True,
        verify=False,
    )  # fmt: skip
    recorder = Recorder(engine)
    ids = [engine.submit(prompt.tolist(), greedy(12)) for prompt in oracle["input_ids"]]
    list(engine.run())
    error = max(np.abs(recorder.stacked(r)[:48] - oracle["logits"][i]).max() for i, r in enumerate(ids))
    assert error > 1e-2
    with pytest.raises(AssertionError):
        check(oracle, engine, recorder, ids)


def test_golden_covers_every_family():
    for family in FAMILIES:
        assert json.loads((ORACLE / family / "config.json").read_text())["num_attention_heads"] == 8
