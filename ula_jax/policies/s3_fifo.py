"""S3-FIFO (Yang et al., SOSP 2023): a small queue for new rows, a main one for those used again, and a ghost list.

As libCacheSim 0.3 has it: rows used twice move from the small queue to the main one, in which they get as many more
chances as they were used (three at most); rows that were given up from the small queue and come back while their
address is in the ghost list go to the main queue at once. While the pool fills, what the small queue does not hold goes
to the main one.

Two things differ for a cache whose misses must become resident. Every row is let in. And the victims of a whole round
are chosen before any new row is put in: the main queue gives what it holds above its share, counting promotions, the
small queue the rest. Rows used in this round are passed over. With one row a round it is the sequential algorithm.
"""

from dataclasses import dataclass
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax

from ula_jax.policies.base import Touch
from ula_jax.policies.books import Books, first, packed, pick, put
from ula_jax.types import EMPTY, Array, Bool, Int32, Scalar, Slots

MOST_USES = 3


class S3FIFOState(NamedTuple):
    books: Books
    uses: Int32[Array, " slots"]
    """Uses since the row came or was promoted, less the chances that it had since: MOST_USES at most."""
    address: Int32[Array, " slots"]
    small: Int32[Array, " slots"]
    """Slots in order of arrival, then EMPTY."""
    main: Int32[Array, " slots"]
    ghost: Int32[Array, " slots"]
    """Addresses given up from the small queue in earlier rounds, oldest first, EMPTY between them."""
    leaving: Int32[Array, " slots"]
    """Addresses given up from the small queue in this round."""
    size: Scalar
    """Slots in play when the round opened."""
    full: Bool[Array, ""]
    """A row was given up: the pool has been full."""


