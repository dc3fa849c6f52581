"""Exact selection on a GPU: guess a threshold from a sample, mark what reaches it, select among the marked.

Three launches. `guess` takes one score at random from each of SAMPLES equal stretches of a row, and from their ranks a
threshold which, whatever the scores are, all of the k largest reach but for about one row in 10^7, and few others.
`mark` reads all scores once, in as many blocks as it takes, and writes a bit for each. `finish`, one block a row, lists
the marked and finds the k-th largest by bisection of keys that it holds in registers. Where the sample misled (fewer
than k marked, or more than there is room for) it does so over the whole row: as exact, but slower.
Ties are told apart by position from the start, so a row of equal scores is a row like any other.
"""

# Kernels are Triton's language, whose stubs type few of its results.
# pyright: reportOperatorIssue=false, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false

from math import ceil, sqrt

import jax
import jax.numpy as jnp
import triton.language as tl
from jaxtyping import Array, Float32, Int32, UInt32

from pallas_kernels import triton_call
from pallas_kernels import triton_parts as parts
from pallas_kernels.topk.reference import EMPTY
from pallas_kernels.triton_call import power_of_2

SAMPLES = 4096
DIRECT = 16384
"""Rows up to this length go to `finish` alone."""
SEGMENT, MARK_WARPS = 4096, 4
"""Scores that a block of `mark` reads, and its warps."""
TILE = 16384
"""Scores at most that a block of `finish` holds in registers."""
PER_WARP = 512
"""Of those, and of samples."""


def select(
    scores: Float32[Array, "*batch length"], k: int, lengths: Int32[Array, "*batch"], interpret: bool = False
) -> Int32[Array, "*batch best"]:
    """As `reference.select`."""
    *batch, length = scores.shape
    k = min(k, length)
    if scores.size == 0:
        return jnp.full((*batch, k), EMPTY, jnp.int32)
    scores, lengths, room = scores.reshape(-1, length), lengths.reshape(-1), _room(length, k)
    rows = scores.shape[0]
    sampled = length > DIRECT and room < length
    if sampled:
        guesses, marks = _marks(scores, k, lengths, interpret)
    else:
        guesses = marks = jnp.zeros((1, 1), jnp.uint32)
    tile = min(TILE, power_of_2(room if sampled else length))
    found, _ = triton_call.call(
        finish,
        scores,
        lengths,
        guesses,
        marks,
        grid=(rows,),
        out=[
            jax.ShapeDtypeStruct((rows, k), jnp.int32),
            jax.ShapeDtypeStruct((rows, room if sampled else 1), jnp.int32),
        ],
        warps=_warps(tile),
        interpret=interpret,
        LENGTH=length,
        K=k,
        ROOM=room,
        WORDS=marks.shape[1],
        SAMPLED=sampled,
        TILE=tile,
    )
    return found.reshape(*batch, k)


