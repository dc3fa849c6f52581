from dataclasses import dataclass, replace

import jax.numpy as jnp

from ula_jax import mapping as maps
from ula_jax import pool
from ula_jax.parallel import Parallel
from ula_jax.placements.base import Counters, Readable, attend_rows
from ula_jax.spec import Capacity
from ula_jax.striping import Striping


@dataclass(frozen=True)
class HostOnly:
    """Every row stays on the host and is read there. The host slot of a row is its address."""

    parallel: Parallel = Parallel()
    striping: Striping = Striping()
    exclusive = False

    def capacity(self, spec, budget):
        slots = min(budget.host // spec.row_bytes, budget.device // max(1, spec.index_bytes))
        return Capacity(spec, self.parallel.dp, slots, 0, slots)

    def init(self, spec, budget):
        slots = self.capacity(spec, budget).host_slots
        return tuple(pool.init(len(layers), spec.row, slots, 0, slots) for layers in spec.groups)

    def resolve(self, group, selection):
        new, valid = selection.new.reshape(-1), selection.addresses >= 0
        group = replace(group, mapping=maps.put_on_host(group.mapping, new, new))
        readable = Readable(~selection.addresses, valid, jnp.full_like(new, -1), new, in_place=True)
        fetched = jnp.sum(valid)
        counters = dict(selected=fetched, unique=fetched, host_fetches=fetched, written_back=jnp.sum(new >= 0))
        return readable, group, Counters.zero(**counters)

    def append(self, group, layer, readable, rows):
        return pool.write_host(group, layer, readable.new_host, rows)

    def attend(self, group, layer, readable, query):
        slots = maps.host_slot(readable.locations.reshape(-1))
        return attend_rows(query, pool.read_host(group, layer, slots), readable.valid)

    def release(self, group, addresses):
        return replace(group, mapping=maps.forget_copies(group.mapping, addresses)[1])
