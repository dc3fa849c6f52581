"""One test for every way in which such a port is known to go wrong; each breaks the thing and sees parity fail.

Their numbers are names: a new finding gets a new one, and those missing belong to families that are not supported.
"""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import models.indexer
from models import ModelConfig, load_checkpoint
from models.layers import layer_norm, linear, rms_norm
from models.mla import MlaAttention
from tests.models.running import (
    GOLDEN,
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
from ula_jax.parallel import Parallel, make_mesh

DENSE = ("deepseek_v3", "deepseek_v2")


def misses(family, layer=0, **breaking):
    """How far the layer is from transformers, and in how many rows it selects other tokens."""
    hidden, history = run_layer(family, layer, **breaking)
    rows = 0
    if family in SPARSE:
        pairs = zip(picked(history.selected[layer]), oracle_picks(family, layer), strict=True)
        rows = sum(found != expected for pair in pairs for found, expected in zip(*pair, strict=True))
    return worst(hidden, oracle(family)[f"hidden_{layer + 1}"]), rows


@pytest.mark.parametrize("family", ["glm_moe_dsa", *DENSE])
def test_trap_1_attention_rope_turns_interleaved_pairs(family):
    assert misses(family)[0] < TOLERANCE
    assert misses(family, changes={"rope_interleave": False})[0] > 0.01


@pytest.mark.parametrize("family", ["glm_moe_dsa", "deepseek_v32"])
def test_trap_2_indexer_rope_is_half_split_in_v32_and_interleaved_in_glm(family):
    right = load(family)[0].config.index_rope_interleave
    assert right == (family == "glm_moe_dsa")
    assert misses(family)[1] == 0
    assert misses(family, changes={"index_rope_interleave": not right})[1] > 10


def test_trap_3_indexer_ropes_its_first_dims(monkeypatch):
    right = models.indexer.Indexer._rope
    monkeypatch.setattr(
        models.indexer.Indexer, "_rope", lambda self, x, angles: right(self, x[..., ::-1], angles)[..., ::-1]
    )
    assert misses("deepseek_v32", fresh=True)[1] > 10


def test_trap_4_index_key_norm_is_a_layer_norm_with_bias(monkeypatch):
    monkeypatch.setattr(models.indexer, "layer_norm", lambda x, w, b, eps: rms_norm(x, w, eps))
    assert misses("glm_moe_dsa", fresh=True)[1] > 10


def test_trap_4_index_key_norm_has_eps_1e_6():
    x = 1e-3 * np.random.default_rng(0).normal(size=(5, 16)).astype(np.float32)
    weight, bias = jnp.ones(16), jnp.zeros(16)
    found = layer_norm(jnp.asarray(x), weight, bias, models.indexer.K_NORM_EPS)
    centred = x - x.mean(-1, keepdims=True)
    expected = {eps: centred / np.sqrt(x.var(-1, keepdims=True) + eps) for eps in (1e-6, 1e-5)}
    assert worst(np.asarray(found), expected[1e-6]) < 1e-5 < 0.1 < worst(np.asarray(found), expected[1e-5])


def test_trap_5_indexer_query_comes_from_the_normed_latent(monkeypatch):
    right = MlaAttention._select

    def raw(self, x, query_latent, angles, history):
        right(self, x, linear(x, self.q_a_proj[...]), angles, history)

    monkeypatch.setattr(MlaAttention, "_select", raw)
    assert misses("glm_moe_dsa", fresh=True)[1] > 10


def test_trap_6_latent_norms_have_an_eps_of_their_own():
    config = load("glm_moe_dsa")[0].config
    assert (config.rms_norm_eps, config.latent_norm_eps) == (1e-5, 1e-6)
    _, history = run_layer("glm_moe_dsa", 0)
    _, served = run_layer("glm_moe_dsa", 0, changes={"latent_norm_eps": 0.1})
    expected = oracle("glm_moe_dsa")["cache/0/k"][:, 0, :48]
    assert worst(history.rows[0][..., :32], expected) < 5e-6
    assert worst(served.rows[0][..., :32], expected) > 0.01


def test_trap_7_relu_comes_before_the_head_weights():
    assert misses("glm_moe_dsa", relu=False)[1] > 10


def test_trap_8_selections_of_the_goldens_have_no_ties():
    """Else comparing sets would prove nothing, or fail by chance."""
    for family in SPARSE:
        assert load(family)[0].config.index_num_heads >= 8
        for scores in golden_forward(family).scores.values():
            ranked = np.sort(scores[:, 16:], -1)  # rows with more than topk = 16 tokens
            assert (ranked[..., -16] - ranked[..., -17]).min() > 2e-5


def test_trap_9_causal_mask_applies_again_below_topk():
    tokens = oracle("glm_moe_dsa")["input_ids"][:, :8]
    model, mesh = load("glm_moe_dsa")
    found = forward(model, mesh, tokens)
    assert worst(found.logits, oracle("glm_moe_dsa")["short_logits"]) < TOLERANCE
    assert found.selected[0].sum() == 2 * 8 * 9 / 2
    hidden, _ = run_layer("glm_moe_dsa", 0, tokens=8, mask_again=False)
    assert worst(hidden, oracle("glm_moe_dsa")["hidden_1"][:, :8]) > 0.01


def test_trap_10_bf16_is_near_but_no_measure_of_parity():
    hidden, history = run_layer("deepseek_v3", 1, changes={"dtype": jnp.bfloat16})
    assert hidden.dtype == jnp.bfloat16
    assert history.rows[1].dtype == np.float32  # what a history takes, whatever the parameters are
    expected = oracle("deepseek_v3")["hidden_2"]
    assert 0.99 < np.corrcoef(hidden.astype(np.float32).ravel(), expected.ravel())[0, 1] < 0.9999


@pytest.mark.parametrize(("family", "factor"), [("deepseek_v32", 1.8739), ("deepseek_v2", 1.5896)])
def test_trap_11_yarn_scales_the_softmax(family, factor):
    mscale = {"deepseek_v32": 1.0, "deepseek_v2": 0.707}[family]
    rope = load(family)[0].config.rope
    published = dataclasses.replace(rope, factor=40.0, mscale=mscale, mscale_all_dim=mscale)
    assert published.softmax_factor == pytest.approx(factor, abs=1e-4)
    assert published.attention_factor == 1.0
    assert misses(family, changes={"rope": dataclasses.replace(rope, mscale=0.0, mscale_all_dim=0.0)})[0] > 0.01
    assert misses(family, changes={"rope": dataclasses.replace(rope, kind="default")})[0] > 0.01


def test_trap_11_glm_has_plain_rope():
    assert load("glm_moe_dsa")[0].config.rope.softmax_factor == 1.0


def test_trap_12_value_and_key_widths_differ_and_head_dim_is_ignored():
    hub = json.loads((GOLDEN / "glm_moe_dsa" / "config.json").read_text())
    config = ModelConfig.from_hub(hub)
    assert config.v_head_dim == 24 != config.qk_nope_head_dim == 16
    assert config == ModelConfig.from_hub(hub | {"head_dim": 192, "qk_head_dim": 1})
    attention = load("glm_moe_dsa")[0].layers[0].self_attn
    assert attention.w_uk.shape == (8, 16, 32)
    assert attention.w_uv.shape == (8, 24, 32)


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("glm_moe_dsa", {"norm_topk_prob": False}),
        ("glm_moe_dsa", {"routed_scaling_factor": 1.0}),
        ("deepseek_v2", {"norm_topk_prob": True}),
        ("deepseek_v3", {"num_expert_groups": 1, "num_selected_groups": 1}),
        ("deepseek_v3", {"num_expert_groups": 2, "num_selected_groups": 1}),
    ],
)
def test_trap_13_routing(family, changes):
    """The right values are seen in test_parity."""
    assert misses(family, 1, changes=changes)[0] > 0.01


