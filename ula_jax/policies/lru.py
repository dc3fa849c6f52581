"""Exact least recently used: the slot whose last round of use is oldest, ties to the lowest slot."""

from dataclasses import dataclass

import numpy as np

from ula_jax.policies.base import Touch
from ula_jax.policies.books import Books
from ula_jax.types import Array, Int32, Scalar, Slots


@dataclass(frozen=True)
class LRU:
    """The baseline for every other policy. `evict` selects from all stamps: O(slots) work a round."""

    def init(self, num_slots: int) -> Books:
        return Books.create(num_slots)

    def touch(self, state: Books, touch: Touch) -> Books:
        return state.touch(touch)

    def evict(self, state: Books, count: Scalar, limit: int) -> tuple[Int32[Array, " limit"], Books]:
        return state.evict(state.age, count, limit)

    def forget(self, state: Books, slots: Slots) -> Books:
        return state.forget(slots)

    def audit(self, state: Books, occupied: np.ndarray) -> None:
        state.audit(occupied)
