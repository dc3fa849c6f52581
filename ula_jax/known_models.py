"""Sizes of published models, as their hub config.json names them."""

from typing import Any

KNOWN: dict[str, dict[str, Any]] = {
    "glm-5.3": dict(
        model_type="glm_moe_dsa", vocab_size=154_880, hidden_size=6144, num_hidden_layers=78, num_attention_heads=64,
        q_lora_rank=2048, kv_lora_rank=512, qk_nope_head_dim=192, qk_rope_head_dim=64, v_head_dim=256,
        intermediate_size=12_288, moe_intermediate_size=2048, n_routed_experts=256, n_shared_experts=1,
        num_experts_per_tok=8, n_group=1, topk_group=1, norm_topk_prob=True, routed_scaling_factor=2.5,
        first_k_dense_replace=3, rms_norm_eps=1e-5, rope_theta=8e6, max_position_embeddings=1_048_576,
        index_topk=2048, index_head_dim=128, index_n_heads=32, index_topk_freq=4, index_skip_topk_offset=3,
        num_nextn_predict_layers=1,
    ),
    "deepseek-v3.2": dict(
        model_type="deepseek_v32", vocab_size=129_280, hidden_size=7168, num_hidden_layers=61, num_attention_heads=128,
        q_lora_rank=1536, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128,
        intermediate_size=18_432, moe_intermediate_size=2048, n_routed_experts=256, n_shared_experts=1,
        first_k_dense_replace=3, max_position_embeddings=163_840, index_topk=2048, index_head_dim=128, index_n_heads=64,
        num_nextn_predict_layers=1,
    ),
    "deepseek-v2-lite": dict(
        model_type="deepseek_v2", vocab_size=102_400, hidden_size=2048, num_hidden_layers=27, num_attention_heads=16,
        q_lora_rank=None, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128,
        intermediate_size=10_944, moe_intermediate_size=1408, n_routed_experts=64, n_shared_experts=2,
        first_k_dense_replace=1, max_position_embeddings=163_840,
    ),
    "qwen3-30b-a3b": dict(
        model_type="qwen3_moe", vocab_size=151_936, hidden_size=2048, num_hidden_layers=48, num_attention_heads=32,
        num_key_value_heads=4, head_dim=128, intermediate_size=6144, moe_intermediate_size=768, num_experts=128,
        num_experts_per_tok=8, max_position_embeddings=40_960,
    ),
    "mixtral-8x7b": dict(
        model_type="mixtral", vocab_size=32_000, hidden_size=4096, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=8, intermediate_size=14_336, num_local_experts=8, num_experts_per_tok=2,
        max_position_embeddings=32_768,
    ),
}  # fmt: skip
"""GLM-5.2 and 5.3 are the same in all of these. The last two have grouped-query attention: the planner knows their
sizes, `models` does not run them."""
KNOWN["glm-5.1"] = KNOWN["glm-5.3"] | dict(index_topk_freq=1, rope_theta=1e6, max_position_embeddings=202_752)
