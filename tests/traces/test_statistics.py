"""Statistics against sets in plain Python, on small random traces with requests that come and go."""

from collections import OrderedDict

import numpy as np
import pytest

from ula_jax.policies.base import NEVER
from ula_jax.traces import statistics
from ula_jax.traces.trace import Trace
from ula_jax.types import EMPTY


def random_trace(seed: int, streams: int = 2, rounds: int = 30, seats: int = 3, k: int = 4, length: int = 12) -> Trace:
    """Sizes from 0 to k, idle seats, requests that finish with and without a successor, runners-up."""
    rng = np.random.default_rng(seed)
    depth = k + 2
    order = np.argsort(rng.random((streams, rounds, seats, length)) + 0.05 * np.arange(length), axis=-1)
    positions = order[..., :depth].astype(np.int32)
    sizes = rng.integers(0, depth + 1, (streams, rounds, seats, 1))
    sizes[rng.random((streams, rounds, seats)) < 0.2] = 0
    positions[np.arange(depth) >= np.where(rng.random(sizes.shape) < 0.5, sizes, depth * (sizes > 0))] = EMPTY
    finished = rng.random((streams, rounds, seats)) < 0.1
    names = tuple(f"rank {i // 2} group {i % 2}" for i in range(streams))
    return Trace(positions, finished, k, length, streams=names)


def rows(trace: Trace, stream: int) -> list[list[list[tuple[int, int, int]]]]:
    """(seat, life, position) of every access, by round and seat."""
    lives = np.cumsum(trace.finished[stream], axis=0)
    return [
        [
            [(seat, int(lives[t, seat]), int(p)) for p in trace.selected[stream, t, seat] if p >= 0]
            for seat in range(trace.seats)
        ]
        for t in range(trace.num_rounds)
    ]


def flat(history):
    return [row for seats in history for seat in seats for row in seat]


@pytest.fixture(scope="module", params=range(3))
def trace(request):
    return random_trace(request.param)


def test_next_and_previous_use(trace):
    found, before = statistics.next_use(trace), statistics.previous_use(trace)
    for stream in range(2):
        history = rows(trace, stream)
        for t, seats in enumerate(history):
            for s, selected in enumerate(seats):
                places = np.nonzero(trace.selected[stream, t, s] >= 0)[0]
                for place, row in zip(places, selected, strict=True):
                    uses = [u for u in range(trace.num_rounds) if row in history[u][s]]
                    assert found[stream, t, s, place] == min((u for u in uses if u > t), default=NEVER)
                    assert before[stream, t, s, place] == max((u for u in uses if u < t), default=EMPTY)
    assert np.all(found[trace.selected < 0] == NEVER)
    assert np.all(before[trace.selected < 0] == EMPTY)


def test_overlap_with_the_round_before_and_the_stream_before(trace):
    found = statistics.overlap(trace)
    for stream in range(2):
        history, shares = rows(trace, stream), []
        for t in range(1, trace.num_rounds):
            for s in range(trace.seats):
                now, before = set(history[t][s]), set(history[t - 1][s])
                if now and before and not trace.finished[stream, t, s]:
                    shares.append(len(now & before) / len(now))
        assert found[stream] == pytest.approx(np.mean(shares))
    shares = [
        len(set(a) & set(b) - {EMPTY}) / len(set(b) - {EMPTY})
        for a, b in zip(trace.selected[0].reshape(-1, trace.k), trace.selected[1].reshape(-1, trace.k), strict=True)
        if max(b) >= 0
    ]
    np.testing.assert_allclose(statistics.stream_overlap(trace), [np.mean(shares)])


def test_streams_of_different_ranks_are_no_pair():
    assert statistics.stream_overlap(random_trace(0, streams=4)).shape == (2,)
    assert statistics.stream_overlap(random_trace(0, streams=1)).shape == (0,)


def unions(trace: Trace, stream: int, window: int) -> list[int]:
    history, lives = rows(trace, stream), np.cumsum(trace.finished[stream], axis=0)
    sizes = []
    for t in range(window - 1, trace.num_rounds):
        union = {row for u in range(t - window + 1, t + 1) for seat in history[u] for row in seat}
        sizes.append(sum(life == lives[t, seat] for seat, life, _ in union))
    return sizes


