"""UlaCache: one address space over the pools of all devices and the host, every row stored once.

DP: a device pool and a host pool per device, shared by all its requests. TP: address t belongs to device t mod P and
rows are fetched from their owners. Device and host hold disjoint rows: a miss takes its victim's device slot and leaves
its host slot to the victim.
"""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from ula_jax import mapping as maps
from ula_jax import pool
from ula_jax.parallel import Parallel
from ula_jax.placements.base import Attended, Counters, Query, Readable, Selection, attend_rows, check_room
from ula_jax.policies import PBLRU
from ula_jax.policies.base import Policy, Ranking, Touch
from ula_jax.policies.round import play
from ula_jax.pool import Group
from ula_jax.spec import Budget, Capacity, KVSpec
from ula_jax.striping import Striping
from ula_jax.types import EMPTY, NOWHERE, Array, Lanes, Scalar, Slots


@dataclass(frozen=True)
class Ula:
    """Exclusive two-tier placement with a shared pool, evicted by any policy."""

    parallel: Parallel = Parallel()
    policy: Policy[Any] = PBLRU()
    exclusive: ClassVar[bool] = True

    @property
    def striping(self) -> Striping:
        return Striping(self.parallel.size if self.parallel.tp else 1)

    def capacity(self, spec: KVSpec, budget: Budget) -> Capacity:
        stripe = self.striping.devices
        self.striping.check_page(spec.page_size)
        host = min(budget.host // spec.row_bytes, self._useful_host(spec, budget))
        device = (budget.device - host * spec.index_bytes) // (spec.row_bytes + spec.index_bytes)
        surplus = (device + host) % (spec.page_size // stripe)
        host, device = host - min(host, surplus), device - max(0, surplus - host)
        check_room("ula", device, spec, budget)
        return Capacity(
            spec, self.parallel.ranks, (device + host) * stripe, device, host, stripe,
            working_set=device if host else None,
        )  # fmt: skip

    def _useful_host(self, spec: KVSpec, budget: Budget) -> int:
        """Host slots beyond which more history means fewer requests.

        Index keys of host rows lie on the device, and so must all that one step may select. With f the largest share
        of a request's rows that one step needs, d device slots and h host slots, all that fits can also be decoded at
        once as long as d >= f (d + h); here that is solved for h.
        """
        stripe, context = self.striping.devices, spec.max_context
        share = min(1.0, spec.rows_needed(context, stripe=stripe) * stripe / context)
        row, key = spec.row_bytes, spec.index_bytes
        return int(budget.device * (1 - share) / (share * (row + key) + (1 - share) * key))

    def init(self, spec: KVSpec, budget: Budget) -> tuple[Group, ...]:
        size = self.capacity(spec, budget)
        rows = size.device_slots + size.host_slots
        return tuple(
            pool.init(
                len(layers), spec.row, rows, size.device_slots, size.host_slots, self.policy.init(size.device_slots)
            )
            for layers in spec.groups
        )

    def resolve(self, group: Group, selection: Selection) -> tuple[Readable, Group, Counters]:
        rank = self._rank()
        new = self.striping.local(selection.new.reshape(-1), rank)
        chosen = self.striping.local(selection.addresses, rank)
        wanted = jnp.concatenate([chosen.reshape(-1), new])
        needed = maps.distinct(wanted, min(wanted.size, group.mapping.location.size))

        location = maps.locate(group.mapping, needed)
        stored = (needed >= 0) & (location != NOWHERE)
        hit = location >= 0
        missing = (needed >= 0) & ~hit
        touch = Touch(maps.device_slot(location), needed, self._requests(group, needed, chosen, selection))
        ranked = self.striping.local(selection.ranked, rank)
        held = maps.device_slot(maps.locate(group.mapping, ranked))
        ranking = Ranking.of(ranked, held, selection.requests, selection.margins, selection.addresses.shape[-1])
        targets, ahead, policy = play(self.policy, group.policy, touch, ranking, group.mapping.device_address.size)

        rows, target = needed, targets
        if ranking is not None:
            rows, target = jnp.concatenate([needed, ranking.addresses]), jnp.concatenate([targets, ahead])
        source = jnp.where(target >= 0, maps.host_slot(maps.locate(group.mapping, rows)), EMPTY)
        victim = maps.lookup(group.mapping.device_address, target, EMPTY)
        mapping = maps.free_host(group.mapping, source)
        refuge, mapping = maps.take_host(mapping, victim >= 0)
        group = pool.exchange(
            group,
            source,
            jnp.where(source >= 0, target, EMPTY),
            jnp.where(refuge >= 0, target, EMPTY),
            refuge,
        )
        mapping = maps.put_on_host(mapping, victim, refuge)
        mapping = maps.put_on_device(mapping, jnp.where(target >= 0, rows, EMPTY), target)

        evicted = victim >= 0
        valid = selection.addresses >= 0
        counters = Counters.zero(
            selected=jnp.sum(valid),
            unique=jnp.sum(stored),
            hits=jnp.sum(hit),
            host_fetches=jnp.sum(source >= 0),
            prefetched=jnp.sum(ahead >= 0),
            evictions=jnp.sum(evicted),
            written_back=jnp.sum(refuge >= 0),
            peer_rows=jnp.sum(valid & (chosen < 0)),
            dropped=jnp.sum(missing & (targets < 0)) + jnp.sum(evicted & (refuge < 0)),
        )
        readable = Readable(
            maps.device_slot(maps.locate(mapping, chosen)),
            valid,
            maps.device_slot(maps.locate(mapping, new)),
            jnp.full_like(new, EMPTY),
        )
        return readable, replace(group, mapping=mapping, policy=policy), counters

    def append(self, group: Group, layer: int, readable: Readable, rows: Lanes) -> Group:
        return pool.write(group, layer, readable.new_device, rows)

    def attend(self, group: Group, layer: int, readable: Readable, query: Query) -> Attended:
        rows = pool.read(group, layer, readable.locations.reshape(-1))
        if self.striping.devices > 1:  # every row has one owner and is zero elsewhere: the sum is exact
            rows = jax.lax.psum(rows, self.parallel.axis)
        return attend_rows(query, rows, readable.valid)

    def release(self, group: Group, addresses: Slots) -> Group:
        slots, mapping = maps.drop(group.mapping, self.striping.local(addresses, self._rank()))
        return replace(group, mapping=mapping, policy=self.policy.forget(group.policy, slots))

    def _requests(self, group: Group, needed: Slots, chosen: Array, selection: Selection) -> Slots:
        """A request that needs each row, EMPTY for rows that are only written."""
        each = jnp.broadcast_to(selection.requests[:, None], (chosen.shape[0], chosen[0].size))
        table = jnp.full(group.mapping.location.size, EMPTY, jnp.int32)
        return maps.lookup(maps.store(table, chosen.reshape(-1), each.reshape(-1)), needed, EMPTY)

    def _rank(self) -> Scalar | int:
        return jax.lax.axis_index(self.parallel.axis) if self.striping.devices > 1 else 0
