"""HiSparse's equal quota of every request (LMSYS, 2026), as a policy of one shared pool.

The quota is the pool divided by the number of requests in this round; a request that is not in the round has none, and
rows whose request is unknown are one request's. Where HiSparse gives every request a buffer of its own, here every
victim is the least recently used row of the request that is then most over its quota, counting the rows that it is
about to get. So a request at its quota pays for its own misses; and where quotas shrank, whoever holds too much pays.
"""

from dataclasses import dataclass
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax

from ula_jax.policies.base import Touch
from ula_jax.policies.books import Books, OnBooks, put
from ula_jax.types import Array, Bool, Int32, Scalar


class QuotaState(NamedTuple):
    books: Books
    owner: Int32[Array, " slots"]
    """Request of the row; `slots` for all that are unknown or numbered beyond the number of slots."""
    active: Bool[Array, " owners"]
    """Requests in this round."""
    missing: Int32[Array, " owners"]
    """Rows that they are about to get."""
    quota: Scalar


@dataclass(frozen=True)
class QuotaLRU(OnBooks):
    """Ties of age, and of requests, go to the lowest slot. One sort a round."""

    def init(self, num_slots: int) -> QuotaState:
        owner, owners = jnp.full(num_slots, num_slots, jnp.int32), num_slots + 1
        none = jnp.zeros(owners, jnp.int32)
        return QuotaState(Books.create(num_slots), owner, none.astype(bool), none, jnp.int32(num_slots))

    def touch(self, state: QuotaState, touch: Touch) -> QuotaState:
        unknown = state.owner.shape[0]
        owner = jnp.full_like(touch.slots, unknown) if touch.requests is None else touch.requests
        owner = jnp.where((owner >= 0) & (owner < unknown), owner, unknown)
        missing = jnp.zeros_like(state.missing)
        active, quota = state.active, state.quota
        if not touch.inserted:
            missed = jnp.zeros_like(touch.slots, bool)
            if touch.addresses is not None:
                missed = (touch.addresses >= 0) & (touch.slots < 0)
            missing = missing.at[owner].add(missed.astype(jnp.int32), mode="drop")
            active = jnp.zeros_like(active).at[owner].max(missed | (touch.slots >= 0), mode="drop")
            quota = state.books.in_play // jnp.maximum(jnp.sum(active, dtype=jnp.int32), 1)
        return QuotaState(state.books.touch(touch), put(state.owner, touch.slots, owner), active, missing, quota)

    def evict(self, state: QuotaState, count: Scalar, limit: int) -> tuple[Int32[Array, " limit"], QuotaState]:
        books, owner = state.books, state.owner
        held = jnp.zeros_like(state.missing).at[owner].add(books.resident.astype(jnp.int32), mode="drop")
        over = held + state.missing - jnp.where(state.active, state.quota, 0)

        # Place of each row among the idle ones of its owner, oldest first.
        size, idle = owner.shape[0], books.idle
        slots = jnp.arange(size, dtype=jnp.int32)
        group, _, by_age = lax.sort((jnp.where(idle, owner, size + 1), books.stamp, slots), num_keys=2)
        begins = jnp.concatenate([jnp.ones(1, bool), group[1:] != group[:-1]])
        place = put(jnp.zeros(size, jnp.int32), by_age, slots - lax.cummax(jnp.where(begins, slots, 0)))

        victims, books = books.evict((over[owner] - place).astype(jnp.float32), count, limit)
        return victims, state._replace(books=books)
