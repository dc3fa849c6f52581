"""What exact top-k means, in jnp."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32, Int32


def top_k(scores: Float32[Array, "*batch length"], k: int) -> Int32[Array, "*batch k"]:
    """Positions of the k largest scores, largest first; ties go to the lowest position.

    NaN ranks below every number except -inf, so a poisoned score can never push out a real one.
    """
    length = scores.shape[-1]
    if not 1 <= k <= length:
        raise ValueError(f"top-k: expected k from 1 to the {length} scores, found {k}; pass min(k, length)")
    return jax.lax.top_k(jnp.where(jnp.isnan(scores), jnp.finfo(jnp.float32).min, scores), k)[1]
