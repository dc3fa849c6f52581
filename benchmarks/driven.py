"""Requests of one rank with made-up histories, whose selections a trace decides while the model's indexer still works.

Nothing is prefilled: random rows and index keys go in through the placement's own `resolve` and `append`, in the chunks
of a prefill, so that maps, policy and both tiers are as after one. What is hot settles in warm-up steps.
"""

import hashlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from models.draws import normal
from ula_jax import index_keys, memory
from ula_jax.address import PageAllocator, addresses_of, page_table
from ula_jax.history import Batch, KVState
from ula_jax.parallel import DP, TP
from ula_jax.placements.base import Selection
from ula_jax.report import UserError, replacing
from ula_jax.runner import Runner, StepOutput
from ula_jax.sampling import Sampling
from ula_jax.traces import TraceConfig, generate, load
from ula_jax.types import EMPTY, NOWHERE, Array, Int32

APART = 16
"""Rounds between two uses of one stream: the fast part of a calibrated score has forgotten 7/8 of itself by then."""


@dataclass(frozen=True)
class Streams:
    """Selections of some independent requests, the newest position of each round left out."""

    positions: Int32[np.ndarray, "streams rounds rest"]
    """All below the stream's history, EMPTY padded."""
    histories: tuple[int, ...]
    """Tokens stored before the first step of a request that follows the stream."""

    def schedule(self, batch: int, groups: int) -> tuple[np.ndarray, np.ndarray]:
        """Stream [batch] of each request, and the round [groups, batch] at which it starts in each layer group."""
        numbers = np.arange(batch)
        starts = (numbers // len(self.histories) * groups + np.arange(groups)[:, None]) * APART
        return (numbers % len(self.histories)).astype(np.int32), starts.astype(np.int32)


def rounds_needed(steps: int, batch: int, groups: int, streams: int) -> int:
    """Rounds that `Streams.schedule` reaches in so many steps."""
    return steps + (-(-batch // streams) * groups - 1) * APART


def calibrated(histories: tuple[int, ...], rounds: int, k: int, folder: Path) -> Streams:
    """Streams of the generator that fits the published replay of GLM-5.1 (`ula_jax.traces.synthetic`), in a file."""
    key = hashlib.sha256(f"{histories} {rounds} {k}".encode()).hexdigest()[:12]
    path = folder / f"selections-{key}.npy"
    if not path.is_file():

        def one(stream: int) -> np.ndarray:
            config = TraceConfig(1, histories[stream] - rounds, rounds, k, None, churn=0.0, shortest=1.0, seed=stream)
            return _rest(generate(config).selected[0, :, 0])

        with ThreadPoolExecutor() as threads:
            made = np.stack(list(threads.map(one, range(len(histories)))))
        with replacing(path) as scratch, scratch.open("wb") as file:
            np.save(file, made)
    return Streams(np.load(path), histories)


def captured(path: Path, rounds: int, k: int) -> Streams:
    """Streams of a trace file: every seat of every stream that one request keeps throughout."""
    trace = load(path)
    if trace.num_rounds < rounds or trace.k > k:
        raise UserError(
            f"{path}: expected at least {rounds} rounds and selections of at most {k}, found {trace.num_rounds} and "
            f"{trace.k}; take fewer steps, a larger model or another trace"
        )
    selected = trace.selected[:, :rounds].transpose(0, 2, 1, 3)
    kept = ~trace.finished[:, 1:rounds].any(axis=1) & (selected >= 0).any(axis=-1).all(axis=-1)
    if not kept.any():
        raise UserError(f"{path}: expected a request that runs for {rounds} rounds, found none; take fewer steps")
    rest = _rest(selected[kept])
    return Streams(rest, (trace.length,) * len(rest))


def _rest(selected: Int32[np.ndarray, "*many k"]) -> Int32[np.ndarray, "*many rest"]:
    return np.ascontiguousarray(np.sort(selected, axis=-1)[..., :-1])


class Requests:
    """A batch in its runner: where histories lie, and the decode loop.

    No step waits for the host: tokens, positions and selections of the next one are made on the device.
    """

    def __init__(self, runner: Runner, streams: Streams, batch: int, steps: int):
        spec, capacity = runner.spec, runner.capacity
        if (ranks := runner.placement.parallel.dp) > 1:
            raise ValueError(f"requests: expected a placement of one rank, found {ranks}; use TP over all devices")
        self.runner, self.steps_left, self.steps_done = runner, steps, 0
        self.stream, starts = streams.schedule(batch, len(spec.groups))
        self.histories = np.asarray(streams.histories, np.int32)[self.stream]
        room = -1 if capacity.resident is None else capacity.resident
        held = [runner.placement.striping.share(int(length) + steps) for length in self.histories]
        self.resident = sum(held) <= room
        """No row leaves the device in any step."""
        pages = PageAllocator(capacity.addresses // spec.page_size, spec.page_size)
        self.pages = [pages.allocate(int(length) + steps) for length in self.histories]
        table = np.stack([page_table(held, spec.table_width) for held in self.pages])
        ones = np.ones((1, batch), np.int32)
        # Everywhere the shardings that a step's own output has: any other compiles the step once more.
        put = partial(jax.device_put, device=memory.sharding(runner.mesh, P(DP)))
        self._fixed = put((ones, table[None], np.arange(batch, dtype=np.int32)[None]))
        self._tokens, self._start = put((0 * ones, self.histories[None]))
        self._sampling = put(Sampling(np.zeros((1, batch), np.float32), 0 * ones))
        trace = (streams.positions, self.stream, starts - self.histories)
        self._trace = jax.device_put(trace, memory.sharding(runner.mesh, P()))

    def fill(self, seed: int = 0, chunk: int = 8192) -> None:
        """Store the histories, request after request. RuntimeError if a row found no place."""
        runner, spec = self.runner, self.runner.spec
        chunk = min(chunk, runner.capacity.device_slots, runner.capacity.buffer_slots or chunk)
        store: Callable[..., KVState] = runner.compile(_store(runner))
        page, draw = spec.page_size, 0
        for number, (held, length) in enumerate(zip(self.pages, self.histories.tolist(), strict=True)):
            for first in range(0, length, chunk):
                addresses = np.full((1, 1, chunk), EMPTY, np.int32)
                found = addresses_of(held, page, first, min(first + chunk, length))
                addresses[0, 0, : found.size] = found
                key = np.array([[seed, draw]], np.uint32)
                runner.state = store(runner.state, addresses, np.array([[number]], np.int32), key)
                draw += 1
        self.check()

    def check(self) -> None:
        """RuntimeError unless as many rows are stored as there are tokens."""
        copies = self.runner.placement.parallel.tp // self.runner.placement.striping.devices
        expected = copies * (int(self.histories.sum()) + self.steps_done * len(self.histories))
        for group in self.runner.state.groups:
            stored = int(jnp.sum(group.mapping.location != NOWHERE))
            if stored != expected:
                raise RuntimeError(f"placement: expected {expected} rows, found {stored}; this is a bug")

    def live_addresses(self) -> np.ndarray:
        """Addresses that hold rows."""
        page = self.runner.spec.page_size
        lengths = self.histories + self.steps_done
        return np.concatenate([addresses_of(p, page, 0, n) for p, n in zip(self.pages, lengths.tolist(), strict=True)])

    def next_batch(self) -> Batch:
        return _batch(self._trace, self._fixed, self._tokens, self._start)

    def arguments(self) -> tuple[Any, ...]:
        """Of `runner.step_function`, for the next step."""
        return self.runner.params, self.runner.state, self.next_batch(), self._sampling

    def step(self) -> StepOutput:
        """Decode one token of each request."""
        if self.steps_done == self.steps_left:
            raise ValueError(f"requests: expected at most {self.steps_left} steps, found more; make them with room")
        output = self.runner.step(self.next_batch(), self._sampling, self.resident)
        self._tokens, self._start = output.tokens, self._start + 1
        self.steps_done += 1
        return output


@jax.jit
def _batch(trace: Any, fixed: Any, tokens: Array, start: Array) -> Batch:
    (positions, stream, offsets), (ones, table, numbers) = trace, fixed
    now = start[0] + offsets
    rest = positions.at[stream, now].get(mode="promise_in_bounds")  # [groups, batch, rest]
    newest = jnp.broadcast_to(start[0, :, None], (*now.shape, 1))
    driven = jnp.concatenate([rest, newest], axis=-1)
    return Batch(tokens[..., None], start, ones, table, numbers, driven[None, :, :, None])


def _store(runner: Runner) -> Callable[..., KVState]:
    """A change of the state: store a chunk [1, chunk] of one request's addresses, with random rows and index keys."""
    spec, placement = runner.spec, runner.placement

    def store(state: KVState, addresses: Array, number: Array, key: Array) -> KVState:
        def draw(width: int) -> Array:
            nonlocal key
            key = key + jnp.array([0, 1 << 20], jnp.uint32)
            return normal(key, (addresses.size, width))

        rank = jax.lax.axis_index(TP) if placement.striping.devices > 1 else 0
        nothing = jnp.full((*addresses.shape, 1), EMPTY, jnp.int32)
        empty = jnp.zeros((1, 0), jnp.int32)
        selection = Selection(nothing, addresses, number, empty, empty.astype(jnp.float32))
        groups, keys = [], []
        for group, stored, layers in zip(state.groups, state.index_keys, spec.groups, strict=True):
            readable, group, _ = placement.resolve(group, selection)
            for place in range(len(layers)):
                group = placement.append(group, place, readable, spec.row.pack(draw(spec.row.width)))
            groups.append(group)
            new = draw(spec.index_dim)[None]
            keys.append(index_keys.append(spec.index_key, stored, addresses, new, placement.striping, rank))
        return KVState(tuple(groups), tuple(keys))

    return store
