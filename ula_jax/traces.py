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
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float32, Int32

SLOW, SLOW_RATE = np.float32(0.7936), np.float32(0.9989)
FAST, FAST_RATE = np.float32(0.6464), np.float32(0.8739)
WHITE = np.float32(0.2395)
NEWEST = np.float32(50.0)  # above any score


@dataclass(frozen=True)
class TraceConfig:
    """Sizes and statistics of a trace; `positions` counts those that the longest request has at the start."""

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
    seed: int = 0

    def __post_init__(self):
        if not 1 <= self.k <= int(0.7 * self.positions):
            raise ValueError(
                f"k: expected 1 to {int(0.7 * self.positions)} (the shortest request), found {self.k}; "
                f"select fewer or raise positions"
            )
        if self.overlap is not None and not 0 < self.overlap < 1:
            raise ValueError(f"overlap: expected between 0 and 1, found {self.overlap}; or None, with fluctuation")


@dataclass(frozen=True)
class Trace:
    """One layer group's selections."""

    selected: Int32[np.ndarray, "rounds requests k"]
    """Positions, ascending in each row."""
    finished: Bool[np.ndarray, "rounds requests"]
    """The request was replaced before this round: its rows are gone, its positions start anew."""
    positions: int
    """Every position is below this number."""

    def addresses(self) -> Int32[np.ndarray, "rounds requests k"]:
        """Positions made distinct over the requests: `request * positions + position`."""
        base = np.arange(self.selected.shape[1], dtype=np.int32) * self.positions
        return self.selected + base[None, :, None]

    def overlap(self) -> float:
        """Mean share of a selection that was in the same request's selection one round earlier."""
        shares = [
            np.intersect1d(before, now, assume_unique=True).size / now.size
            for t in range(1, len(self.selected))
            for before, now, new in zip(self.selected[t - 1], self.selected[t], self.finished[t], strict=True)
            if not new
        ]
        return float(np.mean(shares))


def generate(config: TraceConfig) -> Trace:
    """A trace of `config.rounds` rounds; the same config gives the same trace."""
    fluctuation = config.fluctuation if config.overlap is None else fit_fluctuation(config)
    steps = list(_steps(config, fluctuation))
    return Trace(
        selected=np.stack([selected for selected, _ in steps]),
        finished=np.stack([finished for _, finished in steps]),
        positions=config.positions + config.rounds,
    )


def fit_fluctuation(config: TraceConfig, rounds: int = 40, halvings: int = 10) -> float:
    """The `f` at which consecutive selections overlap by `config.overlap`, by bisection on short traces."""
    assert config.overlap is not None
    low, high = 0.02, 6.0
    for _ in range(halvings):
        middle = (low * high) ** 0.5
        probe = TraceConfig(
            config.requests,
            config.positions,
            rounds,
            config.k,
            None,
            middle,
            churn=0.0,
            seed=config.seed,
        )
        if generate(probe).overlap() > config.overlap:
            low = middle
        else:
            high = middle
    return (low * high) ** 0.5


def _steps(
    config: TraceConfig, fluctuation: float
) -> Iterator[tuple[Int32[np.ndarray, "requests k"], Bool[np.ndarray, " requests"]]]:
    rng = np.random.default_rng(config.seed)
    capacity = config.positions + config.rounds
    shape = (config.requests, capacity)

    def normal(*shape: int) -> Float32[np.ndarray, "..."]:
        return rng.standard_normal(shape, dtype=np.float32)

    def new_lengths(count: int) -> Int32[np.ndarray, " count"]:
        return rng.integers(int(0.7 * config.positions), config.positions + 1, count, dtype=np.int32)

    def advance(part: Float32[np.ndarray, "requests positions"], rate: np.float32) -> None:
        part *= rate
        part += np.sqrt(1 - rate * rate) * normal(*shape)

    static, slow, fast = normal(*shape), normal(*shape), normal(*shape)
    lengths = new_lengths(config.requests)
    scale, rows = np.float32(fluctuation), np.arange(config.requests)
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
        top = np.argpartition(score, capacity - config.k, axis=1)[:, capacity - config.k :]
        yield np.sort(top, axis=1).astype(np.int32), finished
        lengths = np.minimum(lengths + 1, capacity)
