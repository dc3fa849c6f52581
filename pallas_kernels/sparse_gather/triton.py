"""Rows between slots in Triton: threads copy them word by word, wherever the two sides lie.

A program takes a few neighbours in the list at a time, and asks for many parts of their rows before it writes the
first: what limits it is how long the link takes to answer. Few programs walk a list of host slots together, so that
rows in ascending order share what is at hand of the page tables: about a thousand rows on their way are best, and with
twice as many each takes longer. (H200, 6,528 rows of 656 bytes from 2.7 GB: 104 us, and 131 with a write after each
read.)
"""

# Kernels are Triton's language, whose stubs type few of its results.
# pyright: reportOperatorIssue=false, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import triton.language as tl
from jaxtyping import Array, Int32, UInt32

from pallas_kernels import triton_call
from pallas_kernels.sparse_gather.reference import HostLanes, Lanes, beside
from pallas_kernels.triton_call import like, power_of_2

PIECE = 32
"""Words of a part at most: 128 bytes."""
GROUP = 8
"""Parts of each row that are read at once."""
LOOK = 64
"""Turns of a program in which it looks at once for something real in the list."""
WARPS = 1
LINK, DEVICE = (4, 132), (8, 2112)
"""Rows that a program moves at once, and programs at most: on the link to the host, and on the device."""

Slots = Int32[Array, " n"]


class Side(NamedTuple):
    """Where rows are read or written."""

    rows: Any
    """A pool, a list of rows, or the shape of a list to make."""
    slots: Any
    """Int32[n], or None for a list, which is taken in its order."""
    stride: int
    """Words from slot to slot."""
    layer_stride: int


def gather(pool, layer, slots: Slots, interpret: bool = False) -> UInt32[Array, "n words"]:
    return _copy(_device(pool, slots), _new(1, slots, pool), 1, DEVICE, interpret, layer)[0]


def gather_layers(pool, slots: Slots, interpret: bool = False) -> UInt32[Array, "layers n words"]:
    layers = pool.shape[0]
    return _copy(_device(pool, slots), _new(layers, slots, pool), layers, DEVICE, interpret)


def scatter(pool, layer, slots: Slots, rows, interpret: bool = False) -> UInt32[Array, "layers slots words"]:
    return _copy(_list(rows[None]), _device(pool, slots), 1, DEVICE, interpret, layer)


def scatter_layers(pool, slots: Slots, rows, interpret: bool = False) -> UInt32[Array, "layers slots words"]:
    return _copy(_list(rows), _device(pool, slots), pool.shape[0], DEVICE, interpret)


def read_host(pool, layer, slots: Slots, interpret: bool = False) -> UInt32[Array, "n words"]:
    return _copy(_host(pool, slots), _new(1, slots, pool), 1, LINK, interpret, layer)[0]


def write_host(pool, layer, slots: Slots, rows, interpret: bool = False) -> UInt32[Array, "slots layers words"]:
    return _copy(_list(rows[None]), _host(pool, slots), 1, LINK, interpret, layer)


def fetch(device: Lanes, host: HostLanes, source: Slots, target: Slots, interpret: bool = False) -> Lanes:
    return _trade(device, host, (source, target, source, target), False, interpret)[0]


def write_back(device: Lanes, host: HostLanes, victim: Slots, refuge: Slots, interpret: bool = False) -> HostLanes:
    """A call for each lane: XLA sees that the one result of a call takes a host pool's place, but not of several."""
    return tuple(
        _copy(_device(rows, victim), _host(pool, refuge), len(rows), LINK, interpret)
        for rows, pool in zip(device, host, strict=True)
    )


def exchange(
    device: Lanes, host: HostLanes, source: Slots, target: Slots, victim: Slots, refuge: Slots, interpret: bool = False
) -> tuple[Lanes, HostLanes]:
    """Both pools change in one kernel, and XLA can be told so of the device pool alone: it gives all results of a call
    one memory space. So the host pool goes through two calls that do nothing but take its place. What reads the pool as
    it was comes before the first, what reads it later needs the second, and that one needs a result of the kernel; in
    between only the kernel has it. If the caller keeps the pool, XLA copies it before the first.
    """
    lists = source, target, victim, refuge
    if interpret:  # on copies: there the host pools are results like any other
        return _trade(device, host, lists, True, interpret)
    host = tuple(_pass_on(source, pool) for pool in host)
    device, tokens = _trade(device, host, lists, True, interpret)
    return device, tuple(_pass_on(token, pool) for token, pool in zip(tokens, host, strict=True))


