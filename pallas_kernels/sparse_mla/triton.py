"""Sparse MLA in Triton, for Hopper: three launches.

`_prepare` rounds queries to float16, each head's divided by a power of two, and looks for the largest fp8 scale that a
token will read. `_attend` is flash attention of 64 heads over a share of one token's rows: blocks of rows come in by
asynchronous copies, two blocks ahead, become one float16 tile in shared memory, and serve as keys and values. `_merge`
joins the shares of a token.

Numbers. A tile holds fp8 codes times their scale over `grow`, the power of two of the token's largest scale; scores
and outputs are multiplied by it in float32. Weights are counted from the largest, which is 2 ** FULL. So float16 has 11
bits for every number that is not 2^24 times smaller than the largest of its kind, and for bf16 latents from 2^-14 up to
65504. Products and sums are float32; shares of a token are float16 on their way to `_merge`.
"""

# Kernels are Triton's language, whose stubs type few of its results.
# pyright: reportOperatorIssue=false, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false

from math import e, log, log2
from typing import Any

import jax
import jax.numpy as jnp
import triton.language as tl
from jaxtyping import Array, Float, Float32, Int32, UInt32

from pallas_kernels import triton_call
from pallas_kernels.sparse_gather.reference import HostLanes, Lanes
from pallas_kernels.sparse_gather.triton import trade, trade_rows
from pallas_kernels.sparse_mla.reference import RowFormat
from pallas_kernels.triton_call import like, power_of_2

HEADS = 64
"""Heads of one program: what a warp group multiplies at a time. Fewer are padded."""
BLOCK = {"bf16": 32, "fp8": 64}
"""Rows of one tile. Query, tile and the copies under way fill 226 KB of shared memory with 64 fp8 rows."""
PROCESSORS = 132
"""Of an H100 or H200. Not asked of the card: the number of shares decides the order of sums."""
START = 4
"""What it costs a program to start and end, in blocks."""
FULL = tl.constexpr(15)
LN2 = tl.constexpr(log(2))


RIDING = (16, 32)
"""Rows that a fetching program of `sparse_mla_and_fetch` moves at once, and such programs at most. Each takes a
processor for itself, for shared memory is allotted as an attending program needs it: of 132, 32 are enough for the
host link, and attention on the others is done before the rows are there (H200, `docs/results/h200.md`)."""

Attended = tuple[Float32[Array, "batch steps heads latent"], Float32[Array, "batch steps heads"]]


def sparse_mla(
    query: Float[Array, "batch steps heads width"],
    lanes: tuple[UInt32[Array, "layers slots _"], ...],
    layer: int,
    slots: Int32[Array, "batch steps selected"],
    fmt: RowFormat,
    *,
    scale: float,
    interpret: bool = False,
) -> Attended:
    """As `reference.sparse_mla`, up to rounding."""
    return _attention(query, lanes, layer, slots, fmt, scale, interpret, _attend)[0]


def sparse_mla_and_fetch(
    query: Float[Array, "batch steps heads width"],
    lanes: tuple[UInt32[Array, "depth slots _"], ...],
    layer: int,
    slots: Int32[Array, "batch steps selected"],
    fmt: RowFormat,
    device: Lanes,
    host: HostLanes,
    source: Int32[Array, " n"],
    target: Int32[Array, " n"],
    *,
    scale: float,
    interpret: bool = False,
) -> tuple[Attended, Lanes]:
    """As `reference.sparse_mla_and_fetch`; what is attended to has the bits of `sparse_mla`."""
    if not source.shape[0]:
        return sparse_mla(query, lanes, layer, slots, fmt, scale=scale, interpret=interpret), device
    hosts, devices, moves = trade(device, host, source, False, RIDING)
    programs, count = moves["PROGRAMS"], len(device)
    unwritten = [jax.ShapeDtypeStruct((1,), jnp.int32)] * (2 - count)
    attended, fetched = _attention(
        query, lanes, layer, slots, fmt, scale, interpret, _attend_and_fetch, (source, target, *hosts, *devices),
        out=[*map(like, device), *unwritten], alias={11 + lane: 2 + lane for lane in range(count)},
        programs=programs, ROW_PARTS=moves.pop("PARTS"), **moves,
    )  # fmt: skip
    return attended, fetched[:count]


