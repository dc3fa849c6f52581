"""vLLM's offloading for sparse attention (2026): rows stay on the device and spill to the host only under pressure.

The device is a write-back cache of the host. A row is first written to the device alone; the host gets it when it
leaves the device for the first time, and keeps that copy for the row's life: fetched back, the row exists twice and
can leave again for nothing. Under TP every rank keeps all rows in tiers of its own.

Two things differ from vLLM. It spills pages and fetches rows, into a hot buffer that each request gets once it has
spilled; here both are rows in one pool that all requests share. And its latest version copies full pages to the host
ahead of pressure; here a row is written back when it is evicted.
"""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

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
    attend_slots,
    check_room,
    decodable,
    whole_pages,
)
from ula_jax.policies import PBLRU
from ula_jax.policies.base import Policy
from ula_jax.pool import Group
from ula_jax.spec import Budget, Capacity, KVSpec
from ula_jax.striping import Striping
from ula_jax.types import Lanes, Slots


@dataclass(frozen=True)
class ResidentHot:
    """Inclusive two-tier placement with a shared pool. The host slot of a row is its address.

    The policy is that of `ula` unless given: what then differs between the two is the write-backs that copies save and
    the history for which they leave no room.
    """

    parallel: Parallel = Parallel()
    policy: Policy[Any] = PBLRU()
    striping: Striping = Striping()
    exclusive: ClassVar[bool] = False
    write_back: ClassVar[bool] = True

    def capacity(self, spec: KVSpec, budget: Budget) -> Capacity:
        """As many rows as the host has slots for, or as the device has if those are more.

        Copies are never taken away, so sooner or later every row may have been on the host: each needs a host slot of
        its own from the start, as in vLLM, which admits a request only if the host has pages for all of it. Device
        slots add nothing to that. With less host memory than device memory nothing is spilled.
        """
        device = whole_pages(budget.device // (spec.row_bytes + spec.index_bytes), spec)
        host = whole_pages(min(budget.host // spec.row_bytes, decodable(spec, budget.device)), spec)
        if host <= device:
            check_room("resident_hot", device, spec, budget)
            return Capacity(spec, self.parallel.dp, device, device, 0)
        device = (budget.device - host * spec.index_bytes) // spec.row_bytes
        check_room("resident_hot", device, spec, budget)
        return Capacity(spec, self.parallel.dp, host, device, host, working_set=device, resident=device)

    def init(self, spec: KVSpec, budget: Budget) -> tuple[Group, ...]:
        size = self.capacity(spec, budget)
        state = self.policy.init(size.device_slots)
        return tuple(
            pool.init(len(layers), spec.row, size.addresses, size.device_slots, size.host_slots, state)
            for layers in spec.groups
        )

    def resolve(self, group: Group, selection: Selection) -> tuple[Readable, Group, Counters]:
        return shared_pool.resolve(self.policy, None, True, group, selection)

    def append(self, group: Group, layer: int, readable: Readable, rows: Lanes) -> Group:
        return pool.write(group, layer, readable.new_device, rows)

    def attend(self, group: Group, layer: int, readable: Readable, query: Query) -> Attended:
        return attend_slots(query, group.device, layer, readable.locations)

    def release(self, group: Group, addresses: Slots) -> Group:
        slots, mapping = maps.forget_copies(group.mapping, addresses)
        return replace(group, mapping=mapping, policy=self.policy.forget(group.policy, slots))