def test_trap_13_router_bias_chooses_but_does_not_weigh():
    """Against plain numpy, with biased scores below zero, where masking groups with 0 would choose from them."""
    rng = np.random.default_rng(1)
    model, _ = load("deepseek_v3")
    router = model.layers[1].mlp.router
    x, gate = rng.normal(size=(64, 64)).astype(np.float32), np.asarray(router.gate[...])
    bias = rng.normal(size=8).astype(np.float32) - 3
    scores = 1 / (1 + np.exp(-(x @ gate.T)))
    expected = np.zeros_like(scores)
    for row, out in zip(scores, expected, strict=True):
        groups = (row + bias).reshape(4, 2)
        best = np.argsort(-groups.sum(1))[:2]  # two experts a group: the sum of the best two is the sum
        allowed = [group * 2 + i for group in best for i in range(2)]
        chosen = sorted(allowed, key=lambda e: -(row + bias)[e])[:2]
        out[chosen] = 2.5 * row[chosen] / row[chosen].sum()
    before = router.bias[...]
    try:
        router.bias[...] = jnp.asarray(bias)
        found = np.asarray(router(jnp.asarray(x)))
    finally:
        router.bias[...] = before
    assert worst(found, expected) < 1e-5


def test_trap_14_router_stays_float32_and_is_not_gate_proj():
    model, _ = load("deepseek_v3", dtype=jnp.bfloat16)
    moe = model.layers[1].mlp
    assert moe.router.gate.dtype == moe.router.bias.dtype == jnp.float32
    assert moe.router.gate.shape == (8, 64)
    assert moe.gate_proj.shape == (8, 32, 64)
    assert moe.gate_proj.dtype == jnp.bfloat16


