"""Hub config.json <-> ModelConfig, for every spelling that the supported families use."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from models.config import ModelConfig, RopeConfig

ARCHITECTURES = {
    "glm_moe_dsa": "GlmMoeDsaForCausalLM",
    "deepseek_v32": "DeepseekV32ForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "deepseek_v2": "DeepseekV2ForCausalLM",
}
"""What other engines call each family."""


def read_hub_config(source: Mapping[str, Any] | str | Path, **changes: Any) -> ModelConfig:
    """See `ModelConfig.from_hub`."""
    hub = source if isinstance(source, Mapping) else _read_json(Path(source))
    family = hub.get("model_type")
    if family not in ARCHITECTURES:
        raise ValueError(
            f"model_type: expected one of {', '.join(ARCHITECTURES)}, found {family!r}; "
            "convert the checkpoint or add the family in models/hub_config.py"
        )
    for key, expected in (("tie_word_embeddings", False), ("attention_bias", False), ("hidden_act", "silu")):
        if hub.get(key, expected) != expected:
            raise ValueError(f"{key}: expected {expected!r}, found {hub[key]!r}; no supported family uses it")
    layers = _need(hub, "num_hidden_layers")
    fields: dict[str, Any] = dict(
        model_type=family,
        vocab_size=_need(hub, "vocab_size"),
        hidden_size=_need(hub, "hidden_size"),
        num_layers=layers,
        num_heads=_need(hub, "num_attention_heads"),
        q_lora_rank=hub.get("q_lora_rank"),
        kv_lora_rank=_need(hub, "kv_lora_rank"),
        qk_nope_head_dim=_need(hub, "qk_nope_head_dim"),
        qk_rope_head_dim=_need(hub, "qk_rope_head_dim"),
        v_head_dim=_need(hub, "v_head_dim"),
        intermediate_size=_need(hub, "intermediate_size"),
        rope=_rope(hub),
        rope_interleave=hub.get("rope_interleave", True),
        rms_norm_eps=_need(hub, "rms_norm_eps"),
        sparse_layers=_sparse_layers(hub, layers),
        num_mtp_layers=hub.get("num_nextn_predict_layers") or 0,
        max_position_embeddings=hub.get("max_position_embeddings", 4096),
    )
    if any(fields["sparse_layers"]):
        fields |= _experts(hub, family)
    if family in ("glm_moe_dsa", "deepseek_v32"):
        fields |= dict(
            full_layers=_full_layers(hub, layers),
            index_num_heads=_need(hub, "index_n_heads"),
            index_head_dim=_need(hub, "index_head_dim"),
            index_topk=_need(hub, "index_topk"),
            index_rope_interleave=hub.get("indexer_rope_interleave", family == "glm_moe_dsa"),
            index_share_for_mtp_iteration=hub.get("index_share_for_mtp_iteration", False),
        )
    unknown = set(changes) - set(ModelConfig.__dataclass_fields__)
    if unknown:
        raise ValueError(
            f"config changes: expected fields of ModelConfig, found {sorted(unknown)}; see models/config.py"
        )
    return ModelConfig(**(fields | changes))


def write_hub_config(config: ModelConfig, dtype: str) -> dict[str, Any]:
    """The config.json that reads back as `config`, and that transformers reads; no key means `latent_norm_eps`."""
    rope: dict[str, Any] = dict(rope_type=config.rope.kind, rope_theta=config.rope.theta)
    if config.rope.kind == "yarn":
        rope |= dict(
            factor=config.rope.factor,
            original_max_position_embeddings=config.rope.original_length,
            beta_fast=config.rope.beta_fast,
            beta_slow=config.rope.beta_slow,
            mscale=config.rope.mscale,
            mscale_all_dim=config.rope.mscale_all_dim,
        )
    hub: dict[str, Any] = dict(
        architectures=[ARCHITECTURES[config.model_type]],
        model_type=config.model_type,
        dtype=dtype,
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_heads,
        q_lora_rank=config.q_lora_rank,
        kv_lora_rank=config.kv_lora_rank,
        qk_nope_head_dim=config.qk_nope_head_dim,
        qk_rope_head_dim=config.qk_rope_head_dim,
        v_head_dim=config.v_head_dim,
        intermediate_size=config.intermediate_size,
        rope_parameters=rope,
        rope_interleave=config.rope_interleave,
        rms_norm_eps=config.rms_norm_eps,
        mlp_layer_types=["sparse" if sparse else "dense" for sparse in config.sparse_layers],
        num_nextn_predict_layers=config.num_mtp_layers,
        max_position_embeddings=config.max_position_embeddings,
        tie_word_embeddings=False,
        hidden_act="silu",
    )
    dense = config.sparse_layers.count(False)
    if not any(config.sparse_layers[:dense]):  # transformers' DeepSeek V2 and V3 know no list by layer
        hub |= dict(first_k_dense_replace=dense)
    if any(config.sparse_layers):
        softmax_method = "greedy" if config.num_expert_groups == 1 else "group_limited_greedy"
        hub |= dict(
            topk_method="noaux_tc" if config.scoring == "sigmoid" else softmax_method,
            moe_intermediate_size=config.moe_intermediate_size,
            n_routed_experts=config.num_experts,
            num_experts_per_tok=config.num_experts_per_token,
            n_shared_experts=config.num_shared_experts,
            n_group=config.num_expert_groups,
            topk_group=config.num_selected_groups,
            scoring_func=config.scoring,
            norm_topk_prob=config.norm_topk_prob,
            routed_scaling_factor=config.routed_scaling_factor,
        )
    if config.has_indexer:
        hub |= dict(
            indexer_types=["full" if full else "shared" for full in config.full_layers],
            index_n_heads=config.index_num_heads,
            index_head_dim=config.index_head_dim,
            index_topk=config.index_topk,
            indexer_rope_interleave=config.index_rope_interleave,
            index_share_for_mtp_iteration=config.index_share_for_mtp_iteration,
        )
    return hub


def _read_json(path: Path) -> Mapping[str, Any]:
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise ValueError(f"model config: expected a file {file}, found none; pass a hub directory or its config.json")
    try:
        return json.loads(file.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{file}: expected JSON, found {error}; download the file again") from error


def _need(hub: Mapping[str, Any], key: str) -> Any:
    if hub.get(key) is None:
        raise ValueError(f"{key}: expected in the config of {hub['model_type']}, found none; add it to config.json")
    return hub[key]


def _rope(hub: Mapping[str, Any]) -> RopeConfig:
    """GLM-5.x and transformers 5 write rope_parameters; DeepSeek's own files rope_theta + rope_scaling."""
    given = hub.get("rope_parameters") or hub.get("rope_scaling") or {}
    theta = given.get("rope_theta", hub.get("rope_theta"))
    if theta is None:
        raise ValueError("rope_theta: expected in rope_parameters or beside rope_scaling, found none; add it")
    kind = given.get("rope_type", given.get("type", "default"))
    if kind == "default":
        return RopeConfig(float(theta))
    if kind != "yarn":
        raise ValueError(f"rope type: expected 'default' or 'yarn', found {kind!r}; no supported family uses it")
    return RopeConfig(
        theta=float(theta),
        kind="yarn",
        factor=float(_need(given | {"model_type": "YaRN"}, "factor")),
        original_length=given.get("original_max_position_embeddings") or _need(hub, "max_position_embeddings"),
        beta_fast=float(given.get("beta_fast") or 32),
        beta_slow=float(given.get("beta_slow") or 1),
        mscale=float(given.get("mscale") or 0),
        mscale_all_dim=float(given.get("mscale_all_dim") or 0),
    )


