"""From selected addresses to slots: which rows miss, whose place they take, the map after it; with the rows moved; and
where every row is on the device.

Each request reads 2048 neighbours of its history and goes on by some rows a step, which are on the host: so many misses
there are, under any policy that does not give up what was just used. Where rows lie on the host is random. Selections
are computed from the number of the step, about 2 us of every call, because no call may find the last one's rows.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.case import Case
from pallas_kernels import resolve
from pallas_kernels.resolve import EMPTY, Counts
from ula_jax import mapping as maps
from ula_jax import memory, pool
from ula_jax.mapping import Mapping
from ula_jax.parallel import make_mesh
from ula_jax.placements import GpuOnly, ResidentHot, Ula
from ula_jax.placements.base import Counters, Selection
from ula_jax.policies import PBLRU
from ula_jax.policies.base import Touch
from ula_jax.pool import Group
from ula_jax.rows import RowFormat

BARS = {410: 400.0, 102: 115.0, 2: 31.0}
"""With the rows fetched, by misses of each request. SGLang's HiSparse takes 446, 133 and 31, vLLM 419, 139 and 46."""
ALONE = 25.0
CALLS = 12
SPREAD = 2654435761
"""An odd number: multiplied by it, neighbours in a history end up all over a pool of 2^n addresses."""


@dataclass(frozen=True)
class Shape:
    """Sizes are powers of two but for `hot`, the device slots of a request."""

    requests: int
    topk: int
    history: int
    hot: int
    row: RowFormat

    @property
    def addresses(self) -> int:
        return self.requests * self.history

    @property
    def slots(self) -> int:
        return self.requests * self.hot


CARD = Shape(requests=64, topk=2048, history=65536, hot=6144, row=RowFormat("fp8", 512, 64))
"""2.75 GB of rows on the host."""
TINY = Shape(requests=4, topk=16, history=256, hot=48, row=RowFormat("fp8", 16, 4))


class Alone(NamedTuple):
    """State of a round without rows."""

    step: Any
    mapping: Mapping
    policy: Any


class Whole(NamedTuple):
    step: Any
    group: Group


