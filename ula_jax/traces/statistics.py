"""What a trace says about caching: overlaps, working sets, reuse; numpy, exact.

A *row* is a position of one request's life: after `finished`, the same position of the seat is another row. An *access*
is one selected row in one round. Runners-up do not count anywhere here.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Float64, Int32, Int64

from ula_jax.policies.base import NEVER
from ula_jax.traces.trace import Trace
from ula_jax.types import EMPTY

Uses = Int32[np.ndarray, "streams rounds seats k"]

WINDOWS = (1, 2, 4, 8, 16, 32, 64)


def row_numbers(trace: Trace) -> Int64[np.ndarray, "streams rounds seats k"]:
    """A number of the row that each access reads, distinct within its stream; EMPTY padding."""
    return np.where(trace.selected >= 0, trace.selected + _lives(trace)[..., None] * trace.length, EMPTY)


def consecutive(rows: Int64[np.ndarray, " n"]) -> tuple[Int64[np.ndarray, " reuses"], Int64[np.ndarray, " reuses"]]:
    """Places of every two equal numbers with none like them between; EMPTY ignored."""
    order = np.argsort(rows, kind="stable")
    order = order[np.searchsorted(rows, 0, sorter=order) :]
    same = rows[order[1:]] == rows[order[:-1]]
    return order[:-1][same], order[1:][same]


def next_use(trace: Trace) -> Uses:
    """Round of the next access to the same row, NEVER if there is none (also for padding)."""
    result = np.full(trace.selected.shape, NEVER, np.int32)
    for uses, rows in zip(result, row_numbers(trace), strict=True):
        now, later = consecutive(rows.reshape(-1))
        uses.reshape(-1)[now] = later // uses[0].size
    return result


def previous_use(trace: Trace) -> Uses:
    """Round of the access to the same row before this one, EMPTY if there is none (also for padding)."""
    result = np.full(trace.selected.shape, EMPTY, np.int32)
    for uses, rows in zip(result, row_numbers(trace), strict=True):
        now, later = consecutive(rows.reshape(-1))
        uses.reshape(-1)[later] = now // uses[0].size
    return result


def overlap(trace: Trace, uses: Uses | None = None) -> Float64[np.ndarray, " streams"]:
    """Mean share of a selection that was in the same request's selection one round before; nan where there is no pair.

    `uses` is `next_use(trace)` if already at hand, here and below.
    """
    uses = next_use(trace) if uses is None else uses
    sizes = np.sum(trace.selected >= 0, axis=3)
    rounds = np.arange(1, trace.num_rounds, dtype=np.int32)[:, None, None]
    kept = np.sum(uses[:, :-1] == rounds, axis=3)
    pairs = (sizes[:, :-1] > 0) & (sizes[:, 1:] > 0) & ~trace.finished[:, 1:]
    share = np.where(pairs, kept / np.maximum(sizes[:, 1:], 1), 0.0)
    return _ratio(share.sum(axis=(1, 2)), pairs.sum(axis=(1, 2)))


def stream_overlap(trace: Trace) -> Float64[np.ndarray, " pairs"]:
    """Mean share of a selection that the stream before selects too, in the same round and seat.

    Pairs are streams next to each other with the same rank in their names (what stands before ` group `): neighbouring
    layer groups.
    """
    ranks = _ranks(trace)
    pairs = [i for i in range(1, len(ranks)) if ranks[i - 1] == ranks[i]]
    means = np.empty(len(pairs))
    for n, i in enumerate(pairs):
        both = np.sort(np.concatenate([trace.selected[i - 1], trace.selected[i]], axis=2), axis=2)
        shared = np.sum((both[..., 1:] == both[..., :-1]) & (both[..., 1:] >= 0), axis=2)
        sizes = np.sum(trace.selected[i] >= 0, axis=2)
        means[n] = _ratio(np.sum(shared / np.maximum(sizes, 1)), np.sum(sizes > 0))
    return means


def working_set(
    trace: Trace, rounds: Sequence[int] = WINDOWS, uses: Uses | None = None
) -> Float64[np.ndarray, "streams windows"]:
    """W(R) / k: distinct rows that the last R rounds selected, per seat in use and in units of k.

    Mean over the rounds that have R - 1 rounds before them and at least one seat in use; nan if there is none. Rows of
    finished requests do not count: no cache holds them. ValueError for a window below 1.
    """
    if min(rounds, default=1) < 1:
        raise ValueError(f"rounds: expected windows of at least 1 round, found {min(rounds)}; leave it out")
    uses = next_use(trace) if uses is None else uses
    seats = np.sum(np.any(trace.selected >= 0, axis=3), axis=2)
    result = np.full((len(uses), len(rounds)), np.nan)
    for n, window in enumerate(rounds):
        sizes, busy = _unions(trace, uses, window), seats > 0
        busy[:, : window - 1] = False
        share = np.where(busy, sizes / (trace.k * np.maximum(seats, 1)), 0.0)
        result[:, n] = _ratio(share.sum(axis=1), busy.sum(axis=1))
    return result


def ring_for(trace: Trace, slots: int, uses: Uses | None = None) -> int:
    """Smallest R at which W(R), the rows that the last R rounds select, fills a pool of `slots` in every stream.

    PB-LRU with this many buckets behaves as LRU does up to ties. W(R) is the mean over the rounds with R - 1 rounds
    before them. At most the rounds of the trace: then the pool holds nearly all that the trace ever selects.
    """
    uses = next_use(trace) if uses is None else uses
    used = np.any(trace.selected >= 0, axis=(1, 2, 3))  # a rank may never have had a request

    def fills(window: int) -> bool:
        return bool(np.all(_unions(trace, uses, window)[used, window - 1 :].mean(axis=1) >= slots))

    low, high = 0, 1
    while high < trace.num_rounds and not fills(high):
        low, high = high, 2 * high
    high = min(high, trace.num_rounds)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if fills(middle) else (middle, high)
    return high


def reuse_rounds(trace: Trace, uses: Uses | None = None) -> Int64[np.ndarray, "streams rounds"]:
    """Accesses by rounds since the row's last use; entry 0 counts first uses."""
    uses = next_use(trace) if uses is None else uses
    waits = uses - np.arange(trace.num_rounds, dtype=np.int32)[:, None, None]
    again = uses != NEVER
    result = np.stack([np.bincount(w[a], minlength=trace.num_rounds) for w, a in zip(waits, again, strict=True)])
    result[:, 0] = np.sum(trace.selected >= 0, axis=(1, 2, 3)) - again.sum(axis=(1, 2, 3))
    return result.astype(np.int64)


