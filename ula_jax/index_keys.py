"""Index keys of one layer group: on the device in every placement, striped like the rows.

A device scores the positions that it owns. One all-gather then gives every device all scores (UlaCache's way), or only
each device's best with their positions, which is less where contexts are long.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import topk
from pallas_kernels.index_scores import address, paged_index_scores
from ula_jax.parallel import TP, Parallel
from ula_jax.rows import E4M3_MAX, FormatName
from ula_jax.striping import Striping
from ula_jax.types import EMPTY, Addresses, Array, Float32, Int32, Scalar

Gather = Literal["scores", "candidates"]
"""What devices of a stripe send each other for one token: 4 bytes for each position that a request may have, or 8 for
each of the best of each device."""

Keys = tuple[Array, ...]
"""Keys of one layer group by address: (numbers [addresses, dim],), or (codes [addresses, dim], scales [addresses])."""


@dataclass(frozen=True)
class KeyFormat:
    """Stores keys of `dim` numbers in the precision of the rows.

    fp8 are e4m3 codes and one float32 scale a key, 132 bytes for 128 numbers, as DeepSeek and vLLM store them, but in
    two arrays, so that reads stay aligned. DeepSeek first multiplies key and query by a Hadamard matrix, which spreads
    outliers over all numbers of a key: left out, because it only helps precision.
    """

    name: FormatName
    dim: int
    """Numbers in a key; 0 for models without an indexer."""

    @property
    def lanes(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """What is stored of one key, array by array."""
        if not self.dim:
            return ()
        if self.name == "fp8":
            return jax.ShapeDtypeStruct((self.dim,), jnp.float8_e4m3fn), jax.ShapeDtypeStruct((), jnp.float32)
        return (jax.ShapeDtypeStruct((self.dim,), jnp.float32 if self.name == "fp32" else jnp.bfloat16),)

    @property
    def nbytes(self) -> int:
        """Bytes of one key."""
        return sum(lane.size * lane.dtype.itemsize for lane in self.lanes)

    def init(self, addresses: int) -> Keys:
        """Keys of zeros."""
        return tuple(jnp.zeros((addresses, *lane.shape), lane.dtype) for lane in self.lanes)

    def pack(self, keys: Float32[Array, "n dim"]) -> Keys:
        """Keys as they are stored."""
        if self.name != "fp8":
            return (keys.astype(self.lanes[0].dtype),)
        amax = jnp.max(jnp.abs(keys), axis=-1, keepdims=True)
        scale = jnp.where(amax > 0, amax / E4M3_MAX, 1.0)
        return jnp.clip(keys / scale, -E4M3_MAX, E4M3_MAX).astype(jnp.float8_e4m3fn), scale[:, 0]


def append(
    fmt: KeyFormat,
    keys: Keys,
    addresses: Addresses,
    new: Float32[Array, "batch steps dim"],
    striping: Striping,
    rank: Scalar | int,
) -> Keys:
    """Keys with those of the new addresses [batch, steps] written where this device owns them."""
    local = striping.local(addresses.reshape(-1), rank)
    rows = fmt.pack(new.reshape(-1, new.shape[-1]))
    return tuple(
        lane.at[local].set(row, mode="drop", wrap_negative_indices=False) for lane, row in zip(keys, rows, strict=True)
    )


class Scored(NamedTuple):
    """Positions that may be selected, ascending, and their index scores; the same on every device."""

    scores: Float32[Array, "batch steps n"]
    lengths: Int32[Array, "batch steps"]
    """How many there are; the others are -inf."""
    positions: Int32[Array, "batch steps n"] | None
    """EMPTY padded; None where number i is position i."""

    def best(self, k: int) -> Int32[Array, "batch steps best"]:
        """Positions of the k best, ascending, EMPTY padded."""
        return self._positions(topk.select(self.scores, k, self.lengths))

    def ranked(self, k: int) -> tuple[Int32[Array, "batch steps ranks"], Float32[Array, "batch steps ranks"]]:
        """Positions and scores of the k best, best first."""
        at = topk.top_k(self.scores, min(k, self.scores.shape[-1]))
        return self._positions(at), jnp.take_along_axis(self.scores, at, axis=-1)

    def _positions(self, at: Int32[Array, "batch steps k"]) -> Int32[Array, "batch steps k"]:
        if self.positions is None:
            return at
        return jnp.where(at >= 0, jnp.take_along_axis(self.positions, jnp.maximum(at, 0), axis=-1), EMPTY)


def score(
    keys: Keys,
    page_table: Int32[Array, "batch pages"],
    page_size: int,
    query: Float32[Array, "batch steps heads dim"],
    weights: Float32[Array, "batch steps heads"],
    lengths: Int32[Array, "batch steps"],
    striping: Striping,
    parallel: Parallel,
    gather: Gather = "scores",
    most: int = 0,
) -> Scored:
    """Score the first `lengths` positions, which are those that each token sees. Gathering `candidates`, only the best
    `most` of each device are there: all of the best `most` among them.

    A device owns a P-th of the rows of each page, so its part is paged like the whole, with pages of a P-th of the
    size.

    Under TP positions are scored in as many parts as there are devices, part r being positions r mod P, whether one
    device has all parts or each its own: the shape of an XLA product decides the order of its sums, and so its bits.
    """
    devices = striping.devices
    if devices == 1:
        every = paged_index_scores(query, weights, keys, page_table, page_size, lengths, parts=parallel.tp)
        return Scored(every, lengths, None)
    rank = jax.lax.axis_index(TP)
    owned = striping.owned(lengths, rank)
    part = paged_index_scores(query, weights, keys, page_table, page_size // devices, owned)
    if gather == "scores":
        return Scored(striping.in_order(jax.lax.all_gather(part, TP, axis=-1)), lengths, None)
    best = topk.select(part, most, owned)
    found = jnp.where(best >= 0, jnp.take_along_axis(part, jnp.maximum(best, 0), axis=-1), -jnp.inf)
    pairs = jnp.stack([striping.address(best, rank), jax.lax.bitcast_convert_type(found, jnp.int32)])
    pairs = jax.lax.all_gather(pairs, TP, axis=-1, tiled=True)
    last = jnp.where(pairs[0] >= 0, pairs[0], jnp.iinfo(jnp.int32).max)
    order, positions, words = jax.lax.sort((last, *pairs), num_keys=1)
    there = jnp.sum(order < jnp.iinfo(jnp.int32).max, axis=-1, dtype=jnp.int32)
    return Scored(jax.lax.bitcast_convert_type(words, jnp.float32), there, positions)


__all__ = ["Gather", "KeyFormat", "Keys", "Scored", "address", "append", "score"]
