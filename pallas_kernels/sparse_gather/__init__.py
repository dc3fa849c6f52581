"""Rows of one lane of a pool by slot: read or write one layer, or all layers of a group.

A pool lane is `uint32[layers, slots, words]`. Slot lists are padded with EMPTY (-1), which may stand anywhere: it reads
as a row of zeros and drops the row on a write. Slots of one write must be distinct; reads may repeat a slot.

Writes happen in place if the caller donates the pool (or carries it through a scan) and if the write cannot run
before an earlier read of the same pool: order them by data, or with
`pool, rows = jax.lax.optimization_barrier((pool, rows))` between the read and the write. Otherwise XLA copies the pool.

`implementation`: `auto`, `reference` (jnp, any platform), `mosaic` (Pallas Mosaic GPU, Hopper and newer) or
`mosaic_interpret` (the same kernel in the CPU interpreter: slow, for tests).
"""

from jaxtyping import Array, Int32, UInt32

from pallas_kernels.dispatch import choose, needs
from pallas_kernels.sparse_gather import reference

Pool = UInt32[Array, "layers slots words"]
Layer = int | Int32[Array, ""]


def gather(
    pool: Pool, layer: Layer, slots: Int32[Array, " n"], *, implementation: str = "auto"
) -> UInt32[Array, "n words"]:
    """Rows of one layer; zeros where `slots` is EMPTY."""
    _check_layer(pool, layer)
    form = _form("sparse_gather.gather", implementation)
    return form.gather(pool, layer, slots)


def gather_layers(
    pool: Pool, slots: Int32[Array, " n"], *, implementation: str = "auto"
) -> UInt32[Array, "layers n words"]:
    """Rows of every layer, one slot list for all; zeros where `slots` is EMPTY."""
    form = _form("sparse_gather.gather_layers", implementation)
    return form.gather_layers(pool, slots)


def scatter(
    pool: Pool, layer: Layer, slots: Int32[Array, " n"], rows: UInt32[Array, "n words"], *, implementation: str = "auto"
) -> Pool:
    """The pool with `rows` in one layer at `slots` (distinct); rows at EMPTY are dropped."""
    _check_layer(pool, layer)
    form = _form("sparse_gather.scatter", implementation)
    return form.scatter(pool, layer, slots, rows)


def scatter_layers(
    pool: Pool, slots: Int32[Array, " n"], rows: UInt32[Array, "layers n words"], *, implementation: str = "auto"
) -> Pool:
    """The pool with `rows` in every layer at `slots` (distinct); rows at EMPTY are dropped."""
    form = _form("sparse_gather.scatter_layers", implementation)
    return form.scatter_layers(pool, slots, rows)


def _form(kernel: str, implementation: str):
    choose(kernel, implementation, {"reference": None})
    return reference


def _check_layer(pool: Pool, layer: Layer) -> None:
    if isinstance(layer, int) and not 0 <= layer < pool.shape[0]:
        raise IndexError(f"layer: expected 0 to {pool.shape[0] - 1} of this pool's own layers, found {layer}")


__all__ = ["gather", "gather_layers", "scatter", "scatter_layers"]
