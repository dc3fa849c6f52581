"""Rows of a pool by slot, in jnp: the meaning of this kernel, its CPU path and the oracle of the other forms.

Every index goes to XLA as it stands: `wrap_negative_indices=False`, because jnp would turn EMPTY (-1) into
the last slot, and `[layer, slots]` in one indexing step, because `pool[layer][slots]` copies the whole layer
first.
"""

import jax.numpy as jnp
from jaxtyping import Array, Int32, UInt32

EMPTY = -1
"""Padding in slot lists, as in `ula_jax.types`: kernels import nothing from above."""


def gather(
    pool: UInt32[Array, "layers slots words"], layer: int | Int32[Array, ""], slots: Int32[Array, " n"]
) -> UInt32[Array, "n words"]:
    return pool.at[layer, slots].get(mode="fill", fill_value=0, wrap_negative_indices=False)


def gather_layers(
    pool: UInt32[Array, "layers slots words"], slots: Int32[Array, " n"]
) -> UInt32[Array, "layers n words"]:
    return pool.at[:, slots].get(mode="fill", fill_value=0, wrap_negative_indices=False)


def scatter(
    pool: UInt32[Array, "layers slots words"],
    layer: int | Int32[Array, ""],
    slots: Int32[Array, " n"],
    rows: UInt32[Array, "n words"],
) -> UInt32[Array, "layers slots words"]:
    at = pool.at[layer, _distinct(slots, pool.shape[1])]
    return at.set(rows, mode="drop", unique_indices=True, wrap_negative_indices=False)


def scatter_layers(
    pool: UInt32[Array, "layers slots words"],
    slots: Int32[Array, " n"],
    rows: UInt32[Array, "layers n words"],
) -> UInt32[Array, "layers slots words"]:
    at = pool.at[:, _distinct(slots, pool.shape[1])]
    return at.set(rows, mode="drop", unique_indices=True, wrap_negative_indices=False)


def _distinct(slots: Int32[Array, " n"], size: int) -> Int32[Array, " n"]:
    """EMPTY entries moved to distinct indices past the pool, so that the promise of unique indices holds for
    them."""
    past = size + jnp.arange(slots.shape[0], dtype=jnp.int32)
    return jnp.where(slots < 0, past, slots)
