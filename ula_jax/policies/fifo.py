"""First in, first out: the row that came in the oldest round, however often it was used since.

The rows of one round go by the lowest slot; with one row a round it is the sequential algorithm.
"""

from dataclasses import dataclass
from typing import NamedTuple

import jax.numpy as jnp

from ula_jax.policies.base import Touch
from ula_jax.policies.books import Books, OnBooks, put
from ula_jax.types import Array, Int32, Scalar


class FIFOState(NamedTuple):
    books: Books
    arrived: Int32[Array, " slots"]
    """Round in which the row came."""


@dataclass(frozen=True)
class FIFO(OnBooks):
    """Use protects a row in its round only."""

    def init(self, num_slots: int) -> FIFOState:
        return FIFOState(Books.create(num_slots), jnp.zeros(num_slots, jnp.int32))

    def touch(self, state: FIFOState, touch: Touch) -> FIFOState:
        books = state.books.touch(touch)
        return FIFOState(books, put(state.arrived, state.books.new(touch.slots), books.round))

    def evict(self, state: FIFOState, count: Scalar, limit: int) -> tuple[Int32[Array, " limit"], FIFOState]:
        since = (state.books.round - state.arrived).astype(jnp.float32)
        victims, books = state.books.evict(since, count, limit)
        return victims, state._replace(books=books)
