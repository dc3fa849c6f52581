"""A history that keeps whole arrays for one call: what parity needs, and nothing of caching."""

import jax
import jax.numpy as jnp


class NaiveHistory:
    """Selects by stable argsort and attends by masked softmax over the tokens of this call.

    After the trace `rows[layer]`, `keys[group]` and `selected[group]` (a mask [B, S, S]) hold what passed through.
    """

    def __init__(self, positions, topk, *, negate=False, mask_again=True, relu=jax.nn.relu):
        self.causal = positions[:, :, None] >= positions[:, None, :]
        self.topk, self.negate, self.mask_again, self.relu = topk, negate, mask_again, relu
        self.rows, self.keys, self.selected = {}, {}, {}
        self.current = None

    def select(self, group, query, weights, key):
        products = jnp.einsum("bshd,btd->bsht", query, key, precision="highest") * query.shape[-1] ** -0.5
        scores = jnp.einsum("bsh,bsht->bst", weights, self.relu(products), precision="highest")
        scores = jnp.where(self.causal, -scores if self.negate else scores, -jnp.inf)
        count = min(self.topk, key.shape[1])
        best = jnp.argsort(-scores, axis=-1, stable=True)[..., :count]
        mask = jax.nn.one_hot(best, key.shape[1], dtype=jnp.bool).any(-2)
        # With fewer than topk rows the picks reach into the future.
        self.current = mask & self.causal if self.mask_again else mask
        self.keys[group], self.selected[group] = key, self.current

    def select_all(self, group):
        self.current = self.selected[group] = self.causal

    def attend(self, layer, query, row, scale):
        self.rows[layer] = row
        scores = jnp.einsum("bshr,btr->bsht", query, row, precision="highest") * scale
        weights = jax.nn.softmax(jnp.where(self.current[:, :, None], scores, -jnp.inf), -1)
        latent_dim = query.shape[-1] - self.rope_dim
        return jnp.einsum("bsht,btc->bshc", weights, row[..., :latent_dim], precision="highest")

    rope_dim = 8  # of every tiny checkpoint
