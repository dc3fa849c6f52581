"""The operations of bucketed LRU in jnp: their meaning, the CPU path and the oracle of the other forms.

Vectorised over whole bitmaps: O(slots / 32) words a bucket, no loop over slots and no sort.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int32, UInt32

from pallas_kernels.pb_lru.buckets import ALL, EMPTY, Buckets, pack, summarize, unpack

BLOCK = 32
"""Words whose counts are added up before the search for a bit's word."""


def rotate(state: Buckets) -> Buckets:
    """Open a round: the oldest ring bucket joins cold and becomes the current one, empty. No row moves."""
    return _pour(state, state.order[0], state.cold)._replace(order=jnp.roll(state.order, -1))


def merge(state: Buckets, source: Int32[Array, ""] | int, target: Int32[Array, ""] | int) -> Buckets:
    """Everything in one ring bucket into another one."""
    label = jnp.where(state.label == source, jnp.asarray(target, jnp.uint8), state.label)
    return _pour(state, source, target)._replace(label=label)


def assign(state: Buckets, bucket: Int32[Array, " slots"]) -> Buckets:
    """Every slot of cold and of the ring, except the current bucket, into the one of them that is named for it."""
    bits = state.bits
    movable = bits[state.cold] | lax.reduce_or(bits[state.order[:-1]], (0,))
    wanted = pack(bucket == jnp.arange(state.rounds + 1, dtype=jnp.int32)[:, None])
    bits = bits.at[: state.free].set((bits[: state.free] & ~movable) | (wanted & movable))
    label = jnp.where(unpack(movable, bucket.shape[0]), bucket.astype(jnp.uint8), state.label)
    return state._replace(words=summarize(bits), label=label)


def touch(state: Buckets, slots: Int32[Array, " n"], opens: bool = False) -> Buckets:
    """Move slots (EMPTY padding ignored) from wherever they are into the current bucket; `opens`: after `rotate`."""
    state = rotate(state) if opens else state
    label = state.label.at[slots].set(state.cursor.astype(jnp.uint8), mode="drop", wrap_negative_indices=False)
    return _move(state, slots, state.cursor)._replace(label=label)


def forget(state: Buckets, slots: Int32[Array, " n"]) -> Buckets:
    """Move slots (EMPTY padding ignored) from wherever they are into free."""
    return _move(state, slots, state.free)


def evict(state: Buckets, count: Int32[Array, ""], limit: int) -> tuple[Int32[Array, " limit"], Buckets]:
    """The first `count` (<= limit) slots in victim order, then EMPTY; they leave their buckets.

    Victim order: free, cold, then the ring from the oldest bucket to the newest, never the current one.
    Within cold cyclically from `hand`, which moves to one past the last cold victim; within any other bucket
    from the lowest slot. If fewer than `count` slots are outside the current bucket, all of them are given
    and the list is shorter.
    """
    victims, hand = find_victims(state, count, limit)
    return victims, _move(state, victims, None)._replace(hand=hand)


def find_victims(
    state: Buckets, count: Int32[Array, ""], limit: int
) -> tuple[Int32[Array, " limit"], Int32[Array, ""]]:
    """The victims of `evict` and the hand after it, state unchanged."""
    bits, num_words = state.bits, state.bits.shape[1]
    # Every candidate word in victim order. The word under the hand stands twice: first its upper bits, and
    # after all other words its lower ones.
    start, cut = state.hand // 32, (state.hand % 32).astype(jnp.uint32)
    cold_order = (start + jnp.arange(num_words + 1, dtype=jnp.int32)) % num_words
    cold = bits[state.cold, cold_order]
    cold = cold.at[0].set(cold[0] & (ALL << cut)).at[-1].set(cold[-1] & ~(ALL << cut))
    rings = bits[state.order[:-1]].reshape(-1)
    victims, _ = find_set(jnp.concatenate([bits[state.free], cold, rings]), count, limit)

    at, given = victims // 32, victims >= 0
    cold_from, rings_from = num_words, 2 * num_words + 1
    in_cold = (at >= cold_from) & (at < rings_from)
    word = jnp.where(at < cold_from, at, (at - rings_from) % num_words)
    word = jnp.where(in_cold, (start + at - cold_from) % num_words, word)
    victims = jnp.where(given, word * 32 + victims % 32, EMPTY)
    victim = jnp.arange(limit, dtype=jnp.int32)
    last_cold = jnp.max(jnp.where(given & in_cold, victim, EMPTY), initial=EMPTY)
    passed = jnp.max(jnp.where(victim == last_cold, victims + 1, 0), initial=0) % state.label.shape[0]
    return victims, jnp.where(last_cold < 0, state.hand, passed)


def find_set(
    words: UInt32[Array, " words"], count: Int32[Array, ""], limit: int
) -> tuple[Int32[Array, " limit"], Int32[Array, ""]]:
    """Positions of the first `count` (<= limit) set bits in a list of words, then EMPTY; and the number of set bits."""
    # Bit j is bit `j - (bits before the word)` of the word in which the running count passes j.
    words = jnp.pad(words, (0, -words.shape[0] % BLOCK))
    counts = lax.population_count(words).astype(jnp.int32).reshape(-1, BLOCK)
    ends = jnp.cumsum(counts.sum(axis=1))
    number = jnp.arange(limit, dtype=jnp.int32)
    block = jnp.minimum(jnp.searchsorted(ends, number, side="right"), ends.shape[0] - 1).astype(jnp.int32)
    inside = counts[block]
    upto = jnp.cumsum(inside, axis=1)
    rank = number - (ends[block] - upto[:, -1])
    offset = jnp.minimum(jnp.sum(upto <= rank[:, None], axis=1, dtype=jnp.int32), BLOCK - 1)
    rank = rank - jnp.take_along_axis(upto - inside, offset[:, None], axis=1)[:, 0]
    at = block * BLOCK + offset
    found = jnp.where(number < jnp.minimum(count, ends[-1]), at * 32 + select_bit(words[at], rank), EMPTY)
    return found, ends[-1]


def select_bit(word: UInt32[Array, " n"], rank: Int32[Array, " n"]) -> Int32[Array, " n"]:
    """Position of the set bit with `rank` set bits below it, by halving; any position if there is none."""
    position = jnp.zeros_like(rank)
    for width in (16, 8, 4, 2, 1):
        low = lax.population_count(word & jnp.uint32((1 << width) - 1)).astype(jnp.int32)
        above = rank >= low
        rank = jnp.where(above, rank - low, rank)
        word = jnp.where(above, word >> width, word)
        position = jnp.where(above, position + width, position)
    return position


def _pour(state: Buckets, source: Int32[Array, ""] | int, target: Int32[Array, ""] | int) -> Buckets:
    """One bucket into another one; the first is then empty."""
    # The OR of two bitmaps has the OR of their summaries.
    words = state.words.at[target].set(state.words[target] | state.words[source])
    return state._replace(words=words.at[source].set(jnp.uint32(0)))


def _move(state: Buckets, slots: Int32[Array, " n"], bucket: Int32[Array, ""] | int | None) -> Buckets:
    """Slots out of every bucket and, unless None, into `bucket`; summaries made anew."""
    members = jnp.zeros(state.label.shape[0], bool)
    mask = pack(members.at[slots].set(True, mode="drop", wrap_negative_indices=False))
    bits = state.bits & ~mask
    if bucket is not None:
        bits = bits.at[bucket].set(bits[bucket] | mask)
    return state._replace(words=summarize(bits))
