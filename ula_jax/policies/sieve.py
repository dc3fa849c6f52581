"""SIEVE (Zhang et al., NSDI 2024): a queue in order of arrival, and a hand that goes from its old end to its new end.

The hand gives up the first row that was not used since it last came by, and stays there: unlike in CLOCK, new rows do
not come behind it but at the queue's end. A whole round of victims is what the hand meets in one go, before any new row
is put in; rows used in this round are passed over and keep their mark. With one row a round it is the sequential
algorithm.
"""

from dataclasses import dataclass
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from ula_jax.policies.base import Touch
from ula_jax.policies.books import Books, packed, pick, put
from ula_jax.policies.clock import sweep
from ula_jax.types import EMPTY, Array, Bool, Int32, Scalar, Slots


class SieveState(NamedTuple):
    books: Books
    marked: Bool[Array, " slots"]
    """Used since the hand last came by."""
    queue: Int32[Array, " slots"]
    """Slots in order of arrival, then EMPTY."""
    hand: Scalar
    """Place in the queue from which the next scan starts: 0 once the newest row was passed."""


@dataclass(frozen=True)
class SIEVE:
    """The queue is kept in one piece: a cumulative sum and a scatter for every change, no sort."""

    def init(self, num_slots: int) -> SieveState:
        none = jnp.zeros(num_slots, bool)
        return SieveState(Books.create(num_slots), none, jnp.full(num_slots, EMPTY, jnp.int32), jnp.int32(0))

    def touch(self, state: SieveState, touch: Touch) -> SieveState:
        new = state.books.new(touch.slots)
        marked = put(put(state.marked, touch.slots, True), new, False)
        queue = packed(jnp.concatenate([state.queue, new]), state.queue.shape[0])
        return SieveState(state.books.touch(touch), marked, queue, state.hand)

    def evict(self, state: SieveState, count: Scalar, limit: int) -> tuple[Int32[Array, " limit"], SieveState]:
        queue = state.queue
        at = jnp.maximum(queue, 0)
        idle = state.books.idle[at] & (queue >= 0)
        swept = sweep(state.books.free, idle, state.marked[at], state.hand, count, limit)
        victims = jnp.where(swept.from_ring, pick(queue, swept.places), swept.places)
        state = state._replace(
            books=state.books.remove(victims), marked=put(state.marked, queue, swept.marked), hand=swept.hand
        )
        return victims, _remove(state, victims)

    def forget(self, state: SieveState, slots: Slots) -> SieveState:
        return _remove(state._replace(books=state.books.forget(slots)), slots)

    def audit(self, state: SieveState, occupied: np.ndarray) -> None:
        """As `Books.audit`, and the queue names every occupied slot once."""
        state.books.audit(occupied)
        queue = np.asarray(state.queue)
        assert np.array_equal(np.sort(queue[queue >= 0]), np.flatnonzero(occupied)), "the queue is not what is occupied"


def _remove(state: SieveState, slots: Slots) -> SieveState:
    gone = put(jnp.zeros(state.marked.shape[0], bool), slots, True)
    left = jnp.where(gone[jnp.maximum(state.queue, 0)], EMPTY, state.queue)
    before = jnp.sum((left >= 0) & (jnp.arange(left.shape[0]) < state.hand), dtype=jnp.int32)
    hand = jnp.where(before == jnp.sum(left >= 0), 0, before)
    return state._replace(queue=packed(left, left.shape[0]), hand=hand)
