"""Every row on the device (SGLang and vLLM without offloading). Under TP every device holds every row."""

from dataclasses import dataclass, replace
from typing import ClassVar

import jax.numpy as jnp

from ula_jax import mapping as maps
from ula_jax import pool
from ula_jax.parallel import Parallel
from ula_jax.placements.base import (
    Attended,
    Counters,
    Query,
    Readable,
    Selection,
    attend_slots,
    check_room,
    whole_pages,
)
from ula_jax.pool import Group
from ula_jax.spec import Budget, Capacity, KVSpec
from ula_jax.striping import Striping
from ula_jax.types import EMPTY, Lanes, Slots


@dataclass(frozen=True)
class GpuOnly:
    """The slot of a row is its address: nothing is looked up and nothing moves."""

    parallel: Parallel = Parallel()
    striping: Striping = Striping()
    exclusive: ClassVar[bool] = True

    def capacity(self, spec: KVSpec, budget: Budget) -> Capacity:
        slots = whole_pages(budget.device // (spec.row_bytes + spec.index_bytes), spec)
        check_room("gpu_only", slots, spec, budget)
        return Capacity(spec, self.parallel.dp, slots, slots, 0)

    def init(self, spec: KVSpec, budget: Budget) -> tuple[Group, ...]:
        slots = self.capacity(spec, budget).device_slots
        return tuple(pool.init(len(layers), spec.row, slots, slots, 0) for layers in spec.groups)

    def resolve(self, group: Group, selection: Selection) -> tuple[Readable, Group, Counters]:
        new = selection.new.reshape(-1)
        group = replace(group, mapping=maps.put_on_device(group.mapping, new, new))
        valid = selection.addresses >= 0
        stored = jnp.sum(valid, dtype=jnp.int32)
        readable = Readable(selection.addresses, valid, new, jnp.full_like(new, EMPTY))
        return readable, group, Counters.zero(selected=stored, unique=stored, hits=stored)

    def append(self, group: Group, layer: int, readable: Readable, rows: Lanes) -> Group:
        return pool.write(group, layer, readable.new_device, rows)

    def attend(self, group: Group, layer: int, readable: Readable, query: Query) -> Attended:
        return attend_slots(query, group.device, layer, readable.locations)

    def release(self, group: Group, addresses: Slots) -> Group:
        return replace(group, mapping=maps.drop(group.mapping, addresses)[1])
