"""Belady's optimum (IBM Systems Journal 1966): the row whose next use is farthest away.

With a whole round of victims asked for at once it gives the rows used last of all; ties go to the lowest slot. It is
still the best that any policy without prefetching can do.
"""

from dataclasses import dataclass
from typing import NamedTuple

import jax.numpy as jnp

from ula_jax.policies.base import Touch
from ula_jax.policies.books import Books, OnBooks, put
from ula_jax.types import Array, Int32, Scalar


class BeladyState(NamedTuple):
    books: Books
    next_use: Int32[Array, " slots"]


@dataclass(frozen=True)
class Belady(OnBooks):
    """The bound for all others; only a replay can run it."""

    def init(self, num_slots: int) -> BeladyState:
        return BeladyState(Books.create(num_slots), jnp.zeros(num_slots, jnp.int32))

    def touch(self, state: BeladyState, touch: Touch) -> BeladyState:
        next_use = state.next_use
        if touch.next_use is not None:
            next_use = put(next_use, touch.slots, touch.next_use)
        elif touch.slots.size:
            raise ValueError("belady: expected next_use, found none; only a replay knows the future")
        return BeladyState(state.books.touch(touch), next_use)

    def evict(self, state: BeladyState, count: Scalar, limit: int) -> tuple[Int32[Array, " limit"], BeladyState]:
        victims, books = state.books.evict(state.next_use.astype(jnp.float32), count, limit)
        return victims, state._replace(books=books)
