"""CLOCK (Corbato 1968), also called second chance or FIFO-reinsertion.

A hand goes round the slots and gives up the first whose row was not used since it last came by. New rows are unmarked,
as in libCacheSim. A whole round of victims is what the hand meets in one go, before any new row is put in; rows used in
this round are passed over and keep their mark. With one row a round it is the sequential algorithm. A slot that was
freed is filled in its place on the circle, though its row is then newer than its neighbours.
"""

from dataclasses import dataclass
from typing import NamedTuple

import jax.numpy as jnp

from ula_jax.policies.base import Touch
from ula_jax.policies.books import Books, OnBooks, first, put
from ula_jax.types import Array, Bool, Int32, Scalar


class ClockState(NamedTuple):
    books: Books
    marked: Bool[Array, " slots"]
    """Used since the hand last came by."""
    hand: Scalar


@dataclass(frozen=True)
class CLOCK(OnBooks):
    """One mark a slot and one hand a pool."""

    def init(self, num_slots: int) -> ClockState:
        return ClockState(Books.create(num_slots), jnp.zeros(num_slots, bool), jnp.int32(0))

    def touch(self, state: ClockState, touch: Touch) -> ClockState:
        marked = put(put(state.marked, touch.slots, True), state.books.new(touch.slots), False)
        return state._replace(books=state.books.touch(touch), marked=marked)

    def evict(self, state: ClockState, count: Scalar, limit: int) -> tuple[Int32[Array, " limit"], ClockState]:
        _, victims, marked, hand = sweep(state.books.free, state.books.idle, state.marked, state.hand, count, limit)
        return victims, ClockState(state.books.remove(victims), marked, hand)


class Swept(NamedTuple):
    from_ring: Bool[Array, " limit"]
    places: Int32[Array, " limit"]
    """In the ring, or in `free` where not from the ring; EMPTY padding."""
    marked: Bool[Array, " n"]
    hand: Scalar


def sweep(
    free: Bool[Array, " n"],
    idle: Bool[Array, " n"],
    marked: Bool[Array, " n"],
    hand: Scalar,
    count: Scalar,
    limit: int,
) -> Swept:
    """Free slots first; then what a hand going round a ring meets idle and unmarked, taking the marks of the others.

    After one turn there are no marks left, and the second takes all that are idle. The hand stops past the last taken.
    """
    n = idle.shape[0]
    ahead = (jnp.arange(n, dtype=jnp.int32) - hand) % n
    in_turn = jnp.roll(jnp.stack([idle & ~marked, idle & marked]), -hand, axis=1)
    turn, place = first(jnp.concatenate([free[None], in_turn]), count, limit)
    last_turn = jnp.max(turn, initial=0)
    last = jnp.max(jnp.where(turn == last_turn, place, 0), initial=0)
    passed = (last_turn == 2) | ((last_turn == 1) & (ahead < last))
    return Swept(
        from_ring=turn > 0,
        places=jnp.where(turn > 0, (hand + place) % n, place),
        marked=marked & ~(idle & passed),
        hand=jnp.where(last_turn > 0, (hand + last + 1) % n, hand),
    )
