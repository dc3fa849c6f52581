"""Hub configs in every spelling, and errors that say what to do."""

import json

import pytest

from models import ModelConfig
from models.hub_config import write_hub_config
from tests.models.running import FAMILIES, GOLDEN
from ula_jax.parallel import Parallel


def hub(family="glm_moe_dsa", **changes):
    return json.loads((GOLDEN / family / "config.json").read_text()) | changes


# What deepseek-ai/DeepSeek-V3.2 and zai-org/GLM-5.2 have in their config.json, as far as it is read.
V32 = dict(
    model_type="deepseek_v32", vocab_size=129280, hidden_size=7168, intermediate_size=18432, num_hidden_layers=61,
    num_attention_heads=128, q_lora_rank=1536, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64,
    v_head_dim=128, first_k_dense_replace=3, moe_layer_freq=1, moe_intermediate_size=2048, n_routed_experts=256,
    n_shared_experts=1, num_experts_per_tok=8, n_group=8, topk_group=4, topk_method="noaux_tc", scoring_func="sigmoid",
    norm_topk_prob=True, routed_scaling_factor=2.5, index_head_dim=128, index_n_heads=64, index_topk=2048,
    rms_norm_eps=1e-6, rope_theta=10000, num_nextn_predict_layers=1, max_position_embeddings=163840,
    rope_scaling=dict(beta_fast=32, beta_slow=1, factor=40, mscale=1.0, mscale_all_dim=1.0,
                      original_max_position_embeddings=4096, type="yarn"),
)  # fmt: skip
GLM = V32 | dict(
    model_type="glm_moe_dsa", vocab_size=154880, hidden_size=6144, intermediate_size=12288, num_hidden_layers=78,
    num_attention_heads=64, q_lora_rank=2048, qk_nope_head_dim=192, v_head_dim=256, n_group=1, topk_group=1,
    index_n_heads=32, index_topk_freq=4, index_skip_topk_offset=3, rms_norm_eps=1e-5, rope_scaling=None,
    rope_parameters=dict(rope_theta=8000000, rope_type="default"), head_dim=192,
)  # fmt: skip


def test_published_v32():
    config = ModelConfig.from_hub(V32)
    assert config.row_dim == 576
    assert len(config.layer_groups) == 61
    assert config.sparse_layers.count(False) == 3
    assert config.softmax_scale == pytest.approx(192**-0.5 * 1.8739, rel=1e-4)


def test_published_glm_shares_selections():
    config = ModelConfig.from_hub(GLM)
    leaders = [layers[0] for layers in config.layer_groups]
    assert leaders == [0, 1, 2, *range(6, 75, 4)]
    assert len(leaders) == 21
    assert {len(layers) for layers in config.layer_groups[2:]} == {4}
    assert config.softmax_scale == 256**-0.5


def test_index_share_in_three_spellings():
    by_frequency = hub("glm_moe_dsa_share", indexer_types=None)
    by_pattern = by_frequency | {"index_topk_pattern": "FFFSSSFS", "index_topk_freq": 1}
    listed = ModelConfig.from_hub(hub("glm_moe_dsa_share"))
    assert listed == ModelConfig.from_hub(by_frequency) == ModelConfig.from_hub(by_pattern)


def test_dense_model_is_one_group():
    config = ModelConfig.from_hub(GOLDEN / "deepseek_v2")
    assert config.layer_groups == ((0, 1, 2, 3),)
    assert not config.has_indexer


@pytest.mark.parametrize("source", [*FAMILIES, V32, GLM], ids=[*FAMILIES, "v32", "glm"])
def test_written_config_reads_back(source):
    config = ModelConfig.from_hub(source if isinstance(source, dict) else GOLDEN / source)
    assert ModelConfig.from_hub(json.loads(json.dumps(write_hub_config(config, "float32")))) == config


