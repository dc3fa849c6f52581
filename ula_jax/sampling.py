"""Choosing the next token, on the device."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.pytree import pytree
from ula_jax.types import Array, Float32, Int32


@pytree()
@dataclass(frozen=True)
class Sampling:
    """How each row of a batch is sampled."""

    temperature: Float32[Array | np.ndarray, "*ranks batch"]
    """0 means greedy."""
    seed: Int32[Array | np.ndarray, "*ranks batch"]


def sample(
    logits: Float32[Array, "batch vocab"], sampling: Sampling, positions: Int32[Array, " batch"]
) -> Int32[Array, " batch"]:
    """Next token of each row. Randomness depends on the request's seed and the position alone, so neither the
    company a request keeps in the batch nor a preemption changes its tokens."""

    def draw(row, temperature, seed, position):
        key = jax.random.fold_in(jax.random.key(seed), position)
        drawn = jax.random.categorical(key, row / jnp.maximum(temperature, 1e-6))
        return jnp.where(temperature > 0, drawn, jnp.argmax(row)).astype(jnp.int32)

    return jax.vmap(draw)(logits.astype(jnp.float32), sampling.temperature, sampling.seed, positions)
