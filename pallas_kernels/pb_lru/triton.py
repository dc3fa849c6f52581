"""Bucketed LRU in Triton: one launch to touch, two to find and take the victims, however many there are.

Slots move by atomics on bitmap words. Within a launch the words of a bucket only gain bits or only lose them: whoever
sets the first bit of a word, or clears its last one, knows it from the value before, and goes on a level above. So the
summaries come out exact, whoever is first.

Victims: the words of all buckets in victim order are cut into units. `count` counts the bits of each unit, and adds up
those before it among its program's units. A program of `take` has an equal share of the victims: it gives up the units
whose first bit is in its share, without a look at those that hold none. Population counts are shifts and adds, which
the interpreter has too.
"""

from typing import Any

import jax
import jax.numpy as jnp
import triton.language as tl
from jaxtyping import Array, Int32, UInt32

from pallas_kernels import triton_call
from pallas_kernels.pb_lru.buckets import Buckets, levels

SLOTS = 256
"""Entries of a slot list that one program moves."""
FEW = 4096
"""A list up to this length, of a pool with buckets of as many words, has its round opened and its slots moved by one
program."""
POUR = 512
"""Words of a bucket that one program pours."""
UNIT, UNITS = 32, 64
"""Words of a unit, and units of one program that counts."""
PROGRAMS = 1056
"""That take victims, at most."""

NONE = tl.constexpr(-1)
ALL = tl.constexpr(0xFFFFFFFF)
"""To flip bits with: the interpreter has no `~` for unsigned numbers."""


def rotate(state: Buckets, interpret: bool = False) -> Buckets:
    """As `reference.rotate`."""
    pitch = state.words.shape[1]
    words, order = triton_call.call(
        pour,
        state.order,
        state.words,
        grid=(_cdiv(pitch, POUR),),
        out=[_like(state.words), _like(state.order)],
        alias={1: 0},
        interpret=interpret,
        ROUNDS=state.rounds,
        TURN=_power(state.rounds),
        PITCH=pitch,
        TILE=POUR,
    )
    return state._replace(words=words, order=order)


