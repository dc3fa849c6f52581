"""A replay of a trace against a policy, as one jitted scan: no rows, only who is where."""

from functools import partial

import jax
import jax.numpy as jnp

from ula_jax.policies import Touch
from ula_jax.traces import Trace
from ula_jax.types import EMPTY


def replay(policy, trace: Trace, num_slots: int):
    """Hits of each round, int32[rounds]; of `requests * k` accesses each."""
    requests = trace.finished.shape[1]
    selected = jnp.asarray(trace.addresses().reshape(len(trace.selected), -1))
    return _replay(policy, selected, jnp.asarray(trace.finished), num_slots, requests * trace.positions)


@partial(jax.jit, static_argnums=(0, 3, 4))
def _replay(policy, selected, finished, num_slots, num_addresses):
    per_request = num_addresses // finished.shape[1]

    def round_(carry, now):
        state, slot_of, held = carry  # slot of each address, address in each slot; EMPTY for none
        addresses, done = now
        gone = (held >= 0) & done[held // per_request]
        state = policy.forget(state, jnp.where(gone, jnp.arange(num_slots, dtype=jnp.int32), EMPTY))
        slot_of = _put(slot_of, jnp.where(gone, held, EMPTY), EMPTY)
        held = jnp.where(gone, EMPTY, held)

        slots = slot_of[addresses]
        missed = slots < 0
        state = policy.touch(state, Touch(slots))
        victims, state = policy.evict(state, missed.sum(dtype=jnp.int32), addresses.shape[0])
        fresh = jnp.where(missed, victims[jnp.maximum(jnp.cumsum(missed) - 1, 0)], EMPTY)
        state = policy.touch(state, Touch(victims, inserted=True))

        slot_of = _put(slot_of, jnp.where(victims < 0, EMPTY, held[victims]), EMPTY)
        slot_of = _put(slot_of, jnp.where(missed, addresses, EMPTY), fresh)
        held = _put(held, fresh, addresses)
        return (state, slot_of, held), jnp.sum(~missed, dtype=jnp.int32)

    start = (
        policy.init(num_slots),
        jnp.full(num_addresses, EMPTY, jnp.int32),
        jnp.full(num_slots, EMPTY, jnp.int32),
    )
    return jax.lax.scan(round_, start, (selected, finished))[1]


def _put(array, at, value):
    return array.at[at].set(value, mode="drop", wrap_negative_indices=False)
