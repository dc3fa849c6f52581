"""Any row that is not in use, with equal chances: what a policy must at least beat."""

from dataclasses import dataclass

import jax
import numpy as np

from ula_jax.policies.base import Touch
from ula_jax.policies.books import Books
from ula_jax.types import Array, Int32, Scalar, Slots


@dataclass(frozen=True)
class Random:
    """Drawn without replacement from all rows that were not used in this round. The same seed gives the same draws."""

    seed: int = 0

    def init(self, num_slots: int) -> Books:
        return Books.create(num_slots)

    def touch(self, state: Books, touch: Touch) -> Books:
        return state.touch(touch)

    def evict(self, state: Books, count: Scalar, limit: int) -> tuple[Int32[Array, " limit"], Books]:
        key = jax.random.fold_in(jax.random.key(self.seed), state.round)
        return state.evict(jax.random.uniform(key, state.stamp.shape), count, limit)

    def forget(self, state: Books, slots: Slots) -> Books:
        return state.forget(slots)

    def audit(self, state: Books, occupied: np.ndarray) -> None:
        state.audit(occupied)