def stack_distances(trace: Trace) -> Uses:
    """LRU stack distance of every access, in rows, at the granularity of rounds; NEVER for first uses, EMPTY padding.

    For an access in round t to a row last used in round p: the most rows, over rounds u with p < u < t, that were used
    in rounds p + 1 to u and whose request still lives in round u. (Without finished requests: the distinct rows used
    strictly between p and t.) Exact LRU with `size` slots that never evicts a row of the current round misses if
    distance >= size, and hits if distance + ties <= size, where the ties are the row and those that were last used in
    p as well. Takes O(rounds^2 + accesses) time for each stream.
    """
    previous, ends = previous_use(trace), _ends(trace, next_use(trace))
    result = np.where(trace.selected >= 0, NEVER, EMPTY).astype(np.int32)
    for distances, before, end, used in zip(result, previous, ends, trace.selected >= 0, strict=True):
        total = trace.num_rounds
        count = np.zeros(total, np.int64)  # rows by round of last use
        most = np.zeros(total, np.int64)  # of newer rows at any time since that round
        began = np.nonzero(used)[0]
        ended = end[used]
        order = np.argsort(ended, kind="stable")
        first = np.searchsorted(ended[order], np.arange(total + 1))
        for t in range(total):
            again = before[t] >= 0
            distances[t][again] = most[before[t][again]]
            count -= np.bincount(began[order[first[t] : first[t + 1]]], minlength=total)
            count[t] = np.count_nonzero(used[t])
            newer = np.cumsum(count[t:0:-1])[::-1]  # rows last used after round 0, 1, ... t - 1
            np.maximum(most[:t], newer, out=most[:t])
    return result


