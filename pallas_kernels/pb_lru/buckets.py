"""The state of bucketed LRU and the words that every form of its operations shares.

`rounds` ring buckets hold the slots touched in each of the last `rounds` rounds, `cold` what was touched
before that, `free` what holds no row. A bucket is a bitmap over the slots with summary bitmaps above it,
fanout 32. In which order the ring buckets are given up is part of the state: other policies than LRU keep
something else than rounds in them.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int32, UInt8, UInt32

EMPTY = -1
"""Padding in slot lists, as in `ula_jax.types`: kernels import nothing from above."""

MAX_ROUNDS = 254
"""Ring buckets are numbered in a uint8 label."""

ALL = np.uint32(0xFFFFFFFF)

LINE = 32
"""Words of a cache line."""


class Level(NamedTuple):
    """Where in a bucket's words a bitmap or one of its summaries is."""

    start: int
    width: int


def levels(num_slots: int) -> tuple[Level, ...]:
    """The bitmap, and its summaries up to one word. Each starts at a multiple of LINE."""
    found = [Level(0, -(-num_slots // 32))]
    while found[-1].width > 1:
        found.append(Level(end(found[-1]), -(-found[-1].width // 32)))
    return tuple(found)


def end(level: Level) -> int:
    """Where the next level starts."""
    return level.start + -(-level.width // LINE) * LINE


class Buckets(NamedTuple):
    """Bitmaps of `slots` slots in `rounds + 2` buckets: the ring, then `cold`, then `free`.

    A slot is in exactly one bucket, except between `evict` and the `touch` or `forget` that follows: then in
    none. A NamedTuple, because transformations also build it of leaves that are no such arrays.
    """

    words: UInt32[Array, "buckets pitch"]
    """Each bucket's bitmap, and behind it its summaries, as `levels` places them."""
    label: UInt8[Array, " slots"]
    """Ring bucket of the last touch. Not rewritten when the ring turns: if the slot's bit there is clear, the
    slot has moved on to cold (or was evicted or freed)."""
    order: Int32[Array, " rounds"]
    """The ring buckets, first the one to give up first (the oldest), last the current one."""
    hand: Int32[Array, ""]
    """Slot from which the next scan of `cold` starts."""

    @property
    def bits(self) -> UInt32[Array, "buckets words"]:
        """Bit `s % 32` of word `s // 32`: slot `s` is in the bucket."""
        return self.words[:, : levels(self.label.shape[0])[0].width]

    @property
    def summaries(self) -> tuple[UInt32[Array, "buckets _"], ...]:
        """Level by level up to one word: bit `i` is set iff word `i` of the level below is not zero."""
        return tuple(self.words[:, a : a + width] for a, width in levels(self.label.shape[0])[1:])

    @property
    def cursor(self) -> Int32[Array, ""]:
        """The current ring bucket: it holds the slots touched in this round and is never evicted from."""
        return self.order[-1]

    @property
    def rounds(self) -> int:
        return self.words.shape[0] - 2

    @property
    def cold(self) -> int:
        return self.words.shape[0] - 2

    @property
    def free(self) -> int:
        return self.words.shape[0] - 1


def create(num_slots: int, rounds: int) -> Buckets:
    """All `num_slots` slots free. Raises ValueError unless num_slots >= 1 and 1 <= rounds <= MAX_ROUNDS."""
    if num_slots < 1:
        raise ValueError(f"num_slots: expected at least 1, found {num_slots}; give the pool a slot")
    if not 1 <= rounds <= MAX_ROUNDS:
        raise ValueError(f"rounds: expected 1 to {MAX_ROUNDS}, found {rounds}; choose a ring length in that range")
    return _create(num_slots, rounds)


@partial(jax.jit, static_argnums=(0, 1))
def _create(num_slots: int, rounds: int) -> Buckets:
    free = pack(jnp.ones(num_slots, bool))
    bits = jnp.zeros((rounds + 2, free.shape[0]), jnp.uint32).at[-1].set(free)
    order = jnp.roll(jnp.arange(rounds, dtype=jnp.int32), -1)
    return Buckets(summarize(bits), jnp.zeros(num_slots, jnp.uint8), order, jnp.int32(0))


def pack(members: Bool[Array, "*batch n"]) -> UInt32[Array, "*batch words"]:
    """Bitmap words of a mask, 32 entries a word, lowest bit first."""
    *batch, n = members.shape
    members = jnp.pad(members, [(0, 0)] * len(batch) + [(0, -n % 32)])
    lanes = members.reshape(*batch, -1, 32).astype(jnp.uint32)
    return jnp.sum(lanes << jnp.arange(32, dtype=jnp.uint32), axis=-1, dtype=jnp.uint32)


def unpack(words: UInt32[Array, "*batch words"], n: int) -> Bool[Array, "*batch n"]:
    """The mask of `n` entries that `pack` made."""
    lanes = (words[..., None] >> jnp.arange(32, dtype=jnp.uint32)) & jnp.uint32(1)
    return lanes.reshape(*words.shape[:-1], -1)[..., :n].astype(bool)


def summarize(bits: UInt32[Array, "buckets words"]) -> UInt32[Array, "buckets pitch"]:
    """These bitmaps with all their summaries behind them, as `Buckets.words` has them."""
    parts = [bits]
    while parts[-1].shape[1] > 1:
        parts.append(pack(parts[-1] != 0))
    return jnp.concatenate([jnp.pad(part, ((0, 0), (0, -part.shape[1] % LINE))) for part in parts], axis=1)


def bucket_of(state: Buckets, slots: Int32[Array, " n"]) -> Int32[Array, " n"]:
    """Bucket of each slot, decoded from its label and three bits; EMPTY for a slot in no bucket and for
    padding."""
    slots = jnp.where(slots < state.label.shape[0], slots, EMPTY)
    at = jnp.maximum(slots, 0)
    ring = state.label[at].astype(jnp.int32)
    word, bit = at // 32, jnp.uint32(1) << (at % 32).astype(jnp.uint32)

    def holds(bucket: Int32[Array, " n"] | int) -> Bool[Array, " n"]:
        return (state.bits[bucket, word] & bit) != 0

    found = jnp.where(holds(state.free), state.free, EMPTY)
    found = jnp.where(holds(state.cold), state.cold, found)
    found = jnp.where(holds(ring), ring, found)
    return jnp.where(slots < 0, EMPTY, found)


def audit(state: Buckets, occupied: np.ndarray) -> None:
    """AssertionError unless every slot is in exactly one bucket, free are those that are not occupied, and the
    summaries are exact. Runs on the host."""
    state = Buckets(*map(jnp.asarray, state))
    bits = np.asarray(state.bits)
    members = np.unpackbits(np.ascontiguousarray(bits, "<u4").view(np.uint8), axis=1, bitorder="little")
    held = members.sum(axis=0)
    slots = state.label.shape[0]
    stray = np.flatnonzero(held[:slots] != 1)
    assert not stray.size, f"slots in no or several buckets: {stray[:32].tolist()}"
    assert not held[slots:].any(), "bits beyond the last slot"
    free = members[state.free, :slots] == 1
    assert np.array_equal(free, ~occupied), f"free slots are {np.flatnonzero(free)[:32].tolist()}"
    below = bits
    for level in state.summaries:
        nonzero = np.pad(below != 0, ((0, 0), (0, -below.shape[1] % 32)))
        expected = np.packbits(nonzero, axis=1, bitorder="little").view("<u4")
        assert np.array_equal(np.asarray(level), expected), "a summary does not match the level below"
        below = np.asarray(level)
