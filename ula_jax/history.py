"""One step's view of the stored history: what the model calls while it is traced.

The model asks by layer and group only. History finds the selected addresses, lets the placement make them readable,
and hands attention over. It carries the state through the trace; `finish` gives it back.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.pytree import pytree
from ula_jax import index_keys
from ula_jax.index_keys import Gather, Keys
from ula_jax.parallel import TP
from ula_jax.placements.base import Counters, Placement, Query, Readable, Selection
from ula_jax.policies.base import depth, margins
from ula_jax.spec import KVSpec
from ula_jax.types import EMPTY, Array, Bool, Float32, Int32


@pytree()
@dataclass(frozen=True)
class KVState:
    """All stored history: a placement's state and the index keys of each layer group."""

    groups: tuple[Any, ...]
    index_keys: tuple[Keys, ...]


@pytree()
@dataclass(frozen=True)
class Batch:
    """The tokens of one step on one rank; a row of `tokens` belongs to one request."""

    tokens: Int32[Array | np.ndarray, "*ranks batch steps"]
    start: Int32[Array | np.ndarray, "*ranks batch"]
    """Position of the first token of each row."""
    count: Int32[Array | np.ndarray, "*ranks batch"]
    """Real tokens of each row; the rest is padding."""
    page_table: Int32[Array | np.ndarray, "*ranks batch pages"]
    requests: Int32[Array | np.ndarray, "*ranks batch"]
    """Number of each request within its rank, EMPTY for padding."""
    driven: Int32[Array | np.ndarray, "*ranks groups batch steps topk"] | None = None
    """Positions to read instead of those that the indexers pick, ascending, none twice, EMPTY padded: a replayed trace.
    The indexers do their work all the same."""

    @property
    def valid(self) -> Bool[Array, "batch steps"]:
        return jnp.arange(self.tokens.shape[1]) < self.count[:, None]

    @property
    def positions(self) -> Int32[Array, "batch steps"]:
        """Position of each token, 0 for padding."""
        return jnp.where(self.valid, self.start[:, None] + jnp.arange(self.tokens.shape[1]), 0)


