"""The selected buffer (UlaCache): each device's cache, under TP, of rows that it fetched from their owners.

All devices of a stripe select alike. So their buffers hold the same rows in the same slots, and each device knows
without a word which rows all of them miss. It is a pool beside the device's own, evicted by the same policy, whose
"host" are the owners: the host slot of a row is its address. Owners look up, and fetch from their hosts, only what is
in no buffer.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp

from pallas_kernels import sparse_gather
from pallas_kernels.resolve.reference import store
from ula_jax import mapping as maps
from ula_jax import pool
from ula_jax.parallel import TP
from ula_jax.placements import shared_pool
from ula_jax.placements.base import Counters, Readable, Selection
from ula_jax.policies.base import Policy
from ula_jax.pool import Group
from ula_jax.rows import RowFormat
from ula_jax.striping import Striping
from ula_jax.types import EMPTY, NOWHERE, Addresses, Array, Scalar, Slots

SHARE = 8
"""An owner sends this part of its even share of a step's selections in one round."""

Exchange = Literal["all-gather", "all-to-all"]
"""Either brings every device the same rows, and the same bytes. For an all-to-all an owner first copies what it sends
once for each device."""
EXCHANGES = get_args(Exchange)

Resolve = Callable[[Group, Selection], tuple[Readable, Group, Counters]]


def init(layers: int, fmt: RowFormat, addresses: int, slots: int, policy: Policy[Any]) -> Group:
    """An empty buffer for the rows of `addresses` addresses."""
    group = pool.init(layers, fmt, addresses, slots, 0, policy.init(slots))
    mapping = maps.init(addresses, slots, addresses)
    return replace(group, mapping=replace(mapping, host_free_count=jnp.int32(0)))


def resolve(
    owned: Resolve, policy: Policy[Any], striping: Striping, exchange: Exchange, group: Group, selection: Selection
) -> tuple[Readable, Group, Counters]:
    """`Placement.resolve` by way of the buffer: `owned` makes rows readable on the devices that own them."""
    addresses, new = selection.addresses, selection.new.reshape(-1)
    location, valid = maps.locate(group.buffer.mapping, addresses), addresses >= 0
    asked = replace(selection, addresses=jnp.where(location >= 0, EMPTY, addresses))
    readable, group, counters = owned(group, asked)
    rounds: list[Scalar] = []  # a fetch is traced once, and adds its own

    def fetch(buffer: Group, wanted: Addresses, target: Slots, victim: Slots, refuge: Slots) -> Group:
        rows = round_rows(addresses.size + new.size, striping.devices)
        buffer, sent = _from_owners(group, striping, exchange, buffer, wanted, target, rows)
        rounds.append(sent)
        return buffer

    step = shared_pool.trade(policy, group.buffer, addresses, new, selection, True, fetch)
    # Owners have the new rows too.
    mapping = step.group.mapping
    buffer = replace(step.group, mapping=replace(mapping, host_address=store(mapping.host_address, new, new)))
    theirs = (location < 0) & (location != NOWHERE) & (striping.owner(addresses) != jax.lax.axis_index(TP))
    counters = counters._replace(
        selected=jnp.sum(valid, dtype=jnp.int32),
        peer_rows=jnp.sum(theirs, dtype=jnp.int32),
        buffer_hits=jnp.sum(valid & (location >= 0), dtype=jnp.int32),
        rounds=sum(rounds, jnp.int32(0)),
        dropped=counters.dropped + step.counters.dropped,
    )
    readable = replace(readable, locations=step.locations, valid=valid, new_buffer=step.new_device)
    return readable, replace(group, buffer=buffer), counters


def release(policy: Policy[Any], buffer: Group, addresses: Slots) -> Group:
    """The buffer without these addresses, which may soon be others' rows."""
    slots, mapping = maps.forget_copies(buffer.mapping, addresses)
    return replace(buffer, mapping=mapping, policy=policy.forget(buffer.policy, slots))


def round_rows(entries: int, devices: int) -> int:
    """Rows that each owner sends in one round of a step whose list of missing rows has so many entries."""
    return -(-entries // (SHARE * devices))


def _from_owners(
    owned: Group,
    striping: Striping,
    exchange: Exchange,
    buffer: Group,
    wanted: Addresses,
    target: Slots,
    rows: int,
) -> tuple[Group, Scalar]:
    """Rows of all layers from their owners into slots `target`, and the number of rounds; nothing goes back. Every
    device knows the whole list, so an owner sends rows alone, in ascending order, so many in a round: as many rounds as
    the owner of most of them needs."""
    devices, rank = striping.devices, jax.lax.axis_index(TP)
    owner = jnp.where((wanted >= 0) & (target >= 0), striping.owner(wanted), devices)
    order = jnp.argsort(owner, stable=True).astype(jnp.int32)
    count = jnp.bincount(owner, length=devices + 1)[:devices].astype(jnp.int32)
    first, place = (jnp.cumsum(count) - count)[:, None], jnp.arange(rows, dtype=jnp.int32)
    slots = maps.device_slot(maps.locate(owned.mapping, striping.local(wanted, rank)))

    def send(carry: tuple[Scalar, pool.Lanes]) -> tuple[Scalar, pool.Lanes]:
        turn, lanes = carry
        number = turn * rows + place
        entry = jnp.where(number < count[:, None], order[jnp.minimum(first + number, wanted.size - 1)], EMPTY)
        mine, at = maps.lookup(slots, entry[rank], EMPTY), maps.lookup(target, entry.reshape(-1), EMPTY)
        sent = (sparse_gather.gather_layers(lane, mine) for lane in owned.device)
        got = (to_all(lane, devices, exchange) for lane in sent)
        filled = (sparse_gather.scatter_layers(lane, at, come) for lane, come in zip(lanes, got, strict=True))
        return turn + 1, tuple(filled)

    rounds = jnp.max(-(-count // rows))
    _, lanes = jax.lax.while_loop(lambda carry: carry[0] < rounds, send, (jnp.int32(0), buffer.device))
    return replace(buffer, device=lanes), rounds


def to_all(rows: Array, devices: int, exchange: Exchange) -> Array:
    """Rows [layers, rows, words] of this device -> [layers, devices * rows, words] of all devices, on each of them."""
    if exchange == "all-gather":
        return jax.lax.all_gather(rows, TP, axis=1, tiled=True)
    copies = jnp.broadcast_to(rows[:, None], (rows.shape[0], devices, *rows.shape[1:]))
    return jax.lax.all_to_all(copies, TP, 1, 1, tiled=True).reshape(rows.shape[0], -1, rows.shape[-1])
