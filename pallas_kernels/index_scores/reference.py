"""What the lightning indexer computes (DeepSeek-V3.2, section 2), in jnp."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32

EMPTY = -1


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


def paged_index_scores(
    query: Float32[Array, "batch steps heads dim"],
    weights: Float32[Array, "batch steps heads"],
    keys: tuple[Array, ...],
    page_table: Int32[Array, "batch pages"],
    page_size: int,
    lengths: Int32[Array, "batch steps"],
    parts: int = 1,
) -> Float32[Array, "batch steps length"]:
    """`index_scores` of keys that are gathered first, one part at a time."""
    length = page_table.shape[1] * page_size

    def part(first) -> Float32[Array, "batch steps part"]:
        positions = first + parts * jnp.arange(-(-length // parts))
        rows = address(page_table, page_size, positions[None])
        found = (lane.at[rows].get(mode="fill", fill_value=0, wrap_negative_indices=False) for lane in keys)
        scores = index_scores(query, weights, numbers(tuple(found)))
        return jnp.where(positions < lengths[..., None], scores, -jnp.inf)

    if parts == 1:
        return part(0)
    every = jnp.moveaxis(jax.lax.map(part, jnp.arange(parts)), 0, -1)
    return every.reshape(*lengths.shape, -1)[..., :length]  # [batch, steps, length / parts, parts] before


def numbers(keys: tuple[Array, ...]) -> Float32[Array, "*rows dim"]:
    """What stored keys, (numbers,) or (codes, scales), stand for."""
    stored, *scales = keys
    return stored.astype(jnp.float32) * (scales[0][..., None] if scales else 1)


def address(
    page_table: Int32[Array, "batch pages"], page_size: int, positions: Int32[Array, "..."]
) -> Int32[Array, "..."]:
    """Address of each position [batch or 1, n]; EMPTY where the table has no page."""
    page = jnp.take_along_axis(page_table, positions // page_size, axis=1, mode="fill", fill_value=EMPTY)
    return jnp.where(page >= 0, page * page_size + positions % page_size, EMPTY)