def _attention(
    query, lanes, layer, slots, fmt, scale, interpret, kernel, arrays=(), out=(), alias=None, programs=0, **constants
) -> tuple[Attended, tuple[Array, ...]]:
    """Attention by `kernel`, which may have more arrays, outputs and constants than `_attend`, and `programs` on one
    axis before those that attend: what is attended to, and its other results."""
    batch, steps, heads, width = query.shape
    tokens, selected, latent, block = batch * steps, slots.shape[-1], fmt.latent, BLOCK[fmt.name]
    tiles, blocks = -(-heads // HEADS), max(1, -(-selected // block))
    shares = _shares(tokens * tiles, blocks)
    together = 1 if heads % 4 else 4
    parts = heads // together
    at = jnp.full(1, layer, jnp.int32)
    sizes: dict[str, Any] = dict(
        LATENT=latent, HEADS=heads, GROUPS=lanes[1].shape[2] if fmt.name == "fp8" else 0, PEAKS=parts,
        interpret=interpret,
    )  # fmt: skip
    pool: dict[str, Any] = dict(ROPE=fmt.rope, SELECTED=selected, POOL=lanes[0].shape[1], **sizes)
    halves, units, peaks = triton_call.call(
        _prepare, query.astype(jnp.float32), lanes[-1], slots, at, grid=(tokens, parts),
        out=[_array(tokens, heads, width, dtype=jnp.float16), _array(tokens, heads), _array(tokens, parts)],
        warps=together, TOGETHER=together, ROWS=power_of_2(-(-selected // parts)), SCALE=scale * log2(e), **pool,
    )  # fmt: skip
    partial = jnp.float32 if shares == 1 else jnp.float16
    grid = (programs + tokens * shares * tiles,) if programs else (tokens, shares, tiles)
    outputs, lse, *others = triton_call.call(
        kernel, halves, units, peaks, lanes[0], lanes[-1], slots, at, *arrays, grid=grid,
        out=[_array(tokens, shares, heads, latent, dtype=partial), _array(tokens, shares, heads), *out], alias=alias,
        warps=8, stages=3, PADDED=power_of_2(parts), WORDS=lanes[0].shape[2], SHARES=shares, EACH=-(-blocks // shares),
        BLOCK=block, TILE=HEADS, **({"TOKENS": tokens} if programs else {}), **constants, **pool,
    )  # fmt: skip
    if shares > 1:
        few = shares <= 4
        together, columns = (together, latent) if few else (1, latent // 2)
        outputs, lse = triton_call.call(
            _merge, outputs, lse, peaks, grid=(tokens, heads // together, latent // columns),
            out=[_array(tokens, heads, latent), _array(tokens, heads)], warps=together * columns // 256,
            PADDED=power_of_2(parts), SHARES=shares, TOGETHER=together, COLUMNS=columns, **sizes,
        )  # fmt: skip
    attended = outputs.reshape(batch, steps, heads, latent), lse.reshape(batch, steps, heads)
    return attended, tuple(others)


def _shares(programs: int, blocks: int) -> int:
    """Into how many parts to cut a list of blocks so that all programs together take the least time."""
    return min(range(1, blocks + 1), key=lambda n: -(-programs * n // PROCESSORS) * (-(-blocks // n) + START))


def _array(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


@triton_call.kernel
def _prepare(
    query, scales, slots, layer, halves, units, peaks,
    LATENT: tl.constexpr, ROPE: tl.constexpr, HEADS: tl.constexpr, SELECTED: tl.constexpr, POOL: tl.constexpr,
    GROUPS: tl.constexpr, PEAKS: tl.constexpr, TOGETHER: tl.constexpr, ROWS: tl.constexpr, SCALE: tl.constexpr,
):  # fmt: skip
    WIDTH: tl.constexpr = LATENT + ROPE
    token, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = part * ROWS + tl.arange(0, ROWS)
    slot = tl.load(slots + token * SELECTED + at, (at < SELECTED) & (GROUPS > 0), -1).to(tl.int64)[:, None]
    first = tl.load(layer).to(tl.int64) * POOL
    head = token * HEADS + part * TOGETHER + tl.arange(0, TOGETHER)
    latent_at, rope_at = tl.arange(0, LATENT)[None, :], LATENT + tl.arange(0, ROPE)[None, :]
    plain = tl.load(query + head[:, None] * WIDTH + latent_at)
    turned = tl.load(query + head[:, None] * WIDTH + rope_at)
    if GROUPS:
        scale = tl.load(scales + (first + slot) * GROUPS + tl.arange(0, GROUPS)[None, :], slot >= 0, 0)
        tl.store(peaks + token * PEAKS + part, tl.max(tl.max(scale.to(tl.float32, bitcast=True), 1), 0))
        # In the order of the tile's columns (see _attend).
        latent_at = latent_at // 8 % 2 * (LATENT // 2) + latent_at // 16 * 8 + latent_at % 8
    top = tl.maximum(tl.max(tl.abs(plain), 1), tl.max(tl.abs(turned), 1))
    exponent = tl.minimum(tl.maximum(top.to(tl.int32, bitcast=True) >> 23, 15), 253)
    shrink = ((268 - exponent) << 23).to(tl.float32, bitcast=True)[:, None]  # the largest number becomes 2^14 or more
    tl.store(halves + head[:, None] * WIDTH + latent_at, (plain * shrink).to(tl.float16))
    tl.store(halves + head[:, None] * WIDTH + rope_at, (turned * shrink).to(tl.float16))
    tl.store(units + head, ((exponent - 14) << 23).to(tl.float32, bitcast=True) * SCALE)


@triton_call.kernel
def _exponent(peaks):
    """Biased exponent of the largest scale, within what has an inverse."""
    return tl.minimum(tl.maximum(tl.max(peaks, 0).to(tl.int32, bitcast=True) >> 23, 1), 253)


@triton_call.kernel
def _attend_share(
    token, share, heads, query, units, peaks, words, scales, slots, layer, outputs, lse,
    LATENT: tl.constexpr, ROPE: tl.constexpr, HEADS: tl.constexpr, SELECTED: tl.constexpr, POOL: tl.constexpr,
    GROUPS: tl.constexpr, PEAKS: tl.constexpr, PADDED: tl.constexpr, WORDS: tl.constexpr, SHARES: tl.constexpr,
    EACH: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    NUMBERS: tl.constexpr = WORDS * (4 if GROUPS else 2)  # a row's words, counted in numbers of the latent's size
    """Attention of one token's tile of `heads`, counted by tiles, to one share of its rows."""
    token = token.to(tl.int64)
    latent_at, rope_at = tl.arange(0, LATENT)[None, :], tl.arange(0, ROPE)[None, :]
    slots += token * SELECTED
    at = share * EACH * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(slots + at, at < SELECTED, -1)
    first = tl.load(layer).to(tl.int64) * POOL
    latents = words.to(tl.pointer_type(tl.float8e4nv if GROUPS else tl.bfloat16), bitcast=True) + first * NUMBERS
    ropes = words.to(tl.pointer_type(tl.bfloat16), bitcast=True) + first * (2 * WORDS) + (2 * WORDS - ROPE)
    scales += first * GROUPS
    part = tl.arange(0, PADDED)
    peak = tl.load(peaks + token * PEAKS + part, (part < PEAKS) & (GROUPS > 0), 1.0)

    head = heads * TILE + tl.arange(0, TILE)
    exists = (head < HEADS)[:, None]
    query_at = query + (token * HEADS + head[:, None]) * (LATENT + ROPE)
    plain = tl.load(query_at + latent_at, exists, 0.0)
    turned = tl.load(query_at + LATENT + rope_at, exists, 0.0)
    unit = tl.load(units + token * HEADS + head, head < HEADS, 0.0)
    exponent = _exponent(peak)
    grow = (exponent << 23).to(tl.float32, bitcast=True)
    shrink = ((254 - exponent) << 23).to(tl.float32, bitcast=True)

    top = tl.full([TILE], float("-inf"), tl.float32)
    totals = tl.zeros([TILE, 2, 8], tl.float32)
    output = tl.zeros([TILE, LATENT], tl.float32)
    for block in range(EACH):
        at = (share * EACH + block) * BLOCK + tl.arange(0, BLOCK)
        there = (slot >= 0)[:, None]
        slot = slot.to(tl.int64)[:, None]
        tile = tl.load(latents + slot * NUMBERS + latent_at, there, 0.0).to(tl.float16)
        rope = tl.load(ropes + slot * (2 * WORDS) + rope_at, there, 0.0).to(tl.float32)
        if GROUPS:
            scale = tl.load(scales + slot * GROUPS + tl.arange(0, GROUPS)[None, :], there, 0)
            ratio = (scale.to(tl.float32, bitcast=True) * shrink).to(tl.float16)[:, :, None]
            tile = tl.reshape(tl.reshape(tile, [BLOCK, GROUPS, LATENT // GROUPS]) * ratio, [BLOCK, LATENT])
            # A thread has 16 codes in a row, and stores 8 numbers at a time: its second eight go to the tile's second
            # half, so that neighbours store to neighbouring banks.
            tile = tl.reshape(tl.permute(tl.reshape(tile, [BLOCK, LATENT // 16, 2, 8]), 0, 2, 1, 3), [BLOCK, LATENT])
        keys, turned_keys = tile.T, (rope / 256).to(tl.float16).T
        slot = tl.load(slots + at + BLOCK, at + BLOCK < SELECTED, -1)
        # Triton has both warp groups compute all scores if it sees that one product leads to another: behind a branch
        # it does not look, and shares them out. For the same reason the products of a score are not added at once.
        if (share * EACH + block) * BLOCK < SELECTED:
            score = tl.dot(turned, turned_keys) * (unit * 256)[:, None]
            score += tl.dot(plain, keys) * (unit * grow)[:, None]
            read = tl.load(slots + at, at < SELECTED, -1) >= 0
            score = tl.where(read[None, :], score, float("-inf"))
            best = tl.maximum(top, tl.max(score, 1) - FULL)
            base = tl.where(best == float("-inf"), 0.0, best)
            power = tl.exp2(score - base[:, None])
            fade = tl.exp2(top - base)
            top = best
            # Over numbers of one thread; sums over threads wait for the end.
            totals = totals * fade[:, None, None] + tl.sum(tl.reshape(power, [TILE, 2, BLOCK // 16, 8]), 2)
            weight = power.to(tl.float16)
        else:  # past the end of the list: zeros
            fade = tl.full([TILE], 1.0, tl.float32)
            read = tl.load(slots + at, at < SELECTED, -1) >= 0
            weight = tl.broadcast_to(read.to(tl.float16)[None, :], [TILE, BLOCK])
        output = tl.dot(weight, tile, output * fade[:, None])

    total = tl.sum(tl.sum(totals, 2), 1)
    some = total > 0
    total = tl.where(some, total, 1.0)
    output *= ((grow if SHARES == 1 else 1.0) / total)[:, None]
    if GROUPS:
        output = tl.reshape(tl.permute(tl.reshape(output, [TILE, 2, LATENT // 16, 8]), 0, 2, 1, 3), [TILE, LATENT])
    at = (token * SHARES + share) * HEADS + head
    tl.store(outputs + at[:, None] * LATENT + latent_at, output.to(outputs.dtype.element_ty), exists)
    tl.store(lse + at, tl.where(some, (tl.log2(total) + top) * LN2, float("-inf")), head < HEADS)


@triton_call.kernel
def _attend(
    query, units, peaks, words, scales, slots, layer, outputs, lse,
    LATENT: tl.constexpr, ROPE: tl.constexpr, HEADS: tl.constexpr, SELECTED: tl.constexpr, POOL: tl.constexpr,
    GROUPS: tl.constexpr, PEAKS: tl.constexpr, PADDED: tl.constexpr, WORDS: tl.constexpr, SHARES: tl.constexpr,
    EACH: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    _attend_share(
        tl.program_id(0), tl.program_id(1), tl.program_id(2),
        query, units, peaks, words, scales, slots, layer, outputs, lse,
        LATENT, ROPE, HEADS, SELECTED, POOL, GROUPS, PEAKS, PADDED, WORDS, SHARES, EACH, BLOCK, TILE,
    )  # fmt: skip


@triton_call.kernel
def _attend_and_fetch(
    query, units, peaks, words, scales, slots, layer, source, target, host, host2, held, held2,
    outputs, lse, device, device2,
    LATENT: tl.constexpr, ROPE: tl.constexpr, HEADS: tl.constexpr, SELECTED: tl.constexpr, POOL: tl.constexpr,
    GROUPS: tl.constexpr, PEAKS: tl.constexpr, PADDED: tl.constexpr, WORDS: tl.constexpr, SHARES: tl.constexpr,
    EACH: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr, TOKENS: tl.constexpr,
    N: tl.constexpr, PROGRAMS: tl.constexpr, LOOKS: tl.constexpr, LOOK: tl.constexpr, ENTRIES: tl.constexpr,
    GROUP: tl.constexpr, LAYERS: tl.constexpr, ROW_PARTS: tl.constexpr, PIECE: tl.constexpr, SLOTS: tl.constexpr,
    PARTS2: tl.constexpr, PIECE2: tl.constexpr, GROUP2: tl.constexpr, BOTH_WAYS: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0) - PROGRAMS
    if program < 0:
        trade_rows(
            source, target, source, target, host, host2, held, held2, device, device2, device, device2,
            N, PROGRAMS, LOOKS, LOOK, ENTRIES, GROUP, LAYERS, ROW_PARTS, PIECE, SLOTS, PARTS2, PIECE2, GROUP2,
            BOTH_WAYS,
        )  # fmt: skip
    else:
        _attend_share(
            program % TOKENS, program // TOKENS % SHARES, program // (TOKENS * SHARES),
            query, units, peaks, words, scales, slots, layer, outputs, lse,
            LATENT, ROPE, HEADS, SELECTED, POOL, GROUPS, PEAKS, PADDED, WORDS, SHARES, EACH, BLOCK, TILE,
        )  # fmt: skip


@triton_call.kernel
def _merge(
    outputs, lses, peaks, output, lse,
    LATENT: tl.constexpr, HEADS: tl.constexpr, GROUPS: tl.constexpr, PEAKS: tl.constexpr, PADDED: tl.constexpr,
    SHARES: tl.constexpr, TOGETHER: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * TOGETHER + tl.arange(0, TOGETHER)
    column = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    part = tl.arange(0, PADDED)
    peak = tl.load(peaks + token * PEAKS + part, (part < PEAKS) & (GROUPS > 0), 1.0)
    top = tl.full([TOGETHER], float("-inf"), tl.float32)
    for share in tl.static_range(SHARES):  # pyright: ignore
        top = tl.maximum(top, tl.load(lses + (token * SHARES + share) * HEADS + head))
    top = tl.where(top == float("-inf"), 0.0, top)
    total = tl.zeros([TOGETHER], tl.float32)
    merged = tl.zeros([TOGETHER, COLUMNS], tl.float32)
    for share in tl.static_range(SHARES):  # pyright: ignore
        at = (token * SHARES + share) * HEADS + head
        weight = tl.exp(tl.load(lses + at) - top)
        total += weight
        merged += tl.load(outputs + at[:, None] * LATENT + column[None, :]).to(tl.float32) * weight[:, None]
    some = total > 0
    total = tl.where(some, total, 1.0)
    grow = (_exponent(peak) << 23).to(tl.float32, bitcast=True)
    tl.store(output + (token * HEADS + head)[:, None] * LATENT + column[None, :], merged * (grow / total)[:, None])
    tl.store(lse + token * HEADS + head, tl.where(some, tl.log(total) + top, float("-inf")))