def _copy(
    source: Side, target: Side, layers: int, plan: tuple[int, int], interpret: bool, layer: int | Array = 0
) -> Array:
    """The target with its rows. `layer` is the first of the pool's, where the other side is a list."""
    left, right = source.slots, target.slots
    slots = right if left is None else left
    made = isinstance(target.rows, jax.ShapeDtypeStruct)
    if not slots.shape[0]:
        return jnp.zeros(target.rows.shape, target.rows.dtype) if made else target.rows
    tiles = _tiles(slots.shape[0], layers, source.rows.shape[2], plan)
    where = dict(
        FROM_LIST=left is None, FROM=source.stride, FROM_LAYER=source.layer_stride,
        TO_LIST=right is None, TO=target.stride, TO_LAYER=target.layer_stride,
    )  # fmt: skip
    (rows,) = triton_call.call(
        _copy_rows,
        slots if left is None else left,
        slots if right is None else right,
        jnp.asarray(layer, jnp.int32).reshape(1),
        source.rows,
        slots if made else target.rows,
        grid=(tiles["PROGRAMS"],),
        out=[like(target.rows)],
        alias={} if made else {4: 0},
        warps=WARPS,
        interpret=interpret,
        **where,
        **tiles,
    )
    return rows if made else beside(rows, target.rows)


def _trade(device: Lanes, host: HostLanes, lists: tuple[Slots, ...], both_ways: bool, interpret: bool):
    """The device lanes, and for each host lane a result of the kernel: the lane itself when interpreted."""
    lanes = len(device)
    if not lists[0].shape[0]:
        return device, host
    hosts, devices, constants = trade(device, host, lists[0], both_ways, LINK)
    token = jax.ShapeDtypeStruct((1,), jnp.int32)
    unwritten = [token] * (2 - lanes)
    settled = [like(pool) if interpret else token for pool in host]
    results = triton_call.call(
        trade_rows,
        *[*lists, *hosts, *devices],
        grid=(constants["PROGRAMS"],),
        out=[*map(like, device), *unwritten, *settled, *unwritten],
        alias={6 + lane: lane for lane in range(lanes)} | {4 + lane: 2 + lane for lane in range(lanes) if interpret},
        warps=WARPS,
        interpret=interpret,
        **constants,
    )
    after = results[2 : 2 + lanes]
    return results[:lanes], tuple(map(beside, after, host)) if interpret else after


def trade(
    device: Lanes, host: HostLanes, slots: Slots, both_ways: bool, plan: tuple[int, int]
) -> tuple[list[Array], list[Array], dict[str, Any]]:
    """Host lanes, device lanes and constants for `trade_rows`, which has parameters for two lanes: with PARTS2 = 0 it
    leaves those of the second alone. `plan`: rows that a program moves at once, and programs at most."""
    (layers, size, words), lanes = device[0].shape, len(device)
    if lanes > 2:
        raise ValueError(f"lanes: expected one or two, found {lanes}; pack the others into one of them")
    second = device[1].shape[2] if lanes > 1 else 0
    piece = _piece(second)
    parts = second // piece if second else 0
    constants = _tiles(slots.shape[0], layers, words, plan)
    constants |= dict(SLOTS=size, PARTS2=parts, PIECE2=piece, GROUP2=_group(layers * parts), BOTH_WAYS=both_ways)
    unused = [slots] * (2 - lanes)
    return [*host, *unused], [*device, *unused], constants


def _pass_on(after: Array, pool: Array) -> Array:
    """The pool, once `after` is there."""
    (passed,) = triton_call.call(_nothing, after, pool, grid=(1,), out=[like(pool)], alias={1: 0}, warps=1)
    return beside(passed, pool)