def _sparse_layers(hub: Mapping[str, Any], layers: int) -> tuple[bool, ...]:
    if hub.get("mlp_layer_types") is not None:
        return tuple(kind == "sparse" for kind in hub["mlp_layer_types"])
    first, every = _need(hub, "first_k_dense_replace"), hub.get("moe_layer_freq") or 1
    return tuple(layer >= first and layer % every == 0 for layer in range(layers))


def _experts(hub: Mapping[str, Any], family: str) -> dict[str, Any]:
    expected = "softmax" if family == "deepseek_v2" else "sigmoid"
    scoring = hub.get("scoring_func") or expected
    if scoring != expected:
        raise ValueError(f"scoring_func: expected {expected!r} in {family}, found {scoring!r}; correct config.json")
    default = "greedy" if family == "deepseek_v2" else "noaux_tc"
    greedy = (hub.get("topk_method") or default) == "greedy"
    return dict(
        moe_intermediate_size=_need(hub, "moe_intermediate_size"),
        num_experts=_need(hub, "n_routed_experts"),
        num_experts_per_token=_need(hub, "num_experts_per_tok"),
        num_shared_experts=hub.get("n_shared_experts") or 0,
        num_expert_groups=1 if greedy else hub.get("n_group") or 1,
        num_selected_groups=1 if greedy else hub.get("topk_group") or 1,
        scoring=scoring,
        norm_topk_prob=hub.get("norm_topk_prob", family != "deepseek_v2"),
        routed_scaling_factor=hub.get("routed_scaling_factor", 1.0),
    )


def _full_layers(hub: Mapping[str, Any], layers: int) -> tuple[bool, ...]:
    """IndexShare: spelled out by layer, as a pattern such as FFFSSSFS, or as a frequency with an offset."""
    kinds = hub.get("indexer_types") or hub.get("index_topk_pattern")
    if kinds is None:
        every, offset = hub.get("index_topk_freq") or 1, hub.get("index_skip_topk_offset") or 0
        return tuple(max(layer - offset + 1, 0) % every == 0 for layer in range(layers))
    names = {"full": True, "F": True, "shared": False, "S": False}
    bad = sorted({str(kind) for kind in kinds} - set(names))
    if bad:
        raise ValueError(f"indexer kinds: expected full or shared (F or S), found {bad}; correct config.json")
    return tuple(names[kind] for kind in kinds)
