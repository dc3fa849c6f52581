"""The replay against a plain simulation, and what it says of policies and traces that do not fit."""

from dataclasses import dataclass
from typing import ClassVar

import jax.numpy as jnp
import numpy as np
import pytest

from ula_jax.policies import LRU, POLICIES, make_policy
from ula_jax.replay import replay
from ula_jax.traces import Trace, TraceConfig, generate

SIZES = [64, 71, 130]


@pytest.fixture(scope="module")
def trace():
    """Two streams, three seats, some finished requests and a seat that is idle for a while."""
    parts = [generate(TraceConfig(3, 150, 150, 16, None, depth=2.0, churn=0.03, seed=seed)) for seed in (1, 2)]
    positions, scores = (np.concatenate([getattr(p, name) for p in parts]) for name in ("positions", "scores"))
    finished = np.concatenate([p.finished for p in parts])
    positions[:, 40:60, 2], scores[:, 40:60, 2] = -1, -np.inf
    finished[:, 40, 2] = True
    return Trace(positions, finished, 16, parts[0].length, scores, ("a", "b"), (100, 7))


def simulate(trace, stream, size):
    """Exact LRU in rounds: (misses, rows written back) of each round, from dictionaries and lists."""
    last, address, place = [-1] * size, [None] * size, {}
    misses, written = [], []
    for t, (selected, gone) in enumerate(zip(trace.selected[stream], trace.finished[stream], strict=True)):
        for key in [key for key in place if gone[key[0]]]:
            slot = place.pop(key)
            last[slot], address[slot] = -1, None
        needed = [(seat, int(p)) for seat, row in enumerate(selected) for p in row if p >= 0]
        for key in needed:
            if key in place:
                last[place[key]] = t
        missing = [key for key in needed if key not in place]
        oldest = sorted((s for s in range(size) if last[s] < t), key=lambda s: (last[s], s))
        victims = oldest[: len(missing)]
        written.append(sum(address[slot] is not None for slot in victims))
        for key, slot in zip(missing, victims, strict=True):
            place.pop(address[slot], None)
            place[key], address[slot], last[slot] = slot, key, t
        misses.append(len(missing))
    return misses, written


def test_every_size_and_stream_equals_a_plain_simulation(trace):
    seen = []
    table = replay(LRU(), trace, SIZES, warmup=5, on_rounds=seen.append)
    assert sum(seen) == 2 * trace.num_rounds
    assert table.num_rows == 6
    for row in table.to_pylist():
        stream = trace.streams.index(row["stream"])
        misses, written = simulate(trace, stream, row["size"])
        assert row["misses_by_round"] == misses
        assert row["misses"] == sum(misses[5:])
        assert row["written_back"] == sum(written[5:])
        assert row["accesses"] == int((trace.selected[stream, 5:] >= 0).sum())
        assert row["row_bytes"] == trace.row_bytes[stream]
        assert row["prefetched"] == 0


@pytest.fixture(scope="module")
def deep():
    """One stream with runners-up for every policy."""
    return generate(TraceConfig(3, 150, 60, 16, None, depth=4.0, churn=0.03, seed=3))


@pytest.fixture(scope="module")
def best(deep):
    return replay(make_policy("belady"), deep, [100])["misses"][0].as_py()


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_keeps_its_promises_and_none_beats_belady(policy, deep, best):
    row = replay(make_policy(policy), deep, [100]).to_pylist()[0]
    assert row["misses"] + row["prefetched"] >= best
    assert row["misses"] < row["accesses"] / 2
    assert (row["prefetched"] > 0) == (policy == "prefetch")


def test_belady_is_never_worse_and_prefetch_trades_bytes_for_misses(trace):
    best = replay(make_policy("belady"), trace, SIZES)["misses"].to_numpy()
    lru = replay(LRU(), trace, SIZES)["misses"].to_numpy()
    ahead = replay(make_policy("prefetch:policy=lru,share=0.5"), trace, SIZES)
    assert np.all(best < lru)
    assert np.all(ahead["prefetched"].to_numpy() > 0)
    assert np.all(ahead["misses"].to_numpy() + ahead["prefetched"].to_numpy() >= best)
    assert ahead["misses"].to_numpy()[2] < lru[2]


@dataclass(frozen=True)
class Wrong:
    """LRU, with one fault."""

    fault: str
    depth: ClassVar[float] = 1.0

    def init(self, num_slots):
        return LRU().init(num_slots)

    def touch(self, state, touch):
        after = LRU().touch(state, touch)
        return after._replace(round=jnp.float32(0)) if self.fault == "touch" else after

    def evict(self, state, count, limit):
        slots, after = LRU().evict(state, count, limit)
        if self.fault == "protected":  # whatever was used last
            slots = jnp.where(slots >= 0, jnp.argmax(state.stamp * (state.stamp < 2**30)), slots).astype(jnp.int32)
        if self.fault == "short":
            slots = slots.at[0].set(jnp.where(state.round > 0, -1, slots[0]))
        if self.fault == "outside":
            slots = jnp.where(slots >= 0, slots + 7, slots)
        if self.fault == "shape":
            slots = slots[:-1]
        if self.fault == "dtype":
            slots = slots.astype(jnp.float32)
        if self.fault == "state":
            after = (after, after)
        return slots, after

    def forget(self, state, slots):
        return (LRU().forget(state, slots), 0) if self.fault == "forget" else LRU().forget(state, slots)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("protected", r"policy protected!, pool of \d+ slots, round \d+: expected victims that are its own, distinct"),
        ("outside", r"policy outside!, pool of \d+ slots, round \d+: expected victims that are its own"),
        ("short", r"policy short!, pool of 64 slots, round 0: expected a slot for every row that missed, found none"),
        ("shape", r"policy Wrong\(fault='shape'\): expected evict to return int32\[71\].*found int32\[70\]"),
        ("dtype", r"policy Wrong\(fault='dtype'\): expected evict to return int32\[71\].*found float32\[71\]"),
        ("state", r"policy Wrong\(fault='state'\): expected evict to return a state of the shapes it was given"),
        ("touch", r"policy Wrong\(fault='touch'\): expected touch to return a state of the shapes it was given"),
        ("forget", r"policy Wrong\(fault='forget'\): expected forget to return a state of the shapes it was given"),
    ],
)
def test_a_policy_that_breaks_its_promises_is_named(trace, fault, message):
    with pytest.raises(ValueError, match=message):
        replay(Wrong(fault), trace, [64, 71], name=f"{fault}!")


def test_sizes_and_traces_that_do_not_fit_say_why(trace):
    with pytest.raises(ValueError, match=r"expected at least the 48 slots that one round selects .* found 47"):
        replay(LRU(), trace, [64, 47])
    with pytest.raises(ValueError, match=r"sizes: expected at least one pool size"):
        replay(LRU(), trace, [])
    with pytest.raises(ValueError, match=r"warmup: expected 0 to 149 rounds, found 150"):
        replay(LRU(), trace, SIZES, warmup=150)
    with pytest.raises(ValueError, match=r"score_now: expected a trace with ranks up to 4 k, found 2 k"):
        replay(make_policy("score_now"), trace, SIZES, name="score_now")
    bare = Trace(trace.positions, trace.finished, 16, trace.length)
    with pytest.raises(ValueError, match=r"expected a trace with scores, found none"):
        replay(make_policy("score_now:depth=2.0"), bare, SIZES)
