"""Index scores in Triton: keys are read where they lie, once for all tokens of a chunk.

A program scores `TILES` tiles of `TILE` keys of one request against the heads of `CHUNK` tokens. Keys are the rows of
the product, so that a tile is full however few the heads are; sums over heads stay within four threads. A score depends
on its key, its query and nothing else: not on the tile, the batch or the number of keys.

Numbers: e4m3 codes are exact in float16, and bf16 keys go in as they are. Each head's query is divided by a power of
two, which its weight takes over, and rounded to float16, or split into two bf16 parts. Products are added in float32.
"""

# Kernels are Triton's language, whose stubs type few of its results.
# pyright: reportOperatorIssue=false, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false

import jax
import jax.numpy as jnp
import triton.language as tl
from jaxtyping import Array, Float32, Int32

from pallas_kernels import triton_call
from pallas_kernels.triton_call import power_of_2

MOST_NUMBERS = 2**14
"""Numbers of the query that one program holds in registers."""
TILES, MULTIPROCESSORS = 8, 132
"""Tiles of one program, so that reading the query counts for little; fewer where an H200 would not be filled."""


def paged_index_scores(
    query: Float32[Array, "batch steps heads dim"],
    weights: Float32[Array, "batch steps heads"],
    keys: tuple[Array, ...],
    page_table: Int32[Array, "batch pages"],
    page_size: int,
    lengths: Int32[Array, "batch steps"],
    interpret: bool = False,
) -> Float32[Array, "batch steps length"]:
    """As `reference.paged_index_scores`, up to rounding."""
    batch, steps, heads, dim = query.shape
    length, scaled = page_table.shape[1] * page_size, len(keys) == 2
    columns = max(16, power_of_2(heads))
    chunk = min(power_of_2(steps), max(1, MOST_NUMBERS // (columns * dim * (1 if scaled else 2))))
    chunks = -(-steps // chunk)
    tile = 128 if scaled and chunk * columns <= 32 else 64  # as registers and shared memory allow
    tiles = TILES
    while tiles > 1 and batch * chunks * length < MULTIPROCESSORS * tiles * tile:
        tiles //= 2
    return triton_call.call(
        _scores, query, weights, keys[0], keys[-1], page_table, lengths,
        grid=(chunks, -(-length // (tile * tiles)), batch),
        out=[jax.ShapeDtypeStruct((batch, steps, length), jnp.float32)], stages=3, interpret=interpret,
        STEPS=steps, HEADS=heads, DIM=dim, PAGES=page_table.shape[1], PAGE=page_size, SCALED=scaled, CHUNK=chunk,
        COLUMNS=columns, TILE=tile, TILES=tiles, INTERPRETED=interpret,
    )[0]  # fmt: skip


@triton_call.kernel
def _scores(
    query, weights, keys, scales, table, lengths, out,
    STEPS: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, PAGES: tl.constexpr, PAGE: tl.constexpr,
    SCALED: tl.constexpr, CHUNK: tl.constexpr, COLUMNS: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr,
    INTERPRETED: tl.constexpr,
):  # fmt: skip
    LENGTH: tl.constexpr = PAGES * PAGE
    request = tl.program_id(2).to(tl.int64)
    first = tl.program_id(1) * TILE * TILES
    step = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    sees = tl.load(lengths + request * STEPS + step, mask=step < STEPS, other=0)
    lane, dim = tl.arange(0, TILE), tl.arange(0, DIM)
    rows = out + (request * STEPS + step[None, :]) * LENGTH
    if first >= tl.max(sees, 0):
        for tile in tl.range(0, TILES):
            position = (first + tile * TILE + lane)[:, None]
            wanted = (position < LENGTH) & (step < STEPS)[None, :]
            tl.store(rows + position, tl.full((TILE, CHUNK), -float("inf"), tl.float32), mask=wanted)
        return

    half, rest, scale = _queries(query, weights, request, STEPS, HEADS, DIM, SCALED, CHUNK, COLUMNS)
    table += request * PAGES
    page = _page(table, first, TILE, PAGE, PAGES)
    for tile in tl.range(0, TILES):
        # Loaded one tile ahead: the pipeline then takes the keys for its only loads.
        after = _page(table, first + (tile + 1) * TILE, TILE, PAGE, PAGES)
        position = first + tile * TILE + lane
        row = tl.maximum(page, 0).to(tl.int64) * PAGE + position % PAGE
        key = tl.load(keys + row[:, None] * DIM + dim[None, :])
        if SCALED:
            dots = tl.dot(_regroup(key, TILE, DIM).to(tl.float16), half)
        else:
            dots = _add_product(tl.zeros((TILE, CHUNK * COLUMNS), tl.float32), key, half, INTERPRETED)
            dots = _add_product(dots, key, rest, INTERPRETED)
        score = tl.sum(tl.reshape(tl.maximum(dots, 0.0) * scale[None, :], (TILE, CHUNK, COLUMNS)), 2)
        if SCALED:
            score = score * tl.load(scales + row)[:, None]
        seen = position[:, None] < sees[None, :]
        wanted = (position < LENGTH)[:, None] & (step < STEPS)[None, :]
        tl.store(rows + position[:, None], tl.where(seen, score, -float("inf")), mask=wanted)
        page = after


@triton_call.kernel
def _queries(
    query, weights, request,
    STEPS: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, SCALED: tl.constexpr, CHUNK: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """The chunk's queries [dim, columns] in 16 bits, what that rounding left, and the factor of each column."""
    column = tl.arange(0, CHUNK * COLUMNS)
    head, step = column % COLUMNS, tl.program_id(0) * CHUNK + column // COLUMNS
    real = (head < HEADS) & (step < STEPS)
    at = (request * STEPS + step) * HEADS + head
    q = tl.load(query + at[:, None] * DIM + tl.arange(0, DIM)[None, :], mask=real[:, None], other=0.0)
    weight = tl.load(weights + at, mask=real, other=0.0)
    # Two to the exponent of the largest number, and its inverse, made from their bits.
    exponent = tl.minimum(tl.maximum(tl.max(tl.abs(q), 1).to(tl.int32, bitcast=True) >> 23, 1), 253)
    q = q * ((254 - exponent) << 23).to(tl.float32, bitcast=True)[:, None]
    scale = weight * (exponent << 23).to(tl.float32, bitcast=True) * DIM**-0.5
    if SCALED:
        q = _regroup(q, CHUNK * COLUMNS, DIM)
        half = q.to(tl.float16)
    else:
        half = q.to(tl.bfloat16)
    rest = (q - half.to(tl.float32)).to(half.dtype)
    return tl.trans(half), tl.trans(rest), scale


@triton_call.kernel
def _add_product(sums, key, query, INTERPRETED: tl.constexpr):
    if INTERPRETED:  # the interpreter would multiply the bits of bf16 numbers
        key, query = key.to(tl.float32), query.to(tl.float32)
    return tl.dot(key, query, sums)


@triton_call.kernel
def _regroup(x, ROWS: tl.constexpr, DIM: tl.constexpr):
    """The same change of order within the rows of keys and of queries, which no product sees.

    The matrix unit wants from each of four threads pairs of numbers that lie eight apart. In this order those of
    several steps lie side by side: a thread reads 16 codes at once instead of two.
    """
    PAIRS: tl.constexpr = tl.constexpr(DIM // 8 if DIM < 64 else 8)
    x = tl.reshape(x, (ROWS, DIM // (8 * PAIRS), 4, PAIRS, 2))
    return tl.reshape(tl.permute(x, (0, 1, 3, 2, 4)), (ROWS, DIM))


@triton_call.kernel
def _page(table, first, TILE: tl.constexpr, PAGE: tl.constexpr, PAGES: tl.constexpr):
    """Page of the tile at position `first`, or of each of its positions where a tile is not within one page."""
    if PAGE % TILE != 0:
        first += tl.arange(0, TILE)
    return tl.load(table + tl.minimum(first // PAGE, PAGES - 1))