def test_group_limited_v2_takes_the_best_expert_of_each_group():
    config = ModelConfig.from_hub(hub("deepseek_v2", topk_method="group_limited_greedy", n_group=4, topk_group=2))
    assert (config.num_expert_groups, config.num_selected_groups) == (4, 2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "llama"}, r"model_type: expected one of glm_moe_dsa, .*found 'llama'; convert"),
        ({"hidden_size": -64}, r"hidden_size: expected a positive number, found -64"),
        ({"kv_lora_rank": None}, r"kv_lora_rank: expected in the config of glm_moe_dsa, found none; add it"),
        ({"q_lora_rank": None}, r"q_lora_rank: expected a number .* found None"),
        ({"qk_rope_head_dim": 7}, r"qk_rope_head_dim: expected an even number .* found 7"),
        ({"index_head_dim": 4}, r"index_head_dim: expected at least qk_rope_head_dim = 8, found 4"),
        ({"mlp_layer_types": ["dense"]}, r"mlp layer kinds: expected one for each of 4 layers, found 1"),
        ({"indexer_types": ["full"] * 3}, r"indexer kinds: expected one for each of 4 layers, found 3"),
        ({"indexer_types": ["shared"] + ["full"] * 3}, r"indexer of layer 0: expected full .* found shared"),
        ({"indexer_types": ["half"] * 4}, r"indexer kinds: expected full or shared .* found \['half'\]"),
        ({"n_group": 3}, r"n_routed_experts: expected a multiple of n_group = 3, found 8"),
        ({"n_group": 4, "topk_group": 5}, r"topk_group: expected 1 to n_group = 4, found 5"),
        ({"n_group": 8, "topk_group": 1}, r"num_experts_per_tok: expected at most the 1 experts .* found 2"),
        ({"scoring_func": "softmax"}, r"scoring_func: expected 'sigmoid' in glm_moe_dsa, found 'softmax'"),
        ({"tie_word_embeddings": True}, r"tie_word_embeddings: expected False, found True"),
        ({"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4}}, r"rope type: .* found 'linear'"),
        ({"rope_parameters": {"rope_type": "default"}}, r"rope_theta: expected .* found none"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, r"factor: expected .* found none"),
    ],
)
def test_bad_config_says_what_to_do(changes, message):
    with pytest.raises(ValueError, match=message):
        ModelConfig.from_hub(hub(**changes))


def test_bad_changes_and_files(tmp_path):
    with pytest.raises(ValueError, match=r"expected fields of ModelConfig, found \['latent_eps'\]"):
        ModelConfig.from_hub(hub(), latent_eps=1e-5)
    with pytest.raises(ValueError, match=r"latent_norm_eps: expected a positive number, found 0"):
        ModelConfig.from_hub(hub(), latent_norm_eps=0.0)
    with pytest.raises(ValueError, match=r"expected a file .*config\.json, found none; pass a hub directory"):
        ModelConfig.from_hub(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json: expected JSON"):
        ModelConfig.from_hub(tmp_path)


@pytest.mark.parametrize(
    ("changes", "mode", "size", "message"),
    [
        ({}, "tp", 3, r"experts: expected a multiple of the 3 devices, found 8; use 2 devices"),
        ({}, "dp", 3, r"experts: expected a multiple of the 3 devices, found 8"),
        ({"num_attention_heads": 6}, "tp", 4, r"attention heads: .* 4 devices .* 6; use tp=3, with a mode like '2x3'"),
        ({"vocab_size": 255}, "tp", 2, r"vocabulary: expected a multiple of the 2 devices .*, found 255; use tp=1"),
        ({"intermediate_size": 95}, "tp", 2, r"intermediate_size: .* the 2 devices that share it, found 95"),
        ({"moe_intermediate_size": 31}, "tp", 2, r"shared expert width: .* the 2 devices that share it, found 31"),
    ],
)
def test_model_that_does_not_divide_says_what_to_do(changes, mode, size, message):
    with pytest.raises(ValueError, match=message):
        ModelConfig.from_hub(hub(**changes)).check(Parallel.of(mode, size))


def test_dp_divides_experts_alone():
    ModelConfig.from_hub(hub(num_attention_heads=6, vocab_size=255)).check(Parallel(dp=4))
