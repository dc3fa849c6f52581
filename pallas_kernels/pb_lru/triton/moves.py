"""Slots between buckets, by atomics on bitmap words.

Within a launch the words of a bucket only gain bits or only lose them: whoever sets the first bit of a word, or clears
its last one, knows it from the value before, and goes on a level above. So the summaries come out exact, whoever is
first.
"""

# Kernels are Triton's language, whose stubs type few of its results.
# pyright: reportOperatorIssue=false, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false


import triton.language as tl
from jaxtyping import Array, Int32

from pallas_kernels import triton_call
from pallas_kernels import triton_parts as parts
from pallas_kernels.pb_lru.buckets import Buckets
from pallas_kernels.pb_lru.triton import common
from pallas_kernels.triton_call import cdiv, like, power_of_2

SLOTS = 256
"""Entries of a slot list that one program moves."""
FEW = 4096
"""A list up to this length, of a pool with buckets of as many words, has its round opened and its slots moved by one
program."""
POUR = 512
"""Words of a bucket that one program pours."""
NONE = tl.constexpr(-1)


def rotate(state: Buckets, interpret: bool = False) -> Buckets:
    """As `reference.rotate`."""
    pitch = state.words.shape[1]
    words, order = triton_call.call(
        pour,
        state.order,
        state.words,
        grid=(cdiv(pitch, POUR),),
        out=[like(state.words), like(state.order)],
        alias={1: 0},
        interpret=interpret,
        ROUNDS=state.rounds,
        TURN=power_of_2(state.rounds),
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
    block = power_of_2(slots.shape[0]) if opens else SLOTS
    constants = dict(common.layout(state), N=slots.shape[0], NUM_SLOTS=state.label.shape[0], B=block)
    if opens:
        words, label, order = triton_call.call(
            open_and_move,
            slots,
            state.order,
            state.words,
            state.label,
            grid=(1,),
            out=[like(state.words), like(state.label), like(state.order)],
            alias={2: 0, 3: 1},
            warps=max(4, min(32, block // 64)),
            interpret=interpret,
            TURN=power_of_2(state.rounds),
            TILE=min(FEW, power_of_2(state.words.shape[1])),
            **constants,
        )
        return state._replace(words=words, label=label, order=order)
    words, label = triton_call.call(
        move_to_current,
        slots,
        state.order,
        state.words,
        state.label,
        grid=(cdiv(slots.shape[0], block),),
        out=[like(state.words), like(state.label)],
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
        grid=(cdiv(slots.shape[0], SLOTS),),
        out=[like(state.words)],
        alias={2: 0},
        interpret=interpret,
        N=slots.shape[0],
        NUM_SLOTS=state.label.shape[0],
        B=SLOTS,
        **common.layout(state),
    )
    return state._replace(words=words)


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
    _touch(words, label, slot, live, tl.load(order), ROUNDS, LEVELS, WIDTH, PITCH)


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
        _touch(words, label, slot, live, tl.load(order + ROUNDS - 1), ROUNDS, LEVELS, WIDTH, PITCH)


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
    at = parts.lanes(program * B, B)
    slot = tl.load(slots + at, mask=at < N, other=NONE)
    live = (slot >= 0) & (slot < NUM_SLOTS)
    return tl.where(live, slot, 0), live


@triton_call.kernel
def _touch(
    words,
    label,
    slot,
    live,
    current,
    ROUNDS: tl.constexpr,
    LEVELS: tl.constexpr,
    WIDTH: tl.constexpr,
    PITCH: tl.constexpr,
):
    """Slots into the current bucket, and their labels."""
    ring = tl.load(label + slot, mask=live, other=0).to(tl.int32)
    _move(words, slot, live, ring, current, ROUNDS, LEVELS, WIDTH, PITCH)
    tl.store(label + slot, current.to(tl.uint8), mask=live)


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
    word, bit = slot >> 5, parts.bit(slot & 31)
    # Asked for first, and looked at last: nothing else waits for it.
    gained = tl.atomic_or(words + target * PITCH + word, bit, mask=live, sem="relaxed")
    sought, emptied, source = live, tl.zeros_like(live), ring
    for turn in tl.static_range(3):  # pyright: ignore
        # A slot that is not where its label says is in cold, and if not there, in free or just evicted.
        bucket = ring if turn == 0 else tl.zeros_like(ring) + (ROUNDS + turn - 1)
        asked = sought & (bucket != target)
        before = tl.atomic_and(words + bucket * PITCH + word, bit ^ common.ALL, mask=asked, sem="relaxed")
        found = asked & ((before & bit) != 0)
        emptied = emptied | (found & (before == bit))
        source = tl.where(found, bucket, source)
        sought = sought & ~found
    common.summarize(words, source, target, word, emptied, live & (gained == 0), LEVELS, WIDTH, PITCH)
