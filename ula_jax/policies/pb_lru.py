"""Parallel bucketed LRU: recency in whole rounds, kept as bitmaps instead of an order."""

from dataclasses import dataclass

import numpy as np

from pallas_kernels import pb_lru
from ula_jax.policies.base import Touch
from ula_jax.types import Array, Int32, Scalar, Slots


class OnBuckets:
    """All but opening rounds, of a policy whose whole state is `pb_lru.Buckets`."""

    implementation: str

    def evict(self, state: pb_lru.Buckets, count: Scalar, limit: int) -> tuple[Int32[Array, " limit"], pb_lru.Buckets]:
        return pb_lru.evict(state, count, limit, implementation=self.implementation)

    def forget(self, state: pb_lru.Buckets, slots: Slots) -> pb_lru.Buckets:
        return pb_lru.forget(state, slots, implementation=self.implementation)

    def audit(self, state: pb_lru.Buckets, occupied: np.ndarray) -> None:
        pb_lru.audit(state, occupied)


@dataclass(frozen=True)
class PBLRU(OnBuckets):
    """Exact LRU over the last `rounds` rounds; older slots go in the order in which a moving hand meets them.

    Equal to exact LRU, up to the order of slots last used in the same round, as long as the union of the last
    `rounds` selections is at least as large as the pool.
    """

    rounds: int = 32
    implementation: str = "auto"

    def __post_init__(self):
        if not 1 <= self.rounds <= pb_lru.MAX_ROUNDS:
            raise ValueError(
                f"pb_lru rounds: expected 1 to {pb_lru.MAX_ROUNDS}, found {self.rounds}; "
                f"choose a ring length in that range"
            )

    def init(self, num_slots: int) -> pb_lru.Buckets:
        return pb_lru.create(num_slots, self.rounds)

    def touch(self, state: pb_lru.Buckets, touch: Touch) -> pb_lru.Buckets:
        return pb_lru.touch(state, touch.slots, opens=not touch.inserted, implementation=self.implementation)
