"""What most policies know of every slot: when it was last used, whether it is free, whether it was given up."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import pb_lru
from ula_jax.policies.base import Touch
from ula_jax.types import EMPTY, Array, Bool, Float32, Int32, Scalar, Slots

FREE = -1  # older than any round
ABSENT = 2**31 - 1  # given up and not yet used again: newer than any round

LARGEST = 2.0**126
"""Bounds every urgency, so that infinities are left for slots that are free and slots that may not be given."""


class Books(NamedTuple):
    """The slots of one pool. `evict` gives them up by a key, for policies that have one for every slot."""

    stamp: Int32[Array, " slots"]
    """Round of the last use, FREE or ABSENT."""
    round: Scalar

    @staticmethod
    def create(num_slots: int) -> "Books":
        return Books(jnp.full(num_slots, FREE, jnp.int32), jnp.int32(0))

    @property
    def free(self) -> Bool[Array, " slots"]:
        return self.stamp == FREE

    @property
    def resident(self) -> Bool[Array, " slots"]:
        """Slots that hold a row."""
        return (self.stamp >= 0) & (self.stamp != ABSENT)

    @property
    def idle(self) -> Bool[Array, " slots"]:
        """Slots that hold a row that was not used in this round."""
        return (self.stamp >= 0) & (self.stamp < self.round)

    @property
    def age(self) -> Float32[Array, " slots"]:
        """Rounds since the last use, of slots that hold a row. Exact for 16 million rounds."""
        return (self.round - self.stamp).astype(jnp.float32)

    @property
    def in_play(self) -> Scalar:
        """Size of the pool when a round opens. A replay takes the slots of smaller pools away for good."""
        return jnp.sum(self.stamp != ABSENT, dtype=jnp.int32)

    def new(self, slots: Slots) -> Slots:
        """Those of the slots that hold no row yet, EMPTY for the others."""
        stamp = self.stamp.at[slots].get(mode="fill", fill_value=0, wrap_negative_indices=False)
        return jnp.where((stamp == FREE) | (stamp == ABSENT), slots, EMPTY)

    def touch(self, touch: Touch) -> "Books":
        now = self.round if touch.inserted else self.round + 1
        return Books(put(self.stamp, touch.slots, now), now)

    def forget(self, slots: Slots) -> "Books":
        return self._replace(stamp=put(self.stamp, slots, FREE))

    def remove(self, victims: Slots) -> "Books":
        return self._replace(stamp=put(self.stamp, victims, ABSENT))

    def evict(
        self, urgency: Float32[Array, " slots"], count: Scalar, limit: int
    ) -> tuple[Int32[Array, " limit"], "Books"]:
        """Free slots first, then idle ones from the highest urgency down, ties to the lowest slot."""
        size = self.stamp.shape[0]
        # As float32: only floats have a fast top_k on CPU.
        urgency = jnp.where(self.idle, jnp.clip(urgency, -LARGEST, LARGEST), -jnp.inf)
        best, order = jax.lax.top_k(jnp.where(self.free, jnp.inf, urgency), min(limit, size))
        given = (jnp.arange(best.size) < count) & (best > -jnp.inf)
        victims = jnp.pad(jnp.where(given, order, EMPTY), (0, limit - best.size), constant_values=EMPTY)
        return victims, self.remove(victims)

    def audit(self, occupied: np.ndarray) -> None:
        """AssertionError unless free are the slots that are not occupied and no slot is given up and unused."""
        stamp = np.asarray(self.stamp)
        assert np.array_equal(stamp == FREE, ~occupied), f"free slots are {np.flatnonzero(stamp == FREE)[:32].tolist()}"
        assert not np.any(stamp == ABSENT), "a slot was evicted and not used"


class OnBooks:
    """`forget` and `audit` of a policy whose state has `books`, and nothing else that a freed slot changes."""

    def forget(self, state: Any, slots: Slots) -> Any:
        return state._replace(books=state.books.forget(slots))

    def audit(self, state: Any, occupied: np.ndarray) -> None:
        """AssertionError as `Books.audit`."""
        state.books.audit(occupied)


def put(array: Array, at: Slots, value: Array | int | float) -> Array:
    """The array with the value at these places; EMPTY is padding."""
    return array.at[at].set(value, mode="drop", wrap_negative_indices=False)


def pick(array: Array, at: Int32[Array, " n"]) -> Int32[Array, " n"]:
    """Entries of a list of slots or addresses at these places, EMPTY where the place is EMPTY."""
    return array.at[at].get(mode="fill", fill_value=EMPTY, wrap_negative_indices=False)


def first(
    masks: Bool[Array, "masks n"], count: Scalar, limit: int
) -> tuple[Int32[Array, " limit"], Int32[Array, " limit"]]:
    """Mask and place of the first `count` (<= limit) members, mask by mask; then EMPTY."""
    words = pb_lru.pack(masks)
    width = words.shape[1] * 32
    found = pb_lru.first_set(words.reshape(-1), count, limit)
    return jnp.where(found < 0, EMPTY, found // width), jnp.where(found < 0, EMPTY, found % width)


def packed(entries: Int32[Array, " n"], size: int) -> Int32[Array, " size"]:
    """The entries that are not EMPTY, in order, then EMPTY padding."""
    kept = entries >= 0
    place = jnp.where(kept, jnp.cumsum(kept) - 1, EMPTY)
    return put(jnp.full(size, EMPTY, jnp.int32), place.astype(jnp.int32), entries)
