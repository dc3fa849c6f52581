"""Index keys of one layer group: on the device in every placement, striped like the rows.

A device scores the positions that it owns; one all-gather of scores (UlaCache's) gives every device all of them.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from pallas_kernels.index_scores import address, paged_index_scores
from ula_jax.parallel import Parallel
from ula_jax.rows import E4M3_MAX, FormatName
from ula_jax.striping import Striping
from ula_jax.types import Addresses, Array, Float32, Int32, Scalar

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


def scores(
    keys: Keys,
    page_table: Int32[Array, "batch pages"],
    page_size: int,
    query: Float32[Array, "batch steps heads dim"],
    weights: Float32[Array, "batch steps heads"],
    lengths: Int32[Array, "batch steps"],
    striping: Striping,
    parallel: Parallel,
) -> Float32[Array, "batch steps length"]:
    """Index scores of the first `lengths` positions that each token sees, on every device; -inf of all others.

    A device owns every P-th row of each page, so its part is paged like the whole, with pages of a P-th of the size.

    Under TP positions are scored in as many parts as there are devices, part r being positions r mod P, whether one
    device has all parts or each its own: the shape of an XLA product decides the order of its sums, and so its bits.
    """
    devices = striping.devices
    if devices == 1:
        parts = parallel.size if parallel.tp else 1
        return paged_index_scores(query, weights, keys, page_table, page_size, lengths, parts=parts)
    owned = (lengths - jax.lax.axis_index(parallel.axis) + devices - 1) // devices
    part = paged_index_scores(query, weights, keys, page_table, page_size // devices, owned)
    every = jax.lax.all_gather(part, parallel.axis, axis=-1)  # [batch, steps, length / devices, devices]
    return every.reshape(*lengths.shape, -1)


__all__ = ["KeyFormat", "Keys", "address", "append", "scores"]
