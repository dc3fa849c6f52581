"""One round over a device pool that all requests of a rank share, backed by a host pool.

What `ula` and `resident_hot` have in common: everything but where a row goes that leaves the device.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import jax.numpy as jnp

from pallas_kernels import resolve as tables
from ula_jax import mapping as maps
from ula_jax import pool
from ula_jax.placements.base import Counters, Readable, Selection
from ula_jax.policies.base import Policy, Ranking, Touch
from ula_jax.policies.books import packed
from ula_jax.policies.round import begin, fetch_ahead, place, victims
from ula_jax.pool import Group
from ula_jax.types import EMPTY, NOWHERE, Addresses, Array, Slots


def resolve(
    policy: Policy[Any],
    local: Callable[[Array], Array] | None,
    copies: bool,
    group: Group,
    selection: Selection,
) -> tuple[Readable, Group, Counters]:
    """`Placement.resolve`: fetch what is missing, make room for it and for the new rows.

    `local` turns addresses into the group's own, EMPTY where another device has them; None if all are. With `copies` a
    row that was on the host keeps its slot there, which is its address; without, the row that takes its place on the
    device leaves its own host slot to it.

    Where every row is on the device (`Selection.resident`, or no host pool) only slots for the new rows are asked for.
    The policy then hears of those rows alone: to it, all rows stored before the first step in which rows may move were
    used last in the round before.
    """
    chosen, new = selection.addresses, selection.new.reshape(-1)
    if local is not None:
        chosen, new = local(chosen), local(new)
    if selection.resident or not group.mapping.host_address.size:
        step = _stay(policy, group, chosen, new)
    else:
        ranked = selection.ranked if local is None else local(selection.ranked)
        step = trade(policy, group, chosen, new, replace(selection, ranked=ranked), copies)
    locations, new_device, group, counters = step

    valid = selection.addresses >= 0
    if local is not None:
        selected = jnp.sum(valid, dtype=jnp.int32)
        counters = counters._replace(selected=selected, peer_rows=selected - counters.selected)
    return Readable(locations, valid, new_device, jnp.full_like(new, EMPTY)), group, counters


class Step(NamedTuple):
    """Device slots of what was selected and of the new rows, the state after it, and what it did."""

    locations: Addresses
    new_device: Slots
    group: Group
    counters: Counters


def _stay(policy: Policy[Any], group: Group, chosen: Addresses, new: Slots) -> Step:
    """Slots for the new rows, of which the device has enough. Rows that are not there, or lose their slot, are lost:
    the caller was wrong."""
    mapping = group.mapping
    fresh = jnp.where(maps.locate(mapping, new) == NOWHERE, new, EMPTY)
    target, state = place(policy, group.policy, fresh >= 0, mapping.device_address.size)
    state = policy.touch(state, Touch(target, fresh, inserted=True))
    taken = maps.lookup(mapping.device_address, target, EMPTY) >= 0
    mapping = maps.put_on_device(mapping, fresh, target)
    locations, new_device = maps.slots_of(mapping, chosen, new)
    found, there = jnp.sum(jnp.stack([chosen.reshape(-1), locations.reshape(-1)]) >= 0, axis=1, dtype=jnp.int32)
    lost = found - there + jnp.sum((fresh >= 0) & ((target < 0) | taken), dtype=jnp.int32)
    counters = Counters.zero(selected=found, unique=found, hits=there, dropped=lost)
    return Step(locations, new_device, replace(group, mapping=mapping, policy=state), counters)


Exchange = Callable[[Group, Slots, Slots, Slots, Slots], Group]
"""As `pool.exchange`."""


def trade(
    policy: Policy[Any],
    group: Group,
    chosen: Addresses,
    new: Slots,
    selection: Selection,
    copies: bool,
    exchange: Exchange = pool.exchange,
) -> Step:
    """A round of the policy, and the moves that it asks for, made by `exchange`."""
    mapping = group.mapping
    found = maps.find(mapping, chosen, new)
    arrivals, num_slots = found.arriving.size, mapping.device_address.size
    # XLA leaves out what a policy does not look at.
    here = maps.lookup(mapping.device_address, found.slots[:arrivals], EMPTY)
    addresses = jnp.concatenate([here, found.arriving])
    requests = _requests(group, addresses, chosen, selection)
    held = maps.device_slot(maps.locate(mapping, selection.ranked))
    ranking = Ranking.of(selection.ranked, held, selection.requests, selection.margins, chosen.shape[-1])

    state = begin(policy, group.policy, Touch(found.slots, addresses, requests), ranking)
    given, state = victims(policy, state, found.count, arrivals)
    state = policy.touch(state, Touch(given, found.arriving, requests[arrivals:], inserted=True))
    group, counts = _move(group, found.arriving, found.source, given, found.counts, copies, exchange)
    total = tables.Counts(*counts)
    ahead, state = fetch_ahead(policy, state, addresses, given, ranking, num_slots)
    prefetched = jnp.int32(0)
    if ranking is not None and ahead.size:
        rows = packed(jnp.where(ahead >= 0, ranking.addresses, EMPTY), ahead.size)
        source = maps.host_slot(maps.locate(group.mapping, rows))
        begun = jnp.stack(total._replace(fresh=jnp.int32(0), free=group.mapping.host_free_count))
        group, counts = _move(group, rows, source, packed(ahead, ahead.size), begun, copies, exchange)
        total, prefetched = tables.Counts(*counts), jnp.sum(ahead >= 0, dtype=jnp.int32)

    counters = Counters.zero(
        selected=total.entries,
        unique=total.hits + total.misses,
        hits=total.hits,
        host_fetches=total.misses + prefetched,
        prefetched=prefetched,
        evictions=total.victims,
        written_back=total.written,
        dropped=total.lost,
    )
    locations, new_device = maps.slots_of(group.mapping, chosen, new)
    return Step(locations, new_device, replace(group, policy=state), counters)


def _move(
    group: Group, arriving: Slots, source: Slots, given: Slots, counts: Array, copies: bool, exchange: Exchange
) -> tuple[Group, Array]:
    """Rows first, and then the map: what changes in it is known before, but nobody reads it earlier."""
    moves, mapping, counts = maps.move(group.mapping, arriving, source, given, counts, copies)
    group = exchange(group, source, moves.target, moves.victim, moves.refuge)
    return replace(group, mapping=mapping), counts


def _requests(group: Group, needed: Slots, chosen: Addresses, selection: Selection) -> Slots:
    """A request that needs each row, the one with the highest number; EMPTY for rows that are only written."""
    each = jnp.broadcast_to(selection.requests[:, None], (chosen.shape[0], chosen[0].size))
    table = jnp.full(group.mapping.location.size, EMPTY, jnp.int32)
    table = table.at[chosen.reshape(-1)].max(each.reshape(-1), mode="drop", wrap_negative_indices=False)
    return maps.lookup(table, needed, EMPTY)
