"""Rounds of a policy in which only the map from address to slot is kept: the least that a test of hits needs."""

from functools import partial

import jax
import jax.numpy as jnp

from ula_jax.policies.base import Touch
from ula_jax.policies.round import play
from ula_jax.types import EMPTY


@partial(jax.jit, static_argnums=(0, 2, 3))
def hits(policy, size, largest, addresses, accesses, requests=None, next_use=None):
    """Which of accesses int32[rounds, n] hit, in a pool of `largest` slots of which all but `size` are taken away."""
    _, state = policy.evict(policy.init(largest), largest - size, largest)

    def step(carry, now):
        state, slot_of, held = carry
        access, requests, next_use = now
        slots = slot_of[access]
        targets, _, state = play(policy, state, Touch(slots, access, requests, next_use), None, largest)
        left = held.at[targets].get(mode="fill", fill_value=EMPTY, wrap_negative_indices=False)
        slot_of = slot_of.at[left].set(EMPTY, mode="drop", wrap_negative_indices=False)
        slot_of = slot_of.at[access].set(jnp.where(slots < 0, targets, slots))
        held = held.at[targets].set(access, mode="drop", wrap_negative_indices=False)
        return (state, slot_of, held), slots >= 0

    carry = state, jnp.full(addresses, EMPTY, jnp.int32), jnp.full(largest, EMPTY, jnp.int32)
    return jax.lax.scan(step, carry, (accesses, requests, next_use))[1]