def _tiles(n: int, layers: int, words: int, plan: tuple[int, int]) -> dict[str, Any]:
    piece, (entries, programs) = _piece(words), plan
    parts = words // piece
    programs = min(programs, -(-n // entries))
    turns = -(-n // (entries * programs))
    look = min(LOOK, power_of_2(turns))
    return dict(
        N=n, PROGRAMS=programs, LOOKS=-(-turns // look), LOOK=look, ENTRIES=entries, GROUP=_group(layers * parts),
        LAYERS=layers, PARTS=parts, PIECE=piece,
    )  # fmt: skip


def _group(parts: int) -> int:
    return min(GROUP, power_of_2(parts)) if parts else 1


def _piece(words: int) -> int:
    """The largest power of two that divides `words`, up to PIECE."""
    return min(PIECE, words & -words)


def _device(pool, slots: Slots) -> Side:
    return Side(pool, slots, pool.shape[2], pool.shape[1] * pool.shape[2])


def _host(pool, slots: Slots) -> Side:
    return Side(pool, slots, pool.shape[1] * pool.shape[2], pool.shape[2])


def _list(rows) -> Side:
    return Side(rows, None, rows.shape[2], rows.shape[1] * rows.shape[2])


def _new(layers: int, slots: Slots, pool) -> Side:
    return _list(jax.ShapeDtypeStruct((layers, slots.shape[0], pool.shape[2]), pool.dtype))


@triton_call.kernel
def _slots(listed, i, N):  # pyright: ignore
    return tl.load(listed + i, i < N, -1).to(tl.int64)


@triton_call.kernel
def _pairs(left, right, i, N):  # pyright: ignore
    """Which entries of two lists are real in both."""
    return (_slots(left, i, N) >= 0) & (_slots(right, i, N) >= 0)


@triton_call.kernel
def _entries(turn, PROGRAMS: tl.constexpr, ENTRIES: tl.constexpr):
    """Of this program in its turn: programs take neighbours, turn by turn."""
    return (turn * PROGRAMS + tl.program_id(0)) * ENTRIES + tl.arange(0, ENTRIES)


@triton_call.kernel
def _ahead(look, LOOK: tl.constexpr, PROGRAMS: tl.constexpr, ENTRIES: tl.constexpr):
    """Entries [turns, entries] of a look."""
    turn = look * LOOK + tl.arange(0, LOOK)
    return (turn[:, None] * PROGRAMS + tl.program_id(0)) * ENTRIES + tl.arange(0, ENTRIES)[None, :]


@triton_call.kernel
def _first(wanted, LOOK: tl.constexpr):
    """The first of some turns that is wanted, LOOK if none is."""
    return tl.min(tl.where(wanted, tl.arange(0, LOOK), LOOK))


@triton_call.kernel
def _words(slot, SLOT, part, PARTS, LAYER, PIECE):  # pyright: ignore
    """Places of words [entries, parts, PIECE]; a layer has PARTS."""
    word = tl.arange(0, PIECE)[None, None, :]
    return slot * SLOT + (part // PARTS).to(tl.int64) * LAYER + part % PARTS * PIECE + word


@triton_call.kernel
def _copy_rows(  # pyright: ignore
    left, right, layer, rows, held, pool,
    N: tl.constexpr, PROGRAMS: tl.constexpr, LOOKS: tl.constexpr, LOOK: tl.constexpr, ENTRIES: tl.constexpr,
    GROUP: tl.constexpr, LAYERS: tl.constexpr, PARTS: tl.constexpr, PIECE: tl.constexpr,
    FROM_LIST: tl.constexpr, FROM: tl.constexpr, FROM_LAYER: tl.constexpr,
    TO_LIST: tl.constexpr, TO: tl.constexpr, TO_LAYER: tl.constexpr,
):  # fmt: skip
    if TO_LIST:
        rows += tl.load(layer).to(tl.int64) * FROM_LAYER
    if FROM_LIST:
        pool += tl.load(layer).to(tl.int64) * TO_LAYER
    part = tl.arange(0, GROUP)[None, :, None]
    for look in range(LOOKS):
        ahead = _ahead(look, LOOK, PROGRAMS, ENTRIES)
        real = ahead < N
        if not TO_LIST:
            real = _pairs(left, right, ahead, N)
        wanted = tl.max(real.to(tl.int32), axis=1) > 0
        turn = _first(wanted, LOOK)
        while turn < LOOK:
            i = _entries(look * LOOK + turn, PROGRAMS, ENTRIES)[:, None, None]
            a, b = _slots(left, i, N), _slots(right, i, N)
            read = (a >= 0) & (b >= 0)
            written = read
            if TO_LIST:  # what is EMPTY reads as zeros
                b, written = i.to(tl.int64), i < N
            if FROM_LIST:
                a = i.to(tl.int64)
            for first in range(0, LAYERS * PARTS, GROUP):
                there = first + part < LAYERS * PARTS
                row = tl.load(rows + _words(a, FROM, first + part, PARTS, FROM_LAYER, PIECE), read & there, 0)
                tl.store(pool + _words(b, TO, first + part, PARTS, TO_LAYER, PIECE), row, written & there)
            wanted = wanted & (tl.arange(0, LOOK) > turn)
            turn = _first(wanted, LOOK)


@triton_call.kernel
def _read_parts(  # pyright: ignore
    host, device, s, v, up, down, part, LAYERS, SLOTS, PARTS, PIECE, BOTH_WAYS
):  # fmt: skip
    """Some parts of some rows, from both sides."""
    there, row = part < LAYERS * PARTS, PARTS * PIECE
    coming = tl.load(host + _words(s, LAYERS * row, part, PARTS, row, PIECE), up & there)
    leaving = coming
    if BOTH_WAYS:
        leaving = tl.load(device + _words(v, row, part, PARTS, SLOTS * row, PIECE), down & there)
    return coming, leaving


@triton_call.kernel
def _write_parts(  # pyright: ignore
    host, device, t, r, up, down, part, coming, leaving, LAYERS, SLOTS, PARTS, PIECE, BOTH_WAYS
):  # fmt: skip
    """To both sides, what all threads of the program have read."""
    there, row = part < LAYERS * PARTS, PARTS * PIECE
    if BOTH_WAYS:
        tl.debug_barrier()
        tl.store(host + _words(r, LAYERS * row, part, PARTS, row, PIECE), leaving, down & there)
    tl.store(device + _words(t, row, part, PARTS, SLOTS * row, PIECE), coming, up & there)


@triton_call.kernel
def trade_rows(  # pyright: ignore
    source, target, victim, refuge, host, host2, held, held2, device, device2, settled, settled2,
    N: tl.constexpr, PROGRAMS: tl.constexpr, LOOKS: tl.constexpr, LOOK: tl.constexpr, ENTRIES: tl.constexpr,
    GROUP: tl.constexpr, LAYERS: tl.constexpr, PARTS: tl.constexpr, PIECE: tl.constexpr, SLOTS: tl.constexpr,
    PARTS2: tl.constexpr, PIECE2: tl.constexpr, GROUP2: tl.constexpr, BOTH_WAYS: tl.constexpr,
):  # fmt: skip
    """By the first PROGRAMS programs of a grid's first axis, together."""
    part, part2 = tl.arange(0, GROUP)[None, :, None], tl.arange(0, GROUP2)[None, :, None]
    for look in range(LOOKS):
        ahead = _ahead(look, LOOK, PROGRAMS, ENTRIES)
        real = _pairs(source, target, ahead, N)
        if BOTH_WAYS:
            real = real | _pairs(victim, refuge, ahead, N)
        wanted = tl.max(real.to(tl.int32), axis=1) > 0
        turn = _first(wanted, LOOK)
        while turn < LOOK:
            i = _entries(look * LOOK + turn, PROGRAMS, ENTRIES)[:, None, None]
            s, t, v, r = _slots(source, i, N), _slots(target, i, N), _slots(victim, i, N), _slots(refuge, i, N)
            up, down = (s >= 0) & (t >= 0), (v >= 0) & (r >= 0)
            if PARTS2 > 0:  # short rows: asked for first, written last
                coming2, leaving2 = _read_parts(
                    host2, device2, s, v, up, down, part2, LAYERS, SLOTS, PARTS2, PIECE2, BOTH_WAYS
                )
            for first in range(0, LAYERS * PARTS, GROUP):
                coming, leaving = _read_parts(
                    host, device, s, v, up, down, first + part, LAYERS, SLOTS, PARTS, PIECE, BOTH_WAYS
                )
                _write_parts(
                    host, device, t, r, up, down, first + part, coming, leaving,
                    LAYERS, SLOTS, PARTS, PIECE, BOTH_WAYS,
                )  # fmt: skip
            if PARTS2 > 0:
                _write_parts(
                    host2, device2, t, r, up, down, part2, coming2, leaving2,
                    LAYERS, SLOTS, PARTS2, PIECE2, BOTH_WAYS,
                )  # fmt: skip
                for first in range(GROUP2, LAYERS * PARTS2, GROUP2):
                    coming2, leaving2 = _read_parts(
                        host2, device2, s, v, up, down, first + part2, LAYERS, SLOTS, PARTS2, PIECE2, BOTH_WAYS
                    )
                    _write_parts(
                        host2, device2, t, r, up, down, first + part2, coming2, leaving2,
                        LAYERS, SLOTS, PARTS2, PIECE2, BOTH_WAYS,
                    )  # fmt: skip
            wanted = wanted & (tl.arange(0, LOOK) > turn)
            turn = _first(wanted, LOOK)


@triton_call.kernel
def _nothing(after, held, pool):  # pyright: ignore
    pass
