"""The lightning indexer of DeepSeek Sparse Attention: what decides which rows a token reads."""

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Float32
from numpy.typing import DTypeLike

from models.config import ModelConfig
from models.layers import Angles, apply_rope, layer_norm, linear_f32, parameter

K_NORM_EPS = 1e-6


class Indexer(nnx.Module):
    """Query, head weights and key; the score of row t is sum_j w_j relu(d^-1/2 q_j . k_t).

    Replicated on every device: it is small, and every device needs the whole selection. DeepSeek also
    multiplies query and key by a Hadamard matrix; that is orthogonal, changes no score and only helps fp8.
    """

    def __init__(self, config: ModelConfig, prefix: str, dtype: DTypeLike):
        heads, dim = config.index_num_heads, config.index_head_dim
        assert config.q_lora_rank is not None  # ModelConfig refuses an indexer without it
        self.config = config
        self.wq_b = parameter(f"{prefix}wq_b.weight", (heads * dim, config.q_lora_rank), dtype)
        self.wk = parameter(f"{prefix}wk.weight", (dim, config.hidden_size), dtype)
        self.k_norm = parameter(f"{prefix}k_norm.weight", (dim,), dtype, init="norm")
        self.k_norm_bias = parameter(f"{prefix}k_norm.bias", (dim,), dtype, init="bias")
        self.weights_proj = parameter(f"{prefix}weights_proj.weight", (heads, config.hidden_size), dtype)

    def __call__(
        self, x: Float[Array, "B S D"], query_latent: Float[Array, "B S Q"], angles: Angles
    ) -> tuple[Float32[Array, "B S h d"], Float32[Array, "B S h"], Float32[Array, "B S d"]]:
        """(query, weights, key) of the tokens, float32 whatever the parameters are.

        Args:
          x: the layer's input after input_layernorm.
          query_latent: after q_a_layernorm; the raw latent gives plausible and wrong selections.
        """
        heads, dim = self.config.index_num_heads, self.config.index_head_dim
        query = linear_f32(query_latent, self.wq_b[...]).reshape(*x.shape[:2], heads, dim)
        key = layer_norm(linear_f32(x, self.wk[...]), self.k_norm[...], self.k_norm_bias[...], K_NORM_EPS)
        weights = linear_f32(x, self.weights_proj[...]) * jnp.float32(heads**-0.5)
        return self._rope(query, angles), weights, self._rope(key[:, :, None], angles)[:, :, 0]

    def _rope(self, x: Float32[Array, "B S H d"], angles: Angles) -> Float32[Array, "B S H d"]:
        """Rope on the first dims, where the attention has it on the last."""
        turned, rest = jnp.split(x, [self.config.qk_rope_head_dim], -1)
        return jnp.concatenate([apply_rope(turned, angles, self.config.index_rope_interleave), rest], -1)
