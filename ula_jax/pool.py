"""The rows of one layer group on one device, in two tiers: device slots and host slots."""

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import sparse_gather
from pallas_kernels.pytree import pytree
from ula_jax import mapping as maps
from ula_jax.mapping import Mapping
from ula_jax.rows import RowFormat
from ula_jax.types import Lanes, Slots


@pytree()
@dataclass(frozen=True)
class Group:
    """Pools, map and policy state of one layer group.

    `device` holds one uint32 array [layers, slots, words] for each lane of the row format, `host` one [slots, layers,
    words] (`sparse_gather` says why). On the mesh every leaf has a leading axis of devices, sharded over `kv`, and
    `host` is of memory kind `pinned_host`.
    """

    device: Lanes
    host: Lanes
    mapping: Mapping
    policy: Any = ()
    buffer: Any = ()
    """The device's selected buffer (`placements.selected_buffer`), a Group of its own, if the placement has one."""


def init(layers: int, fmt: RowFormat, addresses: int, device_slots: int, host_slots: int, policy: Any = ()) -> Group:
    """Empty pools."""

    device = tuple(jnp.zeros((layers, device_slots, words), jnp.uint32) for words in fmt.lanes)
    host = tuple(jnp.zeros((host_slots, layers, words), jnp.uint32) for words in fmt.lanes)
    return Group(device, host, maps.init(addresses, device_slots, host_slots), policy)


def read(group: Group, layer: int, slots: Slots) -> Lanes:
    """Rows [n, words] of one layer (its number within the group) from device slots; zeros where EMPTY."""
    return tuple(sparse_gather.gather(lane, layer, slots) for lane in group.device)


def read_host(group: Group, layer: int, slots: Slots) -> Lanes:
    """Rows [n, words] of one layer from host slots; zeros where EMPTY."""
    return tuple(sparse_gather.read_host(lane, layer, slots) for lane in group.host)


def write(group: Group, layer: int, slots: Slots, rows: Lanes) -> Group:
    """Rows of one layer into device slots; EMPTY dropped."""
    device = tuple(
        sparse_gather.scatter(lane, layer, slots, row) for lane, row in zip(group.device, rows, strict=True)
    )
    return replace(group, device=device)


def write_host(group: Group, layer: int, slots: Slots, rows: Lanes) -> Group:
    """Rows of one layer into host slots; EMPTY dropped."""
    host = tuple(
        sparse_gather.write_host(lane, layer, slots, row) for lane, row in zip(group.host, rows, strict=True)
    )
    return replace(group, host=host)


@jax.named_scope("exchange")
def fetch(group: Group, source: Slots, target: Slots) -> Group:
    """Copy every layer's rows from host slots `source` to device slots `target`; EMPTY pairs are skipped."""
    return replace(group, device=sparse_gather.fetch(group.device, group.host, source, target))


@jax.named_scope("exchange")
def exchange(group: Group, source: Slots, target: Slots, victim: Slots, refuge: Slots) -> Group:
    """Move rows of every layer both ways at once: host `source` -> device `target`, device `victim` -> host `refuge`.

    Both directions move what was there before. Where a slot is left and filled, one place of the lists does both.
    """
    if not group.host[0].size:
        return group
    device, host = sparse_gather.exchange(group.device, group.host, source, target, victim, refuge)
    return replace(group, device=device, host=host)
