"""What a run cost: rows and bytes over each link, hit rate, and how many copies of each row exist."""

from dataclasses import dataclass, field

import numpy as np

from ula_jax.placements.base import Counters
from ula_jax.spec import KVSpec


@dataclass
class Totals:
    """Sums of the step counters over steps, devices and layer groups; bytes count every layer of a group."""

    spec: KVSpec
    steps: int = 0
    tokens: int = 0
    rows: np.ndarray = field(init=False)
    """int64 [groups, len(Counters)], summed over devices."""

    def __post_init__(self):
        self.rows = np.zeros((len(self.spec.groups), len(Counters._fields)), np.int64)

    def add(self, counters: np.ndarray, tokens: int) -> None:
        """Counters int32 [devices, groups, len(Counters)] of one step that computed `tokens` tokens."""
        self.rows += counters.astype(np.int64).sum(axis=0)
        self.steps += 1
        self.tokens += tokens

    def count(self, name: str) -> int:
        return int(self.rows[:, Counters._fields.index(name)].sum())

    def nbytes(self, name: str) -> int:
        layers = np.array([len(group) for group in self.spec.groups])
        return int((self.rows[:, Counters._fields.index(name)] * layers).sum()) * self.spec.row.nbytes

    @property
    def device_hit_rate(self) -> float:
        """Share of the stored rows looked up that were on the device; 1 before any look-up."""
        unique = self.count("unique")
        return self.count("hits") / unique if unique else 1.0

    @property
    def buffer_hit_rate(self) -> float:
        """Share of the selected entries, over all devices, that were in selected buffers."""
        selected = self.count("selected")
        return self.count("buffer_hits") / selected if selected else 0.0

    @property
    def h2d_bytes(self) -> int:
        return self.nbytes("host_fetches")

    @property
    def d2h_bytes(self) -> int:
        return self.nbytes("written_back")

    @property
    def peer_bytes(self) -> int:
        """Payload that devices received from their peers."""
        return self.nbytes("peer_rows")


@dataclass(frozen=True)
class Residency:
    """Rows stored over all devices and their host pools at one moment, read off the state's own maps."""

    distinct: int
    stored: int
    row_bytes: int

    @property
    def distinct_share(self) -> float:
        return self.distinct / self.stored if self.stored else 1.0

    @property
    def duplicate_bytes(self) -> int:
        return (self.stored - self.distinct) * self.row_bytes
