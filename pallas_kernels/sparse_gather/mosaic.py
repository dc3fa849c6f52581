"""Rows of a pool by slot in Pallas Mosaic GPU (Hopper and newer): the tensor memory accelerator copies whole
rows.

Each block takes batches of rows: it starts every read of a batch, then stores each row as it arrives. Rows
pass through shared memory and no register. Coordinates, not byte offsets, address the pool, so a pool may
pass 2^32 bytes.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Int32, UInt32

BATCH = 8
"""Rows in flight in one block."""
BLOCKS = 264
"""Blocks at most: two on each multiprocessor of an H200."""
ALIGN = 32
"""Words in 128 bytes: where a row must start in shared memory."""
BOX = 256
"""Words at most in one copy."""


def unsupported(words: int) -> str | None:
    """Why rows of so many words cannot be copied, or None."""
    if words % 4:
        return f"it copies multiples of 16 bytes, and a row has {words} words of 4"
    if words > BOX and words % ALIGN:
        return f"rows longer than {BOX} words must be multiples of {ALIGN} words, found {words}"
    return None


def gather(pool, layer, slots, interpret: Any = None) -> UInt32[Array, "n words"]:
    return _read(pool, layer, slots, 1, interpret)[0]


def gather_layers(pool, slots, interpret: Any = None) -> UInt32[Array, "layers n words"]:
    return _read(pool, 0, slots, pool.shape[0], interpret)


def scatter(pool, layer, slots, rows, interpret: Any = None) -> UInt32[Array, "layers slots words"]:
    return _write(pool, layer, slots, rows[None], interpret)


def scatter_layers(pool, slots, rows, interpret: Any = None) -> UInt32[Array, "layers slots words"]:
    return _write(pool, 0, slots, rows, interpret)


def _read(pool, first, slots: Int32[Array, " n"], layers: int, interpret: Any) -> UInt32[Array, "layers n words"]:
    n, words = slots.shape[0], pool.shape[2]
    out = jax.ShapeDtypeStruct((layers, n, words), jnp.uint32)
    if n == 0:
        return jnp.zeros(out.shape, out.dtype)

    def body(first_ref, slots_ref, pool_ref, out_ref, buffer, zeros, arrived):
        zeros[...] = jnp.zeros(zeros.shape, zeros.dtype)
        plgpu.commit_smem()

        def fetch(layer, i, slot, j):
            @pl.when(slot >= 0)
            def _():
                _copy_in(pool_ref.at[first_ref[0] + layer, slot], buffer.at[j], arrived.at[j], words)

        def store(layer, i, slot, j):
            @pl.when(slot >= 0)
            def _():
                plgpu.barrier_wait(arrived.at[j])
                _copy_out(buffer.at[j], out_ref.at[layer, i], words)

            @pl.when(slot < 0)
            def _():
                for start, size in _pieces(words):
                    plgpu.copy_smem_to_gmem(zeros.at[pl.ds(0, size)], out_ref.at[layer, i, pl.ds(start, size)])

        _batches(slots_ref, n, layers, fetch, store)

    first = jnp.asarray(first, jnp.int32).reshape(1)
    return _kernel(body, layers, n, words, out, interpret)(first, slots, pool)


@partial(jax.jit, static_argnames="interpret")  # a ref with a memory space exists only under jit
def _write(pool, first, slots: Int32[Array, " n"], rows: UInt32[Array, "layers n words"], interpret: Any):
    layers, n, words = rows.shape
    if n == 0:
        return pool

    def body(first_ref, slots_ref, rows_ref, pool_ref, buffer, zeros, arrived):
        def fetch(layer, i, slot, j):
            @pl.when(slot >= 0)
            def _():
                _copy_in(rows_ref.at[layer, i], buffer.at[j], arrived.at[j], words)

        def store(layer, i, slot, j):
            @pl.when(slot >= 0)
            def _():
                plgpu.barrier_wait(arrived.at[j])
                _copy_out(buffer.at[j], pool_ref.at[first_ref[0] + layer, slot], words)

        _batches(slots_ref, n, layers, fetch, store)

    held = jax.new_ref(pool, memory_space=plgpu.GMEM)
    first = jnp.asarray(first, jnp.int32).reshape(1)
    _kernel(body, layers, n, words, None, interpret)(first, slots, rows, held)
    return held[...]


def _kernel(body, layers: int, n: int, words: int, out_type: Any, interpret: Any) -> Callable[..., Any]:
    pitch = pl.cdiv(words, ALIGN) * ALIGN
    scratch = dict(
        buffer=plgpu.SMEM((BATCH, pitch), jnp.uint32),
        zeros=plgpu.SMEM((BOX,), jnp.uint32),
        arrived=plgpu.Barrier(num_arrivals=len(_pieces(words)), num_barriers=BATCH),
    )
    grid: dict[str, Any] = dict(grid=(min(BLOCKS, layers * pl.cdiv(n, BATCH)),), grid_names=("block",))
    how: dict[str, Any] = dict(
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
        interpret=interpret,
    )
    if out_type is not None:
        return plgpu.kernel(body, out_type=out_type, scratch_types=scratch, **grid, **how)
    # plgpu.kernel of JAX 0.10 loses a ref that is passed in, because it wraps the call in a custom vmap rule.
    return pl.kernel(lambda *refs: pl.run_scoped(partial(body, *refs), **scratch), mesh=plgpu.Mesh(**grid), **how)


def _batches(slots_ref, n: int, layers: int, fetch, store) -> None:
    """Run `fetch` for every row of a batch, then `store` for every row, over this block's share of the
    batches."""
    per_layer = pl.cdiv(n, BATCH)
    total, blocks = layers * per_layer, lax.axis_size("block")

    def step(turn, carry):
        batch = lax.axis_index("block") + turn * blocks

        @pl.when(batch < total)
        def _():
            layer, start = batch // per_layer, batch % per_layer * BATCH
            at = [start + j for j in range(BATCH)]
            slot = [slots_ref[jnp.minimum(i, n - 1)] for i in at]
            for phase in (fetch, store):
                for j in range(BATCH):
                    pl.when(at[j] < n)(partial(phase, layer, at[j], slot[j], j))
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

        return carry

    lax.fori_loop(0, pl.cdiv(total, blocks), step, None)
    plgpu.wait_smem_to_gmem(0)


def _pieces(words: int) -> list[tuple[int, int]]:
    """(start, size) of the copies that make up a row: at most BOX words each, each at a multiple of ALIGN."""
    size = words if words <= BOX else max(s for s in range(ALIGN, BOX + 1, ALIGN) if words % s == 0)
    return [(start, size) for start in range(0, words, size)]


def _copy_in(row, buffer, barrier, words: int) -> None:
    for start, size in _pieces(words):
        plgpu.copy_gmem_to_smem(row.at[pl.ds(start, size)], buffer.at[pl.ds(start, size)], barrier)


def _copy_out(buffer, row, words: int) -> None:
    for start, size in _pieces(words):
        plgpu.copy_smem_to_gmem(buffer.at[pl.ds(start, size)], row.at[pl.ds(start, size)])