def summary(trace: Trace) -> dict[str, Any]:
    """Sizes and means over streams, ready for a table or JSON; what a short trace does not have is left out.

    `reused_within_n` is the share of accesses to a row that was read in one of the n rounds before.

    `requests` is counted in the first stream of each rank, `distinct_rows` in every stream.
    """
    uses = next_use(trace)
    reuse = reuse_rounds(trace, uses)
    firsts = [_ranks(trace).index(rank) for rank in dict.fromkeys(_ranks(trace))]
    lives, active = _lives(trace), np.any(trace.selected >= 0, axis=3)
    requests = sum(np.unique(lives[i][active[i]]).size for i in firsts)
    first, accesses = int(reuse[:, 0].sum()), int(reuse.sum())
    facts = {
        "rounds": trace.num_rounds,
        "seats": trace.seats,
        "streams": len(trace.positions),
        "k": trace.k,
        "depth": trace.depth,
        "length": trace.length,
        "scores": trace.scores is not None,
        "requests": requests,
        "accesses": accesses,
        "distinct_rows": first,
        "first_use_share": first / max(1, accesses),
        "overlap": _mean(overlap(trace, uses)),
        "stream_overlap": _mean(stream_overlap(trace)),
    }
    within = np.cumsum(reuse[:, 1:].sum(axis=0))
    facts |= {
        f"reused_within_{n}": float(within[min(n, within.size) - 1] / max(1, accesses)) for n in WINDOWS if within.size
    }
    means = working_set(trace, WINDOWS, uses)
    facts |= {f"working_set_{window}": _mean(mean) for window, mean in zip(WINDOWS, means.T, strict=True)}
    return {key: value for key, value in facts.items() if value is not None}


def _ranks(trace: Trace) -> list[str]:
    return [name.rpartition(" group ")[0] for name in trace.stream_names]


def _lives(trace: Trace) -> Int64[np.ndarray, "streams rounds seats"]:
    """A number of the request life in each seat and round, distinct within a stream."""
    nth = np.cumsum(trace.finished, axis=1, dtype=np.int64)
    counts = nth[:, -1:] + 1 if trace.num_rounds else nth
    return nth + np.cumsum(counts, axis=2) - counts


def _ends(trace: Trace, uses: Uses) -> Uses:
    """Round in which the row's last use is no longer this access: used again or gone; `num_rounds` if neither."""
    rounds = np.arange(trace.num_rounds, dtype=np.int32)[:, None]
    marks = np.where(trace.finished, rounds, np.int32(trace.num_rounds))
    after = np.full_like(marks, trace.num_rounds)
    after[:, :-1] = np.minimum.accumulate(marks[:, :0:-1], axis=1)[:, ::-1]
    return np.minimum(uses, after[..., None])


def _unions(trace: Trace, uses: Uses, window: int) -> Int64[np.ndarray, "streams rounds"]:
    """Rows that the last `window` rounds selected (fewer at the start) and whose requests live, in each round."""
    total = trace.num_rounds
    begins = np.arange(total, dtype=np.int32)[:, None, None]
    used = trace.selected >= 0
    leaves = np.minimum(_ends(trace, uses), begins + window)
    gone = np.stack([np.bincount(e[u], minlength=total + window)[:total] for e, u in zip(leaves, used, strict=True)])
    return np.cumsum(used.sum(axis=(2, 3)) - gone, axis=1).astype(np.int64)


def _ratio(total: Any, count: Any) -> Any:
    return np.where(count > 0, total / np.maximum(count, 1), np.nan)


def _mean(values: Float64[np.ndarray, " n"]) -> float | None:
    known = values[~np.isnan(values)]
    return float(known.mean()) if known.size else None
