"""PB-LRU written with Python sets, from its description alone, and the invariants of its state."""

import numpy as np


class SetBuckets:
    """Recency by rounds: `ring[cursor]` is this one; what falls off the ring is cold; `free` holds no row."""

    def __init__(self, size: int, rounds: int):
        self.size = size
        self.ring: list[set[int]] = [set() for _ in range(rounds)]
        self.cold: set[int] = set()
        self.free = set(range(size))
        self.cursor = 0
        self.hand = 0

    def rotate(self):
        self.cursor = (self.cursor + 1) % len(self.ring)
        self.cold |= self.ring[self.cursor]
        self.ring[self.cursor] = set()

    def touch(self, slots):
        self._remove(slots)
        self.ring[self.cursor] |= set(slots)

    def forget(self, slots):
        self._remove(slots)
        self.free |= set(slots)

    def evict(self, count: int) -> list[int]:
        order = sorted(self.free)
        cold = sorted(self.cold, key=lambda slot: (slot - self.hand) % self.size)
        order += cold
        for age in range(1, len(self.ring)):
            order += sorted(self.ring[(self.cursor + age) % len(self.ring)])
        victims = order[:count]
        from_cold = [slot for slot in victims if slot in self.cold]
        if from_cold:
            self.hand = (from_cold[-1] + 1) % self.size
        self._remove(victims)
        return victims

    def buckets(self) -> list[set[int]]:
        return [*self.ring, self.cold, self.free]

    def _remove(self, slots):
        for bucket in self.buckets():
            bucket -= set(slots)


def members(words) -> set[int]:
    """Positions of the set bits of one bitmap."""
    octets = np.ascontiguousarray(words, "<u4").view(np.uint8)
    return set(np.flatnonzero(np.unpackbits(octets, bitorder="little")).tolist())


def check(state, model: SetBuckets) -> None:
    """Same buckets, cursor and hand; summaries exact; labels right for every slot in the ring."""
    assert [members(words) for words in np.asarray(state.bits)] == model.buckets()
    assert (int(state.cursor), int(state.hand)) == (model.cursor, model.hand)
    below = np.asarray(state.bits)
    for level in state.summaries:
        assert level.shape[1] == -(-below.shape[1] // 32)
        for words, summary in zip(below, np.asarray(level), strict=True):
            assert members(summary) == set(np.flatnonzero(words).tolist())
        below = np.asarray(level)
    assert below.shape[1] == 1
    label = np.asarray(state.label)
    for number, bucket in enumerate(model.ring):
        assert all(label[slot] == number for slot in bucket)
