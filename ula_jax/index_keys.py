"""Index keys of one layer group: on the device in every placement, striped like the rows.

A device scores the positions that it owns; one all-gather of scores (UlaCache's) gives every device all of them.
"""

import jax
import jax.numpy as jnp

from pallas_kernels.index_scores import index_scores
from ula_jax.parallel import Parallel
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
    parallel: Parallel,
) -> Float32[Array, "batch steps length"]:
    """Index scores of every position that the page table covers, on every device; unmasked.

    Under TP positions are scored in as many parts as there are devices, part r being positions r mod P, whether one
    device has all parts or each its own: a product's shape decides the order of its sums, and so the last bits.
    """
    batch, length = page_table.shape[0], page_table.shape[1] * page_size
    parts = parallel.size if parallel.tp else 1
    striped = striping.devices > 1
    rank = jax.lax.axis_index(parallel.axis) if striped else 0
    mine = 1 if striped else parts
    positions = (rank + jnp.arange(mine))[:, None] + parts * jnp.arange(-(-length // parts))
    owned = striping.local(address(page_table, page_size, positions.reshape(1, -1)), rank)
    found = keys.at[owned].get(mode="fill", fill_value=0, wrap_negative_indices=False)
    found = found.reshape(batch, mine, -1, found.shape[-1])
    if striped:
        part = index_scores(query, weights, found[:, 0])
        every = jax.lax.all_gather(part, parallel.axis, axis=-1)
    else:
        every = jax.lax.map(lambda one: index_scores(query, weights, one), jnp.moveaxis(found, 1, 0))
        every = jnp.moveaxis(every, 0, -1)
    return every.reshape(*query.shape[:2], -1)[..., :length]  # [batch, steps, length / parts, parts] before


def address(page_table: Int32[Array, "batch pages"], page_size: int, positions: Addresses) -> Addresses:
    """Address of each position [batch or 1, n]; EMPTY where the table has no page."""
    page = jnp.take_along_axis(page_table, positions // page_size, axis=1, mode="fill", fill_value=-1)
    return jnp.where(page >= 0, page * page_size + positions % page_size, -1)
