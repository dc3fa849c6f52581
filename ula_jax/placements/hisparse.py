"""HiSparse (SGLang, 2026): the whole history on the host, a fixed hot buffer on the device for each request and layer.

Hot rows exist twice, and P times more under TP, where every rank keeps its own host copy. New rows are written to both
tiers at once, so evictions are free. A step that needs more rows than a buffer holds (prefill) reads the host in place.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import jax
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
    attend_rows,
    attend_slots,
    check_room,
    whole_pages,
)
from ula_jax.policies import LRU
from ula_jax.policies.base import Policy, Ranking, Touch
from ula_jax.policies.round import Round, play
from ula_jax.pool import Group
from ula_jax.spec import Budget, Capacity, KVSpec
from ula_jax.striping import Striping
from ula_jax.types import EMPTY, Array, Float32, Int32, Lanes, Slots


@dataclass(frozen=True)
class HiSparse:
    """Inclusive placement with per-request quotas. The host slot of a row is its address.

    `buffer` is the rows of one request's hot buffer; None means three selections, SGLang's example (6144 for 2048).
    """

    parallel: Parallel = Parallel()
    policy: Policy[Any] = LRU()
    buffer: int | None = None
    striping: Striping = Striping()
    exclusive: ClassVar[bool] = False

    def capacity(self, spec: KVSpec, budget: Budget) -> Capacity:
        least = spec.rows_needed(spec.max_context)
        buffer = self.buffer or min(3 * spec.topk, spec.max_context)
        if buffer < least:
            raise ValueError(
                f"hisparse: expected a buffer of at least {least} rows (a selection and the new row), found {buffer}; "
                "raise the buffer"
            )
        check_room("hisparse", min(buffer, budget.device // (spec.row_bytes + spec.index_bytes)), spec, budget)
        per_request = buffer * spec.row_bytes + spec.table_width * spec.page_size * spec.index_bytes
        host = whole_pages(budget.host // spec.row_bytes, spec)
        quotas = min(budget.device // per_request, host // spec.page_size)
        if quotas < 1:
            raise ValueError(
                f"hisparse: expected room for one request of {spec.max_context} tokens: {per_request} device bytes and "
                f"{spec.table_width * spec.page_size * spec.row_bytes} host bytes, found {budget.device} and "
                f"{budget.host}; raise the budget or shorten max_context"
            )
        if spec.index_bytes:  # what the buffers leave holds index keys
            host = min(host, whole_pages((budget.device - quotas * buffer * spec.row_bytes) // spec.index_bytes, spec))
        return Capacity(spec, self.parallel.dp, host, quotas * buffer, host, quotas=quotas)

    def init(self, spec: KVSpec, budget: Budget) -> tuple[Group, ...]:
        size = self.capacity(spec, budget)
        assert size.quotas is not None
        state = self.policy.init(size.device_slots // size.quotas)
        states = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (size.quotas, *jnp.shape(leaf))), state)

        def empty(layers: int) -> Group:
            group = pool.init(layers, spec.row, size.addresses, size.device_slots, size.host_slots, states)
            return replace(group, mapping=replace(group.mapping, host_free_count=jnp.int32(0)))

        return tuple(empty(len(layers)) for layers in spec.groups)

    def resolve(self, group: Group, selection: Selection) -> tuple[Readable, Group, Counters]:
        new = selection.new.reshape(-1)
        group = replace(group, mapping=maps.put_on_host(group.mapping, new, new))
        valid = selection.addresses >= 0
        buffer = self._buffer(group)
        wanted = jnp.concatenate([selection.addresses.reshape(*valid.shape[:1], -1), selection.new], axis=1)
        if wanted.shape[1] > buffer:
            selected = jnp.sum(valid, dtype=jnp.int32)
            readable = Readable(~selection.addresses, valid, jnp.full_like(new, EMPTY), new, in_place=True)
            counters = Counters.zero(
                selected=selected, unique=selected, host_fetches=selected, written_back=jnp.sum(new >= 0)
            )
            return readable, group, counters

        needed = jax.vmap(lambda row: maps.distinct(row, row.size))(wanted)
        location = maps.locate(group.mapping, needed)
        request = jnp.maximum(selection.requests, 0)
        base = request[:, None] * buffer
        states = jax.tree.map(lambda leaf: leaf[request], group.policy)
        ranked = selection.ranked
        given, ahead, states = jax.vmap(partial(self._round, buffer, valid.shape[-1]))(
            states,
            needed,
            maps.device_slot(location) - base,
            ranked,
            maps.device_slot(maps.locate(group.mapping, ranked)) - base,
            selection.margins,
        )
        rows = jnp.concatenate([needed, ranked], axis=1)
        target = jnp.concatenate([given, ahead], axis=1)
        target = jnp.where(target >= 0, target + base, EMPTY)
        policy = jax.tree.map(
            lambda whole, part: whole.at[selection.requests].set(part, mode="drop", wrap_negative_indices=False),
            group.policy,
            states,
        )
        missing = (needed >= 0) & (location < 0)
        is_new = jnp.any(needed[:, :, None] == jnp.where(selection.new >= 0, selection.new, -2)[:, None], axis=-1)
        fetched = jnp.concatenate([missing & ~is_new, ahead >= 0], axis=1)
        victim = maps.lookup(group.mapping.device_address, target, EMPTY)
        mapping = maps.put_on_host(group.mapping, victim.reshape(-1), victim.reshape(-1))
        mapping = maps.put_on_device(mapping, jnp.where(target >= 0, rows, EMPTY).reshape(-1), target.reshape(-1))
        group = replace(group, mapping=mapping, policy=policy)
        group = pool.fetch(
            group,
            jnp.where(fetched, rows, EMPTY).reshape(-1),
            jnp.where(fetched, target, EMPTY).reshape(-1),
        )
        counters = Counters.zero(
            selected=jnp.sum(valid),
            unique=jnp.sum((needed >= 0) & ~is_new),
            hits=jnp.sum((location >= 0) & (needed >= 0)),
            host_fetches=jnp.sum(fetched),
            prefetched=jnp.sum(ahead >= 0),
            evictions=jnp.sum(victim >= 0),
            written_back=jnp.sum(new >= 0),
            dropped=jnp.sum(missing & (given < 0)),
        )
        readable = Readable(
            maps.device_slot(maps.locate(mapping, selection.addresses)),
            valid,
            maps.device_slot(maps.locate(mapping, new)),
            new,
        )
        return readable, group, counters

    def _round(
        self,
        buffer: int,
        k: int,
        state: Any,
        needed: Slots,
        slots: Slots,
        ranked: Int32[Array, " depth"],
        ranked_slots: Int32[Array, " depth"],
        margins: Float32[Array, " depth"],
    ) -> Round:
        """One request's round; slots count within its buffer, negative where the row is not there."""
        hits = jnp.where((needed >= 0) & (slots >= 0), slots, EMPTY)
        here = jnp.where((ranked >= 0) & (ranked_slots >= 0), ranked_slots, EMPTY)
        ranking = Ranking.of(ranked[None], here[None], jnp.zeros(1, jnp.int32), margins[None], k)
        return play(self.policy, state, Touch(hits, needed), ranking, buffer)

    def append(self, group: Group, layer: int, readable: Readable, rows: Lanes) -> Group:
        group = pool.write_host(group, layer, readable.new_host, rows)
        return pool.write(group, layer, readable.new_device, rows)

    def attend(self, group: Group, layer: int, readable: Readable, query: Query) -> Attended:
        if readable.in_place:
            rows = pool.read_host(group, layer, maps.host_slot(readable.locations.reshape(-1)))
            return attend_rows(query, rows, readable.valid)
        return attend_slots(query, group.device, layer, readable.locations)

    def release(self, group: Group, addresses: Slots) -> Group:
        buffer = self._buffer(group)
        slots, mapping = maps.forget_copies(group.mapping, addresses)
        quota = jnp.arange(mapping.device_address.size // buffer)[:, None]
        own = jnp.where((slots >= 0) & (slots // buffer == quota), slots % buffer, EMPTY)
        return replace(group, mapping=mapping, policy=jax.vmap(self.policy.forget)(group.policy, own))

    def _buffer(self, group: Group) -> int:
        quotas = jax.tree.leaves(group.policy)[0].shape[0]
        return group.mapping.device_address.size // quotas
