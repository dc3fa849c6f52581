"""One layer of the decoder."""

import jax
from flax import nnx
from jaxtyping import Array, Float
from numpy.typing import DTypeLike

from models.config import ModelConfig
from models.layers import Angles, History, Mlp, parameter, rms_norm, sum_over_heads
from models.mla import MlaAttention
from models.moe import Moe


class DecoderLayer(nnx.Module):
    """Attention and experts (or a dense MLP), each behind a norm and added to the stream."""

    def __init__(
        self,
        config: ModelConfig,
        dtype: DTypeLike,
        *,
        layer: int,
        group: int,
        leads_group: bool,
        sparse: bool,
    ):
        self.config = config
        prefix, hidden = f"model.layers.{layer}.", config.hidden_size
        self.input_layernorm = parameter(f"{prefix}input_layernorm.weight", (hidden,), dtype, init="norm")
        self.self_attn = MlaAttention(
            config, f"{prefix}self_attn.", dtype, layer=layer, group=group, leads_group=leads_group
        )
        name = f"{prefix}post_attention_layernorm.weight"
        self.post_attention_layernorm = parameter(name, (hidden,), dtype, init="norm")
        if sparse:
            self.mlp = Moe(config, f"{prefix}mlp.", dtype)
        else:
            self.mlp = Mlp(f"{prefix}mlp.", hidden, config.intermediate_size, dtype)

    def __call__(self, hidden: Float[Array, "B S D"], angles: Angles, history: History) -> Float[Array, "B S D"]:
        """[B, S, D] -> [B, S, D], in the dtype of the parameters."""
        eps = self.config.rms_norm_eps
        with jax.named_scope("attention"):
            x = rms_norm(hidden, self.input_layernorm[...], eps)
            hidden = hidden + self.self_attn(x, angles, history).astype(hidden.dtype)
        with jax.named_scope("mlp"):
            x = rms_norm(hidden, self.post_attention_layernorm[...], eps)
            y = self.mlp(x) if isinstance(self.mlp, Moe) else sum_over_heads(self.mlp(x))
            return hidden + y.astype(hidden.dtype)
