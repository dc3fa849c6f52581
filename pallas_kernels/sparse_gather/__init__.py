"""Rows by slot: read or write those of a pool, or move them between a pool on the device and one on the host.

A lane of a device pool is `uint32[layers, slots, words]`. On the host it is `uint32[slots, layers, words]`, in pinned
memory that the device reads and writes where it lies. What such an access costs is the pages that it touches more than
the bytes, so the layers of a slot, which move together, share one there. (H200, pages of rows 262 kB apart: 27 ns a
page, in which the link moves 1.4 kB.) For the same reason lists of host slots are fastest in ascending order.

Slot lists are padded with EMPTY (-1), which may stand anywhere: it reads as a row of zeros and drops the row on a
write, and a move between pools is left out if either end is EMPTY. Slots that are written are distinct; a read may
repeat one. Moves cost what their real entries do.

Writes are in place if the caller donates the pool (or carries it through a scan) and if none can run before an earlier
read of the same pool; otherwise XLA copies the pool. What makes the order safe on a GPU is
`rows, read = jax.lax.optimization_barrier((rows, read))` between the two, even where the written rows come from the
read ones (XLA fuses the read into the write). XLA:CPU of JAX 0.10 ignores the barrier, and copies.

`implementation`: `auto`, `reference` (jnp, any platform), `triton` (CUDA) or `triton_interpret` (the same kernels in
Triton's CPU interpreter: slow, for tests); where all rows are on the device also `mosaic` (Pallas Mosaic GPU, Hopper
and newer) and `mosaic_interpret`.
"""

from collections.abc import Callable
from functools import partial

from jaxtyping import Array, Int32, UInt32

from pallas_kernels import triton_call
from pallas_kernels.dispatch import choose, gpu_interpreter, needs
from pallas_kernels.sparse_gather import mosaic, reference
from pallas_kernels.sparse_gather.reference import EMPTY, HostLanes, Lanes

ON_DEVICE = ("reference",)
"""What `auto` may take where all rows are on the device: no other form is faster there (docs/log.md)."""
WITH_HOST = ("triton", "reference")


def gather(
    pool: UInt32[Array, "layers slots words"],
    layer: int | Int32[Array, ""],
    slots: Int32[Array, " n"],
    *,
    implementation: str = "auto",
) -> UInt32[Array, "n words"]:
    """Rows of one layer; zeros where `slots` is EMPTY. IndexError if there is no such layer."""
    _check_layer(pool.shape[0], layer)
    return _form("gather", implementation, ON_DEVICE, pool.shape[2])(pool, layer, slots)


def gather_layers(
    pool: UInt32[Array, "layers slots words"], slots: Int32[Array, " n"], *, implementation: str = "auto"
) -> UInt32[Array, "layers n words"]:
    """Rows of every layer, one slot list for all; zeros where `slots` is EMPTY."""
    return _form("gather_layers", implementation, ON_DEVICE, pool.shape[2])(pool, slots)


def scatter(
    pool: UInt32[Array, "layers slots words"],
    layer: int | Int32[Array, ""],
    slots: Int32[Array, " n"],
    rows: UInt32[Array, "n words"],
    *,
    implementation: str = "auto",
) -> UInt32[Array, "layers slots words"]:
    """The pool with `rows` in one layer at `slots`; rows at EMPTY are dropped. IndexError if there is no such layer."""
    _check_layer(pool.shape[0], layer)
    return _form("scatter", implementation, ON_DEVICE, pool.shape[2])(pool, layer, slots, rows)


def scatter_layers(
    pool: UInt32[Array, "layers slots words"],
    slots: Int32[Array, " n"],
    rows: UInt32[Array, "layers n words"],
    *,
    implementation: str = "auto",
) -> UInt32[Array, "layers slots words"]:
    """The pool with `rows` in every layer at `slots`; rows at EMPTY are dropped."""
    return _form("scatter_layers", implementation, ON_DEVICE, pool.shape[2])(pool, slots, rows)


