"""A trace played against a policy: who is where, round by round, without any rows.

One jitted scan over rounds, vmapped over pool sizes. A pool of `size` slots is a pool of the largest size whose other
slots were taken from the policy at the start and never given back, so one compiled program serves every size.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pyarrow as pa

from ula_jax.policies.base import Policy, Ranking, Touch, depth, margins
from ula_jax.policies.books import pick, put
from ula_jax.policies.round import play, same, victims
from ula_jax.traces.statistics import next_use
from ula_jax.traces.trace import Trace
from ula_jax.types import EMPTY, Array, Bool, Float32, Int32, Scalar

CHUNK = 128
"""Rounds of one compiled scan: between two, progress is shown and broken promises of the policy are noticed."""

SCHEMA = pa.schema(
    [
        ("policy", pa.string()),
        ("stream", pa.string()),
        ("size", pa.int32()),
        ("accesses", pa.int64()),
        ("misses", pa.int64()),
        ("prefetched", pa.int64()),
        ("written_back", pa.int64()),
        ("row_bytes", pa.int64()),
        ("misses_by_round", pa.list_(pa.int32())),
    ]
)
"""`misses` are needed rows that were not on the device, `prefetched` rows fetched ahead, `written_back` rows that left
the device while their request lived: an exclusive placement writes them to the host, an inclusive one does not."""


class Counts(NamedTuple):
    """What one round did; int32, over rounds and sizes in numpy arrays."""

    misses: Any
    prefetched: Any
    written_back: Any
    short: Any
    """Needed rows that got no slot."""
    wrong: Any
    """Slots given that were used in this round, given before, or never the policy's to give."""


class Rounds(NamedTuple):
    """Some rounds of one stream; leading axis: rounds."""

    needed: Int32[Array, "*rounds n"]
    """Addresses selected, EMPTY padded."""
    requests: Int32[Array, "*rounds n"]
    next_use: Int32[Array, "*rounds n"]
    finished: Bool[Array, "*rounds seats"]
    ranked: Int32[Array, "*rounds seats depth"]
    """Addresses by rank: empty for policies that do not look at scores."""
    scores: Float32[Array, "*rounds seats depth"]


def replay(
    policy: Policy[Any],
    trace: Trace,
    sizes: Sequence[int],
    *,
    warmup: int = 0,
    name: str = "",
    on_rounds: Callable[[int], None] | None = None,
) -> pa.Table:
    """Play every stream of the trace at every pool size; one row of `SCHEMA` for each pair.

    Args:
      sizes: slots of a pool. ValueError below the largest selection of one round.
      warmup: first rounds to leave out of the sums (not out of `misses_by_round`).
      name: of the policy in the table and in errors; its repr if empty.
      on_rounds: called with the number of rounds just played, for a progress bar.

    Raises:
      ValueError: sizes or trace do not fit the policy, or the policy broke its promises (policy, size and round are
        named).
    """
    name = name or repr(policy)
    check_sizes(trace, sizes)
    if not 0 <= warmup < trace.num_rounds:
        raise ValueError(f"warmup: expected 0 to {trace.num_rounds - 1} rounds, found {warmup}; leave some to count")
    if depth(policy) > trace.depth:
        raise ValueError(
            f"{name}: expected a trace with ranks up to {depth(policy):g} k, found {trace.depth:g} k; capture or "
            f"generate one with a larger depth, or lower the policy's"
        )
    if depth(policy) > 1 and trace.scores is None:
        raise ValueError(f"{name}: expected a trace with scores, found none; replay it with policies that need none")
    uses, rows = next_use(trace), []
    for stream in range(len(trace.positions)):
        rounds = _rounds(trace, stream, uses[stream], int(depth(policy) * trace.k) if depth(policy) > 1 else 0)
        counts = _play(policy, name, rounds, sizes, trace.seats * trace.length, trace.k, on_rounds)
        accesses = int(np.sum(rounds.needed[warmup:] >= 0))
        for i, size in enumerate(sizes):
            sums = [int(count[warmup:, i].sum()) for count in counts[:3]]
            row = name, trace.stream_names[stream], size, accesses, *sums, int(trace.stream_row_bytes[stream])
            rows.append(dict(zip(SCHEMA.names, [*row, counts.misses[:, i].tolist()], strict=True)))
    return pa.Table.from_pylist(rows, SCHEMA)


def check_sizes(trace: Trace, sizes: Sequence[int]) -> None:
    """ValueError unless every size holds what one round selects."""
    least = trace.largest_round
    if not len(sizes):
        raise ValueError("sizes: expected at least one pool size, found none; give sizes in slots")
    for size in sizes:
        if size < least:
            raise ValueError(
                f"sizes: expected at least the {least} slots that one round selects ({trace.seats} requests of "
                f"k = {trace.k}), found {size}; give larger pools"
            )


def _rounds(trace: Trace, stream: int, uses: Int32[np.ndarray, "rounds seats k"], ranks: int) -> Rounds:
    addresses = trace.addresses[stream]
    flat = addresses[..., : trace.k].reshape(trace.num_rounds, -1)
    requests = np.broadcast_to(np.arange(trace.seats, dtype=np.int32)[:, None], addresses.shape)
    scores = np.zeros((*addresses.shape[:2], 0), np.float32)
    if ranks:
        assert trace.scores is not None
        scores = trace.scores[stream, ..., :ranks]
    whose = np.where(flat >= 0, requests[..., : trace.k].reshape(flat.shape), EMPTY)
    # In numpy, and moved to the device a chunk at a time.
    arrays: tuple[Any, ...] = (
        flat, whose, uses.reshape(flat.shape), trace.finished[stream], addresses[..., :ranks], scores,
    )  # fmt: skip
    return Rounds(*arrays)


