"""Index keys of one layer group: on the device in every placement, striped like the rows.

A device scores the positions that it owns; one all-gather of scores (UlaCache's) gives every device all of them.
"""

import jax
import jax.numpy as jnp

from pallas_kernels.index_scores import index_scores
from ula_jax.parallel import AXIS
from ula_jax.striping import Striping
from ula_jax.types import Addresses, Array, Float32, Int32, Scalar


def append(
    keys: Float32[Array, "addresses dim"] | Array,
    addresses: Addresses,
    new: Array,
    striping: Striping,
    rank: Scalar | int,
) -> Array:
    """Keys with those of the new addresses [batch, steps] written where this device owns them."""
    local = striping.local(addresses.reshape(-1), rank)
    rows = new.reshape(-1, new.shape[-1]).astype(keys.dtype)
    return keys.at[local].set(rows, mode="drop", wrap_negative_indices=False)


def scores(
    keys: Array,
    page_table: Int32[Array, "batch pages"],
    page_size: int,
    query: Float32[Array, "batch steps heads dim"],
    weights: Float32[Array, "batch steps heads"],
    striping: Striping,
    rank: Scalar | int,
) -> Float32[Array, "batch steps length"]:
    """Index scores of every position that the page table covers, on every device; unmasked."""
    stripe = striping.devices
    owned = rank + stripe * jnp.arange(page_table.shape[1] * page_size // stripe)
    local = striping.local(address(page_table, page_size, owned[None]), rank)
    found = keys.at[local].get(mode="fill", fill_value=0, wrap_negative_indices=False)
    part = index_scores(query, weights, found)
    if stripe == 1:
        return part
    every = jax.lax.all_gather(part, AXIS, axis=-1)  # [batch, steps, length / stripe, stripe]
    return every.reshape(*part.shape[:2], -1)


def address(page_table: Int32[Array, "batch pages"], page_size: int, positions: Addresses) -> Addresses:
    """Address of each position [batch or 1, n]; EMPTY where the table has no page."""
    page = jnp.take_along_axis(page_table, positions // page_size, axis=1, mode="fill", fill_value=-1)
    return jnp.where(page >= 0, page * page_size + positions % page_size, -1)
