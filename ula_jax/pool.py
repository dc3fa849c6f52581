"""The rows of one layer group on one device, in two tiers: device slots and host slots."""

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import sparse_gather
from pallas_kernels.pytree import pytree
from ula_jax import mapping as maps
from ula_jax import memory
from ula_jax.mapping import Mapping
from ula_jax.rows import RowFormat
from ula_jax.types import Lanes, Slots


@pytree()
@dataclass(frozen=True)
class Group:
    """Pools, map and policy state of one layer group.

    `device` and `host` hold one uint32 array [layers, slots, words] for each lane of the row format. On the mesh
    every leaf has a leading axis of devices, sharded over `kv`, and `host` is of memory kind `pinned_host`.
    """

    device: Lanes
    host: Lanes
    mapping: Mapping
    policy: Any = ()


def init(layers: int, fmt: RowFormat, addresses: int, device_slots: int, host_slots: int, policy: Any = ()) -> Group:
    """Empty pools."""

    def tier(slots: int) -> Lanes:
        return tuple(jnp.zeros((layers, slots, words), jnp.uint32) for words in fmt.lanes)

    return Group(tier(device_slots), tier(host_slots), maps.init(addresses, device_slots, host_slots), policy)


def read(group: Group, layer: int, slots: Slots) -> Lanes:
    """Rows [n, words] of one layer (its number within the group) from device slots; zeros where EMPTY."""
    return tuple(sparse_gather.gather(lane, layer, slots) for lane in group.device)


def read_host(group: Group, layer: int, slots: Slots) -> Lanes:
    """Rows [n, words] of one layer from host slots; zeros where EMPTY."""
    return tuple(memory.host_gather(lane, slots, layer) for lane in group.host)


def write(group: Group, layer: int, slots: Slots, rows: Lanes) -> Group:
    """Rows of one layer into device slots; EMPTY dropped."""
    device = tuple(
        sparse_gather.scatter(lane, layer, slots, row) for lane, row in zip(group.device, rows, strict=True)
    )
    return replace(group, device=device)


def write_host(group: Group, layer: int, slots: Slots, rows: Lanes) -> Group:
    """Rows of one layer into host slots; EMPTY dropped."""
    host = tuple(
        memory.host_scatter(lane, slots, row, layer) for lane, row in zip(group.host, rows, strict=True)
    )
    return replace(group, host=host)


def fetch(group: Group, source: Slots, target: Slots) -> Group:
    """Copy every layer's rows from host slots `source` to device slots `target`; EMPTY pairs are skipped."""
    device = tuple(
        sparse_gather.scatter_layers(lane, target, memory.host_gather(host, source))
        for lane, host in zip(group.device, group.host, strict=True)
    )
    return replace(group, device=device)


def exchange(group: Group, source: Slots, target: Slots, victim: Slots, refuge: Slots) -> Group:
    """Move rows of every layer both ways at once: host `source` -> device `target`, device `victim` -> host `refuge`.

    All reads come before all writes, so a slot may be left and filled in the same exchange. The barrier is that order:
    without a dependence XLA would copy a pool that is read and then written.
    """
    if not group.host[0].shape[1]:
        return group
    up = tuple(memory.host_gather(lane, source) for lane in group.host)
    down = tuple(sparse_gather.gather_layers(lane, victim) for lane in group.device)
    up, down = jax.lax.optimization_barrier((up, down))
    device = tuple(
        sparse_gather.scatter_layers(lane, target, rows) for lane, rows in zip(group.device, up, strict=True)
    )
    host = tuple(memory.host_scatter(lane, refuge, rows) for lane, rows in zip(group.host, down, strict=True))
    return replace(group, device=device, host=host)
