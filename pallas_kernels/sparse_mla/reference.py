"""What sparse MLA attention means, in jnp."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32

HIGHEST = jax.lax.Precision.HIGHEST  # a GPU would take TF32 for float32


def sparse_mla(
    query: Float[Array, "batch steps heads width"],
    rows: Float32[Array, "batch steps selected width"],
    valid: Bool[Array, "batch steps selected"],
    *,
    scale: float,
    latent: int,
) -> tuple[Float32[Array, "batch steps heads latent"], Float32[Array, "batch steps heads"]]:
    """Multi-query attention with `width`-number keys whose first `latent` numbers are the values.

    Returns the softmax-weighted latent and the natural log-sum-exp of the scaled scores. Rows that are not valid
    weigh nothing whatever they hold (NaN too); a query with no valid row gives output 0 and log-sum-exp -inf.
    """
    rows = jnp.where(valid[..., None], rows, 0.0)
    scores = jnp.einsum("bshd,bskd->bshk", query.astype(jnp.float32), rows, precision=HIGHEST) * scale
    scores = jnp.where(valid[:, :, None], scores, -jnp.inf)
    top = jnp.max(scores, axis=-1, keepdims=True)
    top = jnp.where(jnp.isfinite(top), top, 0.0)
    weights = jnp.exp(scores - top)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    weights = weights / jnp.where(total > 0, total, 1.0)
    output = jnp.einsum("bshk,bskc->bshc", weights, rows[..., :latent], precision=HIGHEST)
    return output, jnp.log(total[..., 0]) + top[..., 0]
