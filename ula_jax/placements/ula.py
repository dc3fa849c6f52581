"""UlaCache: one address space over the pools of all devices and the host, every row stored once.

DP: a device pool and a host pool per device, shared by all its requests. TP: addresses are striped over the devices and
rows are fetched from their owners, in every step or into a selected buffer. Device and host hold disjoint rows: a miss
takes its victim's device slot and leaves its host slot to the victim.
"""

from bisect import bisect_left
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import jax

from ula_jax import mapping as maps
from ula_jax import pool
from ula_jax.parallel import TP, Parallel
from ula_jax.placements import selected_buffer, shared_pool
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
from ula_jax.placements.selected_buffer import EXCHANGES, Exchange
from ula_jax.policies import PBLRU
from ula_jax.policies.base import Policy, prefetch
from ula_jax.pool import Group
from ula_jax.spec import Budget, Capacity, KVSpec
from ula_jax.striping import Striping
from ula_jax.types import Lanes, Scalar, Slots


@dataclass(frozen=True)
class Ula:
    """Exclusive two-tier placement with a shared pool, evicted by any policy.

    `buffer`, under TP: rows per request of each device's selected buffer, at least a selection and the new row; 0 means
    none, and that every selected row is fetched from its owner in every step. All requests share it.
    `stripe`, under TP: neighbouring addresses that one device owns. `exchange`: the collective that brings rows
    into buffers.
    """

    parallel: Parallel = Parallel()
    policy: Policy[Any] = PBLRU()
    buffer: int = 0
    stripe: int = 1
    exchange: Exchange = "all-gather"
    exclusive: ClassVar[bool] = True
    name: ClassVar[str] = "ula"

    def __post_init__(self):
        if self.exchange not in EXCHANGES:
            raise ValueError(
                f"{self.name}: expected an exchange of {list(EXCHANGES)}, found {self.exchange!r}; choose one of them"
            )
        if self.buffer and self.striping.devices == 1:
            raise ValueError(
                f"{self.name}: expected a buffer of 0 where a device owns all rows that it reads, found {self.buffer} "
                f"with {self.parallel}; leave it out, or use TP over several devices"
            )
        if self.buffer and prefetch(self.policy):
            raise ValueError(
                f"{self.name}: expected a policy that fetches nothing ahead beside a buffer, found {self.policy}; an "
                "owner may have such rows on its host: use the policy within, or no buffer"
            )

    @property
    def striping(self) -> Striping:
        return Striping(self.parallel.tp, self.stripe if self.parallel.tp > 1 else 1)

    def capacity(self, spec: KVSpec, budget: Budget) -> Capacity:
        """With a buffer, it has slots for as many requests of full length as then still fit beside it, at least one."""
        if not self.buffer:
            return self._capacity(spec, budget, None)
        least = spec.rows_needed(spec.max_context)
        if self.buffer < least:
            raise ValueError(
                f"{self.name}: expected a buffer of at least {least} rows (a selection and the new row), found "
                f"{self.buffer}; raise the buffer, or set it to 0 for none"
            )

        def too_many(requests: int) -> bool:
            try:
                found = self._capacity(spec, budget, requests * self.buffer)
            except ValueError:
                return True
            return found.requests(spec.max_context) < requests

        numbers = range(1, budget.device // (self.buffer * spec.row_bytes) + 2)
        requests = numbers[bisect_left(numbers, True, key=too_many)] - 1
        return self._capacity(spec, budget, max(1, requests) * self.buffer)

    def _capacity(self, spec: KVSpec, budget: Budget, buffer: int | None) -> Capacity:
        striping = self.striping
        striping.check_page(spec.page_size)
        room = budget.device - (buffer or 0) * spec.row_bytes
        check_room(self.name, room // (spec.row_bytes + spec.index_bytes), spec, budget)
        rows = decodable(spec, room, striping)
        host = max(0, rows - (room - rows * spec.index_bytes) // spec.row_bytes)
        host = min(budget.host // spec.row_bytes, host)
        device = (room - host * spec.index_bytes) // (spec.row_bytes + spec.index_bytes)
        surplus = (device + host) % (spec.page_size // striping.devices)
        host, device = host - min(host, surplus), device - max(0, surplus - host)
        check_room(self.name, device, spec, budget)
        return Capacity(
            spec, self.parallel.dp, (device + host) * striping.devices, device, host, striping,
            working_set=device if host else None, buffer_slots=buffer, resident=device if host else None,
        )  # fmt: skip

    def init(self, spec: KVSpec, budget: Budget) -> tuple[Group, ...]:
        size = self.capacity(spec, budget)
        rows = size.device_slots + size.host_slots

        def empty(layers: int) -> Group:
            policy = self.policy.init(size.device_slots)
            group = pool.init(layers, spec.row, rows, size.device_slots, size.host_slots, policy)
            if not size.buffer_slots:
                return group
            buffer = selected_buffer.init(layers, spec.row, size.addresses, size.buffer_slots, self.policy)
            return replace(group, buffer=buffer)

        return tuple(empty(len(layers)) for layers in spec.groups)

    def resolve(self, group: Group, selection: Selection) -> tuple[Readable, Group, Counters]:
        if not self.buffer:
            return self._resolve(group, selection)
        return selected_buffer.resolve(
            self._resolve, self.policy, self.striping, self.exchange, group, selection
        )

    def _resolve(self, group: Group, selection: Selection) -> tuple[Readable, Group, Counters]:
        """Make rows readable on the devices that own them."""
        rank = self._rank()
        local = (lambda addresses: self.striping.local(addresses, rank)) if self.striping.devices > 1 else None
        return shared_pool.resolve(self.policy, local, False, group, selection)

    def append(self, group: Group, layer: int, readable: Readable, rows: Lanes) -> Group:
        group = pool.write(group, layer, readable.new_device, rows)
        if readable.new_buffer is None:
            return group
        return replace(group, buffer=pool.write(group.buffer, layer, readable.new_buffer, rows))

    def attend(self, group: Group, layer: int, readable: Readable, query: Query) -> Attended:
        if self.striping.devices == 1:
            return attend_slots(query, group.device, layer, readable.locations)
        if self.buffer:
            return attend_slots(query, group.buffer.device, layer, readable.locations)
        rows = pool.read(group, layer, readable.locations.reshape(-1))
        rows = jax.lax.psum(rows, TP)  # every row has one owner and is zero elsewhere: the sum is exact
        return attend_rows(query, rows, readable.valid)

    def release(self, group: Group, addresses: Slots) -> Group:
        if self.buffer:
            group = replace(group, buffer=selected_buffer.release(self.policy, group.buffer, addresses))
        slots, mapping = maps.drop(group.mapping, self.striping.local(addresses, self._rank()))
        return replace(group, mapping=mapping, policy=self.policy.forget(group.policy, slots))

    def _rank(self) -> Scalar | int:
        return jax.lax.axis_index(TP) if self.striping.devices > 1 else 0
