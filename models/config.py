"""What a model is: sizes, layer kinds and the choices in which the supported families differ."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ula_jax.parallel import Parallel


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding: plain, or YaRN-stretched (DeepSeek V2, V3, V3.2)."""

    theta: float
    kind: Literal["default", "yarn"] = "default"
    factor: float = 1.0
    original_length: int = 4096
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 0.0
    mscale_all_dim: float = 0.0

    def _magnitude(self, mscale: float) -> float:
        return 0.1 * mscale * math.log(self.factor) + 1.0 if self.factor > 1 else 1.0

    @property
    def attention_factor(self) -> float:
        """What cos and sin are multiplied by."""
        if self.kind != "yarn":
            return 1.0
        if self.mscale and self.mscale_all_dim:
            return self._magnitude(self.mscale) / self._magnitude(self.mscale_all_dim)
        return self._magnitude(1.0)

    @property
    def softmax_factor(self) -> float:
        """What the softmax scale is multiplied by: m(mscale_all_dim) squared."""
        if self.kind != "yarn" or not self.mscale_all_dim:
            return 1.0
        return self._magnitude(self.mscale_all_dim) ** 2


@dataclass(frozen=True)
class ModelConfig:
    """A sparse-attention (or dense) MLA model with routed experts.

    Families: glm_moe_dsa, deepseek_v32 (lightning indexer), deepseek_v3, deepseek_v2 (dense attention).
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    intermediate_size: int
    rope: RopeConfig
    sparse_layers: tuple[bool, ...]
    """Per layer: routed experts (True) or a dense MLP."""

    moe_intermediate_size: int = 0
    num_experts: int = 0
    num_experts_per_token: int = 0
    num_shared_experts: int = 0
    num_expert_groups: int = 1
    num_selected_groups: int = 1
    scoring: Literal["sigmoid", "softmax"] = "sigmoid"
    """Sigmoid routers carry a bias that takes part in choosing alone."""

    norm_topk_prob: bool = True
    routed_scaling_factor: float = 1.0

    full_layers: tuple[bool, ...] = ()
    """Per layer: has an indexer of its own (True) or shares the selection of the nearest one below.
    Empty: dense attention.
    """

    index_num_heads: int = 0
    index_head_dim: int = 0
    index_topk: int = 0
    index_rope_interleave: bool = False
    """Rope layout of the indexer: half-split in V3.2, interleaved pairs in GLM-5.x."""

    index_share_for_mtp_iteration: bool = False
    rope_interleave: bool = True
    rms_norm_eps: float = 1e-6
    latent_norm_eps: float = 1e-6
    """Of q_a_layernorm and kv_a_layernorm: transformers uses 1e-6 whatever the config, vLLM and SGLang
    rms_norm_eps (1e-5 in GLM-5.x)."""

    num_mtp_layers: int = 0
    max_position_embeddings: int = 4096

    @classmethod
    def from_hub(cls, source: Mapping[str, Any] | str | Path, **changes: Any) -> "ModelConfig":
        """From a hub config.json: its parsed contents, path or directory; `changes` override fields."""
        from models.hub_config import read_hub_config

        return read_hub_config(source, **changes)

    @property
    def has_indexer(self) -> bool:
        return any(self.full_layers)

    @property
    def layer_groups(self) -> tuple[tuple[int, ...], ...]:
        """Layers that share one selection, in order; a dense model is one group."""
        if not self.has_indexer:
            return (tuple(range(self.num_layers)),)
        starts = [layer for layer, full in enumerate(self.full_layers) if full]
        return tuple(
            tuple(range(start, stop)) for start, stop in zip(starts, [*starts[1:], self.num_layers], strict=True)
        )

    @property
    def row_dim(self) -> int:
        """Numbers in one cached row: normalised latent and roped key."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def qk_head_dim(self) -> int:
        # Never the hub's `head_dim`: it is 64 or 192 for one and the same GLM-5 and used by nothing.
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def softmax_scale(self) -> float:
        return self.qk_head_dim**-0.5 * self.rope.softmax_factor

    @property
    def shared_intermediate_size(self) -> int:
        """The shared experts are one MLP of their summed width."""
        return self.num_shared_experts * self.moe_intermediate_size

    def __post_init__(self):
        positive = [
            "vocab_size", "hidden_size", "num_layers", "num_heads", "kv_lora_rank", "qk_nope_head_dim",
            "qk_rope_head_dim", "v_head_dim", "intermediate_size", "num_expert_groups",
        ]  # fmt: skip
        if self.q_lora_rank is not None:
            positive.append("q_lora_rank")
        if any(self.sparse_layers):
            positive += ["num_experts", "num_experts_per_token", "moe_intermediate_size"]
        if self.has_indexer:
            positive += ["index_num_heads", "index_head_dim", "index_topk"]
        for name in positive:
            if getattr(self, name) < 1:
                raise _bad(name, "a positive number", getattr(self, name), "correct config.json")
        for name in ("rms_norm_eps", "latent_norm_eps"):
            if not getattr(self, name) > 0:
                raise _bad(name, "a positive number", getattr(self, name), "1e-6 is usual")
        self._check_layers()
        self._check_experts()

    def _check_layers(self):
        if len(self.sparse_layers) != self.num_layers:
            raise _bad(
                "mlp layer kinds",
                f"one for each of {self.num_layers} layers",
                len(self.sparse_layers),
                "correct mlp_layer_types or first_k_dense_replace",
            )
        if self.qk_rope_head_dim % 2:
            raise _bad("qk_rope_head_dim", "an even number (rope turns pairs)", self.qk_rope_head_dim,
                       "correct config.json")  # fmt: skip
        if not self.has_indexer:
            return
        if len(self.full_layers) != self.num_layers:
            raise _bad("indexer kinds", f"one for each of {self.num_layers} layers", len(self.full_layers),
                       "correct indexer_types or index_topk_pattern")  # fmt: skip
        if not self.full_layers[0]:
            raise _bad("indexer of layer 0", "full (there is no selection below to share)", "shared",
                       "correct indexer_types, index_topk_pattern or index_skip_topk_offset")  # fmt: skip
        if self.q_lora_rank is None:
            raise _bad("q_lora_rank", "a number (the indexer reads the query latent)", None,
                       "give q_lora_rank or drop index_topk")  # fmt: skip
        if self.index_head_dim < self.qk_rope_head_dim:
            raise _bad("index_head_dim", f"at least qk_rope_head_dim = {self.qk_rope_head_dim}",
                       self.index_head_dim, "correct config.json")  # fmt: skip

    def _check_experts(self):
        if not any(self.sparse_layers):
            return
        if self.num_experts % self.num_expert_groups:
            raise _bad("n_routed_experts", f"a multiple of n_group = {self.num_expert_groups}",
                       self.num_experts, "correct config.json")  # fmt: skip
        if not 1 <= self.num_selected_groups <= self.num_expert_groups:
            raise _bad("topk_group", f"1 to n_group = {self.num_expert_groups}", self.num_selected_groups,
                       "correct config.json")  # fmt: skip
        reachable = self.num_experts // self.num_expert_groups * self.num_selected_groups
        if self.num_experts_per_token > reachable:
            raise _bad("num_experts_per_tok", f"at most the {reachable} experts of the chosen groups",
                       self.num_experts_per_token, "correct config.json")  # fmt: skip

    def check(self, parallel: Parallel) -> None:
        """Raise ValueError unless the model divides over the devices."""
        if any(self.sparse_layers) and self.num_experts % parallel.size:
            hint = f"use {_divisor(self.num_experts, parallel.size)} devices"
            raise _bad("experts", f"a multiple of the {parallel.size} devices", self.num_experts, hint)
        divided = {"attention heads": self.num_heads, "vocabulary": self.vocab_size}
        if not all(self.sparse_layers):
            divided["intermediate_size"] = self.intermediate_size
        if any(self.sparse_layers):
            divided["shared expert width"] = self.shared_intermediate_size
        for what, count in divided.items():
            if count % parallel.tp:
                nearest = _divisor(count, parallel.tp)
                hint = f"use tp={nearest}, with a mode like '2x{nearest}' for more devices, or mode 'dp'"
                raise _bad(what, f"a multiple of the {parallel.tp} devices that share it", count, hint)


def _divisor(count: int, most: int) -> int:
    """The largest divisor of `count` that is at most `most`."""
    return next(n for n in range(most, 0, -1) if count % n == 0)


def _bad(what: str, expected: object, found: object, hint: str) -> ValueError:
    return ValueError(f"{what}: expected {expected}, found {found}; {hint}")
