"""The decoder: embeddings, layers, final norm and logits. It keeps no KV; a history does.

Everything here runs inside `jax.shard_map` over the mesh axes `dp` and `tp` with explicit collectives. Outside of it a
model is a tree of sharded arrays: `graphdef, state = nnx.split(model)`, in_specs from
`nnx.get_partition_spec(state)`, and `nnx.merge(graphdef, local_state)` inside.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Float32, Int32
from numpy.typing import DTypeLike

from models.config import ModelConfig
from models.decoder_layer import DecoderLayer
from models.layers import Angles, History, linear_f32, parameter, rms_norm, rope_angles
from models.mtp import MtpLayer
from ula_jax.parallel import TP, Parallel


class Decoder(nnx.Module):
    """A whole model. Built here its parameters are shapes only; `models.weights` loads or draws them."""

    def __init__(self, config: ModelConfig, parallel: Parallel, dtype: DTypeLike = jnp.float32, *, mtp: bool = False):
        config.check(parallel)
        if mtp and not config.num_mtp_layers:
            raise ValueError(
                "mtp: expected a model with a multi-token-prediction layer, found "
                "num_nextn_predict_layers = 0; pass mtp=False"
            )
        self.config, self.parallel = config, parallel
        vocab, hidden = config.vocab_size, config.hidden_size
        self.embed_tokens = parameter("model.embed_tokens.weight", (vocab, hidden), dtype, init="embedding")
        self.layers = nnx.List(
            DecoderLayer(
                config, dtype,
                layer=layer, group=group, leads_group=layer == layers[0], sparse=config.sparse_layers[layer],
            )
            for group, layers in enumerate(config.layer_groups)
            for layer in layers
        )  # fmt: skip
        self.norm = parameter("model.norm.weight", (hidden,), dtype, init="norm")
        self.lm_head = parameter("lm_head.weight", (vocab, hidden), dtype, P(TP, None))
        self.mtp = MtpLayer(config, dtype) if mtp else None

    def __call__(
        self, tokens: Int32[Array, "B S"], positions: Int32[Array, "B S"], history: History
    ) -> Float32[Array, "B S D"]:
        """Hidden state after the final norm.

        Args:
          tokens, positions: padding carries token 0 and position 0; what it computes is finite and touches
            nothing.
          history: selects rows and attends over them (`ula_jax.history`).
        """
        hidden = self.embed(tokens)
        angles = self.angles(positions)
        for index, layer in enumerate(self.layers):
            with jax.named_scope(f"layer_{index}"):
                hidden = layer(hidden, angles, history)
        return rms_norm(hidden.astype(jnp.float32), self.norm[...], self.config.rms_norm_eps)

    def embed(self, tokens: Int32[Array, "B S"]) -> Float[Array, "B S D"]:
        return self.embed_tokens[...].at[tokens].get(mode="clip")

    def angles(self, positions: Int32[Array, "B S"]) -> Angles:
        return rope_angles(self.config.rope, self.config.qk_rope_head_dim, positions)

    def logits(self, hidden: Float32[Array, "B S D"]) -> Float32[Array, "B S V"]:
        """Over the whole vocabulary, on every device."""
        head = self.lm_head[...]
        with jax.named_scope("lm_head"):
            logits = linear_f32(hidden.astype(head.dtype), head)
            if self.parallel.tp > 1:
                logits = jax.lax.all_gather(logits, TP, axis=2, tiled=True)
            return logits

    def draft(
        self,
        tokens: Int32[Array, "B S"],
        previous_hidden: Float32[Array, "B S D"],
        positions: Int32[Array, "B S"],
        history: History,
    ) -> Float32[Array, "B S D"]:
        """One step of the MTP layer: from token t+1 at `positions` and the hidden state of token t, that of
        t+1.

        `logits` of the result are for token t+2, and the result is the next draft step's `previous_hidden`.
        """
        if self.mtp is None:
            raise ValueError("draft: expected a model with its MTP layer, found none; load it with mtp=True")
        return self.mtp(self.embed(tokens), previous_hidden, self.angles(positions), history)
