"""Exact least recently used: the slot whose last round of use is oldest, ties to the lowest slot."""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ula_jax.policies.base import Touch
from ula_jax.types import EMPTY, Array, Int32, Scalar, Slots

FREE = -1  # older than any round, so free slots go first
ABSENT = jnp.iinfo(jnp.int32).max  # evicted and not yet touched again: newer than any round


class LRUState(NamedTuple):
    stamp: Int32[Array, " slots"]
    """Round of the last use, FREE or ABSENT."""
    round: Scalar


@dataclass(frozen=True)
class LRU:
    """The baseline for every other policy. `evict` selects from all stamps: O(slots) work a round."""

    def init(self, num_slots: int) -> LRUState:
        return LRUState(jnp.full(num_slots, FREE, jnp.int32), jnp.int32(0))

    def touch(self, state: LRUState, touch: Touch) -> LRUState:
        now = state.round if touch.inserted else state.round + 1
        return LRUState(_stamp(state.stamp, touch.slots, now), now)

    def evict(self, state: LRUState, count: Scalar, limit: int) -> tuple[Int32[Array, " limit"], LRUState]:
        size = state.stamp.shape[0]
        # As float32: exact for 16 million rounds, and only floats have a fast top_k on CPU. Lowest slot first.
        age = (state.round - state.stamp).astype(jnp.float32)
        age = jnp.where(state.stamp == ABSENT, -1.0, jnp.where(state.stamp == FREE, jnp.inf, age))
        _, oldest = jax.lax.top_k(age, min(limit, size))
        oldest = jnp.pad(oldest, (0, max(limit - size, 0)))
        rank = jnp.arange(limit, dtype=jnp.int32)
        given = (rank < jnp.minimum(count, size)) & (state.stamp[oldest] < state.round)
        victims = jnp.where(given, oldest, EMPTY)
        return victims, LRUState(_stamp(state.stamp, victims, ABSENT), state.round)

    def forget(self, state: LRUState, slots: Slots) -> LRUState:
        return LRUState(_stamp(state.stamp, slots, FREE), state.round)

    def audit(self, state: LRUState, occupied: np.ndarray) -> None:
        """AssertionError unless free are the slots that are not occupied and no slot is between two buckets."""
        stamp = np.asarray(state.stamp)
        assert np.array_equal(stamp == FREE, ~occupied), f"free slots are {np.flatnonzero(stamp == FREE)[:32].tolist()}"
        assert not np.any(stamp == ABSENT), "a slot was evicted and not used"


def _stamp(stamp: Int32[Array, " slots"], slots: Slots, value: int | Scalar) -> Int32[Array, " slots"]:
    return stamp.at[slots].set(value, mode="drop", wrap_negative_indices=False)
