"""Multi-head latent attention in absorbed form: one cached row a token, read by all heads."""

import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Float32
from numpy.typing import DTypeLike

from models.config import ModelConfig
from models.indexer import Indexer
from models.layers import (
    Angles,
    History,
    apply_rope,
    contract,
    linear,
    linear_f32,
    parameter,
    rms_norm,
    sum_over_heads,
)
from ula_jax.parallel import TP


class MlaAttention(nnx.Module):
    """Attention of one layer; the history decides which rows it reads and where they lie.

    TP holds a share of the heads on each device; latents and indexer are computed alike on all of them. The
    hub's kv_b_proj is held as its two parts: w_uk [H, n, C] joins the query, w_uv [H, v, C] the output, so
    that keys and values of single heads never exist.
    """

    def __init__(
        self,
        config: ModelConfig,
        prefix: str,
        dtype: DTypeLike,
        *,
        layer: int,
        group: int,
        leads_group: bool,
    ):
        self.config = config
        self.layer, self.group, self.leads_group = layer, group, leads_group
        hidden, heads, latent = config.hidden_size, config.num_heads, config.kv_lora_rank
        by_head = P(TP, None)
        by_head_3d = P(TP, None, None)
        query_dim = heads * config.qk_head_dim
        if config.q_lora_rank is None:
            self.q_proj = parameter(f"{prefix}q_proj.weight", (query_dim, hidden), dtype, by_head)
        else:
            rank = config.q_lora_rank
            self.q_a_proj = parameter(f"{prefix}q_a_proj.weight", (rank, hidden), dtype)
            self.q_a_layernorm = parameter(f"{prefix}q_a_layernorm.weight", (rank,), dtype, init="norm")
            self.q_b_proj = parameter(f"{prefix}q_b_proj.weight", (query_dim, rank), dtype, by_head)
        self.kv_a_proj = parameter(f"{prefix}kv_a_proj_with_mqa.weight", (config.row_dim, hidden), dtype)
        self.kv_a_layernorm = parameter(f"{prefix}kv_a_layernorm.weight", (latent,), dtype, init="norm")
        name = f"{prefix}kv_b_proj.weight"
        self.w_uk = parameter(name, (heads, config.qk_nope_head_dim, latent), dtype, by_head_3d, "key_heads")
        self.w_uv = parameter(name, (heads, config.v_head_dim, latent), dtype, by_head_3d, "value_heads")
        self.o_proj = parameter(f"{prefix}o_proj.weight", (hidden, heads * config.v_head_dim), dtype, P(None, TP))
        # Layers that share a selection have no indexer, in the checkpoint as here.
        owns_indexer = leads_group and config.has_indexer
        self.indexer = Indexer(config, f"{prefix}indexer.", dtype) if owns_indexer else None

    def __call__(self, x: Float[Array, "B S D"], angles: Angles, history: History) -> Float32[Array, "B S D"]:
        """[B, S, D] after input_layernorm -> [B, S, D], the same on all devices under TP."""
        query_latent, query = self._query(x, angles)
        if self.leads_group:
            self._select(x, query_latent, angles, history)
        row = self._row(x, angles).astype(jnp.float32)
        output = history.attend(self.layer, query, row, self.config.softmax_scale)
        return self._output(output.astype(x.dtype))

    def _select(self, x: Float[Array, "B S D"], query_latent: Float[Array, "B S Q"], angles: Angles, history: History):
        if self.indexer is None:
            history.select_all(self.group)
        else:
            query, weights, key = self.indexer(x, query_latent, angles)
            history.select(self.group, query, weights, key)

    def _query(
        self, x: Float[Array, "B S D"], angles: Angles
    ) -> tuple[Float[Array, "B S Q"], Float32[Array, "B S H R"]]:
        """The query latent (x itself where the model has none) and the absorbed query."""
        config = self.config
        if config.q_lora_rank is None:
            query_latent, up = x, self.q_proj[...]
        else:
            query_latent = rms_norm(linear(x, self.q_a_proj[...]), self.q_a_layernorm[...], config.latent_norm_eps)
            up = self.q_b_proj[...]
        query = linear(query_latent, up).reshape(*x.shape[:2], -1, config.qk_head_dim)
        plain, turned = jnp.split(query, [config.qk_nope_head_dim], -1)
        absorbed = contract("bshn,hnc->bshc", plain, self.w_uk[...])
        turned = apply_rope(turned.astype(jnp.float32), angles, config.rope_interleave)
        return query_latent, jnp.concatenate([absorbed, turned], -1)

    def _row(self, x: Float[Array, "B S D"], angles: Angles) -> Float[Array, "B S R"]:
        """What is cached of a token: its latent after the norm and its key after rope."""
        config = self.config
        latent, key = jnp.split(linear(x, self.kv_a_proj[...]), [config.kv_lora_rank], -1)
        latent = rms_norm(latent, self.kv_a_layernorm[...], config.latent_norm_eps)
        key = apply_rope(key[:, :, None], angles, config.rope_interleave)[:, :, 0]
        return jnp.concatenate([latent, key], -1)

    def _output(self, latent: Float[Array, "B S H C"]) -> Float32[Array, "B S D"]:
        values = contract("bshc,hvc->bshv", latent, self.w_uv[...]).astype(latent.dtype)
        return sum_over_heads(linear_f32(values.reshape(*values.shape[:2], -1), self.o_proj[...]))