def _marks(
    scores: Float32[Array, "rows length"], k: int, lengths: Int32[Array, " rows"], interpret: bool
) -> tuple[UInt32[Array, "rows 2"], UInt32[Array, "rows words"]]:
    """The guesses, and a bit for each score that reaches its row's; nothing is written far behind a row's length."""
    rows, length = scores.shape
    (guesses,) = triton_call.call(
        guess,
        scores,
        lengths,
        grid=(rows,),
        out=[jax.ShapeDtypeStruct((rows, 2), jnp.uint32)],
        warps=_warps(SAMPLES),
        interpret=interpret,
        LENGTH=length,
        K=k,
        SAMPLES=SAMPLES,
    )
    segments = -(-length // SEGMENT)
    (marks,) = triton_call.call(
        mark,
        scores,
        lengths,
        guesses,
        grid=(rows * segments,),
        out=[jax.ShapeDtypeStruct((rows, segments * SEGMENT // 32), jnp.uint32)],
        warps=MARK_WARPS,
        interpret=interpret,
        LENGTH=length,
        SEGMENT=SEGMENT,
    )
    return guesses, marks


def _room(length: int, k: int) -> int:
    """More scores than reach a guess, by six standard deviations of their number, or all of them."""
    stretch = ceil(length / SAMPLES)
    taken = k / stretch + 5 * sqrt(k / stretch) + 5
    taken += taken / 8 + 1
    return min(length, ceil(stretch * (taken + 6 * sqrt(taken) + 6)))


def _warps(keys: int) -> int:
    return min(max(keys // PER_WARP, 1), 32)


@triton_call.kernel
def _key(score):
    """Unsigned numbers in the order of the scores."""
    bits = score.to(tl.uint32, bitcast=True)
    size = bits & 0x7FFFFFFF
    bits = tl.where(size > 0x7F800000, 0xFF7FFFFF, bits)  # NaN counts as the lowest finite number
    bits = tl.where(size < 0x00800000, 0, bits)
    return tl.where(bits >= 0x80000000, bits ^ 0xFFFFFFFF, bits | 0x80000000)


@triton_call.kernel
def _keys(scores, positions, listed, i, n):
    """Positions and keys of numbers i of a row's n scores, or, if listed, of those at n positions; 0 past the end."""
    at = tl.where(listed, tl.load(positions + i, mask=i < tl.where(listed, n, 0), other=0), i)
    return at, tl.where(i < n, _key(tl.load(scores + at, mask=i < n, other=0.0)), 0)


@triton_call.kernel
def _threshold(key, n, wanted, slack, low, high, scores, positions, listed, TILE: tl.constexpr):
    """The largest key that at least `wanted` of n keys reach, and how many of those that equal it are wanted.

    Sooner if its search, from `low`, which all reach, to `high`, meets a key that `wanted` to `wanted + slack` reach.
    `key` are the first TILE keys; if there are more, they are read in every turn.
    """
    reach, above = n, tl.full((), 0, tl.int32)
    while (low < high) & (reach > wanted + slack):
        middle = high - ((high - low) >> 1)
        count = tl.sum((key >= middle).to(tl.int32))
        start = TILE
        while start < n:
            _, more = _keys(scores, positions, listed, parts.lanes(start, TILE), n)
            count += tl.sum((more >= middle).to(tl.int32))
            start += TILE
        enough = count >= wanted
        low = tl.where(enough, middle, low)
        reach = tl.where(enough, count, reach)
        high = tl.where(enough, high, middle - 1)
        above = tl.where(enough, above, count)
    return low, tl.where(reach > wanted + slack, wanted - above, n)


@triton_call.kernel
def guess(scores, lengths, guesses, LENGTH: tl.constexpr, K: tl.constexpr, SAMPLES: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    length = tl.minimum(tl.maximum(tl.load(lengths + row), 0), LENGTH)
    stretch = tl.maximum(tl.cdiv(length, SAMPLES), 1)
    i = tl.arange(0, SAMPLES)
    mixed = i.to(tl.uint32) * 0x9E3779B1
    mixed = (mixed ^ (mixed >> 15)) * 0x85EBCA77
    at = tl.minimum(i * stretch + ((mixed ^ (mixed >> 13)) % stretch.to(tl.uint32)).to(tl.int32), length - 1)
    n = tl.cdiv(length, stretch)
    key = tl.where(i < n, _key(tl.load(scores + row * LENGTH + at, mask=i < n, other=0.0)), 0)
    # How many of the k largest are in the sample is a sum of independent draws, close to Poisson from below. Take so
    # many more that it cannot be.
    mean, spread = K / stretch.to(tl.float32), 1 - 1 / stretch.to(tl.float32)
    wanted = (mean + 5 * tl.sqrt(mean * spread) + 5 * spread).to(tl.int32) + 1
    low, high = tl.full((), 0, tl.uint32), tl.full((), 0xFFFFFFFF, tl.uint32)
    low, ties = _threshold(key, n, wanted, wanted // 8, low, high, scores, lengths, False, SAMPLES)
    tied = (i < n) & (key == low)
    border = tl.max(tl.where(tied & (tl.cumsum(tied.to(tl.int32)) == ties), at, -1))
    tl.store(guesses + row * 2, low)
    tl.store(guesses + row * 2 + 1, tl.where(ties == n, LENGTH, border).to(tl.uint32))


@triton_call.kernel
def mark(scores, lengths, guesses, marks, LENGTH: tl.constexpr, SEGMENT: tl.constexpr):
    SEGMENTS: tl.constexpr = (LENGTH + SEGMENT - 1) // SEGMENT
    row = (tl.program_id(0) // SEGMENTS).to(tl.int64)
    start = tl.program_id(0) % SEGMENTS * SEGMENT
    length = tl.minimum(tl.load(lengths + row), LENGTH)
    if start < length:
        low, border = tl.load(guesses + row * 2), tl.load(guesses + row * 2 + 1).to(tl.int32)
        word, bit = tl.arange(0, SEGMENT // 32), tl.arange(0, 32)
        at = start + word[:, None] * 32 + bit[None, :]
        # The bound of the load is a constant, so that loads are 16 bytes wide.
        key = _key(tl.load(scores + row * LENGTH + at, mask=at < LENGTH, other=0.0))
        keep = (at < length) & ((key > low) | ((key == low) & (at <= border)))
        words = tl.sum(keep.to(tl.uint32) << bit[None, :].to(tl.uint32), axis=1)
        tl.store(marks + row * (SEGMENTS * SEGMENT // 32) + start // 32 + word, words)


@triton_call.kernel
def _list(marks, positions, length, ROOM: tl.constexpr, TILE: tl.constexpr):
    """Positions of the marked, in order, as many as there is room for; the number of all marked."""
    n = tl.full((), 0, tl.int32)
    start = 0
    while start * 32 < length:
        i = parts.lanes(start, TILE)
        word = tl.load(marks + i, mask=i * 32 < length, other=0)
        ones = parts.ones(word)
        place = n + tl.cumsum(ones) - ones
        n += tl.sum(ones)
        turns = tl.max(ones)
        while turns > 0:
            rest = word & (word - 1)
            # A power of two, as a float, carries its logarithm in its exponent.
            bit = ((word ^ rest).to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127
            tl.store(positions + place, i * 32 + bit, mask=(word != 0) & (place < ROOM))
            place += 1
            word = rest
            turns -= 1
        start += TILE
    tl.debug_barrier()
    return n


@triton_call.kernel
def finish(
    scores,
    lengths,
    guesses,
    marks,
    found,
    positions,
    LENGTH: tl.constexpr,
    K: tl.constexpr,
    ROOM: tl.constexpr,
    WORDS: tl.constexpr,
    SAMPLED: tl.constexpr,
    TILE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    n = tl.minimum(tl.maximum(tl.load(lengths + row), 0), LENGTH)
    wanted = tl.minimum(n, K)
    scores += row * LENGTH
    found += row * K
    listed, low = n < 0, tl.full((), 0, tl.uint32)
    if SAMPLED:
        positions += row * ROOM
        marked = _list(marks + row * WORDS, positions, n, ROOM, TILE)
        listed = (marked >= wanted) & (marked <= ROOM)
        n = tl.where(listed, marked, n)
        low = tl.where(listed, tl.load(guesses + row * 2), 0)
    _, key = _keys(scores, positions, listed, parts.lanes(0, TILE), n)
    high = tl.where(n > TILE, 0xFFFFFFFF, tl.max(key))
    low, wanted_ties = _threshold(key, n, wanted, 0, low, high, scores, positions, listed, TILE)
    larger, ties = tl.full((), 0, tl.int32), tl.full((), 0, tl.int32)
    start = 0
    while start < n:
        i = parts.lanes(start, TILE)
        at, key = _keys(scores, positions, listed, i, n)
        above, tied = (i < n) & (key > low), (i < n) & (key == low)
        # Both are counted by one scan, in the halves of a word.
        both = above.to(tl.int32) | (tied.to(tl.int32) << 16)
        upto, total = tl.cumsum(both), tl.sum(both)
        tie = ties + (upto >> 16)
        place = larger + (upto & 0xFFFF) + tl.minimum(tie, wanted_ties) - 1
        tl.store(found + place, at, mask=above | (tied & (tie <= wanted_ties)))
        larger += total & 0xFFFF
        ties += total >> 16
        start += TILE
    taken = larger + tl.minimum(ties, wanted_ties)
    start = 0
    while start < K:
        i = parts.lanes(start, TILE)
        tl.store(found + i, -1, mask=(i >= taken) & (i < K))
        start += TILE
