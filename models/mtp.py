"""Multi-token prediction: one more decoder layer that drafts the token after next."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Float32
from numpy.typing import DTypeLike

from models.config import ModelConfig
from models.decoder_layer import DecoderLayer
from models.layers import Angles, History, linear, parameter, rms_norm


class MtpLayer(nnx.Module):
    """Layer `num_layers` of the checkpoint, in a group of its own: `len(layer_groups)`.

    It always has its own indexer (in a sparse model) and routed experts; embeddings and lm_head are the
    model's.
    """

    def __init__(self, config: ModelConfig, dtype: DTypeLike):
        self.config = config
        prefix, hidden = f"model.layers.{config.num_layers}.", config.hidden_size
        self.enorm = parameter(f"{prefix}enorm.weight", (hidden,), dtype, init="norm")
        self.hnorm = parameter(f"{prefix}hnorm.weight", (hidden,), dtype, init="norm")
        self.eh_proj = parameter(f"{prefix}eh_proj.weight", (hidden, 2 * hidden), dtype)
        self.block = DecoderLayer(
            config,
            dtype,
            layer=config.num_layers,
            group=len(config.layer_groups),
            leads_group=True,
            sparse=any(config.sparse_layers),
        )
        self.norm = parameter(f"{prefix}shared_head.norm.weight", (hidden,), dtype, init="norm")

    def __call__(
        self,
        embedding: Float[Array, "B S D"],
        previous_hidden: Float32[Array, "B S D"],
        angles: Angles,
        history: History,
    ) -> Float32[Array, "B S D"]:
        """Hidden state after shared_head.norm.

        Args:
          embedding, angles: of the tokens t+1, at their own positions.
          previous_hidden: of the tokens t: the main model's after its final norm, or this layer's last
            result.
        """
        eps = self.config.rms_norm_eps
        with jax.named_scope("mtp_layer"):
            previous = rms_norm(previous_hidden.astype(embedding.dtype), self.hnorm[...], eps)
            joined = jnp.concatenate([rms_norm(embedding, self.enorm[...], eps), previous], -1)
            hidden = self.block(linear(joined, self.eh_proj[...]), angles, history)
            return rms_norm(hidden.astype(jnp.float32), self.norm[...], eps)
