"""Selection traces: which rows each request read in each round, with the scores that chose them."""

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from jaxtyping import Bool, Float32, Int32

from ula_jax.types import EMPTY


@dataclass(frozen=True)
class Trace:
    """Some streams of selections, each with a pool of its own: one layer group of one rank.

    A *seat* is a place for one request at a time. When a request finishes, its rows are gone and the next one in the
    seat starts anew; row (seat, position) is then another row.
    """

    positions: Int32[np.ndarray, "streams rounds seats depth"]
    """Positions by descending score, EMPTY padded. The first `k` are the selection, the others runners-up."""
    finished: Bool[np.ndarray, "streams rounds seats"]
    """The seat's request was replaced, or left, before this round."""
    k: int
    """Rows that a request selects in a round, at most."""
    length: int
    """Every position is below this number."""
    scores: Float32[np.ndarray, "streams rounds seats depth"] | None = None
    """Indexer scores of `positions`; None where the source has none (then the order within a row means nothing)."""
    streams: tuple[str, ...] = ()
    """A name of each stream, such as `rank 0 group 2`."""
    row_bytes: tuple[int, ...] = ()
    """Bytes that move when one row of a stream moves: all layers of the group. Empty: 1 each."""
    meta: dict[str, Any] = field(default_factory=dict)
    """Where it comes from: model, command, versions, date."""

    def __post_init__(self):
        streams, _, _, depth = self.positions.shape
        if not 1 <= self.k <= depth:
            raise ValueError(f"trace: expected k from 1 to the {depth} positions of a round, found {self.k}")
        for name in ("streams", "row_bytes"):
            if len(getattr(self, name)) not in (0, streams):
                raise ValueError(f"trace: expected {streams} {name}, found {len(getattr(self, name))}")

    @property
    def num_rounds(self) -> int:
        return self.positions.shape[1]

    @property
    def seats(self) -> int:
        return self.positions.shape[2]

    @property
    def depth(self) -> float:
        """Ranks that are known, in units of k."""
        return self.positions.shape[3] / self.k

    @property
    def stream_names(self) -> tuple[str, ...]:
        return self.streams or tuple(f"stream {i}" for i in range(len(self.positions)))

    @cached_property
    def largest_round(self) -> int:
        """Most rows that one round of one stream selects, over all seats: the smallest pool, and `1k` on commands."""
        return int(np.max(np.sum(self.selected >= 0, axis=(2, 3)), initial=1))

    @cached_property
    def stream_row_bytes(self) -> np.ndarray:
        """int64 [streams]."""
        return np.asarray(self.row_bytes or [1] * len(self.positions), np.int64)

    @cached_property
    def addresses(self) -> Int32[np.ndarray, "streams rounds seats depth"]:
        """`positions` made distinct over the seats: `seat * length + position`."""
        base = np.arange(self.seats, dtype=np.int32)[:, None] * self.length
        return np.where(self.positions >= 0, self.positions + base, EMPTY).astype(np.int32)

    @property
    def selected(self) -> Int32[np.ndarray, "streams rounds seats k"]:
        """The selections alone."""
        return self.positions[..., : self.k]
