"""Rows between a device pool and a host pool: fetched, written back, exchanged, read and written one layer at a time.

Rows are fp8 rows of GLM-5.x with their scales. The host pool is 8.9 GB, and what a fetch takes depends on how far apart
its rows are there, so lists are long (each page of 64 kB holds a row or two) or as long as a step's. No list is used
twice. The bars are shares of what a bulk copy moves in one direction, in each direction.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.case import Case
from pallas_kernels import sparse_gather as sg
from pallas_kernels.sparse_gather import EMPTY
from ula_jax import memory
from ula_jax.parallel import make_mesh

WORDS = (160, 4)
ROW = 4 * sum(WORDS)
LINK = 53.8e9
"""Bytes a second of a bulk copy in either direction (`benchmarks.card`), for the bars."""
BARS = {"fetch": 0.85, "exchange": 0.70}
MIX = 2654435761
PIECE = 1 << 18
"""Slots that are filled at once."""


@dataclass(frozen=True)
class Shape:
    """Slots of one pool, how many entries a list has, and how many of them are real."""

    layers: int
    host: int
    device: int
    n: int
    real: int

    @property
    def name(self) -> str:
        real = f"{self.real} of " if self.real < self.n else ""
        return f"{self.layers} layers, {real}{self.n} slots"


ONE = partial(Shape, 1, 13_500_000, 1 << 20)
FOUR = partial(Shape, 4, 3_375_000, 1 << 18)
CARDS = {
    "fetch": (ONE(1 << 18, 1 << 18), FOUR(1 << 16, 1 << 16), FOUR(1 << 17, 1 << 11), FOUR(128, 128)),
    "exchange": (ONE(1 << 18, 1 << 18), FOUR(1 << 16, 1 << 16), FOUR(128, 128)),
    "write_back": (FOUR(1 << 13, 1 << 13),),
    "read_host": (FOUR(1 << 15, 1 << 15),),
    "write_host": (FOUR(1 << 12, 1 << 12),),
}
SMALL = {name: (Shape(2, 40, 20, 12, 9),) for name in CARDS}
LAYER = 1

Lanes = tuple[jax.Array, ...]
Pools = tuple[Lanes, Lanes]


def cases(rng: np.random.Generator, small: bool) -> Iterator[Case]:
    for name, shapes in (SMALL if small else CARDS).items():
        for shape in shapes:
            yield case(name, shape, rng, small)


def case(name: str, shape: Shape, rng: np.random.Generator, small: bool) -> Case:
    one = name in ("read_host", "write_host")
    moved = shape.real * (4 * WORDS[0] if one else shape.layers * ROW)
    share = None if small or shape.real < 1 << 13 else BARS.get(name)
    forms = ["triton_interpret" if small else "triton"]
    if small or shape.n <= 1 << 13 or one:
        forms.insert(0, "reference")
    return Case(
        kernel=f"sparse_gather.{name}",
        shape=shape.name,
        forms={form: partial(run, name, form) for form in forms},
        calls=[lists(shape, rng) for _ in range(2 if small else max(3, min(12, (1 << 18) // shape.n)))],
        state=partial(start, shape),
        check=partial(wrong, name, shape),
        link_bytes=moved,
        bar=share and 1e6 * moved / LINK / share,
        base=forms[0],
    )


def run(name: str, form: str, state: Pools, at_host: jax.Array, at_device: jax.Array) -> tuple[Pools, Any]:
    device, host = state
    if name == "fetch":
        return (sg.fetch(device, host, at_host, at_device, implementation=form), host), None
    if name == "write_back":
        return (device, sg.write_back(device, host, at_device, at_host, implementation=form)), None
    if name == "exchange":
        return sg.exchange(device, host, at_host, at_device, at_device, at_host, implementation=form), None
    if name == "read_host":
        return state, sg.read_host(host[0], LAYER, at_host, implementation=form)
    rows = jnp.broadcast_to(at_device[:, None].astype(jnp.uint32), (at_device.size, WORDS[0]))
    return (device, (sg.write_host(host[0], LAYER, at_host, rows, implementation=form), host[1])), None


def lists(shape: Shape, rng: np.random.Generator) -> tuple[jax.Array, jax.Array]:
    """Host slots and device slots, the real ones first."""
    found = np.full((2, shape.n), EMPTY, np.int32)
    for row, size in zip(found, (shape.host, shape.device), strict=True):
        row[: shape.real] = rng.permutation(np.unique(rng.integers(0, size, 2 * shape.real + 64)))[: shape.real]
    found[0, : shape.real].sort()
    return jnp.asarray(found[0]), jnp.asarray(found[1])


def value(lane: int, slot: Any, layer: Any, word: Any) -> Any:
    """What a word is at first, in uint32 arithmetic: lanes are numbered from 0 on the device and from 2 on the host."""
    u = np.uint32
    return (slot * u(MIX) ^ slot * u(MIX) >> u(15)) + layer * u(40503) + word * u(97) + u(lane)


@partial(jax.jit, donate_argnums=0, static_argnums=(1, 3))
def fill(pool: jax.Array, lane: int, first: jax.Array, slots: int) -> jax.Array:
    """`slots` slots of a host pool, made on the device."""
    slot = first.astype(jnp.uint32) + jnp.arange(slots, dtype=jnp.uint32)
    layer, word = (jnp.arange(n, dtype=jnp.uint32) for n in pool.shape[1:])
    rows = value(lane, slot[:, None, None], layer[:, None], word)
    return jax.lax.dynamic_update_slice(pool, memory.to_host(rows), (first, jnp.int32(0), jnp.int32(0)))


def start(shape: Shape) -> Pools:
    """Pools in which every word tells where it is."""
    place = memory.sharding(make_mesh(), jax.sharding.PartitionSpec(), host=True)
    slot, layer = (jnp.arange(n, dtype=jnp.uint32) for n in (shape.device, shape.layers))
    device, host = [], []
    for lane, words in enumerate(WORDS):
        word = jnp.arange(words, dtype=jnp.uint32)
        device.append(jax.jit(value, static_argnums=0)(lane, slot[:, None], layer[:, None, None], word))
        pool = memory.zeros_on_host((shape.host, shape.layers, words), jnp.uint32, place)
        piece = min(shape.host, PIECE)
        for first in range(0, shape.host, piece):
            pool = fill(pool, lane + 2, jnp.int32(min(first, shape.host - piece)), piece)
        host.append(pool)
    return tuple(device), tuple(host)


def wrong(name: str, shape: Shape, form: str, result: Any, call: tuple[jax.Array, jax.Array]) -> str | None:
    """Every word that was to move, and as many others."""
    (device, host), read = result
    there, here = (np.asarray(slots[: shape.real]).astype(np.uint32) for slots in call)
    layer = np.arange(shape.layers, dtype=np.uint32)[:, None]
    if name == "read_host":
        expected = value(2, there[:, None], np.uint32(LAYER), np.arange(WORDS[0], dtype=np.uint32))
        return None if np.array_equal(read[: shape.real], expected) else "rows read are not those of the slots"
    for lane, words in enumerate(WORDS):
        word = np.arange(words, dtype=np.uint32)
        came = name in ("fetch", "exchange")
        expected = value(lane + 2 if came else lane, (there if came else here)[:, None, None], layer, word)
        if not np.array_equal(device[lane][:, here].swapaxes(0, 1), expected):
            return f"device, lane {lane}: slots do not hold what {name} should leave there"
        left = name in ("write_back", "exchange")
        expected = value(lane if left else lane + 2, (here if left else there)[:, None, None], layer, word)
        if name == "write_host" and lane == 0:
            expected[:, LAYER] = here[:, None]
        found = [sg.read_host(host[lane], n, call[0], implementation="reference") for n in range(shape.layers)]
        if not np.array_equal(np.stack([rows[: shape.real] for rows in found], 1), expected):
            return f"host, lane {lane}: slots do not hold what {name} should leave there"
    others = np.setdiff1d(np.arange(0, shape.host, max(1, shape.host // 1000), dtype=np.uint32), there)
    rows = sg.read_host(host[0], 0, jnp.asarray(others, jnp.int32), implementation="reference")
    if not np.array_equal(rows, value(2, others[:, None], np.uint32(0), np.arange(WORDS[0], dtype=np.uint32))):
        return "host: slots have changed that no list names"
    return None
