"""What exact top-k means, in jnp."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32, Int32

EMPTY = -1
"""Padding in lists of positions, as in `ula_jax.types`: kernels import nothing from above."""


def top_k(scores: Float32[Array, "*batch length"], k: int) -> Int32[Array, "*batch k"]:
    """Positions by rank; see the package."""
    return jax.lax.top_k(_comparable(scores), k)[1]


def select(
    scores: Float32[Array, "*batch length"], k: int, lengths: Int32[Array, "*batch"]
) -> Int32[Array, "*batch best"]:
    """Positions in ascending order; see the package."""
    length = scores.shape[-1]
    # Behind the end stands -inf, and a -inf before the end comes first because its position is lower.
    scores = jnp.where(jnp.arange(length) < lengths[..., None], scores, -jnp.inf)
    picks = top_k(scores, min(k, length))
    picks = jnp.sort(jnp.where(picks < lengths[..., None], picks, length), axis=-1)
    return jnp.where(picks < length, picks, EMPTY)


def _comparable(scores: Float32[Array, "*batch length"]) -> Float32[Array, "*batch length"]:
    """The scores in such a form that any order of floats, `lax.top_k`'s by their bits too, is the package's."""
    limits = jnp.finfo(jnp.float32)
    # XLA flushes subnormal numbers in some comparisons and not in others: here they are 0 in all.
    scores = jnp.where(jnp.abs(scores) < limits.smallest_normal, 0.0, scores)
    return jnp.where(jnp.isnan(scores), limits.min, scores)
