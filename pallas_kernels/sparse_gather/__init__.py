"""Rows of one lane of a pool by slot: read or write one layer, or all layers of a group.

A pool lane is `uint32[layers, slots, words]`. Slot lists are padded with EMPTY (-1), which may stand
anywhere: it reads as a row of zeros and drops the row on a write. Slots of one write are distinct; a read may
repeat a slot.

A write happens in place if the caller donates the pool (or carries it through a scan) and if it cannot run
before an earlier read of the same pool; otherwise XLA copies the pool. What makes the order safe on a GPU is
`rows, read = jax.lax.optimization_barrier((rows, read))` between the two, even where the written rows come from the
read ones (XLA fuses the read into the write). XLA:CPU of JAX 0.10 ignores the barrier, and copies.

`implementation`: `auto`, `reference` (jnp, any platform), `mosaic` (Pallas Mosaic GPU, Hopper and newer) or
`mosaic_interpret` (the same kernel in the CPU interpreter: slow, for tests).
"""

from collections.abc import Callable
from functools import partial

from jaxtyping import Array, Int32, UInt32

from pallas_kernels.dispatch import choose, gpu_interpreter, needs
from pallas_kernels.sparse_gather import mosaic, reference
from pallas_kernels.sparse_gather.reference import EMPTY

PREFER = ("reference",)
"""What `auto` may take. On an H200 with JAX 0.11.2, four layers of 65,536 rows of 640 bytes take XLA 102 us
to gather and 110 us to scatter, `mosaic` 242 and 262 us; at 2,048 rows both take what the call takes (45
us)."""


def gather(
    pool: UInt32[Array, "layers slots words"],
    layer: int | Int32[Array, ""],
    slots: Int32[Array, " n"],
    *,
    implementation: str = "auto",
) -> UInt32[Array, "n words"]:
    """Rows of one layer; zeros where `slots` is EMPTY."""
    _check_layer(pool, layer)
    return _form("gather", implementation, pool)(pool, layer, slots)


def gather_layers(
    pool: UInt32[Array, "layers slots words"], slots: Int32[Array, " n"], *, implementation: str = "auto"
) -> UInt32[Array, "layers n words"]:
    """Rows of every layer, one slot list for all; zeros where `slots` is EMPTY."""
    return _form("gather_layers", implementation, pool)(pool, slots)


def scatter(
    pool: UInt32[Array, "layers slots words"],
    layer: int | Int32[Array, ""],
    slots: Int32[Array, " n"],
    rows: UInt32[Array, "n words"],
    *,
    implementation: str = "auto",
) -> UInt32[Array, "layers slots words"]:
    """The pool with `rows` in one layer at `slots` (distinct); rows at EMPTY are dropped."""
    _check_layer(pool, layer)
    return _form("scatter", implementation, pool)(pool, layer, slots, rows)


def scatter_layers(
    pool: UInt32[Array, "layers slots words"],
    slots: Int32[Array, " n"],
    rows: UInt32[Array, "layers n words"],
    *,
    implementation: str = "auto",
) -> UInt32[Array, "layers slots words"]:
    """The pool with `rows` in every layer at `slots` (distinct); rows at EMPTY are dropped."""
    return _form("scatter_layers", implementation, pool)(pool, slots, rows)


def _form(name: str, implementation: str, pool: UInt32[Array, "layers slots words"]) -> Callable:
    shape = mosaic.unsupported(pool.shape[2])
    forms = {"reference": None, "mosaic": shape or needs("gpu"), "mosaic_interpret": shape or needs("cpu")}
    chosen = choose(f"sparse_gather.{name}", implementation, forms, PREFER)
    if chosen == "reference":
        return getattr(reference, name)
    return partial(getattr(mosaic, name), interpret=gpu_interpreter() if chosen == "mosaic_interpret" else None)


def _check_layer(pool: UInt32[Array, "layers slots words"], layer: int | Int32[Array, ""]) -> None:
    if isinstance(layer, int) and not 0 <= layer < pool.shape[0]:
        raise IndexError(f"layer: expected 0 to {pool.shape[0] - 1}, found {layer}; count from the pool's first layer")


__all__ = ["EMPTY", "gather", "gather_layers", "scatter", "scatter_layers"]
