"""Address resolution in Triton: three launches to find, one to move, one to look up.

`mark` sets a bit for every needed slot in one bitmap, host slots before device slots. `tally` counts the bits of each
block of it, and adds up those before it among its program's blocks; `collect` adds the totals of the programs before,
knows where the list of each block begins, and writes the lists of all blocks at once. (Counted while the bits are set,
by atomics on a number for each block, they took 60 us and not 2.)
"""

# Kernels are Triton's language, whose stubs type few of its results.
# pyright: reportOperatorIssue=false, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false

from typing import Any

import triton.language as tl
from jaxtyping import Array, Int32

from pallas_kernels import triton_call
from pallas_kernels import triton_parts as parts
from pallas_kernels.resolve.tables import Counts, Found, Moves, Tables, limit
from pallas_kernels.triton_call import cdiv, ints, power_of_2

MARK, MOVE = 512, 512
"""Entries and arrivals of one program."""
HOST_WORDS, DEVICE_WORDS = 128, 32
"""Bitmap words of a block, at least. On the host few bits are set, on the device many."""
MOST_BLOCKS = 4096
"""Of either part of the bitmap."""
TALLY = 16
"""Blocks of the bitmap that one program counts."""

NONE = tl.constexpr(-1)
NO_PLACE = tl.constexpr(-(2**31))


def find(tables: Tables, selected: Int32[Array, " n"], new: Int32[Array, " new"], interpret: bool = False) -> Found:
    most, n, k = limit(selected.shape[0], new.shape[0], tables), selected.shape[0], new.shape[0]
    host, device = tables.host_address.shape[0], tables.device_address.shape[0]
    host_words, host_tallies = _blocks(host, HOST_WORDS)
    device_words, device_tallies = _blocks(device, DEVICE_WORDS)
    tallies = host_tallies + device_tallies
    start = host_tallies * TALLY * host_words
    words = start + device_tallies * TALLY * device_words
    tiers: dict[str, Any] = dict(
        START=start, HOST_TALLIES=host_tallies, HOST_WORDS=host_words, DEVICE_WORDS=device_words, EACH=TALLY
    )

    (marks,) = triton_call.call(
        _mark,
        tables.location,
        selected,
        new,
        grid=(cdiv(n, MARK) + cdiv(k, MARK),),
        out=[ints(words + 2)],
        zeroed=[0],
        interpret=interpret,
        N=n,
        K=k,
        START=start,
        TOTALS=words,
        B=MARK,
    )
    inner, totals = triton_call.call(
        _tally,
        marks,
        grid=(tallies,),
        out=[ints(tallies * TALLY), ints(tallies)],
        interpret=interpret,
        **tiers,
    )
    slots, arriving, source, count, counts = triton_call.call(
        _collect,
        tables.location,
        tables.host_address,
        tables.host_free_count,
        new,
        marks,
        inner,
        totals,
        grid=(tallies * TALLY + 1,),
        out=[ints(2 * most), ints(most), ints(most), ints(1), ints(len(Counts._fields))],
        interpret=interpret,
        K=k,
        MOST=most,
        TALLIES=tallies,
        LANES=power_of_2(tallies),
        FILL=min(1024, power_of_2(cdiv(2 * most, tallies * TALLY))),
        TOTALS=words,
        B=128,
        **tiers,
    )
    return Found(slots, arriving, source, count.reshape(()), counts)


def move(
    tables: Tables,
    arriving: Int32[Array, " arrivals"],
    source: Int32[Array, " arrivals"],
    given: Int32[Array, " arrivals"],
    counts: Int32[Array, " counts"],
    copies: bool,
    interpret: bool = False,
) -> tuple[Moves, Tables, Int32[Array, " counts"]]:
    most = arriving.shape[0]
    state = [*tables[:4], tables.host_free_count.reshape(1), counts]
    *moves, location, device_address, host_address, host_free, free, counts = triton_call.call(
        _rewrite,
        arriving,
        source,
        given,
        *state,
        grid=(cdiv(most, MOVE),),
        out=[ints(most)] * 3 + [ints(table.shape[0]) for table in state],
        alias={3 + i: 3 + i for i in range(len(state))},
        interpret=interpret,
        MOST=most,
        COPIES=copies,
        B=MOVE,
    )
    return Moves(*moves), Tables(location, device_address, host_address, host_free, free.reshape(())), counts