@dataclass(frozen=True)
class S3FIFO:
    """Shares of the pool in percent. An address that a new request has taken over may still be in the ghost list."""

    small: int = 10
    ghost: int = 90
    promote: int = 2
    """Uses that take a row from the small queue to the main one."""

    def __post_init__(self):
        if not 0 < self.small < 100 or not 0 <= self.ghost <= 100 or self.promote < 1:
            raise ValueError(
                f"s3_fifo: expected small from 1 to 99, ghost from 0 to 100 and promote of at least 1, found "
                f"{self.small}, {self.ghost} and {self.promote}; correct them"
            )

    def init(self, num_slots: int) -> S3FIFOState:
        empty = jnp.full(num_slots, EMPTY, jnp.int32)
        return S3FIFOState(
            books=Books.create(num_slots),
            uses=jnp.zeros(num_slots, jnp.int32),
            address=empty,
            small=empty,
            main=empty,
            ghost=empty,
            leaving=empty,
            size=jnp.int32(num_slots),
            full=jnp.zeros((), bool),
        )

    def touch(self, state: S3FIFOState, touch: Touch) -> S3FIFOState:
        uses = jnp.minimum(state.uses.at[touch.slots].add(1, mode="drop", wrap_negative_indices=False), MOST_USES)
        state, before = state._replace(books=state.books.touch(touch), uses=uses), state.books
        if touch.inserted:
            return self._insert(state, before.new(touch.slots), touch.addresses)
        return state._replace(
            ghost=_newest(state.ghost, state.leaving, before.in_play * self.ghost // 100),
            leaving=jnp.full_like(state.leaving, EMPTY),
            size=before.in_play,
        )

    def evict(self, state: S3FIFOState, count: Scalar, limit: int) -> tuple[Int32[Array, " limit"], S3FIFOState]:
        length = state.small.shape[0]
        needed = jnp.minimum(count, limit) - jnp.sum(state.books.free, dtype=jnp.int32)

        idle, uses = _of(state.books.idle, state.small), state.uses[jnp.maximum(state.small, 0)]
        leave, promoted = self._from_small(state, idle & (uses < self.promote), idle & (uses >= self.promote), needed)
        rest = idle & ~leave & ~promoted
        moved = jnp.where(promoted, state.small, EMPTY)
        main = packed(jnp.concatenate([state.main, moved]), length)
        chances = put(state.uses, moved, 0)
        idle_in_main, left = _of(state.books.idle, main), chances[jnp.maximum(main, 0)]

        # The main queue goes round: in the first turn rows without chances leave, in the next those that had one...
        turns = idle_in_main & (left == jnp.arange(MOST_USES + 1)[:, None])
        mask, place = first(jnp.concatenate([state.books.free[None], leave[None], turns, rest[None]]), count, limit)
        from_small, from_main = (mask == 1) | (mask == MOST_USES + 3), (mask >= 2) & (mask < MOST_USES + 3)
        victims = jnp.where(from_main, pick(main, place), jnp.where(from_small, pick(state.small, place), place))

        last_turn = jnp.max(jnp.where(from_main, mask - 2, EMPTY), initial=EMPTY)
        last = jnp.max(jnp.where(from_main & (mask - 2 == last_turn), place, EMPTY), initial=EMPTY)
        went_round = jnp.where(jnp.arange(length) <= last, last_turn + 1, jnp.maximum(last_turn, 0))
        chances = put(chances, jnp.where(idle_in_main, main, EMPTY), jnp.maximum(left - went_round, 0))

        gone = put(jnp.zeros(length, bool), victims, True)
        given_up = jnp.where(from_small, pick(state.address, victims), EMPTY)
        return victims, state._replace(
            books=state.books.remove(victims),
            uses=chances,
            small=packed(jnp.where(promoted | _of(gone, state.small), EMPTY, state.small), length),
            main=packed(jnp.roll(jnp.where(_of(gone, main), EMPTY, main), -(last + 1)), length),
            leaving=packed(jnp.concatenate([state.leaving, given_up]), length),
            full=state.full | jnp.any(from_small | from_main),
        )

    def forget(self, state: S3FIFOState, slots: Slots) -> S3FIFOState:
        gone = put(jnp.zeros(state.uses.shape[0], bool), slots, True)
        small, main = (
            packed(jnp.where(_of(gone, queue), EMPTY, queue), gone.shape[0]) for queue in (state.small, state.main)
        )
        return state._replace(books=state.books.forget(slots), small=small, main=main)

    def audit(self, state: S3FIFOState, occupied: np.ndarray) -> None:
        """As `Books.audit`, and the two queues name every occupied slot once."""
        state.books.audit(occupied)
        both = np.concatenate([np.asarray(state.small), np.asarray(state.main)])
        assert np.array_equal(np.sort(both[both >= 0]), np.flatnonzero(occupied)), "the queues are not what is occupied"

    def _insert(self, state: S3FIFOState, new: Slots, addresses: Int32[Array, " n"] | None) -> S3FIFOState:
        length = state.small.shape[0]
        if addresses is None:
            addresses = jnp.full_like(new, EMPTY)
        ghost, back = _take(state.ghost, jnp.where(new >= 0, addresses, EMPTY))
        fresh = (new >= 0) & ~back
        room = self._small(state) - jnp.sum(state.small >= 0, dtype=jnp.int32)
        into_small = fresh & (state.full | (jnp.cumsum(fresh) <= room))
        return state._replace(
            uses=put(state.uses, new, 0),
            address=put(state.address, new, addresses),
            ghost=ghost,
            small=packed(jnp.concatenate([state.small, jnp.where(into_small, new, EMPTY)]), length),
            main=packed(jnp.concatenate([state.main, jnp.where(into_small, EMPTY, new)]), length),
        )

    def _small(self, state: S3FIFOState) -> Scalar:
        return jnp.maximum(state.size * self.small // 100, 1)

    def _from_small(
        self, state: S3FIFOState, could: Bool[Array, " n"], earned: Bool[Array, " n"], needed: Scalar
    ) -> tuple[Bool[Array, " n"], Bool[Array, " n"]]:
        """Which entries of the small queue leave, of those that could, and which are promoted on the way.

        Before each of them the main queue gives whatever it holds above its share, promoted rows included.
        """
        above = jnp.sum(state.main >= 0, dtype=jnp.int32) - (state.size - self._small(state))
        promotions = jnp.cumsum(earned, dtype=jnp.int32)
        so_far = lax.cummax(jnp.where(could, promotions, 0))  # promotions before the last entry that could leave
        before = jnp.concatenate([jnp.zeros(1, jnp.int32), so_far[:-1]])
        number = jnp.cumsum(could, dtype=jnp.int32)
        leave = could & (number - 1 + jnp.maximum(above + before, 0) < needed)
        left = jnp.sum(leave, dtype=jnp.int32)
        # Once none is left that could leave, all others are promoted, and the main queue gives the rest.
        to_the_end = (left == number[-1]) & (left + jnp.maximum(above + so_far[-1], 0) < needed)
        return leave, earned & ((number < left) | to_the_end)


def _of(mask: Bool[Array, " slots"], queue: Int32[Array, " n"]) -> Bool[Array, " n"]:
    """The mask in the order of a queue of slots, False at EMPTY."""
    return mask[jnp.maximum(queue, 0)] & (queue >= 0)


def _newest(older: Int32[Array, " n"], newer: Int32[Array, " m"], most: Scalar) -> Int32[Array, " n"]:
    """The last `most` addresses of two lists, in order."""
    both = jnp.concatenate([older, newer])
    from_end = jnp.cumsum((both >= 0)[::-1])[::-1]
    return packed(jnp.where(from_end <= most, both, EMPTY), older.shape[0])


def _take(ghost: Int32[Array, " n"], addresses: Int32[Array, " m"]) -> tuple[Int32[Array, " n"], Bool[Array, " m"]]:
    """The ghost list without these addresses, and which of them were in it."""
    if not addresses.shape[0]:
        return ghost, jnp.zeros(0, bool)
    ordered = jnp.sort(addresses)
    place = jnp.minimum(jnp.searchsorted(ordered, ghost), addresses.shape[0] - 1).astype(jnp.int32)
    known = (ghost >= 0) & (ordered[place] == ghost)
    found = put(jnp.zeros(addresses.shape[0], bool), jnp.where(known, place, EMPTY), True)
    back = found[jnp.minimum(jnp.searchsorted(ordered, addresses), addresses.shape[0] - 1)]
    return jnp.where(known, EMPTY, ghost), back & (addresses >= 0)
