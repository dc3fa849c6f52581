"""Victim search of bucketed LRU in Pallas Triton: one block walks down the summaries and touches O(limit)
words a level.

Bucket by bucket in victim order, the kernel expands the words of one level into the list of their set bits,
which are the words to read one level below; an empty segment is skipped 32, 1024, ... slots at a time. `m`
victims need at most `m + 2` entries of a list, because every entry but those at the two ends of the searched
range holds a victim.

The list lies in global memory, because a block cannot scatter into registers; a barrier separates its writes
from its reads. Population counts are shifts and adds: `lax.population_count` does not lower.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Int32, UInt32

from pallas_kernels.pb_lru.buckets import ALL, EMPTY, Buckets, pack

WARPS = 8


def evict(
    state: Buckets, count: Int32[Array, ""], limit: int, interpret: bool = False
) -> tuple[Int32[Array, " limit"], Buckets]:
    """As `reference.evict`, bit for bit."""
    if limit == 0:
        return jnp.zeros(0, jnp.int32), state
    lanes = pl.next_power_of_2(limit + 2)
    scalars = jnp.concatenate([jnp.stack([jnp.minimum(count, limit), state.hand]), state.order])
    lists = jax.ShapeDtypeStruct((lanes,), jnp.int32)
    victims, buckets, hand, _ = pl.pallas_call(
        partial(_search, num_slots=state.label.shape[0], lanes=lanes, interpret=interpret),
        # victims, their buckets, the hand, and two lists that take turns, each with room for writes that do
        # not count
        out_shape=(
            lists,
            lists,
            jax.ShapeDtypeStruct((1,), jnp.int32),
            jax.ShapeDtypeStruct((2, 2 * lanes), jnp.int32),
        ),
        compiler_params=plt.CompilerParams(num_warps=WARPS),
        interpret=interpret,
    )(scalars, state.bits, *state.summaries)
    return victims[:limit], _remove(state._replace(hand=hand[0]), victims[:limit], buckets[:limit])


def _search(scalars_ref, *refs, num_slots: int, lanes: int, interpret: bool):
    *levels, victims_ref, buckets_ref, hand_ref, list_ref = refs
    lane = jnp.arange(lanes, dtype=jnp.int32)
    count, start = scalars_ref[0], scalars_ref[1]
    rounds = levels[0].shape[0] - 2
    victims_ref[...] = jnp.full(lanes, EMPTY, jnp.int32)
    buckets_ref[...] = jnp.full(lanes, EMPTY, jnp.int32)

    def segment(carry):
        turn, taken, hand = carry
        # Turn 0 is free, 1 is cold from the hand up, 2 is cold below the hand, and then come the rings in
        # their order.
        ring = scalars_ref[2 + jnp.maximum(turn - 3, 0)]
        bucket = jnp.where(turn == 0, rounds + 1, jnp.where(turn <= 2, rounds, ring))
        low = jnp.where(turn == 1, start, 0)
        high = jnp.where(turn == 2, start, num_slots)
        cap = count - taken + 2

        def descend():
            found = jnp.int32(1)
            list_ref[0, lane] = jnp.zeros(lanes, jnp.int32)
            for depth in range(len(levels)):
                _barrier(interpret)
                level = len(levels) - 1 - depth
                source, target = depth % 2, 1 - depth % 2
                at = jnp.where(lane < found, list_ref[source, lane], 0)
                word = jnp.where(lane < found, levels[level][bucket, at], jnp.uint32(0))
                word = word & _between(low >> (5 * level), (high - 1) >> (5 * level), at * 32)
                found = _expand(list_ref, target, lane, at, word, cap)
            _barrier(interpret)
            got = jnp.minimum(found, count - taken)
            slot = list_ref[len(levels) % 2, lane]
            # Lanes that have nothing write past the list's end, each to its own place.
            there = jnp.where(lane < got, taken + lane, lanes)
            plt.store(victims_ref.at[there], slot, mask=lane < got)
            plt.store(buckets_ref.at[there], jnp.full(lanes, bucket, jnp.int32), mask=lane < got)
            last = list_ref[len(levels) % 2, jnp.maximum(got - 1, 0)]
            moved = ((turn == 1) | (turn == 2)) & (got > 0)
            return taken + got, jnp.where(moved, (last + 1) % num_slots, hand)

        top = levels[-1][bucket, 0]
        taken, hand = lax.cond((top != 0) & (low < high), descend, lambda: (taken, hand))
        return turn + 1, taken, hand

    def unfinished(carry):
        turn, taken, _ = carry
        return (turn < rounds + 2) & (taken < count)

    *_, hand = lax.while_loop(unfinished, segment, (jnp.int32(0), jnp.int32(0), start))
    hand_ref[0] = hand


def _expand(list_ref, target: int, lane, at, word, cap):
    """Write the positions of all set bits, in order and `cap` at most, to a list; the number written."""
    ones = _popcount(word)
    place = jnp.cumsum(ones) - ones
    total = jnp.sum(ones)

    def lowest_bit(carry):
        word, place = carry
        bit = _popcount((word & (~word + 1)) - 1)
        keep = (word != 0) & (place < cap)
        list_ref[target, jnp.where(keep, place, lane.shape[0] + lane)] = at * 32 + bit
        return word & (word - 1), place + 1

    lax.while_loop(lambda carry: jnp.max(carry[0]) > 0, lowest_bit, (word, place))
    return jnp.minimum(total, cap)


def _between(first, last, base):
    """Mask of the bits that stand for positions `first` to `last` in words whose bit 0 stands for `base`."""
    below = jnp.clip(first - base, 0, 32)
    upto = jnp.clip(last - base + 1, 0, 32)

    def lowest(bits):
        # A shift by 32 has no defined result.
        return jnp.where(bits == 32, jnp.uint32(ALL), (jnp.uint32(1) << jnp.minimum(bits, 31).astype(jnp.uint32)) - 1)

    return lowest(upto) & ~lowest(below)


def _popcount(word):
    word = word - ((word >> 1) & jnp.uint32(0x55555555))
    word = (word & jnp.uint32(0x33333333)) + ((word >> 2) & jnp.uint32(0x33333333))
    word = (word + (word >> 4)) & jnp.uint32(0x0F0F0F0F)
    return ((word * jnp.uint32(0x01010101)) >> 24).astype(jnp.int32)


def _barrier(interpret: bool) -> None:
    if not interpret:  # the interpreter runs one lane group in order and has no rule for it
        plt.debug_barrier()


def _remove(state: Buckets, slots: Int32[Array, " n"], buckets: Int32[Array, " n"]) -> Buckets:
    """Distinct slots out of the buckets in which they are, O(n) words a level."""
    bit = jnp.where(slots < 0, jnp.uint32(0), jnp.uint32(1) << (slots % 32).astype(jnp.uint32))
    level = state.bits.at[buckets, slots // 32].add(-bit, mode="drop", wrap_negative_indices=False)
    bits, summaries, at = level, [], slots // 32
    for above in state.summaries:
        # A word of a summary is made anew from all its children: slots that share it write the same value.
        at = at // 32
        child = at[:, None] * 32 + jnp.arange(32, dtype=jnp.int32)
        below = level.at[buckets[:, None], child].get(mode="fill", fill_value=0, wrap_negative_indices=False)
        words: UInt32[Array, " n"] = pack(below != 0)[:, 0]
        level = above.at[buckets, at].set(words, mode="drop", wrap_negative_indices=False)
        summaries.append(level)
    return state._replace(bits=bits, summaries=tuple(summaries))