def slots_of(
    location: Int32[Array, " addresses"],
    selected: Int32[Array, " n"],
    new: Int32[Array, " new"],
    interpret: bool = False,
) -> tuple[Int32[Array, " n"], Int32[Array, " new"]]:
    n, k = selected.shape[0], new.shape[0]
    found, placed = triton_call.call(
        _look_up,
        location,
        selected,
        new,
        grid=(cdiv(n, MARK) + cdiv(k, MARK),),
        out=[ints(n), ints(k)],
        interpret=interpret,
        N=n,
        K=k,
        B=MARK,
    )
    return found, placed


def _blocks(slots: int, words: int) -> tuple[int, int]:
    """Words of a block of the bitmap over so many slots, and programs that tally its blocks."""
    words = max(words, power_of_2(cdiv(slots, 32 * MOST_BLOCKS))) if slots else words
    return words, cdiv(slots, 32 * words * TALLY)


@triton_call.kernel
def _mark(
    location,
    selected,
    new,
    marks,
    N: tl.constexpr,
    K: tl.constexpr,
    START: tl.constexpr,
    TOTALS: tl.constexpr,
    B: tl.constexpr,
):
    """`marks`: the bitmap, and how many entries are there and how many fresh rows."""
    at = parts.lanes(tl.program_id(0) * B, B)
    behind = at - tl.cdiv(N, B) * B
    address = tl.load(selected + at, mask=at < N, other=NONE)
    fresh = tl.load(new + behind, mask=(behind >= 0) & (behind < K), other=NONE)
    address = tl.maximum(address, fresh)
    place = tl.load(location + address, mask=address >= 0, other=NO_PLACE)
    stored, here = place != NO_PLACE, place >= 0

    bit = tl.where(here, START * 32 + place, ~place)
    tl.atomic_or(marks + (bit >> 5), 1 << (bit & 31), mask=stored, sem="relaxed")
    entry, is_fresh = (address >= 0) & (behind < 0), (fresh >= 0) & ~stored
    both = tl.sum(entry.to(tl.int32) + is_fresh.to(tl.int32) * 65536)
    tl.atomic_add(marks + TOTALS, both & 65535, mask=both > 0, sem="relaxed")
    tl.atomic_add(marks + TOTALS + 1, both // 65536, mask=both > 65535, sem="relaxed")


@triton_call.kernel
def _tally(
    marks,
    inner,
    totals,
    START: tl.constexpr,
    HOST_TALLIES: tl.constexpr,
    HOST_WORDS: tl.constexpr,
    DEVICE_WORDS: tl.constexpr,
    EACH: tl.constexpr,
):
    program = tl.program_id(0)
    block = program * EACH + tl.arange(0, EACH)[:, None]
    if program < HOST_TALLIES:
        ones = _ones_of(marks + block * HOST_WORDS + tl.arange(0, HOST_WORDS)[None, :])
    else:
        block_there = block - HOST_TALLIES * EACH
        ones = _ones_of(marks + START + block_there * DEVICE_WORDS + tl.arange(0, DEVICE_WORDS)[None, :])
    tl.store(inner + program * EACH + tl.arange(0, EACH), tl.cumsum(ones) - ones)
    tl.store(totals + program, tl.sum(ones))


@triton_call.kernel
def _ones_of(at):
    """Bits set in each row of words."""
    return tl.sum(parts.ones(tl.load(at).to(tl.uint32, bitcast=True)), axis=1)


@triton_call.kernel
def _collect(
    location,
    host_address,
    host_free_count,
    new,
    marks,
    inner,
    totals,
    slots,
    arriving,
    source,
    count,
    counts,
    K: tl.constexpr,
    MOST: tl.constexpr,
    TALLIES: tl.constexpr,
    LANES: tl.constexpr,
    FILL: tl.constexpr,
    START: tl.constexpr,
    TOTALS: tl.constexpr,
    HOST_TALLIES: tl.constexpr,
    HOST_WORDS: tl.constexpr,
    DEVICE_WORDS: tl.constexpr,
    EACH: tl.constexpr,
    B: tl.constexpr,
):
    block = tl.program_id(0)
    fresh, lane = tl.load(marks + TOTALS + 1), tl.arange(0, LANES)
    held = tl.load(totals + lane, mask=lane < TALLIES, other=0)
    misses = tl.sum(tl.where(lane < HOST_TALLIES, held, 0))
    hits = tl.sum(held) - misses
    before = tl.sum(tl.where(lane < block // EACH, held, 0)) + tl.load(inner + block, mask=block < TALLIES * EACH)
    if block < HOST_TALLIES * EACH:
        word_at = parts.lanes(block * HOST_WORDS, HOST_WORDS)
        word = tl.load(marks + word_at).to(tl.uint32, bitcast=True)
        ones = parts.ones(word)
        at = fresh + before + tl.cumsum(ones) - ones
        while tl.max((word != 0).to(tl.int32)) > 0:
            lowest = word_at * 32 + parts.ones(word ^ (word - 1)) - 1
            some = (word != 0) & (at < MOST)
            tl.store(source + at, lowest, mask=some)
            tl.store(arriving + at, tl.load(host_address + lowest, mask=some), mask=some)
            word = word & (word - 1)
            at += 1
    elif block < TALLIES * EACH:
        _write_all(
            slots, marks + START, (block - HOST_TALLIES * EACH) * DEVICE_WORDS, before - misses, MOST, DEVICE_WORDS
        )
    else:
        seen = 0
        for start in range(0, K, B):
            i = start + tl.arange(0, B)
            address = tl.load(new + i, mask=i < K, other=NONE)
            place = tl.load(location + address, mask=address >= 0, other=0)
            is_fresh = (place == NO_PLACE).to(tl.int32)
            at = seen + tl.cumsum(is_fresh) - is_fresh
            tl.store(arriving + at, address, mask=(is_fresh > 0) & (at < MOST))
            tl.store(source + at, NONE, mask=(is_fresh > 0) & (at < MOST))
            seen += tl.sum(is_fresh)
        all_of_them = fresh + misses
        tl.store(count, tl.minimum(all_of_them, MOST))
        tl.store(counts, tl.load(marks + TOTALS))
        tl.store(counts + 1, hits)
        tl.store(counts + 2, misses)
        tl.store(counts + 3, fresh)
        tl.store(counts + 4, tl.load(host_free_count))
        tl.store(counts + 5, 0)
        tl.store(counts + 6, 0)
        tl.store(counts + 7, tl.maximum(all_of_them - MOST, 0))
    for turn in range(tl.cdiv(2 * MOST, (TALLIES * EACH + 1) * FILL)):
        i = (turn * (TALLIES * EACH + 1) + block) * FILL + tl.arange(0, FILL)
        tl.store(slots + i, NONE, mask=(i >= hits) & (i < 2 * MOST))
        beyond = (i >= fresh + misses) & (i < MOST)
        tl.store(arriving + i, NONE, mask=beyond)
        tl.store(source + i, NONE, mask=beyond)


@triton_call.kernel
def _write_all(out, words, first, before, MOST: tl.constexpr, WORDS: tl.constexpr):
    """Numbers of the bits that are set in some words, from place `before` on: all at once, for words with many."""
    word_at, number = first + tl.arange(0, WORDS), tl.arange(0, 32)[None, :]
    word = tl.load(words + word_at).to(tl.uint32, bitcast=True)
    ones, bit = parts.ones(word), parts.bit(number)
    at = (before + tl.cumsum(ones) - ones)[:, None] + parts.ones(word[:, None] & (bit - 1))
    tl.store(out + at, word_at[:, None] * 32 + number, mask=((word[:, None] & bit) != 0) & (at < MOST))


@triton_call.kernel
def _rewrite(
    arriving,
    source,
    given,
    location_in,
    device_address_in,
    host_address_in,
    host_free_in,
    free_in,
    counts_in,
    target,
    leaving,
    refuge,
    location,
    device_address,
    host_address,
    host_free,
    free,
    counts,
    MOST: tl.constexpr,
    COPIES: tl.constexpr,
    B: tl.constexpr,
):
    at = parts.lanes(tl.program_id(0) * B, B)
    address = tl.load(arriving + at, mask=at < MOST, other=NONE)
    slot = tl.load(given + at, mask=at < MOST, other=NONE)
    origin = tl.load(source + at, mask=at < MOST, other=NONE)
    comes = (address >= 0) & (slot >= 0)
    from_host = comes & (origin >= 0)
    victim = tl.load(device_address + slot, mask=comes, other=NONE)
    leaves = victim >= 0
    if COPIES:
        shelter = victim
        written = leaves & (tl.load(host_address + victim, mask=leaves, other=0) < 0)
    else:
        # Pops are the last of the fresh rows, pushes the first of the others, and there is never both.
        top, fresh = tl.load(counts + 4), tl.load(counts + 3)
        popped, pushed, place = leaves & ~from_host, from_host & ~leaves, top - fresh + at
        taken = tl.load(host_free + place, mask=popped & (place >= 0), other=NONE)
        shelter = tl.where(popped, taken, tl.where(leaves, origin, NONE))
        written = shelter >= 0
        tl.store(host_free + place, origin, mask=pushed)
        tl.store(host_address + origin, NONE, mask=pushed)
        change = tl.sum(pushed.to(tl.int32)) - tl.sum((popped & written).to(tl.int32))
        tl.atomic_add(free, change, mask=change != 0, sem="relaxed")
    tl.store(location + victim, ~shelter, mask=shelter >= 0)
    tl.store(host_address + shelter, victim, mask=shelter >= 0)
    tl.store(location + address, slot, mask=comes)
    tl.store(device_address + slot, address, mask=comes)
    tl.store(target + at, tl.where(from_host, slot, NONE), mask=at < MOST)
    tl.store(leaving + at, tl.where(written, slot, NONE), mask=at < MOST)
    tl.store(refuge + at, tl.where(written, shelter, NONE), mask=at < MOST)
    lost = ((address >= 0) & ~comes) | (leaves & (shelter < 0))
    if tl.max(address) >= 0:  # most programs have nothing: thousands of zeros for one address would have to queue
        tl.atomic_add(counts + 5, tl.sum(leaves.to(tl.int32)), sem="relaxed")
        tl.atomic_add(counts + 6, tl.sum(written.to(tl.int32)), sem="relaxed")
        tl.atomic_add(counts + 7, tl.sum(lost.to(tl.int32)), sem="relaxed")


@triton_call.kernel
def _look_up(location, selected, new, found, placed, N: tl.constexpr, K: tl.constexpr, B: tl.constexpr):
    at = parts.lanes(tl.program_id(0) * B, B)
    behind = at - tl.cdiv(N, B) * B
    of_new = (behind >= 0) & (behind < K)
    address = tl.maximum(
        tl.load(selected + at, mask=at < N, other=NONE), tl.load(new + behind, mask=of_new, other=NONE)
    )
    place = tl.maximum(tl.load(location + address, mask=address >= 0, other=NONE), NONE)
    tl.store(found + at, place, mask=at < N)
    tl.store(placed + behind, place, mask=of_new)