def test_working_sets(trace):
    windows = (1, 2, 5, 30, 31)
    found = statistics.working_set(trace, windows)
    for stream in range(2):
        busy = [sum(map(bool, seats)) for seats in rows(trace, stream)]
        for n, window in enumerate(windows[:-1]):
            sizes = zip(unions(trace, stream, window), busy[window - 1 :], strict=True)
            assert found[stream, n] == pytest.approx(np.mean([size / (trace.k * b) for size, b in sizes if b]))
    assert np.all(np.isnan(found[:, -1]))
    with pytest.raises(ValueError, match=r"rounds: expected windows of at least 1 round, found 0"):
        statistics.working_set(trace, (1, 0))


def test_the_ring_is_the_shortest_that_fills_the_pool(trace):
    for slots in (1, 10, 17):
        ring = statistics.ring_for(trace, slots)
        assert all(np.mean(unions(trace, stream, ring)) >= slots for stream in range(2))
        assert ring == 1 or any(np.mean(unions(trace, stream, ring - 1)) < slots for stream in range(2))
    assert statistics.ring_for(trace, 1000) == trace.num_rounds


def test_reuse_rounds(trace):
    found = statistics.reuse_rounds(trace)
    for stream in range(2):
        last, expected = {}, np.zeros(trace.num_rounds, int)
        for t, seats in enumerate(rows(trace, stream)):
            for row in flat([seats]):
                expected[t - last.get(row, t)] += 1
                last[row] = t
        np.testing.assert_array_equal(found[stream], expected)


def test_stack_distances_bound_exact_lru(trace):
    """LRU over an ordered dict, in two tie orders: what the distances say must miss misses, and what must hit hits."""
    distances = statistics.stack_distances(trace)
    sizes = range(trace.largest_round, 30)
    assert np.all(distances[trace.selected < 0] == EMPTY)
    undecided = 0
    for stream in range(2):
        history, lives = rows(trace, stream), np.cumsum(trace.finished[stream], axis=0)
        for size in sizes:
            for turn in (1, -1):
                held: OrderedDict[tuple[int, int, int], int] = OrderedDict()
                for t, seats in enumerate(history):
                    for row in [row for row in held if row[1] != lives[t, row[0]]]:
                        del held[row]
                    ties = {row: sum(other == used for other in held.values()) for row, used in held.items()}
                    hits = set(held)
                    now = flat([seats])
                    for row in now[::turn]:
                        held.pop(row, None)
                        held[row] = t
                    while len(held) > size:
                        held.popitem(last=False)
                    found = distances[stream, t][trace.selected[stream, t] >= 0]
                    for row, distance in zip(now, found, strict=True):
                        if distance >= size:
                            assert row not in hits
                        elif row not in hits:
                            assert distance != NEVER
                            undecided += 1
                        if row in hits:
                            assert distance < size
                            assert ties[row] >= 1
    accesses = int((distances >= 0).sum()) * len(sizes) * 2
    assert undecided < 0.1 * accesses


def test_distances_without_finished_requests_count_distinct_rows():
    trace = random_trace(5)
    trace = Trace(trace.positions, np.zeros_like(trace.finished), trace.k, trace.length)
    distances = statistics.stack_distances(trace)
    for stream in range(2):
        history, last = rows(trace, stream), {}
        for t, seats in enumerate(history):
            found = iter(distances[stream, t][trace.selected[stream, t] >= 0])
            for row in flat([seats]):
                between = set(flat(history[last.get(row, t) + 1 : t]))
                assert next(found) == (len(between) if row in last else NEVER)
            last |= {row: t for row in flat([seats])}


def test_summary(trace):
    facts = statistics.summary(trace)
    assert facts["requests"] == len({row[:2] for row in flat(rows(trace, 0))})
    assert facts["accesses"] == np.sum(trace.selected >= 0)
    assert facts["distinct_rows"] == sum(len(set(flat(rows(trace, stream)))) for stream in range(2))
    assert facts["overlap"] == pytest.approx(statistics.overlap(trace).mean())
    assert facts["working_set_8"] == pytest.approx(statistics.working_set(trace, (8,)).mean())
    assert "working_set_32" not in facts
    one = Trace(trace.positions[:, :1], trace.finished[:, :1], trace.k, trace.length)
    assert "overlap" not in statistics.summary(one)


def test_reuse_in_the_summary():
    """One row of three in each round, 0 1 0 0 2 1: read again after 2, 1 and 4 rounds."""
    selected = np.array([0, 1, 0, 0, 2, 1], np.int32).reshape(1, 6, 1, 1)
    facts = statistics.summary(Trace(selected, np.zeros((1, 6, 1), bool), 1, 3))
    assert [facts[f"reused_within_{n}"] for n in (1, 2, 4, 64)] == pytest.approx([1 / 6, 2 / 6, 3 / 6, 3 / 6])
