"""Bucketed LRU whose buckets grow with age: few bitmaps reach far back, so no ring length has to be chosen."""

from dataclasses import dataclass
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels import pb_lru
from ula_jax.policies.base import Touch
from ula_jax.types import EMPTY, Array, Int32, Scalar, Slots


class ExpState(NamedTuple):
    buckets: pb_lru.Buckets
    size: Int32[Array, " rounds"]
    """Parallel to `buckets.order`: the bucket holds what was last used in 2 ** size rounds; EMPTY for unused ones."""


@dataclass(frozen=True)
class PBLRUExp:
    """As `pb_lru`, but when more than `width` buckets stand for equally many rounds, the two oldest become one.

    This is how a binary counter carries. Slots in one bucket go from the lowest one on. `buckets` bitmaps reach about
    width * 2 ** (buckets / (width - 1)) rounds back with ages true to a factor of 2; what is older is cold.
    """

    buckets: int = 12
    width: int = 4
    implementation: str = "auto"

    def __post_init__(self):
        if self.width < 2 or not self.width <= self.buckets < pb_lru.MAX_ROUNDS:
            raise ValueError(
                f"pb_lru_exp: expected 2 <= width <= buckets < {pb_lru.MAX_ROUNDS}, found width {self.width} and "
                f"buckets {self.buckets}; choose numbers in that range"
            )

    def init(self, num_slots: int) -> ExpState:
        size = jnp.full(self.buckets + 1, EMPTY, jnp.int32).at[-1].set(0)  # one more for the current round
        return ExpState(pb_lru.create(num_slots, self.buckets + 1), size)

    def touch(self, state: ExpState, touch: Touch) -> ExpState:
        if not touch.inserted:
            # A class of size c exists only while each smaller one has at least width - 1 buckets.
            state = lax.fori_loop(0, self.buckets // (self.width - 1), self._carry, state)
            size = jnp.roll(state.size, -1).at[-1].set(0)
            state = state._replace(size=size)
        opens, form = not touch.inserted, self.implementation
        return state._replace(buckets=pb_lru.touch(state.buckets, touch.slots, opens=opens, implementation=form))

    def evict(self, state: ExpState, count: Scalar, limit: int) -> tuple[Int32[Array, " limit"], ExpState]:
        victims, buckets = pb_lru.evict(state.buckets, count, limit, implementation=self.implementation)
        return victims, state._replace(buckets=buckets)

    def forget(self, state: ExpState, slots: Slots) -> ExpState:
        return state._replace(buckets=pb_lru.forget(state.buckets, slots, implementation=self.implementation))

    def audit(self, state: ExpState, occupied: np.ndarray) -> None:
        pb_lru.audit(state.buckets, occupied)

    def _carry(self, size: Scalar, state: ExpState) -> ExpState:
        """If there are too many buckets of this size, the oldest joins the next one, and is unused: first in order."""
        is_size = state.size == size
        older = jnp.argmax(is_size)

        def join(state: ExpState) -> ExpState:
            order = state.buckets.order
            buckets = pb_lru.merge(state.buckets, order[older], order[older + 1])
            place = jnp.arange(order.shape[0])
            place = jnp.where(place == 0, older, jnp.where(place <= older, place - 1, place))
            sizes = state.size.at[older].set(EMPTY).at[older + 1].set(size + 1)
            return ExpState(buckets._replace(order=order[place]), sizes[place])

        return lax.cond(jnp.sum(is_size) > self.width, join, lambda state: state, state)
