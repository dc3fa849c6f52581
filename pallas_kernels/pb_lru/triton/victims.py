"""Victims, and the first bits of any bitmap.

The words of all buckets in victim order are cut into units. `count_units` counts the bits of each unit, and
adds up those before it among its program's units. A program of `take` sees at once which of its units hold bits; with
the totals of the programs before, it knows the places of these bits in the list. Population counts are shifts and adds,
which the interpreter has too.
"""

# Kernels are Triton's language, whose stubs type few of its results.
# pyright: reportOperatorIssue=false, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false

from typing import Any

import jax.numpy as jnp
import triton.language as tl
from jaxtyping import Array, Int32, UInt32

from pallas_kernels import triton_call
from pallas_kernels import triton_parts as parts
from pallas_kernels.pb_lru.buckets import Buckets
from pallas_kernels.pb_lru.triton import common
from pallas_kernels.triton_call import cdiv, ints, like, power_of_2

UNIT, UNITS = 128, 16
"""Words of a unit, and units of one program that counts."""
PROGRAMS = 1056
"""That take victims, at most: victims are in neighbouring units, and each program has every so many-th."""
BITS = 4
"""Of a word, that are listed at once."""

NONE = tl.constexpr(-1)


def evict(
    state: Buckets, count: Int32[Array, ""], limit: int, interpret: bool = False
) -> tuple[Int32[Array, " limit"], Buckets]:
    """As `reference.evict`."""
    if not limit:
        return jnp.zeros(0, jnp.int32), state
    layout = common.layout(state)
    *counts, units = _count(state.words, state.order, state.hand, layout, interpret)
    victims, words, hand = triton_call.call(
        take,
        state.order,
        state.hand,
        count,
        *counts,
        state.words,
        grid=(units["GRID"],),
        out=[ints(limit), like(state.words), like(state.hand)],
        alias={6: 1},
        interpret=interpret,
        LIMIT=limit,
        FILL=power_of_2(cdiv(limit, units["GRID"])),
        NUM_SLOTS=state.label.shape[0],
        **layout,
        **units,
    )
    return victims, state._replace(words=words, hand=hand)


def find_set(
    words: UInt32[Array, " words"], count: Int32[Array, ""], limit: int, interpret: bool = False
) -> tuple[Int32[Array, " limit"], Int32[Array, ""]]:
    """As `reference.find_set`."""
    layout = dict(ROUNDS=0, LEVELS=1, WIDTH=words.shape[0], PITCH=words.shape[0])
    *counts, units = _count(words, count, count, layout, interpret)
    return triton_call.call(
        read_off,
        words,
        count,
        *counts,
        grid=(units["GRID"],),
        out=[ints(limit), ints()],
        interpret=interpret,
        LIMIT=limit,
        FILL=power_of_2(cdiv(limit, units["GRID"])),
        **layout,
        **units,
    )  # pyright: ignore[reportReturnType]


def _count(
    words: Array, order: Array, hand: Array, layout: dict[str, Any], interpret: bool
) -> tuple[Array, Array, Array, dict[str, Any]]:
    """Bits of each unit, those before it within its program's units, all of a program's units, and constants of the
    kernel that follows.

    A bucket's words are `PER` units. One more, the last one, has what lies in the first unit before the hand.
    """
    per = cdiv(layout["WIDTH"], UNIT)
    units = dict(NUMBER=(layout["ROUNDS"] + 1) * (per + 1), PER=per, UNIT=UNIT, UNITS=UNITS)
    programs = cdiv(units["NUMBER"], UNITS)
    held, inner, totals = triton_call.call(
        count_units,
        words,
        order,
        hand,
        grid=(programs,),
        out=[ints(programs * UNITS), ints(programs * UNITS), ints(programs)],
        interpret=interpret,
        **layout,
        **units,
    )
    grid = min(units["NUMBER"], PROGRAMS)
    units |= dict(GRID=grid, TURNS=power_of_2(cdiv(units["NUMBER"], grid)), BITS=BITS)
    return held, inner, totals, units | dict(COUNTED=programs, LANES=power_of_2(programs))


@triton_call.kernel
def count_units(
    words,
    order,
    hand,
    held,
    inner,
    totals,
    ROUNDS: tl.constexpr,
    LEVELS: tl.constexpr,
    WIDTH: tl.constexpr,
    PITCH: tl.constexpr,
    NUMBER: tl.constexpr,
    PER: tl.constexpr,
    UNIT: tl.constexpr,
    UNITS: tl.constexpr,
):
    unit = tl.program_id(0) * UNITS + tl.arange(0, UNITS)
    bucket, first, turn, start = _unit(unit, order, hand, ROUNDS, PER, UNIT)
    at = first[:, None] + tl.arange(0, UNIT)[None, :]
    word = tl.load(words + bucket[:, None] * PITCH + at, mask=(at < WIDTH) & (unit < NUMBER)[:, None], other=0)
    ones = tl.sum(parts.ones(word & _kept(at, turn[:, None], start[:, None], PER)), axis=1)
    tl.store(held + unit, ones)
    tl.store(inner + unit, tl.cumsum(ones) - ones)
    tl.store(totals + tl.program_id(0), tl.sum(ones))


