"""Rows between slots in Triton: threads copy them word by word, wherever the two sides lie.

A program takes a few neighbours in the list at a time, and reads a first part of each row before it reads the rest: a
page of host memory that is not at hand is then asked for once, and not by all parts of the row at the same time. Few
programs walk a list of host slots together, so that rows in ascending order share what is at hand of the page tables.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import triton.language as tl
from jaxtyping import Array, Int32, UInt32

from pallas_kernels import triton_call
from pallas_kernels.sparse_gather.reference import HostLanes, Lanes, beside

PIECE = 32
"""Words of a part at most: 128 bytes."""
GROUP = 4
"""Parts of each row that are read at once, after the first."""
ENTRIES = 8
"""Rows that a program moves at once."""
LOOK = 16
"""Turns that a program skips at a look where the list has nothing real."""
WARPS = 1
HOST_PROGRAMS = 132
"""Programs at most that share the link to the host."""
DEVICE_PROGRAMS = 2112
"""Programs at most that stay on the device."""

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
    return _copy(_device(pool, slots), _new(1, slots, pool), 1, DEVICE_PROGRAMS, interpret, layer)[0]


def gather_layers(pool, slots: Slots, interpret: bool = False) -> UInt32[Array, "layers n words"]:
    layers = pool.shape[0]
    return _copy(_device(pool, slots), _new(layers, slots, pool), layers, DEVICE_PROGRAMS, interpret)


def scatter(pool, layer, slots: Slots, rows, interpret: bool = False) -> UInt32[Array, "layers slots words"]:
    return _copy(_list(rows[None]), _device(pool, slots), 1, DEVICE_PROGRAMS, interpret, layer)


def scatter_layers(pool, slots: Slots, rows, interpret: bool = False) -> UInt32[Array, "layers slots words"]:
    return _copy(_list(rows), _device(pool, slots), pool.shape[0], DEVICE_PROGRAMS, interpret)


def read_host(pool, layer, slots: Slots, interpret: bool = False) -> UInt32[Array, "n words"]:
    return _copy(_host(pool, slots), _new(1, slots, pool), 1, HOST_PROGRAMS, interpret, layer)[0]


def write_host(pool, layer, slots: Slots, rows, interpret: bool = False) -> UInt32[Array, "slots layers words"]:
    return _copy(_list(rows[None]), _host(pool, slots), 1, HOST_PROGRAMS, interpret, layer)


def fetch(device: Lanes, host: HostLanes, source: Slots, target: Slots, interpret: bool = False) -> Lanes:
    return _trade(device, host, (source, target, source, target), False, interpret)[0]


def write_back(device: Lanes, host: HostLanes, victim: Slots, refuge: Slots, interpret: bool = False) -> HostLanes:
    """A call for each lane: XLA sees that the one result of a call takes a host pool's place, but not of several."""
    return tuple(
        _copy(_device(rows, victim), _host(pool, refuge), len(rows), HOST_PROGRAMS, interpret)
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


def _copy(source: Side, target: Side, layers: int, programs: int, interpret: bool, layer: int | Array = 0) -> Array:
    """The target with its rows. `layer` is the first of the pool's, where the other side is a list."""
    left, right = source.slots, target.slots
    slots = right if left is None else left
    made = isinstance(target.rows, jax.ShapeDtypeStruct)
    if not slots.shape[0]:
        return jnp.zeros(target.rows.shape, target.rows.dtype) if made else target.rows
    grid, plan = _plan(slots.shape[0], layers, source.rows.shape[2], programs)
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
        grid=grid,
        out=[_like(target.rows)],
        alias={} if made else {4: 0},
        warps=WARPS,
        interpret=interpret,
        **where,
        **plan,
    )
    return rows if made else beside(rows, target.rows)


