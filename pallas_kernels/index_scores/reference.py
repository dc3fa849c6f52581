"""What the lightning indexer computes (DeepSeek-V3.2, section 2), in jnp."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32


def index_scores(
    query: Float[Array, "batch steps heads dim"],
    weights: Float[Array, "batch steps heads"],
    keys: Float[Array, "batch length dim"],
) -> Float32[Array, "batch steps length"]:
    """sum over heads j of weights_j * relu(dim^-1/2 * query_j . key), in float32.

    The bits of a score may depend on `length`: XLA picks a product's order of sums by its shape.
    """
    query, keys = query.astype(jnp.float32), keys.astype(jnp.float32)
    dots = jnp.einsum("bshd,btd->bsht", query, keys, precision=jax.lax.Precision.HIGHEST)
    dots = dots * query.shape[-1] ** -0.5
    return jnp.sum(weights.astype(jnp.float32)[..., None] * jax.nn.relu(dots), axis=2)