class History:
    """Lives while one step is traced, inside shard_map; arrays are one device's part.

    `capture` keeps the best-scored positions of each row's last token in `ranked`: that many times `topk`. `resident`
    says that every row is on the device in this step (`Selection.resident`), `gather` what devices of a stripe send
    each other to select.
    """

    def __init__(
        self,
        spec: KVSpec,
        placement: Placement,
        state: KVState,
        batch: Batch,
        capture: float = 0.0,
        resident: bool = False,
        gather: Gather = "scores",
    ):
        self.spec, self.placement, self.batch = spec, placement, batch
        self.resident = resident
        self.gather: Gather = gather
        self.groups, self.index_keys = list(state.groups), list(state.index_keys)
        self.counters: dict[int, Counters] = {}
        self.selected: dict[int, Array] = {}
        """Selected positions [batch, steps, topk] of each group, EMPTY padded."""
        self.overruled: dict[int, Array] = {}
        """Sum of the positions that the indexer of each driven group picked: what keeps its work from being dropped."""
        self.ranked: dict[int, tuple[Array, Array]] = {}
        """Positions and scores [batch, depth] by rank at each row's last token, EMPTY padded."""
        looks = depth(getattr(placement, "policy", None))
        self._looks = int(looks * spec.topk) if looks > 1 else 0
        self._ranks = max(self._looks, int(capture * spec.topk))
        self._readable: dict[int, Readable] = {}
        self._place = {layer: (g, i) for g, layers in enumerate(spec.groups) for i, layer in enumerate(layers)}
        striped = placement.striping.devices > 1
        self._rank = jax.lax.axis_index(TP) if striped else 0
        self._table = jnp.asarray(batch.page_table)
        self._new = jnp.where(batch.valid, self._address(batch.positions), EMPTY)

    def select(
        self,
        group: int,
        query: Float32[Array, "batch steps heads dim"],
        weights: Float32[Array, "batch steps heads"],
        key: Float32[Array, "batch steps dim"],
    ) -> None:
        """Store the tokens' index keys, score every position, and make the best `topk` readable for this group."""
        striping, table = self.placement.striping, self._table
        fmt = self.spec.index_key
        keys = index_keys.append(fmt, self.index_keys[group], self._new, key, striping, self._rank)
        self.index_keys[group] = keys
        lengths = jnp.where(self.batch.valid, self.batch.positions + 1, 0)
        with jax.named_scope("index_scores"):
            scored = index_keys.score(
                keys, table, self.spec.page_size, query, weights, lengths, striping, self.placement.parallel,
                self.gather, max(self.spec.topk, self._ranks),
            )  # fmt: skip
        with jax.named_scope("top_k"):
            picks = scored.best(self.spec.topk)
            if self._ranks:
                self.ranked[group] = self._at_last_token(*scored.ranked(self._ranks))
        if self.batch.driven is not None:
            picks, driven = jax.lax.optimization_barrier((picks, jnp.asarray(self.batch.driven)[group]))
            self.overruled[group], picks = jnp.sum(picks), driven
        self._resolve(group, picks)

    def select_all(self, group: int) -> None:
        """Make every earlier position readable: dense attention."""
        positions = jnp.arange(self.spec.table_width * self.spec.page_size)
        visible = positions <= self.batch.positions[..., None]
        self._resolve(group, jnp.where(visible, positions, EMPTY))

    def attend(
        self,
        layer: int,
        query: Float32[Array, "batch steps heads width"],
        row: Float32[Array, "batch steps width"],
        scale: float,
    ) -> Float32[Array, "batch steps heads latent"]:
        """Store the tokens' rows of this layer and attend to the selected rows, the new ones among them."""
        group, place = self._place[layer]
        readable, fmt = self._readable[group], self.spec.row
        # Behind a barrier: computed once, wherever they are stored, and so with one set of bits.
        rows = jax.lax.optimization_barrier(fmt.pack(row.reshape(-1, row.shape[-1])))
        with jax.named_scope("append"):
            state = self.placement.append(self.groups[group], place, readable, rows)
        self.groups[group] = state
        with jax.named_scope("attend"):
            return self.placement.attend(state, place, readable, Query(query, scale, fmt)).output

    def finish(self) -> tuple[KVState, Int32[Array, "groups counters"]]:
        """The state after the step, and what each group did."""
        counters = jnp.stack([jnp.stack(self.counters[g]) for g in sorted(self.counters)])
        return KVState(tuple(self.groups), tuple(self.index_keys)), counters

    @jax.named_scope("resolve")
    def _resolve(self, group: int, positions: Int32[Array, "batch steps topk"]) -> None:
        """Positions come in ascending order: the order in which attention sums is then part of no placement."""
        positions = jnp.where(self.batch.valid[..., None], positions, EMPTY)
        self.selected[group] = positions
        flat = positions.reshape(positions.shape[0], -1)
        addresses = jnp.where(flat >= 0, self._address(jnp.maximum(flat, 0)), EMPTY).reshape(positions.shape)
        ranked = jnp.zeros((positions.shape[0], 0), jnp.int32)
        above = ranked.astype(jnp.float32)
        if self._looks and group in self.ranked:
            best, scores = (array[:, : self._looks] for array in self.ranked[group])
            ranked = jnp.where(best >= 0, self._address(jnp.maximum(best, 0)), EMPTY)
            above = margins(scores, ranked, positions.shape[-1])
        selection = Selection(addresses, self._new, jnp.asarray(self.batch.requests), ranked, above, self.resident)
        readable, self.groups[group], counters = self.placement.resolve(self.groups[group], selection)
        self._readable[group], self.counters[group] = readable, counters

    def _at_last_token(
        self, positions: Int32[Array, "batch steps depth"], scores: Float32[Array, "batch steps depth"]
    ) -> tuple[Int32[Array, "batch depth"], Float32[Array, "batch depth"]]:
        last = jnp.maximum(jnp.asarray(self.batch.count) - 1, 0)[:, None, None]
        positions, scores = (jnp.take_along_axis(array, last, axis=1)[:, 0] for array in (positions, scores))
        seen = (scores > -jnp.inf) & (jnp.asarray(self.batch.count)[:, None] > 0)
        return jnp.where(seen, positions, EMPTY), jnp.where(seen, scores, -jnp.inf)

    def _address(self, positions: Int32[Array, "batch n"]) -> Int32[Array, "batch n"]:
        return index_keys.address(self._table, self.spec.page_size, positions)