@triton_call.kernel
def take(
    order,
    hand,
    count,
    held,
    inner,
    totals,
    words_in,
    victims,
    words,
    passed,
    ROUNDS: tl.constexpr,
    LEVELS: tl.constexpr,
    WIDTH: tl.constexpr,
    PITCH: tl.constexpr,
    NUMBER: tl.constexpr,
    PER: tl.constexpr,
    UNIT: tl.constexpr,
    UNITS: tl.constexpr,
    GRID: tl.constexpr,
    TURNS: tl.constexpr,
    BITS: tl.constexpr,
    COUNTED: tl.constexpr,
    LANES: tl.constexpr,
    LIMIT: tl.constexpr,
    FILL: tl.constexpr,
    NUM_SLOTS: tl.constexpr,
):
    mine, pending, within = _mine(held, inner, NUMBER, GRID, TURNS)
    buckets, firsts, turns, starts = _unit(mine, order, hand, ROUNDS, PER, UNIT)
    in_cold = tl.load(inner + PER + 1, mask=PER + 1 < COUNTED * UNITS, other=0)
    in_rings = tl.load(inner + 2 * (PER + 1), mask=2 * (PER + 1) < COUNTED * UNITS, other=0)
    lane, total, given = _given(count, totals, COUNTED, LANES, LIMIT)
    cold, rings = _before(PER + 1, in_cold, lane, total, UNITS), _before(2 * (PER + 1), in_rings, lane, total, UNITS)
    last_cold = tl.minimum(given, rings) - 1
    if (tl.program_id(0) == 0) & (last_cold < cold):
        tl.store(passed, tl.load(hand))
    unit, before = _first(pending, mine, within, lane, total, NUMBER, UNITS)
    while (unit < NUMBER) & (before < given):
        bucket, turn, start = _of(unit, mine, buckets), _of(unit, mine, turns), _of(unit, mine, starts)
        word_at = _of(unit, mine, firsts) + tl.arange(0, UNIT)
        word, at, number = _bits(words + bucket * PITCH, word_at, turn, start, before, given, WIDTH, PER)
        gone = parts.lowest(word, number)
        was = tl.atomic_and(words + bucket * PITCH + word_at, gone ^ common.ALL, mask=gone != 0, sem="relaxed")
        _list(victims, word, word_at * 32, at, number, BITS)
        emptied = (gone != 0) & (was == gone)
        common.summarize(words, bucket, bucket, word_at, emptied, tl.zeros_like(emptied), LEVELS, WIDTH, PITCH)
        # Slots ascend within a unit.
        if (last_cold >= tl.maximum(before, cold)) & (last_cold < before + tl.sum(number)):
            after = tl.max(tl.where(gone != 0, word_at * 32 + parts.length(gone), 0))
            tl.store(passed, after % NUM_SLOTS)
        unit, before = _first(pending & (mine > unit), mine, within, lane, total, NUMBER, UNITS)
    _fill(victims, given, GRID, LIMIT, FILL)


@triton_call.kernel
def read_off(
    words,
    count,
    held,
    inner,
    totals,
    found,
    everything,
    ROUNDS: tl.constexpr,
    LEVELS: tl.constexpr,
    WIDTH: tl.constexpr,
    PITCH: tl.constexpr,
    NUMBER: tl.constexpr,
    PER: tl.constexpr,
    UNIT: tl.constexpr,
    UNITS: tl.constexpr,
    GRID: tl.constexpr,
    TURNS: tl.constexpr,
    BITS: tl.constexpr,
    COUNTED: tl.constexpr,
    LANES: tl.constexpr,
    LIMIT: tl.constexpr,
    FILL: tl.constexpr,
):
    mine, pending, within = _mine(held, inner, NUMBER, GRID, TURNS)
    lane, total, given = _given(count, totals, COUNTED, LANES, LIMIT)
    if tl.program_id(0) == 0:
        tl.store(everything, tl.sum(total))
    unit, before = _first(pending, mine, within, lane, total, NUMBER, UNITS)
    while (unit < NUMBER) & (before < given):
        word_at = unit * UNIT + tl.arange(0, UNIT)
        word, at, number = _bits(words, word_at, unit, 0, before, given, WIDTH, PER)
        _list(found, word, word_at * 32, at, number, BITS)
        unit, before = _first(pending & (mine > unit), mine, within, lane, total, NUMBER, UNITS)
    _fill(found, given, GRID, LIMIT, FILL)