def _play(
    policy: Policy[Any],
    name: str,
    rounds: Rounds,
    sizes: Sequence[int],
    addresses: int,
    k: int,
    on_rounds: Callable[[int], None] | None,
) -> Counts:
    """Counts int32 [rounds, sizes]."""
    total, largest = len(rounds.needed), max(sizes)
    carry = _start(policy, jnp.asarray(sizes, jnp.int32), largest, addresses)
    parts = []
    for begin in range(0, total, CHUNK):
        chunk = jax.tree.map(lambda array, begin=begin: array[begin : begin + CHUNK], rounds)
        real = len(chunk.needed)
        if begin and real < CHUNK:  # pad, so that the last chunk needs no second compilation
            chunk = jax.tree.map(
                lambda a, more=CHUNK - real: np.pad(a, [(0, more)] + [(0, 0)] * (a.ndim - 1), mode="edge"), chunk
            )
        carry, counts = _scan(policy, carry, chunk, largest, addresses, k)
        counts = Counts(*(np.asarray(count)[:real] for count in counts))
        _check(name, counts, sizes, begin)
        parts.append(counts)
        if on_rounds:
            on_rounds(real)
    return Counts(*map(np.concatenate, zip(*parts, strict=True)))


def _check(name: str, counts: Counts, sizes: Sequence[int], begin: int) -> None:
    for field, complaint in (
        ("wrong", "expected victims that are its own, distinct and not used in this round, found {} others"),
        ("short", "expected a slot for every row that missed, found none for {} rows"),
    ):
        bad = np.argwhere(np.asarray(getattr(counts, field)) > 0)
        if bad.size:
            at, size = bad[0]
            raise ValueError(
                f"policy {name}, pool of {sizes[size]} slots, round {begin + at}: "
                f"{complaint.format(getattr(counts, field)[at, size])}; correct its evict or touch"
            )


class _Carry(NamedTuple):
    """Of one pool."""

    state: Any
    slot_of: Int32[Array, " addresses"]
    held: Int32[Array, " slots"]
    """Address in each slot, EMPTY for none, RETIRED for slots that are not part of the pool."""


RETIRED = -2


@partial(jax.jit, static_argnums=(0, 2, 3))
def _start(policy: Policy[Any], sizes: Int32[Array, " sizes"], largest: int, addresses: int) -> _Carry:
    def one(size: Scalar) -> _Carry:
        retired, state = victims(policy, policy.init(largest), largest - size, largest)
        held = put(jnp.full(largest, EMPTY, jnp.int32), retired, RETIRED)
        return _Carry(state, jnp.full(addresses, EMPTY, jnp.int32), held)

    return jax.vmap(one)(sizes)


@partial(jax.jit, static_argnums=(0, 3, 4, 5), donate_argnums=1)
def _scan(policy: Policy[Any], carry: Any, rounds: Rounds, largest: int, addresses: int, k: int) -> tuple[Any, Counts]:
    def body(carry: Any, now: Rounds) -> tuple[Any, Counts]:
        return jax.vmap(partial(_round, policy, addresses, k), in_axes=(0, None))(carry, now)

    return jax.lax.scan(body, carry, rounds)


def _round(policy: Policy[Any], addresses: int, k: int, carry: Any, now: Rounds) -> tuple[_Carry, Counts]:
    state, slot_of, held = carry
    num_slots, length = held.size, addresses // now.finished.size
    gone = (held >= 0) & now.finished[jnp.maximum(held, 0) // length]
    left_alone = policy.forget(state, jnp.where(gone, jnp.arange(num_slots, dtype=jnp.int32), EMPTY))
    state = same(policy, "forget", state, left_alone)
    slot_of = put(slot_of, jnp.where(gone, held, EMPTY), EMPTY)
    held = jnp.where(gone, EMPTY, held)

    slots = pick(slot_of, now.needed)
    held_ranks = pick(slot_of, now.ranked.reshape(-1)).reshape(now.ranked.shape)
    seats = jnp.arange(now.finished.size, dtype=jnp.int32)
    ranking = Ranking.of(now.ranked, held_ranks, seats, margins(now.scores, now.ranked, k), k)
    needed = Touch(slots, now.needed, now.requests, now.next_use)
    targets, ahead, state = play(policy, state, needed, ranking, num_slots)

    missed = (now.needed >= 0) & (slots < 0)
    short = jnp.sum(missed & (targets < 0), dtype=jnp.int32)
    filled = jnp.concatenate([targets, ahead])
    rows = now.needed if ranking is None else jnp.concatenate([now.needed, ranking.addresses])
    uses = jnp.zeros(num_slots, jnp.int32)
    uses = uses.at[jnp.concatenate([slots, filled])].add(1, mode="drop", wrap_negative_indices=False)
    outside = (filled >= num_slots) | (filled < EMPTY) | (pick(held, filled) == RETIRED)
    wrong = jnp.sum(jnp.maximum(uses - 1, 0), dtype=jnp.int32) + jnp.sum(outside, dtype=jnp.int32)

    left = pick(held, filled)
    slot_of = put(slot_of, left, EMPTY)
    slot_of = put(slot_of, jnp.where(filled >= 0, rows, EMPTY), filled)
    held = put(held, filled, rows)
    counts = Counts(
        misses=jnp.sum(missed, dtype=jnp.int32),
        prefetched=jnp.sum(ahead >= 0, dtype=jnp.int32),
        written_back=jnp.sum(left >= 0, dtype=jnp.int32),
        short=short,
        wrong=wrong,
    )
    return _Carry(state, slot_of, held), counts
