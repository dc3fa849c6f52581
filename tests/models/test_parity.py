"""Full forwards against transformers, on one device and on up to eight, in both modes."""

import numpy as np
import pytest

from tests.models.running import (
    FAMILIES,
    SPARSE,
    TOLERANCE,
    forward,
    golden_forward,
    load,
    oracle,
    oracle_picks,
    picked,
    run_layer,
    worst,
)

WITH_MTP = FAMILIES[:4]
# Each family on one device, one of them on every number of devices, the others on eight in one mode or both.
LAYOUTS = [(family, "tp", 1) for family in FAMILIES] + [("deepseek_v32", "dp", 1)]
LAYOUTS += [("deepseek_v32", mode, size) for mode in ("tp", "dp") for size in (2, 4, 8)]
LAYOUTS += [("glm_moe_dsa_share", "tp", 8), ("glm_moe_dsa_share", "dp", 8)]
LAYOUTS += [("glm_moe_dsa", "dp", 8), ("deepseek_v3", "dp", 8), ("deepseek_v2", "tp", 8)]


@pytest.mark.parametrize(("family", "mode", "size"), LAYOUTS)
def test_every_row_matches_transformers(family, mode, size):
    found, expected = golden_forward(family, mode, size), oracle(family)
    last = expected[f"hidden_{load(family)[0].config.num_layers}"]
    for first in range(0, len(found.logits), 2):  # repeats of the two golden requests
        two = slice(first, first + 2)
        assert worst(found.logits[two], expected["logits"]) < TOLERANCE
        assert worst(found.hidden[two], last) < TOLERANCE
        if family in WITH_MTP:
            assert worst(found.mtp_logits[two], expected["mtp_logits"]) < TOLERANCE
            assert worst(found.mtp_hidden[two], expected["mtp_hidden"]) < TOLERANCE
        for group, layers in enumerate(load(family)[0].config.layer_groups):
            if family in SPARSE:
                assert picked(found.selected[group][two]) == oracle_picks(family, layers[0])


@pytest.mark.parametrize(
    ("family", "layer"),
    [("glm_moe_dsa_share", 0), ("glm_moe_dsa_share", 1), *((family, 1) for family in FAMILIES[2:])],
)
def test_one_layer_alone_matches_transformers(family, layer):
    hidden, _ = run_layer(family, layer)
    assert worst(hidden, oracle(family)[f"hidden_{layer + 1}"]) < TOLERANCE


@pytest.mark.parametrize("family", FAMILIES)
def test_cached_rows_and_index_keys_match_transformers(family):
    found, expected = golden_forward(family), oracle(family)
    config = load(family)[0].config
    leaders = {layers[0]: group for group, layers in enumerate(config.layer_groups)}
    for layer in (0, 1, 2, config.num_layers - 1):
        latent, key = np.split(found.rows[layer], [config.kv_lora_rank], -1)
        roped = expected[f"cache/{layer}/v"][:, 0, :48]
        if family == "deepseek_v2":  # its complex multiplication leaves the pairs interleaved
            roped = np.concatenate([roped[..., 0::2], roped[..., 1::2]], -1)
        assert worst(latent, expected[f"cache/{layer}/k"][:, 0, :48]) < TOLERANCE
        assert worst(key, roped) < TOLERANCE
        assert (f"cache/{layer}/index_k" in expected) == (family in SPARSE and layer in leaders)
        if family in SPARSE and layer in leaders:
            assert worst(found.keys[leaders[layer]], expected[f"cache/{layer}/index_k"][:, :48]) < TOLERANCE


@pytest.mark.parametrize("family", SPARSE)
def test_negated_index_scores_fail_parity(family):
    hidden, history = run_layer(family, 0, negate=True)
    assert worst(hidden, oracle(family)["hidden_1"]) > 0.1
    assert picked(history.selected[0]) != oracle_picks(family, 0)


def test_a_request_does_not_depend_on_its_neighbours():
    """Bit for bit: experts, selections and collectives keep requests apart."""
    tokens = oracle("deepseek_v32")["input_ids"]
    other = np.stack([tokens[0], tokens[1][::-1]])
    for mode, size in (("tp", 1), ("dp", 2)):
        mine = golden_forward("deepseek_v32", mode, size)
        theirs = forward(*load("deepseek_v32", mode, size), other)
        np.testing.assert_array_equal(mine.logits[0], theirs.logits[0])
        assert not np.array_equal(mine.logits[1], theirs.logits[1])


def test_padding_is_finite_and_touches_nothing():
    """A padded cell has token 0 and position 0; here the second request is shorter by eight tokens."""
    tokens, real = oracle("deepseek_v32")["input_ids"].copy(), 40
    positions = np.broadcast_to(np.arange(48, dtype=np.int32), tokens.shape).copy()
    tokens[1, real:] = positions[1, real:] = 0
    valid = np.arange(48) < np.array([[48], [real]])
    found = forward(*load("deepseek_v32"), tokens, positions, valid=valid)
    expected = oracle("deepseek_v32")["logits"]
    assert np.isfinite(found.logits).all()
    assert worst(found.logits[0], expected[0]) < TOLERANCE
    assert worst(found.logits[1, :real], expected[1, :real]) < TOLERANCE