@triton_call.kernel
def _mine(held, inner, NUMBER: tl.constexpr, GRID: tl.constexpr, TURNS: tl.constexpr):
    """Units of a program, which of them hold bits, and how many bits are before each among those counted with it."""
    unit = tl.program_id(0) + tl.arange(0, TURNS) * GRID
    there = unit < NUMBER
    return unit, tl.load(held + unit, mask=there, other=0) > 0, tl.load(inner + unit, mask=there, other=0)


@triton_call.kernel
def _given(count, totals, COUNTED: tl.constexpr, LANES: tl.constexpr, LIMIT: tl.constexpr):
    """The programs that counted, what each counted, and how many bits are given."""
    lane = tl.arange(0, LANES)
    total = tl.load(totals + lane, mask=lane < COUNTED, other=0)
    return lane, total, tl.minimum(tl.minimum(tl.load(count), LIMIT), tl.sum(total))


@triton_call.kernel
def _first(pending, mine, within, lane, total, NUMBER: tl.constexpr, UNITS: tl.constexpr):
    """The first pending unit, NUMBER if none is, and the bits before it."""
    unit = tl.min(tl.where(pending, mine, NUMBER))
    return unit, _before(unit, _of(unit, mine, within), lane, total, UNITS)


@triton_call.kernel
def _of(unit, mine, values):
    """The value of one unit."""
    return tl.sum(tl.where(mine == unit, values, 0))


@triton_call.kernel
def _unit(unit, order, hand, ROUNDS: tl.constexpr, PER: tl.constexpr, UNIT: tl.constexpr):
    """Of units, numbered in victim order: bucket, first word, number in the bucket, slot where the bucket starts."""
    segment, turn = unit // (PER + 1), unit % (PER + 1)
    bucket, start = segment * 0, segment * 0
    if ROUNDS > 0:
        ring = tl.load(order + segment - 2, mask=(segment >= 2) & (segment <= ROUNDS), other=0)
        bucket = tl.where(segment == 0, ROUNDS + 1, tl.where(segment == 1, ROUNDS, ring))
        start = tl.where(segment == 1, tl.load(hand), 0)
    return bucket, (start // (32 * UNIT) + turn) % PER * UNIT, turn, start


@triton_call.kernel
def _kept(at, turn, start, PER: tl.constexpr):
    """Which bits of words belong to the unit: in the one where the bucket starts not those before, in its last only
    those."""
    below = tl.minimum(tl.maximum(start - at * 32, 0), 32)
    low = tl.where(below == 32, common.ALL, parts.bit(tl.minimum(below, 31)) - 1)
    return tl.where(turn == 0, low ^ common.ALL, tl.where(turn == PER, low, common.ALL))


@triton_call.kernel
def _before(unit, within, lane, total, UNITS: tl.constexpr):
    """Bits in all units before this one; `total` are those of each program that counted."""
    return tl.sum(tl.where(lane < unit // UNITS, total, 0)) + within


@triton_call.kernel
def _bits(words, word_at, turn, start, before, given, WIDTH: tl.constexpr, PER: tl.constexpr):
    """Words of a unit, the places of their first bits in the list, and how many of their bits are given. `before` is
    the place of the unit's first bit."""
    word = tl.load(words + word_at, mask=word_at < WIDTH, other=0) & _kept(word_at, turn, start, PER)
    ones = parts.ones(word)
    at = before + tl.cumsum(ones) - ones
    return word, at, tl.minimum(tl.maximum(given - at, 0), ones)


@triton_call.kernel
def _list(out, word, first, at, number, BITS: tl.constexpr):
    """Of each word the lowest `number` bits, the first of which stands for `first`, into the list from place `at`."""
    lane = tl.arange(0, BITS)[None, :]
    left = tl.max(number)
    word, first, at, end = parts.dropped(word, BITS), first[:, None], at[:, None] + lane, (at + number)[:, None]
    while left > 0:
        tl.store(out + at, first + parts.ones(word ^ (word - 1)) - 1, mask=at < end)
        at, left = at + BITS, left - BITS
        for _ in tl.static_range(BITS):  # pyright: ignore
            word = word & (word - 1)


@triton_call.kernel
def _fill(out, given, GRID: tl.constexpr, LIMIT: tl.constexpr, FILL: tl.constexpr):
    """EMPTY behind what is given."""
    at = tl.program_id(0) * FILL + tl.arange(0, FILL)
    tl.store(out + at, NONE, mask=(at >= given) & (at < LIMIT))
