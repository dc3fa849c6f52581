"""UlaCache: one address space over the pools of all devices and the host, every row stored once.

DP: a device pool and a host pool per device, shared by all its requests. TP: address t belongs to device t mod P and
rows are fetched from their owners. Device and host hold disjoint rows: a miss takes its victim's device slot and leaves
its host slot to the victim.
"""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import jax

from ula_jax import mapping as maps
from ula_jax import pool
from ula_jax.parallel import Parallel
from ula_jax.placements import shared_pool
from ula_jax.placements.base import (
    Attended,
    Counters,
    Query,
    Readable,
    Selection,
    attend_rows,
    attend_slots,
    check_room,
    decodable,
)
from ula_jax.policies import PBLRU
from ula_jax.policies.base import Policy
from ula_jax.pool import Group
from ula_jax.spec import Budget, Capacity, KVSpec
from ula_jax.striping import Striping
from ula_jax.types import Lanes, Scalar, Slots


@dataclass(frozen=True)
class Ula:
    """Exclusive two-tier placement with a shared pool, evicted by any policy."""

    parallel: Parallel = Parallel()
    policy: Policy[Any] = PBLRU()
    exclusive: ClassVar[bool] = True
    name: ClassVar[str] = "ula"

    @property
    def striping(self) -> Striping:
        return Striping(self.parallel.size if self.parallel.tp else 1)

    def capacity(self, spec: KVSpec, budget: Budget) -> Capacity:
        stripe = self.striping.devices
        self.striping.check_page(spec.page_size)
        rows = decodable(spec, budget.device, stripe)
        host = max(0, rows - (budget.device - rows * spec.index_bytes) // spec.row_bytes)
        host = min(budget.host // spec.row_bytes, host)
        device = (budget.device - host * spec.index_bytes) // (spec.row_bytes + spec.index_bytes)
        surplus = (device + host) % (spec.page_size // stripe)
        host, device = host - min(host, surplus), device - max(0, surplus - host)
        check_room(self.name, device, spec, budget)
        return Capacity(
            spec, self.parallel.ranks, (device + host) * stripe, device, host, stripe,
            working_set=device if host else None, resident=device if host else None,
        )  # fmt: skip

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
        local = (lambda addresses: self.striping.local(addresses, rank)) if self.striping.devices > 1 else None
        return shared_pool.resolve(self.policy, local, False, group, selection)

    def append(self, group: Group, layer: int, readable: Readable, rows: Lanes) -> Group:
        return pool.write(group, layer, readable.new_device, rows)

    def attend(self, group: Group, layer: int, readable: Readable, query: Query) -> Attended:
        if self.striping.devices == 1:
            return attend_slots(query, group.device, layer, readable.locations)
        rows = pool.read(group, layer, readable.locations.reshape(-1))
        rows = jax.lax.psum(rows, self.parallel.axis)  # every row has one owner and is zero elsewhere: the sum is exact
        return attend_rows(query, rows, readable.valid)

    def release(self, group: Group, addresses: Slots) -> Group:
        slots, mapping = maps.drop(group.mapping, self.striping.local(addresses, self._rank()))
        return replace(group, mapping=mapping, policy=self.policy.forget(group.policy, slots))

    def _rank(self) -> Scalar | int:
        return jax.lax.axis_index(self.parallel.axis) if self.striping.devices > 1 else 0
