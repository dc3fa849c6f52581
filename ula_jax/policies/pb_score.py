"""PB-LRU's bitmaps with score ranks in place of ages: no search over the keys of all slots.

Within a class the score is not looked at: victims go from the lowest slot on, in the cold class from a moving hand on.
"""

from dataclasses import dataclass

import jax.numpy as jnp

from pallas_kernels import pb_lru
from ula_jax.policies.base import Ranking, Touch
from ula_jax.policies.books import put
from ula_jax.policies.pb_lru import OnBuckets

EDGES = (1.1, 1.25, 1.5, 2.0, 2.5, 3.0, 4.0)
"""Rank, in units of k, at which the next colder class begins. Below the last edge, or unranked, is cold."""


@dataclass(frozen=True)
class PBScore(OnBuckets):
    """Every row that was not used in this round is classed anew from its rank in this round's scores.

    Rows used in a round are in a class of their own, and in the hottest of the others as of the next round.
    """

    depth: float = 4.0
    implementation: str = "auto"

    def init(self, num_slots: int) -> pb_lru.Buckets:
        # The classes from hot to cold, then the current round's. The coldest is given up first.
        classes = len(EDGES)
        order = jnp.asarray([*range(classes - 1, -1, -1), classes], jnp.int32)
        return pb_lru.create(num_slots, classes + 1)._replace(order=order)

    def touch(self, state: pb_lru.Buckets, touch: Touch) -> pb_lru.Buckets:
        if not touch.inserted:
            state = pb_lru.merge(state, len(EDGES), 0)
        return pb_lru.touch(state, touch.slots, implementation=self.implementation)

    def observe(self, state: pb_lru.Buckets, ranking: Ranking) -> pb_lru.Buckets:
        edges = jnp.asarray([int(edge * ranking.k) for edge in EDGES], jnp.int32)
        found = jnp.sum(ranking.ranks[:, None] >= edges, axis=1, dtype=jnp.int32)
        found = jnp.where(found == len(EDGES), state.cold, found)
        every = put(jnp.full(state.label.shape[0], state.cold, jnp.int32), ranking.slots, found)
        return pb_lru.assign(state, every)
