from dataclasses import dataclass
from typing import NamedTuple

import jax.numpy as jnp

from ula_jax.policies.books import Books, put


class State(NamedTuple):
    books: Books  # which slots are free, used in this round, or given away
    arrived: jnp.ndarray  # int32 [slots]: round in which each slot was filled


@dataclass(frozen=True)
class Fifo:
    def init(self, num_slots):
        return State(Books.create(num_slots), jnp.zeros(num_slots, jnp.int32))

    def touch(self, state, touch):
        books = state.books.touch(touch)
        return State(books, put(state.arrived, state.books.new(touch.slots), books.round))

    def evict(self, state, count, limit):
        waited = (state.books.round - state.arrived).astype(jnp.float32)
        slots, books = state.books.evict(waited, count, limit)
        return slots, state._replace(books=books)

    def forget(self, state, slots):
        return state._replace(books=state.books.forget(slots))
