"""The one file that knows memory kinds and how JAX versions differ about them.

Pools on the host are arrays of memory kind `pinned_host`; JAX types their memory space, so an ordinary op may not mix
them with device arrays. On CPU devices the kinds are typed alike but share one memory: types are checked, not speed.
"""

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ula_jax.types import Array, Int32, UInt32

HOST = "pinned_host"
DEVICE = "device"


def to_host(x: Array) -> Array:
    return jax.device_put(x, jax.memory.Space.Host)


def to_device(x: Array) -> Array:
    return jax.device_put(x, jax.memory.Space.Device)


def sharding(mesh: Mesh, spec: PartitionSpec, host: bool = False) -> NamedSharding:
    return NamedSharding(mesh, spec, memory_kind=HOST if host else DEVICE)


def host_gather(
    pool: UInt32[Array, "layers slots words"], slots: Int32[Array, " n"], layer: int | None = None
) -> UInt32[Array, "... n words"]:
    """Rows of a host pool on the device: [layers, n, words], or [n, words] of one layer. Zeros where EMPTY.

    Indices go to the host space and bounds are promised: with JAX's default index handling XLA copies the pool.
    """
    target, index = _select(pool, jnp.maximum(slots, 0), layer)
    rows = to_device(target.at[index].get(mode="promise_in_bounds", wrap_negative_indices=False))
    return jnp.where((slots >= 0)[:, None], rows, 0)


def host_scatter(
    pool: UInt32[Array, "layers slots words"],
    slots: Int32[Array, " n"],
    rows: UInt32[Array, "... n words"],
    layer: int | None = None,
) -> UInt32[Array, "layers slots words"]:
    """Host pool with rows written at distinct slots, EMPTY dropped; in place when the pool is donated."""
    beyond = pool.shape[0] * pool.shape[1] + jnp.arange(slots.shape[0], dtype=jnp.int32)
    target, index = _select(pool, jnp.where(slots >= 0, slots, beyond), layer)
    written = target.at[index].set(to_host(rows), mode="drop", unique_indices=True, wrap_negative_indices=False)
    return written.reshape(pool.shape)


def _select(pool: Array, slots: Array, layer: int | None):
    """The pool and an index of host arrays. One layer is an offset in the flat pool: a slice of it would be a copy,
    and a static index beside a host one is built on the device, which JAX refuses to mix."""
    if layer is None:
        return pool, (slice(None), to_host(slots))
    layers, num_slots, words = pool.shape
    return pool.reshape(layers * num_slots, words), (to_host(slots + layer * num_slots),)
