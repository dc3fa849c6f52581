"""Routed experts: a float32 router, experts sharded over the devices in DP as in TP."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Float32
from numpy.typing import DTypeLike

from models.config import ModelConfig
from models.layers import Mlp, contract, linear_f32, parameter
from ula_jax.parallel import DEVICES, DP, TP, scattered_total, total


class Router(nnx.Module):
    """Which experts a token takes and how much of each."""

    def __init__(self, config: ModelConfig, prefix: str):
        self.config = config
        experts = config.num_experts
        self.gate = parameter(f"{prefix}gate.weight", (experts, config.hidden_size), jnp.float32)
        if config.scoring == "sigmoid":
            name = f"{prefix}gate.e_score_correction_bias"
            self.bias = parameter(name, (experts,), jnp.float32, init="router_bias")

    def __call__(self, x: Float[Array, "T D"]) -> Float32[Array, "T E"]:
        """Gates, zero for the experts not taken."""
        config = self.config
        scores = linear_f32(x.astype(jnp.float32), self.gate[...])
        if config.scoring == "softmax":
            scores = choice = jax.nn.softmax(scores, -1)
        else:
            scores = jax.nn.sigmoid(scores)
            choice = scores + self.bias[...]  # chooses, never weighs
        if config.num_expert_groups > 1:
            choice = self._within_best_groups(choice)
        _, chosen = jax.lax.top_k(choice, config.num_experts_per_token)
        gates = jnp.take_along_axis(scores, chosen, -1, mode="promise_in_bounds")
        if config.norm_topk_prob:
            gates = gates / (gates.sum(-1, keepdims=True) + 1e-20)
        gates = gates * jnp.float32(config.routed_scaling_factor)
        taken = jax.nn.one_hot(chosen, config.num_experts, dtype=jnp.float32)
        return contract("tk,tke->te", gates, taken)

    def _within_best_groups(self, choice: Float32[Array, "T E"]) -> Float32[Array, "T E"]:
        """Experts outside the chosen groups get -inf: 0 would beat a negative biased score."""
        config = self.config
        grouped = choice.reshape(choice.shape[0], config.num_expert_groups, -1)
        if config.scoring == "sigmoid":
            group_scores = jax.lax.top_k(grouped, min(2, grouped.shape[-1]))[0].sum(-1)
        else:
            group_scores = grouped.max(-1)
        _, best = jax.lax.top_k(group_scores, config.num_selected_groups)
        allowed = jax.nn.one_hot(best, config.num_expert_groups, dtype=jnp.bool).any(-2)
        return jnp.where(allowed[..., None], grouped, -jnp.inf).reshape(choice.shape)


class Moe(nnx.Module):
    """Routed experts and a shared expert.

    Every device runs all of its own experts on all tokens and weighs them by their gates, most of which are
    zero. That is E / (P top-k) times the arithmetic needed (4 for 256 experts, top 8, 8 devices), and
    activations of tokens x local experts x hidden size. In return nothing is sorted, dropped or padded, the order
    of the sum is fixed, and a token's result cannot depend on its neighbours. Ranks gather the tokens of all of
    them first and scatter the sum.
    """

    def __init__(self, config: ModelConfig, prefix: str, dtype: DTypeLike):
        experts, width, hidden = config.num_experts, config.moe_intermediate_size, config.hidden_size
        spec = P(DEVICES, None, None)
        self.router = Router(config, prefix)
        name = prefix + "experts.{}."
        self.gate_proj = parameter(f"{name}gate_proj.weight", (experts, width, hidden), dtype, spec, "experts")
        self.up_proj = parameter(f"{name}up_proj.weight", (experts, width, hidden), dtype, spec, "experts")
        self.down_proj = parameter(f"{name}down_proj.weight", (experts, hidden, width), dtype, spec, "experts")
        if config.num_shared_experts:
            width = config.shared_intermediate_size
            self.shared_experts = Mlp(f"{prefix}shared_experts.", hidden, width, dtype)
        else:
            self.shared_experts = None

    def __call__(self, x: Float[Array, "B S D"]) -> Float32[Array, "B S D"]:
        """[B, S, D] after post_attention_layernorm -> [B, S, D], whole."""
        tokens = everyone = x.reshape(-1, x.shape[-1])
        gates = self.router(tokens)
        if jax.lax.axis_size(DP) > 1:
            everyone, gates = (jax.lax.all_gather(own, DP, tiled=True) for own in (tokens, gates))
        shared = self.shared_experts(tokens) if self.shared_experts is not None else jnp.float32(0)
        output = total(scattered_total(self._routed(everyone, gates), DP) + shared, TP)
        return output.reshape(x.shape)

    def _routed(self, x: Float[Array, "T D"], gates: Float32[Array, "T E"]) -> Float32[Array, "T D"]:
        """The share of this device's experts."""
        gate, up = self.gate_proj[...], self.up_proj[...]
        first = jax.lax.axis_index(DEVICES) * gate.shape[0]
        local = jax.lax.dynamic_slice_in_dim(gates, first, gate.shape[0], axis=1)
        inner = jax.nn.silu(contract("td,eid->tei", x, gate)) * contract("td,eid->tei", x, up)
        weighed = (inner * local[..., None]).astype(x.dtype)
        # Summed over experts and widths at once, XLA:GPU would first transpose all the weights.
        return contract("tei,edi->etd", weighed, self.down_proj[...]).sum(0)