def test_trap_15_first_layers_are_dense_in_both_spellings():
    hub = json.loads((GOLDEN / "glm_moe_dsa" / "config.json").read_text())
    listed = {key: value for key, value in hub.items() if key != "first_k_dense_replace"}
    counted = {key: value for key, value in hub.items() if key != "mlp_layer_types"}
    assert ModelConfig.from_hub(listed) == ModelConfig.from_hub(counted)
    assert ModelConfig.from_hub(counted | {"first_k_dense_replace": 3}).sparse_layers == (False,) * 3 + (True,)


def test_trap_16_shared_layers_have_no_indexer_and_the_mtp_layer_does():
    model, _ = load("glm_moe_dsa_share")
    assert model.config.layer_groups == ((0,), (1,), (2, 3, 4, 5), (6, 7))
    owners = [index for index, layer in enumerate(model.layers) if layer.self_attn.indexer is not None]
    assert owners == [0, 1, 2, 6]
    assert model.mtp.block.self_attn.indexer is not None
    with pytest.raises(ValueError, match=r"layers\.3\.self_attn\.indexer"):
        load_checkpoint(GOLDEN / "glm_moe_dsa_share", make_mesh(), Parallel(), full_layers=(True,) * 8)


def test_trap_18_rope_parameters_and_rope_scaling_read_alike():
    hub = json.loads((GOLDEN / "deepseek_v32" / "config.json").read_text())
    rope = hub.pop("rope_parameters")
    theta, kind = rope.pop("rope_theta"), rope.pop("rope_type")
    old = hub | {"rope_theta": theta, "rope_scaling": rope | {"type": kind}}
    assert ModelConfig.from_hub(old) == load("deepseek_v32")[0].config
    plain = ModelConfig.from_hub(hub | {"rope_theta": theta, "rope_scaling": None}).rope
    assert (plain.kind, plain.theta) == ("default", theta)


def test_trap_20_hadamard_transform_changes_no_selection():
    hadamard = np.ones((1, 1))
    while len(hadamard) < 16:
        hadamard = np.block([[hadamard, hadamard], [hadamard, -hadamard]])
    turned = jnp.asarray(hadamard * 16**-0.5, jnp.float32)
    assert misses("glm_moe_dsa", hadamard=turned)[1] == 0
    assert jax.numpy.allclose(turned @ turned.T, jnp.eye(16))