def _trade(device: Lanes, host: HostLanes, lists: tuple[Slots, ...], both_ways: bool, interpret: bool):
    """The device lanes, and for each host lane a result of the kernel: the lane itself when interpreted."""
    (layers, slots, words), lanes = device[0].shape, len(device)
    if lanes > 2:
        raise ValueError(f"lanes: expected one or two, found {lanes}; pack the others into one of them")
    if not lists[0].shape[0]:
        return device, host
    grid, plan = _plan(lists[0].shape[0], layers, words, HOST_PROGRAMS)
    second = device[1].shape[2] if lanes > 1 else 0
    piece = _piece(second)
    parts = second // piece if second else 0
    token = jax.ShapeDtypeStruct((1,), jnp.int32)
    # The kernel has parameters for two lanes. With PARTS2 = 0 it leaves those of the second alone.
    unused, unwritten = [lists[0]] * (2 - lanes), [token] * (2 - lanes)
    settled = [_like(pool) if interpret else token for pool in host]
    plan |= dict(SLOTS=slots, PARTS2=parts, PIECE2=piece, GROUP2=_group(layers * parts), BOTH_WAYS=both_ways)
    results = triton_call.call(
        _trade_rows,
        *[*lists, *host, *unused, *device, *unused],
        grid=grid,
        out=[*map(_like, device), *unwritten, *settled, *unwritten],
        alias={6 + lane: lane for lane in range(lanes)} | {4 + lane: 2 + lane for lane in range(lanes) if interpret},
        warps=WARPS,
        interpret=interpret,
        **plan,
    )
    after = results[2 : 2 + lanes]
    return results[:lanes], tuple(map(beside, after, host)) if interpret else after


def _pass_on(after: Array, pool: Array) -> Array:
    """The pool, once `after` is there."""
    (passed,) = triton_call.call(_nothing, after, pool, grid=(1,), out=[_like(pool)], alias={1: 0}, warps=1)
    return beside(passed, pool)


