"""Rows by slot in jnp: the meaning of this kernel, its CPU path and the oracle of the other form.

On the device every index goes to XLA as it stands: `wrap_negative_indices=False`, because jnp would turn EMPTY (-1)
into the last slot, and `[layer, slots]` in one indexing step, because `pool[layer][slots]` copies a whole layer first.

On the host XLA reads and writes a pool where it lies if the indices lie there too and reads promise their bounds; with
anything else it copies the pool. One layer is a place in the flat pool: a static index beside a host one is built on
the device, which JAX refuses to mix. What XLA reads on the host lands in host memory first and is copied from there.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int32, UInt32

EMPTY = -1
"""Padding in slot lists, as in `ula_jax.types`: kernels import nothing from above."""

Lanes = tuple[UInt32[Array, "layers _ _"], ...]
HostLanes = tuple[UInt32[Array, "_ layers _"], ...]


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
    return _set(pool.at[layer, _distinct(slots, pool.shape[1])], rows)


def scatter_layers(
    pool: UInt32[Array, "layers slots words"],
    slots: Int32[Array, " n"],
    rows: UInt32[Array, "layers n words"],
) -> UInt32[Array, "layers slots words"]:
    return _set(pool.at[:, _distinct(slots, pool.shape[1])], rows)


def read_host(
    pool: UInt32[Array, "slots layers words"], layer: int | Int32[Array, ""], slots: Int32[Array, " n"]
) -> UInt32[Array, "n words"]:
    return _read(pool.reshape(-1, pool.shape[2]), jnp.where(slots < 0, EMPTY, slots * pool.shape[1] + layer))


def write_host(
    pool: UInt32[Array, "slots layers words"],
    layer: int | Int32[Array, ""],
    slots: Int32[Array, " n"],
    rows: UInt32[Array, "n words"],
) -> UInt32[Array, "slots layers words"]:
    flat = pool.reshape(-1, pool.shape[2])
    places = _distinct(jnp.where(slots < 0, EMPTY, slots * pool.shape[1] + layer), flat.shape[0])
    return _set(flat.at[beside(places, pool)], beside(rows, pool)).reshape(pool.shape)


def fetch(device: Lanes, host: HostLanes, source: Int32[Array, " n"], target: Int32[Array, " n"]) -> Lanes:
    source, target = _pairs(source, target)
    return tuple(
        scatter_layers(lane, target, jnp.swapaxes(_read(rows, source), 0, 1))
        for lane, rows in zip(device, host, strict=True)
    )


def write_back(device: Lanes, host: HostLanes, victim: Int32[Array, " n"], refuge: Int32[Array, " n"]) -> HostLanes:
    victim, refuge = _pairs(victim, refuge)
    return tuple(
        _write(lane, refuge, gather_layers(rows, victim)) for lane, rows in zip(host, device, strict=True)
    )


def exchange(
    device: Lanes,
    host: HostLanes,
    source: Int32[Array, " n"],
    target: Int32[Array, " n"],
    victim: Int32[Array, " n"],
    refuge: Int32[Array, " n"],
) -> tuple[Lanes, HostLanes]:
    """Any slots may be left and filled. The barrier sets all reads before all writes: without it XLA would copy a pool
    that is read and then written."""
    source, target = _pairs(source, target)
    victim, refuge = _pairs(victim, refuge)
    up = [jnp.swapaxes(_read(lane, source), 0, 1) for lane in host]
    down = [gather_layers(lane, victim) for lane in device]
    up, down = jax.lax.optimization_barrier((up, down))
    return (
        tuple(scatter_layers(lane, target, rows) for lane, rows in zip(device, up, strict=True)),
        tuple(_write(lane, refuge, rows) for lane, rows in zip(host, down, strict=True)),
    )


def beside(x: Array, pool: Array) -> Array:
    """`x` in the memory of `pool`: JAX types memory spaces, and no operation mixes them."""
    space = jax.typeof(pool).memory_space
    return x if jax.typeof(x).memory_space == space else jax.device_put(x, space)


def _read(pool: UInt32[Array, "slots ..."], slots: Int32[Array, " n"]) -> UInt32[Array, "n ..."]:
    """Rows of a host pool on the device, zeros where EMPTY."""
    at = pool.at[beside(jnp.maximum(slots, 0), pool)]
    rows = beside(at.get(mode="promise_in_bounds", wrap_negative_indices=False), slots)
    return jnp.where((slots < 0).reshape(-1, *[1] * (rows.ndim - 1)), 0, rows)


def _write(pool: UInt32[Array, "slots layers words"], slots: Int32[Array, " n"], rows: UInt32[Array, "layers n words"]):
    at = pool.at[beside(_distinct(slots, pool.shape[0]), pool)]
    return _set(at, beside(jnp.swapaxes(rows, 0, 1), pool))


def _set(at: Any, rows: Array) -> Array:
    return at.set(rows, mode="drop", unique_indices=True, wrap_negative_indices=False)


def _distinct(slots: Int32[Array, " n"], size: int) -> Int32[Array, " n"]:
    """EMPTY entries moved to distinct indices past the pool, so that the promise of unique indices holds for
    them."""
    past = size + jnp.arange(slots.shape[0], dtype=jnp.int32)
    return jnp.where(slots < 0, past, slots)


def _pairs(left: Int32[Array, " n"], right: Int32[Array, " n"]) -> tuple[Int32[Array, " n"], Int32[Array, " n"]]:
    """Both EMPTY where one is."""
    both = (left >= 0) & (right >= 0)
    return jnp.where(both, left, EMPTY), jnp.where(both, right, EMPTY)
