"""A history that keeps whole arrays for one call: what parity needs, and nothing of caching."""

import jax
import jax.numpy as jnp


class NaiveHistory:
    """Selects by rank and attends by masked softmax over the tokens of this call.

    After the trace `rows[layer]`, `keys[group]`, `scores[group]` and `selected[group]` (a mask [B, S, S]) hold what
    passed through. The options each break one thing, for controls.
    """

    def __init__(self, config, positions, *, valid=None, negate=False, mask_again=True, relu=True, hadamard=None):
        self.latent, self.topk = config.kv_lora_rank, config.index_topk
        self.positions = positions
        self.causal = positions[:, :, None] >= positions[:, None, :]
        if valid is not None:  # padding is seen by itself alone
            self.causal = self.causal & (jnp.eye(positions.shape[1], dtype=jnp.bool) | valid[:, None])
        self.negate, self.mask_again, self.relu, self.hadamard = negate, mask_again, relu, hadamard
        self.rows, self.keys, self.scores, self.selected = {}, {}, {}, {}
        self.current = None

    def select(self, group, query, weights, key):
        self.keys[group] = key
        if self.hadamard is not None:
            query, key = query @ self.hadamard, key @ self.hadamard
        products = jnp.einsum("bshd,btd->bsht", query, key, precision="highest") * query.shape[-1] ** -0.5
        products = jax.nn.relu(products) if self.relu else products
        scores = jnp.einsum("bsh,bsht->bst", weights, products, precision="highest")
        self.scores[group] = scores = jnp.where(self.causal, -scores if self.negate else scores, -jnp.inf)
        # A token's rank is the number of better ones: higher, or equal and earlier. (A sort takes long to compile.)
        one, other = scores[..., :, None], scores[..., None, :]
        earlier = jnp.tril(jnp.ones((key.shape[1],) * 2, jnp.bool), -1)
        mask = ((other > one) | (other == one) & earlier).sum(-1) < self.topk
        # With fewer than topk rows the picks reach into the future.
        self.current = self.selected[group] = mask & self.causal if self.mask_again else mask

    def select_all(self, group):
        self.current = self.selected[group] = self.causal

    def attend(self, layer, query, row, scale):
        self.rows[layer] = row
        scores = jnp.einsum("bshr,btr->bsht", query, row, precision="highest") * scale
        weights = jax.nn.softmax(jnp.where(self.current[:, :, None], scores, -jnp.inf), -1)
        return jnp.einsum("bsht,btc->bshc", weights, row[..., : self.latent], precision="highest")
