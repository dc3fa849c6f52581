from dataclasses import dataclass
from typing import NamedTuple

import jax.numpy as jnp


class State(NamedTuple):
    arrived: jnp.ndarray  # [slots] round in which each slot was filled, -1 when free
    used: jnp.ndarray  # [slots] round in which it was last read
    round: jnp.ndarray


@dataclass(frozen=True)
class Fifo:
    def init(self, num_slots):
        return State(jnp.full(num_slots, -1), jnp.full(num_slots, -1), jnp.int32(0))

    def touch(self, state, touch):
        now = state.round if touch.inserted else state.round + 1
        arrived = put(state.arrived, touch.slots, now) if touch.inserted else state.arrived
        return State(arrived, put(state.used, touch.slots, now), now)

    def evict(self, state, count, limit):
        age = jnp.where(state.used == state.round, jnp.iinfo(jnp.int32).max, state.arrived)
        oldest = jnp.resize(jnp.argsort(age), limit).astype(jnp.int32)
        given = (jnp.arange(limit) < jnp.minimum(count, age.size)) & (state.used[oldest] < state.round)
        slots = jnp.where(given, oldest, -1)
        return slots, state._replace(used=put(state.used, slots, state.round))

    def forget(self, state, slots):
        return state._replace(arrived=put(state.arrived, slots, -1), used=put(state.used, slots, -1))


def put(array, slots, value):  # -1 in a slot list is padding
    return array.at[slots].set(value, mode="drop", wrap_negative_indices=False)
