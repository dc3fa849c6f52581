"""What sparse MLA attention means, in jnp."""

from typing import Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32, UInt32

from pallas_kernels.sparse_gather.reference import EMPTY, HostLanes, Lanes, fetch, gather

HIGHEST = jax.lax.Precision.HIGHEST  # a GPU would take TF32 for float32


@runtime_checkable
class RowFormat(Protocol):
    """How a row of `latent + rope` numbers is stored as words: what kernels ask of `ula_jax.rows.RowFormat`.

    fp32 and bf16 rows are numbers in one lane. fp8 rows are e4m3 latents and bf16 rope in one lane, and in a second one
    float32 scale for each 128 latents.
    """

    @property
    def name(self) -> str: ...

    @property
    def latent(self) -> int: ...

    @property
    def rope(self) -> int: ...

    @property
    def lanes(self) -> tuple[int, ...]:
        """Words of each lane."""
        ...

    def unpack(self, lanes: tuple[UInt32[Array, "..."], ...]) -> Float32[Array, "..."]:
        """Rows [n, words] of each lane as numbers [n, latent + rope]."""
        ...


def sparse_mla(
    query: Float[Array, "batch steps heads width"],
    lanes: tuple[UInt32[Array, "layers slots _"], ...],
    layer: int,
    slots: Int32[Array, "batch steps selected"],
    fmt: RowFormat,
    *,
    scale: float,
) -> tuple[Float32[Array, "batch steps heads latent"], Float32[Array, "batch steps heads"]]:
    rows = tuple(gather(lane, layer, slots.reshape(-1)) for lane in lanes)
    rows = jax.lax.optimization_barrier(rows)  # fused into the arithmetic, the gather would change its rounding
    numbers = fmt.unpack(rows).reshape(*slots.shape, fmt.latent + fmt.rope)
    valid = slots >= 0
    numbers = jnp.where(valid[..., None], numbers, 0.0)
    scores = jnp.einsum("bshd,bskd->bshk", query.astype(jnp.float32), numbers, precision=HIGHEST) * scale
    scores = jnp.where(valid[:, :, None], scores, -jnp.inf)
    top = jnp.max(scores, axis=-1, keepdims=True)
    top = jnp.where(jnp.isfinite(top), top, 0.0)
    weights = jnp.exp(scores - top)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    weights = weights / jnp.where(total > 0, total, 1.0)
    output = jnp.einsum("bshk,bskc->bshc", weights, numbers[..., : fmt.latent], precision=HIGHEST)
    return output, jnp.log(total[..., 0]) + top[..., 0]


def sparse_mla_and_fetch(
    query: Float[Array, "batch steps heads width"],
    lanes: tuple[UInt32[Array, "depth slots _"], ...],
    layer: int,
    slots: Int32[Array, "batch steps selected"],
    fmt: RowFormat,
    device: Lanes,
    host: HostLanes,
    source: Int32[Array, " n"],
    target: Int32[Array, " n"],
    *,
    scale: float,
) -> tuple[tuple[Float32[Array, "batch steps heads latent"], Float32[Array, "batch steps heads"]], Lanes]:
    attended = sparse_mla(query, lanes, layer, slots, fmt, scale=scale)
    return attended, fetch(device, host, source, target)


__all__ = ["EMPTY", "HostLanes", "Lanes", "RowFormat", "sparse_mla", "sparse_mla_and_fetch"]
