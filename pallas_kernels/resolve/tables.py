"""The map between addresses and slots, and what a step finds in it: words that every form shares."""

from typing import NamedTuple

from jaxtyping import Array, Int32

EMPTY = -1
"""Padding in lists, no address in a table: as in `ula_jax.types`, because kernels import nothing from above."""

NOWHERE = -(2**31)
"""Location of an address that holds no row."""


class Tables(NamedTuple):
    """Where each address is and what each slot holds. A location is a device slot, the bitwise-not of a host slot, or
    NOWHERE."""

    location: Int32[Array, " addresses"]
    device_address: Int32[Array, " device_slots"]
    host_address: Int32[Array, " host_slots"]
    host_free: Int32[Array, " host_slots"]
    """A stack: the first `host_free_count` entries are the free host slots."""
    host_free_count: Int32[Array, ""]


class Counts(NamedTuple):
    """What `find` counted, and then `move`. One array of these in this order goes through both."""

    entries: Int32[Array, ""]
    """Entries of the selections, repeats counted."""
    hits: Int32[Array, ""]
    """Distinct rows that were on the device."""
    misses: Int32[Array, ""]
    """Distinct rows that were on the host."""
    fresh: Int32[Array, ""]
    """New rows, which were nowhere."""
    free: Int32[Array, ""]
    """Free host slots before the move."""
    victims: Int32[Array, ""]
    """Rows that left the device."""
    written: Int32[Array, ""]
    """Rows that go to the host."""
    lost: Int32[Array, ""]
    """Rows for which there was no slot."""


class Found(NamedTuple):
    """What a step needs; padding (EMPTY) stands behind each list."""

    slots: Int32[Array, " twice_arrivals"]
    """First half: device slots of the needed rows that are there, ascending. Second half, for those that arrive:
    EMPTY."""
    arriving: Int32[Array, " arrivals"]
    """Addresses without a device slot: fresh ones in the order of the new rows, then those on the host by ascending
    host slot, the order in which a link reads fastest."""
    source: Int32[Array, " arrivals"]
    """Host slot of each, EMPTY for fresh ones."""
    count: Int32[Array, ""]
    """Addresses that arrive."""
    counts: Int32[Array, " counts"]


class Moves(NamedTuple):
    """Rows to move, pair by pair: host slot `Found.source` to device slot `target`, device slot `victim` to host slot
    `refuge`. Where both pairs of a place are filled they name the same device slot and, without copies, the same host
    slot."""

    target: Int32[Array, " arrivals"]
    victim: Int32[Array, " arrivals"]
    refuge: Int32[Array, " arrivals"]


def limit(selected: int, new: int, tables: Tables) -> int:
    """Length of the lists: no more rows can be there than are asked for, and there is no place for more arrivals than
    device slots."""
    return min(selected + new, tables.device_address.shape[0])