def _plan(n: int, layers: int, words: int, programs: int) -> tuple[tuple[int], dict[str, Any]]:
    """Grid and tiles."""
    piece = _piece(words)
    parts = words // piece
    programs = min(programs, -(-n // ENTRIES))
    turns = -(-n // (ENTRIES * programs))
    look = min(LOOK, _power(turns))
    return (programs,), dict(
        N=n, LOOKS=-(-turns // look), LOOK=look, ENTRIES=ENTRIES, GROUP=_group(layers * parts - 1),
        LAYERS=layers, PARTS=parts, PIECE=piece,
    )  # fmt: skip


def _group(parts: int) -> int:
    return min(GROUP, _power(max(1, parts)))


def _power(n: int) -> int:
    """The least power of two that is not below n."""
    return 1 << (n - 1).bit_length()


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


def _like(x) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


@triton_call.kernel
def _slots(listed, i, N):  # pyright: ignore
    return tl.load(listed + i, i < N, -1).to(tl.int64)


@triton_call.kernel
def _any(left, right, i, N):  # pyright: ignore
    """Whether an entry of two lists is real in both."""
    return tl.max(((_slots(left, i, N) >= 0) & (_slots(right, i, N) >= 0)).to(tl.int32)) > 0


@triton_call.kernel
def _words(slot, SLOT, part, PARTS, LAYER, PIECE):  # pyright: ignore
    """Places of words [entries, parts, PIECE]; a layer has PARTS."""
    word = tl.arange(0, PIECE)[None, None, :]
    return slot * SLOT + (part // PARTS).to(tl.int64) * LAYER + part % PARTS * PIECE + word


@triton_call.kernel
def _copy_rows(  # pyright: ignore
    left, right, layer, rows, held, pool,
    N: tl.constexpr, LOOKS: tl.constexpr, LOOK: tl.constexpr, ENTRIES: tl.constexpr, GROUP: tl.constexpr,
    LAYERS: tl.constexpr, PARTS: tl.constexpr, PIECE: tl.constexpr,
    FROM_LIST: tl.constexpr, FROM: tl.constexpr, FROM_LAYER: tl.constexpr,
    TO_LIST: tl.constexpr, TO: tl.constexpr, TO_LAYER: tl.constexpr,
):  # fmt: skip
    if TO_LIST:
        rows += tl.load(layer).to(tl.int64) * FROM_LAYER
    if FROM_LIST:
        pool += tl.load(layer).to(tl.int64) * TO_LAYER
    entry, part = tl.arange(0, ENTRIES)[:, None, None], tl.arange(0, GROUP)[None, :, None]
    for look in range(LOOKS):
        turns = look * LOOK + tl.arange(0, LOOK)[None, :, None]
        if TO_LIST or _any(left, right, (turns * tl.num_programs(0) + tl.program_id(0)) * ENTRIES + entry, N):
            for turn in range(LOOK):
                i = ((look * LOOK + turn) * tl.num_programs(0) + tl.program_id(0)) * ENTRIES + entry
                a, b = _slots(left, i, N), _slots(right, i, N)
                real = (a >= 0) & (b >= 0)
                written = real
                if TO_LIST:  # what is EMPTY reads as zeros
                    b, written = i.to(tl.int64), i < N
                if FROM_LIST:
                    a = i.to(tl.int64)
                if tl.max(written.to(tl.int32)) > 0:
                    head = tl.arange(0, 1)[None, :, None]
                    row = tl.load(rows + _words(a, FROM, head, PARTS, FROM_LAYER, PIECE), real, 0)
                    tl.store(pool + _words(b, TO, head, PARTS, TO_LAYER, PIECE), row, written)
                    for first in range(1, LAYERS * PARTS, GROUP):
                        there = first + part < LAYERS * PARTS
                        rest = tl.load(rows + _words(a, FROM, first + part, PARTS, FROM_LAYER, PIECE), real & there, 0)
                        tl.store(pool + _words(b, TO, first + part, PARTS, TO_LAYER, PIECE), rest, written & there)


@triton_call.kernel
def _trade_parts(  # pyright: ignore
    host, device, s, t, v, r, up, down, part, LAYERS, SLOTS, PARTS, PIECE, BOTH_WAYS
):  # fmt: skip
    """Read both sides of some parts of some rows, then write both."""
    there = part < LAYERS * PARTS
    row = PARTS * PIECE
    coming = tl.load(host + _words(s, LAYERS * row, part, PARTS, row, PIECE), up & there)
    if BOTH_WAYS:
        leaving = tl.load(device + _words(v, row, part, PARTS, SLOTS * row, PIECE), down & there)
        tl.debug_barrier()
        tl.store(host + _words(r, LAYERS * row, part, PARTS, row, PIECE), leaving, down & there)
    tl.store(device + _words(t, row, part, PARTS, SLOTS * row, PIECE), coming, up & there)


@triton_call.kernel
def _trade_rows(  # pyright: ignore
    source, target, victim, refuge, host, host2, held, held2, device, device2, settled, settled2,
    N: tl.constexpr, LOOKS: tl.constexpr, LOOK: tl.constexpr, ENTRIES: tl.constexpr, GROUP: tl.constexpr,
    LAYERS: tl.constexpr, PARTS: tl.constexpr, PIECE: tl.constexpr, SLOTS: tl.constexpr,
    PARTS2: tl.constexpr, PIECE2: tl.constexpr, GROUP2: tl.constexpr, BOTH_WAYS: tl.constexpr,
):  # fmt: skip
    entry, part = tl.arange(0, ENTRIES)[:, None, None], tl.arange(0, GROUP)[None, :, None]
    head, part2 = tl.arange(0, 1)[None, :, None], tl.arange(0, GROUP2)[None, :, None]
    for look in range(LOOKS):
        turns = look * LOOK + tl.arange(0, LOOK)[None, :, None]
        ahead = (turns * tl.num_programs(0) + tl.program_id(0)) * ENTRIES + entry
        if _any(source, target, ahead, N) or _any(victim, refuge, ahead, N):
            for turn in range(LOOK):
                i = ((look * LOOK + turn) * tl.num_programs(0) + tl.program_id(0)) * ENTRIES + entry
                s, t, v, r = _slots(source, i, N), _slots(target, i, N), _slots(victim, i, N), _slots(refuge, i, N)
                up, down = (s >= 0) & (t >= 0), (v >= 0) & (r >= 0)
                if tl.max((up | down).to(tl.int32)) > 0:
                    _trade_parts(
                        host, device, s, t, v, r, up, down, head, LAYERS, SLOTS, PARTS, PIECE, BOTH_WAYS
                    )
                    if PARTS2 > 0:
                        for first in range(0, LAYERS * PARTS2, GROUP2):
                            _trade_parts(
                                host2, device2, s, t, v, r, up, down, first + part2,
                                LAYERS, SLOTS, PARTS2, PIECE2, BOTH_WAYS,
                            )  # fmt: skip
                    for first in range(1, LAYERS * PARTS, GROUP):
                        _trade_parts(
                            host, device, s, t, v, r, up, down, first + part, LAYERS, SLOTS, PARTS, PIECE, BOTH_WAYS
                        )


@triton_call.kernel
def _nothing(after, held, pool):  # pyright: ignore
    pass
