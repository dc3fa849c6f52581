"""Synthetic traces of sparse attention: which positions each request selects in each decoding step.

A position's indexer score is the sum of a part that never changes, a slow and a fast autoregressive part, and
white noise:

    score = static + 0.794 AR(0.9989) + f (0.646 AR(0.874) + 0.240 white)

A request selects the `k` highest scores, its newest position always among them. `f` scales what changes from
one step to the next and so sets the overlap of consecutive selections; `f = 1` resembles the published replay
of GLM-5.1 under HiSparse (arXiv 2608.07009). Finished requests are replaced by new ones under the same
number.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace

import numpy as np
from jaxtyping import Bool, Float32, Int32

from ula_jax.traces.statistics import overlap
from ula_jax.traces.trace import Trace

SLOW, SLOW_RATE = np.float32(0.7936), np.float32(0.9989)
FAST, FAST_RATE = np.float32(0.6464), np.float32(0.8739)
WHITE = np.float32(0.2395)
NEWEST = np.float32(50.0)  # above any score


@dataclass(frozen=True)
class TraceConfig:
    """Sizes and statistics of a trace; `positions` counts those that the longest request has at the start.

    The published replay: requests 1, positions 100384, rounds 1799, k 2048, overlap None, churn 0, shortest 1.
    """

    requests: int = 8
    positions: int = 6000
    rounds: int = 260
    k: int = 128
    overlap: float | None = 0.7
    """Share of a selection that was in the one before; None takes `fluctuation` as it stands."""
    fluctuation: float = 1.0
    """`f` above, where `overlap` is None."""
    churn: float = 0.004
    """Probability that a request ends before a round."""
    shortest: float = 0.7
    """Positions of the shortest request at the start, as a share of `positions`."""
    depth: float = 1.0
    """Ranks to keep, in units of `k`: above 1 for policies that look at scores or prefetch."""
    seed: int = 0

    def __post_init__(self):
        if min(self.requests, self.positions, self.rounds) < 1 or not 0 <= self.churn <= 1 or self.fluctuation < 0:
            raise ValueError(
                f"trace: expected requests, positions and rounds of at least 1, churn from 0 to 1 and a fluctuation "
                f"that is not negative, found {self}; correct them"
            )
        if not 0 < self.shortest <= 1:
            raise ValueError(f"shortest: expected a share above 0, at most 1, found {self.shortest}; give one there")
        least = int(self.shortest * self.positions)
        if not 1 <= self.k <= least:
            raise ValueError(
                f"k: expected 1 to {least} (the shortest request), found {self.k}; select fewer or raise positions"
            )
        if not 1 <= self.depth <= least / self.k:
            raise ValueError(
                f"depth: expected 1 to {least / self.k:.1f} (the shortest request), found {self.depth}; "
                f"keep fewer ranks or raise positions"
            )
        if self.overlap is not None and not 0 < self.overlap < 1:
            raise ValueError(f"overlap: expected between 0 and 1, found {self.overlap}; or None, with fluctuation")


def generate(config: TraceConfig) -> Trace:
    """A trace of `config.rounds` rounds in one stream; the same config gives the same trace."""
    fluctuation = config.fluctuation if config.overlap is None else fit_fluctuation(config)
    shape = (1, config.rounds, config.requests, int(config.depth * config.k))
    positions, scores = np.empty(shape, np.int32), np.empty(shape, np.float32)
    finished = np.empty((1, config.rounds, config.requests), bool)
    for t, (ranked, score, gone) in enumerate(_steps(config, fluctuation)):
        positions[0, t], scores[0, t], finished[0, t] = ranked, score, gone
    meta = {"source": "synthetic", **asdict(config), "fluctuation": fluctuation}
    return Trace(positions, finished, config.k, config.positions + config.rounds, scores, meta=meta)


def fit_fluctuation(config: TraceConfig, rounds: int = 40, halvings: int = 10) -> float:
    """The `f` at which consecutive selections overlap by `config.overlap`, by bisection on short traces."""
    assert config.overlap is not None
    low, high, found = 0.02, 6.0, 0.0
    for _ in range(halvings):
        middle = (low * high) ** 0.5
        probe = replace(config, rounds=rounds, overlap=None, fluctuation=middle, churn=0.0, depth=1.0)
        found = float(overlap(generate(probe)).mean())
        low, high = (middle, high) if found > config.overlap else (low, middle)
    if abs(found - config.overlap) > 0.03:
        raise ValueError(
            f"overlap: expected one that selections of {config.k} of {config.positions} positions can have, found "
            f"{config.overlap}; the nearest is {found:.2f}"
        )
    return (low * high) ** 0.5


def _steps(
    config: TraceConfig, fluctuation: float
) -> Iterator[
    tuple[Int32[np.ndarray, "requests depth"], Float32[np.ndarray, "requests depth"], Bool[np.ndarray, " requests"]]
]:
    rng = np.random.default_rng(config.seed)
    capacity = config.positions + config.rounds
    shape = (config.requests, capacity)

    def normal(*shape: int) -> Float32[np.ndarray, "..."]:
        return rng.standard_normal(shape, dtype=np.float32)

    def new_lengths(count: int) -> Int32[np.ndarray, " count"]:
        return rng.integers(int(config.shortest * config.positions), config.positions + 1, count, dtype=np.int32)

    def advance(part: Float32[np.ndarray, "requests positions"], rate: np.float32) -> None:
        part *= rate
        part += np.sqrt(1 - rate * rate) * normal(*shape)

    static, slow, fast = normal(*shape), normal(*shape), normal(*shape)
    lengths = new_lengths(config.requests)
    scale, rows, depth = np.float32(fluctuation), np.arange(config.requests), int(config.depth * config.k)
    for _ in range(config.rounds):
        finished = rng.random(config.requests) < config.churn
        if finished.any():
            lengths[finished] = new_lengths(int(finished.sum()))
            for part in (static, slow, fast):
                part[finished] = normal(int(finished.sum()), capacity)
        advance(slow, SLOW_RATE)
        advance(fast, FAST_RATE)
        score = static + SLOW * slow + scale * (FAST * fast + WHITE * normal(*shape))
        score[np.arange(capacity) >= lengths[:, None]] = -np.inf
        score[rows, lengths - 1] = NEWEST
        top = np.argpartition(score, capacity - depth, axis=1)[:, capacity - depth :]
        best = np.take_along_axis(score, top, axis=1)
        order = np.argsort(-best, axis=1, kind="stable")
        yield np.take_along_axis(top, order, axis=1), np.take_along_axis(best, order, axis=1), finished
        lengths = np.minimum(lengths + 1, capacity)
