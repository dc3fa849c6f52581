"""Address <-> location for the rows of one layer group on one device.

A location is a device slot (>= 0), the bitwise-not of a host slot (< 0), or NOWHERE. Every function is pure; EMPTY in
an index list is dropped. Free host slots are a stack; free device slots are the policy's business. A step's look-ups go
through the kernels of `pallas_kernels.resolve`; what happens between steps or in a few rows is written out here.
"""

from dataclasses import dataclass, replace

import jax.numpy as jnp

from pallas_kernels import resolve
from pallas_kernels.pytree import pytree
from pallas_kernels.resolve.reference import lookup, store
from ula_jax.types import EMPTY, NOWHERE, Addresses, Array, Bool, Int32, Scalar, Slots


@pytree()
@dataclass(frozen=True)
class Mapping:
    """Where each address is, and which address each slot holds (EMPTY when none)."""

    location: Int32[Array, " addresses"]
    device_address: Int32[Array, " device_slots"]
    host_address: Int32[Array, " host_slots"]
    host_free: Int32[Array, " host_slots"]
    """The first `host_free_count` entries are the free host slots."""
    host_free_count: Scalar

    @property
    def tables(self) -> resolve.Tables:
        """The same for kernels."""
        return resolve.Tables(
            self.location, self.device_address, self.host_address, self.host_free, self.host_free_count
        )


def init(addresses: int, device_slots: int, host_slots: int) -> Mapping:
    """Nothing stored. The stack gives out host slots in ascending order."""
    return Mapping(
        location=jnp.full(addresses, NOWHERE, jnp.int32),
        device_address=jnp.full(device_slots, EMPTY, jnp.int32),
        host_address=jnp.full(host_slots, EMPTY, jnp.int32),
        host_free=jnp.arange(host_slots - 1, -1, -1, dtype=jnp.int32),
        host_free_count=jnp.int32(host_slots),
    )


def locate(mapping: Mapping, addresses: Addresses) -> Addresses:
    """Location of each address; NOWHERE where EMPTY."""
    return lookup(mapping.location, addresses, NOWHERE)


def device_slot(locations: Addresses) -> Addresses:
    """Device slot of each location, EMPTY where it is none."""
    return jnp.where(locations >= 0, locations, EMPTY)


def host_slot(locations: Addresses) -> Addresses:
    """Host slot of each location, EMPTY where it is none."""
    return jnp.where((locations < 0) & (locations != NOWHERE), ~locations, EMPTY)


def find(mapping: Mapping, selected: Addresses, new: Slots) -> resolve.Found:
    """What a step needs: `pallas_kernels.resolve.find`."""
    return resolve.find(mapping.tables, selected.reshape(-1), new)


def move(
    mapping: Mapping,
    arriving: Addresses,
    source: Slots,
    given: Slots,
    counts: Int32[Array, " counts"],
    copies: bool = False,
) -> tuple[resolve.Moves, Mapping, Int32[Array, " counts"]]:
    """The map with the arriving addresses in the slots given: `pallas_kernels.resolve.move`."""
    moves, tables, counts = resolve.move(mapping.tables, arriving, source, given, counts, copies=copies)
    return moves, Mapping(*tables), counts


def slots_of(mapping: Mapping, selected: Addresses, new: Slots) -> tuple[Addresses, Slots]:
    """Device slots of selected and of new addresses, EMPTY where the row is elsewhere."""
    found, places = resolve.slots_of(mapping.location, selected.reshape(-1), new)
    return found.reshape(selected.shape), places


def put_on_device(mapping: Mapping, addresses: Slots, slots: Slots) -> Mapping:
    """Addresses now live in these device slots; what the slots held before must have been moved away."""
    return replace(
        mapping,
        location=store(mapping.location, jnp.where(slots >= 0, addresses, EMPTY), slots),
        device_address=store(mapping.device_address, jnp.where(addresses >= 0, slots, EMPTY), addresses),
    )


def put_on_host(mapping: Mapping, addresses: Slots, slots: Slots) -> Mapping:
    """Addresses now live in these host slots, taken with `take_host`."""
    return replace(
        mapping,
        location=store(mapping.location, jnp.where(slots >= 0, addresses, EMPTY), ~slots),
        host_address=store(mapping.host_address, jnp.where(addresses >= 0, slots, EMPTY), addresses),
    )


def free_host(mapping: Mapping, slots: Slots) -> Mapping:
    """Push host slots on the free stack."""
    freed = slots >= 0
    place = jnp.where(freed, mapping.host_free_count + jnp.cumsum(freed) - 1, EMPTY)
    return replace(
        mapping,
        host_address=store(mapping.host_address, slots, jnp.full_like(slots, EMPTY)),
        host_free=store(mapping.host_free, place, slots),
        host_free_count=mapping.host_free_count + jnp.sum(freed, dtype=jnp.int32),
    )


def take_host(mapping: Mapping, wanted: Bool[Array, " n"]) -> tuple[Slots, Mapping]:
    """A free host slot for each wanted entry, EMPTY for the others and where none is left."""
    place = mapping.host_free_count - jnp.cumsum(wanted)
    granted = wanted & (place >= 0)
    slots = lookup(mapping.host_free, jnp.where(granted, place, EMPTY), EMPTY)
    taken = jnp.sum(granted, dtype=jnp.int32)
    return slots, replace(mapping, host_free_count=mapping.host_free_count - taken)


def drop(mapping: Mapping, addresses: Slots) -> tuple[Slots, Mapping]:
    """Forget addresses: their host slots are freed, their device slots returned for the policy to forget."""
    location = locate(mapping, addresses)
    slots = device_slot(location)
    mapping = free_host(mapping, host_slot(location))
    return slots, replace(
        mapping,
        location=store(mapping.location, addresses, jnp.full_like(addresses, NOWHERE)),
        device_address=store(mapping.device_address, slots, jnp.full_like(slots, EMPTY)),
    )


def forget_copies(mapping: Mapping, addresses: Slots) -> tuple[Slots, Mapping]:
    """`drop` for inclusive placements, where the host slot of a row is its address and is never handed out."""
    slots = device_slot(locate(mapping, addresses))
    nothing = jnp.full_like(addresses, EMPTY)
    return slots, replace(
        mapping,
        location=store(mapping.location, addresses, jnp.full_like(addresses, NOWHERE)),
        device_address=store(mapping.device_address, slots, nothing),
        host_address=store(mapping.host_address, addresses, nothing),
    )


def distinct(addresses: Slots, limit: int) -> Int32[Array, " limit"]:
    """The distinct addresses in ascending order, EMPTY padded. `limit` bounds their number by derivation."""
    last = jnp.iinfo(jnp.int32).max
    ordered = jnp.sort(jnp.where(addresses >= 0, addresses, last))
    first = (ordered != jnp.concatenate([jnp.full(1, EMPTY, jnp.int32), ordered[:-1]])) & (ordered != last)
    place = jnp.where(first, jnp.cumsum(first) - 1, EMPTY)
    return store(jnp.full(limit, EMPTY, jnp.int32), place, ordered)