def cases(rng: np.random.Generator, small: bool) -> Iterator[Case]:
    shape = TINY if small else CARD
    fastest = "triton_interpret" if small else "triton"
    for misses in (3, 1) if small else BARS:
        yield Case(
            kernel="resolve alone",
            shape=f"{shape.requests} requests, {misses} misses each",
            forms={form: partial(alone, form, shape, misses) for form in ("reference", fastest)},
            calls=calls(shape, small),
            state=partial(start, shape, True),
            check=partial(wrong, shape, misses),
            device_bytes=16 * shape.requests * shape.topk,
            bar=None if small else ALONE,
        )
    for misses in (3,) if small else BARS:
        for name, placement in (("fetch", ResidentHot(policy=PBLRU())), ("exchange", Ula(policy=PBLRU()))):
            copies = not placement.exclusive
            yield Case(
                kernel=f"resolve + {name}",
                shape=f"{shape.requests} requests, {misses} misses each",
                forms={"auto": partial(whole, placement, shape, misses)},
                calls=calls(shape, small),
                state=partial(start_whole, shape, copies),
                check=partial(wrong_rows, shape, misses),
                device_bytes=16 * shape.requests * shape.topk,
                link_bytes=misses * shape.requests * shape.row.nbytes,
                bar=BARS.get(misses) if copies else None,
                base="auto",
            )

    for requests in (1, shape.requests):
        policy = PBLRU()
        yield Case(
            kernel="resolve, all on the device",
            shape=f"{requests} requests",
            forms={"gpu_only": partial(stay, GpuOnly()), "ula": partial(stay, Ula(policy=policy))},
            calls=[
                (jnp.asarray(rng.integers(0, shape.slots // 2, (requests, 1, shape.topk), np.int32)),)
                for _ in range(2 if small else CALLS)
            ],
            state=partial(start_resident, shape, policy),
            check=wrong_resident,
            base="gpu_only",
        )


def calls(shape: Shape, small: bool) -> list[tuple[jax.Array]]:
    """No new rows, as the peers have none in this operation."""
    return [(jnp.full((shape.requests, 1), EMPTY, jnp.int32),) for _ in range(2 if small else CALLS)]


def selection(shape: Shape, misses: int, step: Any) -> jax.Array:
    """Addresses [requests, 1, topk] of a step, of which the last `misses` of each request are on the host."""
    request = jnp.arange(shape.requests, dtype=jnp.uint32)[:, None, None] * shape.history
    first = (shape.hot - shape.topk + (step + 1) * misses).astype(jnp.uint32)
    return scattered(shape, request + (first + jnp.arange(shape.topk, dtype=jnp.uint32)) % shape.history)


def scattered(shape: Shape, position: Any) -> Any:
    return ((position * np.uint32(SPREAD)) % np.uint32(shape.addresses)).astype(np.int32)


@cache
def layout(shape: Shape, copies: bool) -> tuple[np.ndarray, ...]:
    """The first `hot` rows of each request are on the device, in any slots, and all others on the host."""
    rng = np.random.default_rng(1)
    position = np.arange(shape.addresses, dtype=np.uint32)
    hot = position % shape.history < shape.hot
    device, there = rng.permutation(scattered(shape, position[hot])), scattered(shape, position[~hot])
    location = np.full(shape.addresses, resolve.NOWHERE, np.int32)
    location[device] = np.arange(shape.slots)
    if copies:
        held, location[there] = np.arange(shape.addresses, dtype=np.int32), ~there
    else:
        held = rng.permutation(there)
        location[held] = ~np.arange(held.size)
    return location, device, held, np.full(held.size, EMPTY, np.int32)


def start(shape: Shape, copies: bool) -> Alone:
    policy, slots = PBLRU(implementation="reference"), jnp.arange(shape.slots, dtype=jnp.int32)
    state = jax.jit(lambda: policy.touch(policy.init(shape.slots), Touch(slots)))()
    tables = [jnp.asarray(table) for table in (*layout(shape, copies), np.int32(0))]
    return Alone(jnp.int32(0), Mapping(*tables), state)


def start_whole(shape: Shape, copies: bool) -> Whole:
    """With rows of one layer that tell their address and where in the row each word belongs."""
    step, mapping, policy = start(shape, copies)
    host = memory.sharding(make_mesh(), jax.sharding.PartitionSpec(), host=True)
    like = jax.eval_shape(partial(pool.init, 1, shape.row, shape.addresses, shape.slots, mapping.host_address.size))

    def lanes(arrays: tuple[Any, ...], addresses: jax.Array) -> tuple[jax.Array, ...]:
        return tuple(rows(shape, lane, addresses).reshape(array.shape) for lane, array in enumerate(arrays))

    device = lanes(like.device, mapping.device_address)
    pinned = tuple(jax.device_put(lane, host) for lane in lanes(like.host, mapping.host_address))
    return Whole(step, Group(device, pinned, mapping, policy))


def rows(shape: Shape, lane: int, addresses: Any) -> jax.Array:
    words = shape.row.lanes[lane]
    number = addresses.astype(jnp.uint32)[:, None] * words + jnp.arange(words, dtype=jnp.uint32)
    return number * jnp.uint32(SPREAD) + jnp.uint32(lane)


def alone(form: str, shape: Shape, misses: int, state: Alone, new: jax.Array) -> tuple[Alone, Any]:
    """What `placements.shared_pool` does, every part in the form named."""
    selected, policy = selection(shape, misses, state.step).reshape(-1), PBLRU(implementation=policy_form(form))
    found = resolve.find(state.mapping.tables, selected, new.reshape(-1), implementation=form)
    books = policy.touch(state.policy, Touch(found.slots))
    given, books = policy.evict(books, found.count, found.arriving.size)
    books = policy.touch(books, Touch(given, inserted=True))
    moves, tables, counts = resolve.move(
        state.mapping.tables, found.arriving, found.source, given, found.counts, copies=True, implementation=form
    )
    slots, _ = resolve.slots_of(tables.location, selected, new.reshape(-1), implementation=form)
    return Alone(state.step + 1, Mapping(*tables), books), (slots, moves, counts)


def policy_form(form: str) -> str:
    return "auto" if form == "triton" else "reference"


def whole(placement: Any, shape: Shape, misses: int, state: Whole, new: jax.Array) -> tuple[Whole, Any]:
    requests = jnp.arange(shape.requests, dtype=jnp.int32)
    nothing = jnp.zeros((shape.requests, 0), jnp.int32)
    wanted = Selection(selection(shape, misses, state.step), new, requests, nothing, nothing.astype(jnp.float32))
    readable, group, counters = placement.resolve(state.group, wanted)
    return Whole(state.step + 1, group), (readable.locations, jnp.stack(counters))


def start_resident(shape: Shape, policy: PBLRU) -> Whole:
    """Half of the device's slots are filled; `gpu_only` has each row in the slot of its number."""
    live = shape.slots // 2
    mapping = maps.init(shape.slots, shape.slots, 1)
    rows = jnp.arange(shape.slots, dtype=jnp.int32)
    rows = jnp.where(rows < live, rows, EMPTY)
    mapping = maps.put_on_device(mapping, rows, rows)
    return Whole(jnp.int32(0), Group((), (), mapping, policy.touch(policy.init(shape.slots), Touch(rows))))


def stay(placement: Any, state: Whole, selected: jax.Array) -> tuple[Whole, Any]:
    """Every request stores a row and reads old ones."""
    requests = jnp.arange(selected.shape[0], dtype=jnp.int32)
    new = state.group.mapping.device_address.size // 2 + state.step * requests.size + requests
    nothing = jnp.zeros((requests.size, 0), jnp.int32)
    wanted = Selection(selected, new[:, None], requests, nothing, nothing.astype(jnp.float32), resident=True)
    readable, group, counters = placement.resolve(state.group, wanted)
    return Whole(state.step + 1, group), (readable.locations, readable.new_device, jnp.stack(counters))


def wrong_resident(form: str, result: Any, call: tuple) -> str | None:
    state, (slots, new_device, counters) = result
    held, found = np.asarray(state.group.mapping.device_address), Counters(*counters.tolist())
    first = held.size // 2
    if not np.array_equal(held[np.asarray(slots)], call[0]):
        return "a row is not in the slot that was found for it"
    if not np.array_equal(held[np.asarray(new_device)], first + np.arange(new_device.size)):
        return "a new row has no slot"
    if (found.selected, found.hits, found.dropped) != (call[0].size, call[0].size, 0):
        return f"expected {call[0].size} hits, found {found}"
    return None


def wrong(shape: Shape, misses: int, form: str, result: Any, call: tuple) -> str | None:
    state, (slots, moves, counts) = result
    selected = np.asarray(selection(shape, misses, np.int32(0))).reshape(-1)
    if not np.array_equal(np.asarray(state.mapping.device_address)[np.asarray(slots)], selected):
        return "a row is not in the slot that was found for it"
    counts, moved = Counts(*counts.tolist()), int((np.asarray(moves.target) >= 0).sum())
    missed = shape.requests * misses
    if (counts.hits, counts.misses, counts.victims, counts.lost, moved) != (
        selected.size - missed, missed, missed, 0, missed
    ):  # fmt: skip
        return f"expected {missed} misses, as many victims and moves, found {counts} and {moved} moves"
    return None


def wrong_rows(shape: Shape, misses: int, form: str, result: Any, call: tuple) -> str | None:
    state, (slots, counters) = result
    selected = selection(shape, misses, jnp.int32(0)).reshape(-1)
    for lane, held in enumerate(state.group.device):
        if not np.array_equal(held[0, slots.reshape(-1)], rows(shape, lane, selected)):
            return f"rows of lane {lane} are not those selected"
    found, missed = Counters(*counters.tolist()), shape.requests * misses
    if (found.unique, found.host_fetches, found.evictions, found.dropped) != (selected.size, missed, missed, 0):
        return f"expected {missed} fetches and evictions, found {found}"
    return None
