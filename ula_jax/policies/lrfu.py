"""LRFU (Lee et al., IEEE Trans. Computers 2001): the row whose uses, each fading with time, weigh least.

Time is counted in rounds, so all uses of one round weigh the same; ties go to the lowest slot. Only rows that are here
have a weight: one that comes back starts anew.
"""

from dataclasses import dataclass
from math import log2
from typing import NamedTuple

import jax.numpy as jnp

from ula_jax.policies.base import Touch
from ula_jax.policies.books import Books, OnBooks, put
from ula_jax.types import Array, Float32, Int32, Scalar


class LRFUState(NamedTuple):
    books: Books
    weight: Float32[Array, " slots"]
    """As of the slot's last use; it fades when it is next read."""


@dataclass(frozen=True)
class LRFU(OnBooks):
    """A use weighs `decay` to the power of the rounds since: near 0 it is LRU, at 1 it is LFU."""

    decay: float = 0.9

    def __post_init__(self):
        if not 0 < self.decay <= 1:
            raise ValueError(f"lrfu decay: expected a number above 0, at most 1, found {self.decay}; choose one there")

    def init(self, num_slots: int) -> LRFUState:
        return LRFUState(Books.create(num_slots), jnp.zeros(num_slots, jnp.float32))

    def touch(self, state: LRFUState, touch: Touch) -> LRFUState:
        books, slots = state.books.touch(touch), touch.slots
        at = jnp.maximum(slots, 0)  # what padding reads is not written
        weight, since = state.weight[at], (books.round - state.books.stamp[at]).astype(jnp.float32)
        faded = jnp.where(state.books.new(slots) >= 0, 0.0, weight * self.decay**since)
        return LRFUState(books, put(state.weight, slots, faded + 1))

    def evict(self, state: LRFUState, count: Scalar, limit: int) -> tuple[Int32[Array, " limit"], LRFUState]:
        # In logarithms: the weight itself is 0 in float32 after a thousand rounds.
        urgency = state.books.age * -log2(self.decay) - jnp.log2(jnp.maximum(state.weight, 1.0))
        victims, books = state.books.evict(urgency, count, limit)
        return victims, state._replace(books=books)
