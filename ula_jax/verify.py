"""The invariants of a placement's state (docs/design.md), checked on the host in numpy."""

from dataclasses import replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.multihost_utils import process_allgather

from ula_jax.history import KVState
from ula_jax.metrics import Residency
from ula_jax.placements.base import Placement
from ula_jax.pool import Group
from ula_jax.spec import KVSpec
from ula_jax.types import EMPTY, NOWHERE


class InvariantError(AssertionError):
    """A placement's state contradicts itself or has lost a row."""


def check(placement: Placement, state: KVState, live: list[np.ndarray]) -> None:
    """Raise InvariantError unless every live address is stored as the placement promises.

    `live[rank]` are the addresses of the rank that hold rows. Every placement: location and address_of are inverse,
    nothing dead is stored, policy and map agree on which slots are occupied. Exclusive ones: each live row exactly
    once, free + used = size; a selected buffer holds live rows alone. Inclusive ones: host copies lie at their
    addresses and equal the rows on the device; every live row has one, unless rows are only written back. Each of
    several processes checks its own devices.
    """
    for number, group in enumerate(state.groups):
        for device, local in _by_device(_without_pools(group) if placement.exclusive else group).items():
            where = f"group {number}, device {device}"
            _check_device(where, placement, local, _local(placement, live, device))
            if local.buffer:
                _check_buffer(f"{where}, buffer", placement, local.buffer, live[device // placement.parallel.tp])


def residency(placement: Placement, state: KVState, live: list[np.ndarray], spec: KVSpec) -> Residency:
    """How many rows (of one token in one layer) are stored, and how many of them are different ones.

    To be called by every process: each counts on its own devices, and they tell each other.
    """
    own = [sum(map(_occupied, _by_device(_without_pools(group)).values())) for group in state.groups]
    stored = process_allgather(np.array(own, np.int32)).astype(np.int64).sum(axis=0)
    layers = np.array([len(group) for group in spec.groups])
    distinct = int(layers.sum()) * sum(len(addresses) for addresses in live)
    return Residency(distinct, int(stored @ layers), spec.row.nbytes)


def _occupied(group: Group) -> int:
    """Slots of one device, its buffer and its host pool that hold a row."""
    mapping: Any = group.mapping
    tables = [mapping.device_address, mapping.host_address]
    if group.buffer:
        tables.append(group.buffer.mapping.device_address)
    return sum(int((table != EMPTY).sum()) for table in tables)


def _check_device(where: str, placement: Placement, group: Group, live: np.ndarray) -> None:
    mapping: Any = group.mapping
    device, host, location = mapping.device_address, mapping.host_address, mapping.location
    occupied = np.flatnonzero(device != EMPTY)
    held = np.flatnonzero(host != EMPTY)

    stored = np.flatnonzero(location != NOWHERE)
    _require(where, np.array_equal(stored, np.sort(live)), "location: expected exactly the live addresses", stored)
    on_device = stored[location[stored] >= 0]
    slots = location[on_device]
    _require(where, np.array_equal(device[slots], on_device), "device: expected address_of(location(a)) = a", on_device)
    _require(where, len(occupied) == len(on_device), "device: expected no other slot occupied", occupied)
    on_host = stored[location[stored] < 0]
    refuge = ~location[on_host]
    _require(where, np.array_equal(host[refuge], on_host), "host: expected address_of(location(a)) = a", on_host)

    if placement.exclusive:
        free = mapping.host_free[: int(mapping.host_free_count)]
        _require(where, len(held) == len(on_host), "host: expected no row that is also on the device", held)
        _require(where, len(free) + len(held) == len(host), "host: expected free + used = size", free)
        _require(where, len(np.unique(free)) == len(free), "host: expected distinct free slots", free)
        _require(where, np.all(host[free] == EMPTY), "host: expected free slots to hold nothing", free)
    else:
        _check_copies(where, group, held, stored)
        if not getattr(placement, "write_back", False):
            _require(where, np.array_equal(held, stored), "host: expected every live row (inclusive placement)", held)
    policy = getattr(placement, "policy", None)
    if policy is not None and hasattr(policy, "audit"):
        _check_policy(where, policy, group.policy, device != EMPTY)


def _check_buffer(where: str, placement: Placement, buffer: Group, live: np.ndarray) -> None:
    """A row is in a slot, or its owner is asked for it; its place among the owners is its address."""
    mapping: Any = buffer.mapping
    stored, held = np.flatnonzero(mapping.location != NOWHERE), np.flatnonzero(mapping.host_address != EMPTY)
    _require(where, np.array_equal(stored, np.sort(live)), "location: expected exactly the live addresses", stored)
    _require(where, np.array_equal(held, stored), "expected every live row to have an owner", held)
    _require(where, np.array_equal(mapping.host_address[held], held), "expected owners to hold rows as numbered", held)
    here = stored[mapping.location[stored] >= 0]
    elsewhere = np.setdiff1d(stored, here)
    occupied = np.flatnonzero(mapping.device_address != EMPTY)
    slots = mapping.location[here]
    _require(where, np.array_equal(mapping.device_address[slots], here), "expected address_of(location(a)) = a", here)
    _require(where, len(occupied) == len(here), "expected no other slot occupied", occupied)
    _require(where, np.array_equal(~mapping.location[elsewhere], elsewhere), "expected the others at owners", elsewhere)
    policy = getattr(placement, "policy", None)
    if hasattr(policy, "audit"):
        _check_policy(where, policy, buffer.policy, mapping.device_address != EMPTY)


def _check_copies(where: str, group: Group, held: np.ndarray, stored: np.ndarray) -> None:
    """Rows are written once: a copy is never stale as long as it is one."""
    mapping: Any = group.mapping
    _require(where, np.array_equal(mapping.host_address[held], held), "host: expected every copy at its address", held)
    _require(where, np.isin(held, stored).all(), "host: expected copies of live rows alone", held)
    twice = held[mapping.location[held] >= 0]
    slots = mapping.location[twice]
    for device, host in zip(group.device, group.host, strict=True):
        same = np.all(np.asarray(device)[:, slots] == np.asarray(host)[twice].swapaxes(0, 1), axis=(0, 2))
        _require(where, same.all(), "host: expected copies that equal the rows on the device", twice[~same])


def _check_policy(where: str, policy: Any, state: Any, occupied: np.ndarray) -> None:
    """The policy's own invariants; one state a pool, or one for each of a pool's equal parts (quotas)."""
    first = jax.tree.leaves(state)[0]
    parts = first.shape[0] if first.ndim > _rank_of_first_leaf(policy) else None
    states = [state] if parts is None else [jax.tree.map(lambda leaf, i=i: leaf[i], state) for i in range(parts)]
    for part, (one, mask) in enumerate(zip(states, occupied.reshape(len(states), -1), strict=True)):
        try:
            policy.audit(jax.tree.map(jnp.asarray, one), mask)
        except AssertionError as wrong:
            raise InvariantError(f"{where}, pool part {part}: policy: {wrong}") from wrong


@cache
def _rank_of_first_leaf(policy: Any) -> int:
    return jax.tree.leaves(jax.eval_shape(lambda: policy.init(1)))[0].ndim


def _local(placement: Placement, live: list[np.ndarray], device: int) -> np.ndarray:
    """Local numbers of the live addresses that a device should hold."""
    rank, place = divmod(device, placement.parallel.tp)
    if placement.striping.devices == 1:
        return live[rank]
    local = np.asarray(placement.striping.local(jnp.asarray(live[rank]), place))
    return local[local != EMPTY]


def _without_pools(group: Group) -> Group:
    """Maps and policies."""
    buffer = replace(group.buffer, device=(), host=()) if group.buffer else ()
    return replace(group, device=(), host=(), buffer=buffer)


def _by_device(group: Group) -> dict[int, Group]:
    """What each device of this process holds, as numpy."""
    leaves, tree = jax.tree.flatten(group)
    held: list[dict[int, np.ndarray]] = [{} for _ in leaves]
    for parts, leaf in zip(held, leaves, strict=True):
        for shard in leaf.addressable_shards:
            parts.update(enumerate(np.asarray(shard.data), shard.index[0].start or 0))
    return {device: tree.unflatten([parts[device] for parts in held]) for device in held[0]}


def _require(where: str, held: Any, expected: str, found: np.ndarray) -> None:
    if not held:
        raise InvariantError(f"{where}: {expected}, found {found[:32].tolist()} ({len(found)} in all)")
