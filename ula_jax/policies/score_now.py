"""The row with the lowest indexer score now: what scored far below the selection is not selected next.

All victims of a round are chosen by the scores of that round. Rows below everything ranked go first, oldest first.
"""

from dataclasses import dataclass
from typing import NamedTuple

import jax.numpy as jnp

from ula_jax.policies.base import Ranking, Touch
from ula_jax.policies.books import Books, OnBooks, put
from ula_jax.types import Array, Float32, Int32, Scalar

UNRANKED = -jnp.inf


class ScoreState(NamedTuple):
    books: Books
    margin: Float32[Array, " slots"]
    """Margin in the last ranking, UNRANKED for rows that were not in it."""


@dataclass(frozen=True)
class ScoreNow(OnBooks):
    """Ties of margins go to the lowest slot. Without any ranking it is LRU."""

    depth: float = 4.0

    def init(self, num_slots: int) -> ScoreState:
        return ScoreState(Books.create(num_slots), jnp.full(num_slots, UNRANKED, jnp.float32))

    def touch(self, state: ScoreState, touch: Touch) -> ScoreState:
        return ScoreState(state.books.touch(touch), put(state.margin, state.books.new(touch.slots), UNRANKED))

    def observe(self, state: ScoreState, ranking: Ranking) -> ScoreState:
        margins = jnp.where(jnp.isnan(ranking.margins), UNRANKED, ranking.margins)
        return state._replace(margin=put(jnp.full_like(state.margin, UNRANKED), ranking.slots, margins))

    def evict(self, state: ScoreState, count: Scalar, limit: int) -> tuple[Int32[Array, " limit"], ScoreState]:
        # One key of two parts that do not overlap: ages (exact, as the factor is a power of two) above any margin.
        ranked = jnp.clip(-state.margin, -(2.0**99), 2.0**99)
        urgency = jnp.where(state.margin == UNRANKED, (state.books.age + 1) * 2.0**100, ranked)
        victims, books = state.books.evict(urgency, count, limit)
        return victims, state._replace(books=books)