def touch(state: Buckets, slots: Int32[Array, " n"], opens: bool = False, interpret: bool = False) -> Buckets:
    """As `reference.touch`."""
    few = 0 < slots.shape[0] <= FEW and state.words.shape[1] <= FEW
    if opens and not few:
        state, opens = rotate(state, interpret), False
    if not slots.shape[0]:
        return state
    block = _power(slots.shape[0]) if opens else SLOTS
    constants = dict(_layout(state), N=slots.shape[0], NUM_SLOTS=state.label.shape[0], B=block)
    if opens:
        words, label, order = triton_call.call(
            open_and_move,
            slots,
            state.order,
            state.words,
            state.label,
            grid=(1,),
            out=[_like(state.words), _like(state.label), _like(state.order)],
            alias={2: 0, 3: 1},
            warps=max(4, min(32, block // 64)),
            interpret=interpret,
            TURN=_power(state.rounds),
            TILE=min(FEW, _power(state.words.shape[1])),
            **constants,
        )
        return state._replace(words=words, label=label, order=order)
    words, label = triton_call.call(
        move_to_current,
        slots,
        state.order,
        state.words,
        state.label,
        grid=(_cdiv(slots.shape[0], block),),
        out=[_like(state.words), _like(state.label)],
        alias={2: 0, 3: 1},
        warps=block // 32 // 2,
        interpret=interpret,
        **constants,
    )
    return state._replace(words=words, label=label)


def forget(state: Buckets, slots: Int32[Array, " n"], interpret: bool = False) -> Buckets:
    """As `reference.forget`."""
    if not slots.shape[0]:
        return state
    (words,) = triton_call.call(
        move_to_free,
        slots,
        state.label,
        state.words,
        grid=(_cdiv(slots.shape[0], SLOTS),),
        out=[_like(state.words)],
        alias={2: 0},
        interpret=interpret,
        N=slots.shape[0],
        NUM_SLOTS=state.label.shape[0],
        B=SLOTS,
        **_layout(state),
    )
    return state._replace(words=words)


def evict(
    state: Buckets, count: Int32[Array, ""], limit: int, interpret: bool = False
) -> tuple[Int32[Array, " limit"], Buckets]:
    """As `reference.evict`."""
    if not limit:
        return jnp.zeros(0, jnp.int32), state
    layout = _layout(state)
    inner, totals, units = _count(state.words, state.order, state.hand, layout, interpret)
    victims, words, hand = triton_call.call(
        take,
        state.order,
        state.hand,
        count,
        inner,
        totals,
        state.words,
        grid=(units["GRID"],),
        out=[_ints(limit), _like(state.words), _like(state.hand)],
        alias={5: 1},
        interpret=interpret,
        LIMIT=limit,
        FILL=_power(_cdiv(limit, units["GRID"])),
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
    inner, totals, units = _count(words, count, count, layout, interpret)
    return triton_call.call(
        read_off,
        words,
        count,
        inner,
        totals,
        grid=(units["GRID"],),
        out=[_ints(limit), _ints()],
        interpret=interpret,
        LIMIT=limit,
        FILL=_power(_cdiv(limit, units["GRID"])),
        **layout,
        **units,
    )  # pyright: ignore[reportReturnType]


def _count(
    words: Array, order: Array, hand: Array, layout: dict[str, Any], interpret: bool
) -> tuple[Array, Array, dict[str, Any]]:
    """Bits before each unit within its program's units, bits of each program's units, and constants of both kernels.

    A bucket's words are `PER` units. One more, the last one, has what lies in the first unit before the hand.
    """
    per = _cdiv(layout["WIDTH"], UNIT)
    number = (layout["ROUNDS"] + 1) * (per + 1)
    programs = _cdiv(number, UNITS)
    inner, totals = triton_call.call(
        count_units,
        words,
        order,
        hand,
        grid=(programs,),
        out=[_ints(programs * UNITS), _ints(programs)],
        interpret=interpret,
        NUMBER=number,
        PER=per,
        UNIT=UNIT,
        UNITS=UNITS,
        **layout,
    )
    grid = min(number, PROGRAMS)
    units = dict(NUMBER=number, PER=per, UNIT=UNIT, UNITS=UNITS, GRID=grid, COUNTED=programs, LANES=_power(programs))
    return inner, totals, units


def _layout(state: Buckets) -> dict[str, Any]:
    found = levels(state.label.shape[0])
    return dict(ROUNDS=state.rounds, LEVELS=len(found), WIDTH=found[0].width, PITCH=state.words.shape[1])


def _like(array: Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array.shape, array.dtype)


def _ints(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def _cdiv(a: int, b: int) -> int:
    return -(-a // b)


def _power(n: int) -> int:
    """The power of two at or above n."""
    return 1 << max(n - 1, 0).bit_length()


@triton_call.kernel
def pour(
    order, words_in, words, turned, ROUNDS: tl.constexpr, TURN: tl.constexpr, PITCH: tl.constexpr, TILE: tl.constexpr
):
    _pour(order, words, tl.program_id(0) * TILE + tl.arange(0, TILE), ROUNDS, PITCH)
    if tl.program_id(0) == 0:
        _turn(order, turned, ROUNDS, TURN)


@triton_call.kernel
def open_and_move(
    slots,
    order,
    words_in,
    label_in,
    words,
    label,
    turned,
    ROUNDS: tl.constexpr,
    LEVELS: tl.constexpr,
    WIDTH: tl.constexpr,
    PITCH: tl.constexpr,
    N: tl.constexpr,
    NUM_SLOTS: tl.constexpr,
    B: tl.constexpr,
    TURN: tl.constexpr,
    TILE: tl.constexpr,
):
    _pour(order, words, tl.arange(0, TILE), ROUNDS, PITCH)
    _turn(order, turned, ROUNDS, TURN)
    tl.debug_barrier()
    slot, live = _slots(slots, 0, N, NUM_SLOTS, B)
    current = tl.load(order)
    ring = tl.load(label + slot, mask=live, other=0).to(tl.int32)
    _move(words, slot, live, ring, current, ROUNDS, LEVELS, WIDTH, PITCH)
    tl.store(label + slot, current.to(tl.uint8), mask=live)


@triton_call.kernel
def move_to_current(
    slots,
    order,
    words_in,
    label_in,
    words,
    label,
    ROUNDS: tl.constexpr,
    LEVELS: tl.constexpr,
    WIDTH: tl.constexpr,
    PITCH: tl.constexpr,
    N: tl.constexpr,
    NUM_SLOTS: tl.constexpr,
    B: tl.constexpr,
):
    slot, live = _slots(slots, tl.program_id(0), N, NUM_SLOTS, B)
    if tl.max(live.to(tl.int32)) > 0:
        current = tl.load(order + ROUNDS - 1)
        ring = tl.load(label + slot, mask=live, other=0).to(tl.int32)
        _move(words, slot, live, ring, current, ROUNDS, LEVELS, WIDTH, PITCH)
        tl.store(label + slot, current.to(tl.uint8), mask=live)


@triton_call.kernel
def move_to_free(
    slots,
    label,
    words_in,
    words,
    ROUNDS: tl.constexpr,
    LEVELS: tl.constexpr,
    WIDTH: tl.constexpr,
    PITCH: tl.constexpr,
    N: tl.constexpr,
    NUM_SLOTS: tl.constexpr,
    B: tl.constexpr,
):
    slot, live = _slots(slots, tl.program_id(0), N, NUM_SLOTS, B)
    if tl.max(live.to(tl.int32)) > 0:
        ring = tl.load(label + slot, mask=live, other=0).to(tl.int32)
        _move(words, slot, live, ring, ROUNDS + 1, ROUNDS, LEVELS, WIDTH, PITCH)


@triton_call.kernel
def _pour(order, words, at, ROUNDS: tl.constexpr, PITCH: tl.constexpr):
    """The oldest ring bucket into cold; the OR of two bitmaps has the OR of their summaries."""
    oldest, cold, there = words + tl.load(order) * PITCH + at, words + ROUNDS * PITCH + at, at < PITCH
    tl.store(cold, tl.load(cold, mask=there) | tl.load(oldest, mask=there), mask=there)
    tl.store(oldest, tl.zeros_like(at).to(tl.uint32), mask=there)


@triton_call.kernel
def _turn(order, turned, ROUNDS: tl.constexpr, TURN: tl.constexpr):
    i = tl.arange(0, TURN)
    tl.store(turned + i, tl.load(order + (i + 1) % ROUNDS), mask=i < ROUNDS)


@triton_call.kernel
def _slots(slots, program, N: tl.constexpr, NUM_SLOTS: tl.constexpr, B: tl.constexpr):
    """Slots of a program, and which of them are no padding."""
    # Named as not contiguous, so that neighbouring lanes have neighbouring entries and nothing crosses shared memory.
    at = program * B + tl.max_contiguous(tl.arange(0, B), 1)
    slot = tl.load(slots + at, mask=at < N, other=NONE)
    live = (slot >= 0) & (slot < NUM_SLOTS)
    return tl.where(live, slot, 0), live


@triton_call.kernel
def _move(
    words,
    slot,
    live,
    ring,
    target,
    ROUNDS: tl.constexpr,
    LEVELS: tl.constexpr,
    WIDTH: tl.constexpr,
    PITCH: tl.constexpr,
):
    """Slots, labelled `ring`, out of the bucket in which they are and into the target. Some may stand twice."""
    word, bit = slot >> 5, _bit(slot & 31)
    sought, emptied, source = live, tl.zeros_like(live), ring
    for turn in tl.static_range(3):  # pyright: ignore
        # A slot that is not where its label says is in cold, and if not there, in free or just evicted.
        bucket = ring if turn == 0 else tl.zeros_like(ring) + (ROUNDS + turn - 1)
        asked = sought & (bucket != target)
        before = tl.atomic_and(words + bucket * PITCH + word, bit ^ ALL, mask=asked, sem="relaxed")
        found = asked & ((before & bit) != 0)
        emptied = emptied | (found & (before == bit))
        source = tl.where(found, bucket, source)
        sought = sought & ~found
    _clear_above(words, source, word, emptied, LEVELS, WIDTH, PITCH)
    gains, start, width = live, 0, WIDTH
    for _ in tl.static_range(LEVELS):  # pyright: ignore
        before = tl.atomic_or(words + target * PITCH + start + word, bit, mask=gains, sem="relaxed")
        gains = gains & (before == 0)
        start, width = start + (width + 31) // 32 * 32, (width + 31) // 32
        word, bit = word >> 5, _bit(word & 31)


@triton_call.kernel
def _clear_above(words, bucket, word, emptied, LEVELS: tl.constexpr, WIDTH: tl.constexpr, PITCH: tl.constexpr):
    """Words of a bucket have become zero: what its summaries say of them."""
    start, width = 0, WIDTH
    for _ in tl.static_range(LEVELS - 1):  # pyright: ignore
        start, width = start + (width + 31) // 32 * 32, (width + 31) // 32
        word, bit = word >> 5, _bit(word & 31)
        before = tl.atomic_and(words + bucket * PITCH + start + word, bit ^ ALL, mask=emptied, sem="relaxed")
        emptied = emptied & (before == bit)


@triton_call.kernel
def count_units(
    words,
    order,
    hand,
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
    ones = tl.sum(_ones(word & _kept(at, turn[:, None], start[:, None], PER)), axis=1)
    tl.store(inner + unit, tl.cumsum(ones) - ones)
    tl.store(totals + tl.program_id(0), tl.sum(ones))


@triton_call.kernel
def take(
    order,
    hand,
    count,
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
    COUNTED: tl.constexpr,
    LANES: tl.constexpr,
    GRID: tl.constexpr,
    LIMIT: tl.constexpr,
    FILL: tl.constexpr,
    NUM_SLOTS: tl.constexpr,
):
    lane, upto, given, rank, end = _share(count, totals, inner, UNITS, COUNTED, LANES, GRID, LIMIT)
    cold = _before(PER + 1, lane, upto, inner, COUNTED, UNITS)
    rings = _before(2 * (PER + 1), lane, upto, inner, COUNTED, UNITS)
    last_cold = tl.minimum(given, rings) - 1
    if (tl.program_id(0) == 0) & (last_cold < cold):
        tl.store(passed, tl.load(hand))
    while rank < end:
        unit, stop = _unit_of(rank, lane, upto, inner, UNITS)
        bucket, first, turn, start = _unit(unit, order, hand, ROUNDS, PER, UNIT)
        word_at, slot, place, taken = _bits(words, bucket, first, turn, start, rank, given, WIDTH, PITCH, PER, UNIT)
        tl.store(victims + place, slot, mask=taken)
        one = _bit(tl.arange(0, 32))
        gone = tl.sum(tl.where(taken, one[None, :], 0), axis=1).to(tl.uint32)
        before = tl.atomic_and(words + bucket * PITCH + word_at, gone ^ ALL, mask=gone != 0, sem="relaxed")
        _clear_above(words, bucket, word_at, (gone != 0) & (before == gone), LEVELS, WIDTH, PITCH)
        if (rank <= last_cold) & (last_cold < stop) & (last_cold >= cold):
            after = tl.max(tl.where(taken & (place == last_cold), slot + 1, 0))
            tl.store(passed, after % NUM_SLOTS)
        rank = stop
    _fill(victims, given, GRID, LIMIT, FILL)


@triton_call.kernel
def read_off(
    words,
    count,
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
    COUNTED: tl.constexpr,
    LANES: tl.constexpr,
    GRID: tl.constexpr,
    LIMIT: tl.constexpr,
    FILL: tl.constexpr,
):
    lane, upto, given, rank, end = _share(count, totals, inner, UNITS, COUNTED, LANES, GRID, LIMIT)
    if tl.program_id(0) == 0:
        tl.store(everything, tl.max(upto))
    while rank < end:
        unit, stop = _unit_of(rank, lane, upto, inner, UNITS)
        bucket, first, turn, start = _unit(unit, count, count, ROUNDS, PER, UNIT)
        _, slot, place, taken = _bits(words, bucket, first, turn, start, rank, given, WIDTH, PITCH, PER, UNIT)
        tl.store(found + place, slot, mask=taken)
        rank = stop
    _fill(found, given, GRID, LIMIT, FILL)


@triton_call.kernel
def _share(
    count,
    totals,
    inner,
    UNITS: tl.constexpr,
    COUNTED: tl.constexpr,
    LANES: tl.constexpr,
    GRID: tl.constexpr,
    LIMIT: tl.constexpr,
):
    """Bits up to and with each program that counted, how many are given in all, and between which ranks the units begin
    that are this program's."""
    lane = tl.arange(0, LANES)
    upto = tl.cumsum(tl.load(totals + lane, mask=lane < COUNTED, other=0))
    given = tl.minimum(tl.minimum(tl.load(count), LIMIT), tl.max(upto))
    each = (given + GRID - 1) // GRID
    rank = tl.program_id(0) * each
    end = tl.minimum(rank + each, given)
    if (rank > 0) & (rank < end):
        _, rank = _unit_of(rank - 1, lane, upto, inner, UNITS)
    return lane, upto, given, rank, end


@triton_call.kernel
def _unit_of(rank, lane, upto, inner, UNITS: tl.constexpr):
    """The unit that holds the bit of a rank, and the rank of the first bit behind it."""
    counted = tl.sum((upto <= rank).to(tl.int32))
    total = tl.max(upto)
    number = tl.arange(0, UNITS)
    first = tl.max(tl.where(lane < counted, upto, 0)) + tl.load(inner + counted * UNITS + number)
    within = tl.sum((first <= rank).to(tl.int32)) - 1  # a unit without bits begins where the next one does
    stop = tl.minimum(tl.min(tl.where(number > within, first, total)), tl.min(tl.where(lane >= counted, upto, total)))
    return counted * UNITS + within, stop


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
    low = tl.where(below == 32, ALL, _bit(tl.minimum(below, 31)) - 1)
    return tl.where(turn == 0, low ^ ALL, tl.where(turn == PER, low, ALL))


@triton_call.kernel
def _before(unit, lane, upto, inner, COUNTED: tl.constexpr, UNITS: tl.constexpr):
    """Bits in all units before this one."""
    within = tl.load(inner + unit, mask=unit < COUNTED * UNITS, other=0)
    return tl.max(tl.where(lane < unit // UNITS, upto, 0)) + within


@triton_call.kernel
def _bits(
    words,
    bucket,
    first,
    turn,
    start,
    before,
    given,
    WIDTH: tl.constexpr,
    PITCH: tl.constexpr,
    PER: tl.constexpr,
    UNIT: tl.constexpr,
):
    """Words of a unit, and for each of their bits its number, its place in the list and whether it is among those
    given. `before` is the place of the unit's first bit."""
    at = first + tl.arange(0, UNIT)
    word = tl.load(words + bucket * PITCH + at, mask=at < WIDTH, other=0) & _kept(at, turn, start, PER)
    ones = _ones(word)
    base = before + tl.cumsum(ones) - ones
    lane = tl.arange(0, 32)
    bit = _bit(lane)[None, :]
    place = base[:, None] + _ones(word[:, None] & (bit - 1))
    return at, at[:, None] * 32 + lane[None, :], place, ((word[:, None] & bit) != 0) & (place < given)


@triton_call.kernel
def _fill(out, given, GRID: tl.constexpr, LIMIT: tl.constexpr, FILL: tl.constexpr):
    """EMPTY behind what is given."""
    at = tl.program_id(0) * FILL + tl.arange(0, FILL)
    tl.store(out + at, NONE, mask=(at >= given) & (at < LIMIT))


@triton_call.kernel
def _bit(at):
    return tl.zeros_like(at).to(tl.uint32) + 1 << at.to(tl.uint32)


@triton_call.kernel
def _ones(word):
    """Bits set."""
    word = word - ((word >> 1) & 0x55555555)
    word = (word & 0x33333333) + ((word >> 2) & 0x33333333)
    word = (word + (word >> 4)) & 0x0F0F0F0F
    return ((word * 0x01010101) >> 24).to(tl.int32)