def read_host(
    pool: UInt32[Array, "slots layers words"],
    layer: int | Int32[Array, ""],
    slots: Int32[Array, " n"],
    *,
    implementation: str = "auto",
) -> UInt32[Array, "n words"]:
    """Rows of one layer of a host pool, on the device; zeros where `slots` is EMPTY. IndexError if there is no such
    layer."""
    _check_layer(pool.shape[1], layer)
    return _form("read_host", implementation, WITH_HOST)(pool, layer, slots)


def write_host(
    pool: UInt32[Array, "slots layers words"],
    layer: int | Int32[Array, ""],
    slots: Int32[Array, " n"],
    rows: UInt32[Array, "n words"],
    *,
    implementation: str = "auto",
) -> UInt32[Array, "slots layers words"]:
    """The host pool with `rows` (on the device) in one layer at `slots`; rows at EMPTY are dropped. IndexError if there
    is no such layer."""
    _check_layer(pool.shape[1], layer)
    return _form("write_host", implementation, WITH_HOST)(pool, layer, slots, rows)


def fetch(
    device: Lanes,
    host: HostLanes,
    source: Int32[Array, " n"],
    target: Int32[Array, " n"],
    *,
    implementation: str = "auto",
) -> Lanes:
    """The device pool's lanes (one or two) with every layer's rows copied from host slots `source` to `target`."""
    return _form("fetch", implementation, WITH_HOST)(device, host, source, target)


def write_back(
    device: Lanes,
    host: HostLanes,
    victim: Int32[Array, " n"],
    refuge: Int32[Array, " n"],
    *,
    implementation: str = "auto",
) -> HostLanes:
    """The host pool's lanes with every layer's rows copied from device slots `victim` to slots `refuge`."""
    return _form("write_back", implementation, WITH_HOST)(device, host, victim, refuge)


def exchange(
    device: Lanes,
    host: HostLanes,
    source: Int32[Array, " n"],
    target: Int32[Array, " n"],
    victim: Int32[Array, " n"],
    refuge: Int32[Array, " n"],
    *,
    implementation: str = "auto",
) -> tuple[Lanes, HostLanes]:
    """`fetch` and `write_back` at once, both of what the pools (one or two lanes each) held before: (device, host).

    A slot may be left and filled in one exchange, but by the same entry of the lists: where `target[i]` is some victim,
    it is `victim[i]`, and where `refuge[i]` is some source, it is `source[i]`. (`reference` does without.)
    """
    return _form("exchange", implementation, WITH_HOST)(device, host, source, target, victim, refuge)


def _form(name: str, implementation: str, prefer: tuple[str, ...], words: int | None = None) -> Callable:
    forms = {"reference": None, **triton_call.forms()}
    if words is not None:
        shape = mosaic.unsupported(words)
        forms |= {"mosaic": shape or needs("gpu"), "mosaic_interpret": shape or needs("cpu")}
    chosen = choose(f"sparse_gather.{name}", implementation, forms, prefer)
    if chosen == "reference":
        return getattr(reference, name)
    if chosen.startswith("mosaic"):
        return partial(getattr(mosaic, name), interpret=gpu_interpreter() if chosen == "mosaic_interpret" else None)
    from pallas_kernels.sparse_gather import triton

    return partial(getattr(triton, name), interpret=chosen == "triton_interpret")


def _check_layer(layers: int, layer: int | Int32[Array, ""]) -> None:
    if isinstance(layer, int) and not 0 <= layer < layers:
        raise IndexError(f"layer: expected 0 to {layers - 1}, found {layer}; count from the pool's first layer")


__all__ = [
    "EMPTY", "HostLanes", "Lanes", "exchange", "fetch", "gather", "gather_layers", "read_host", "scatter",
    "scatter_layers", "write_back", "write_host",
]  # fmt: skip
