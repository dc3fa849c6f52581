"""UlaCache's stripe with attention where the rows are: each device attends to those of the selected rows that it owns.

No row leaves its owner. Queries of all heads go to every device, and partial outputs come back, to be merged by
log-sum-exp as in decode context parallelism (vLLM, TensorRT-LLM), which has no second tier. Storage, policy and tiers
are those of `ula`. Sums over rows are split by owner, so logits equal those of other placements up to rounding alone.
"""

from dataclasses import dataclass, replace
from typing import ClassVar

import jax
import jax.numpy as jnp

from ula_jax.parallel import TP
from ula_jax.placements.base import Attended, Counters, Query, Readable, Selection, attend_slots, merged
from ula_jax.placements.ula import Ula
from ula_jax.pool import Group
from ula_jax.types import Array, Float32


@dataclass(frozen=True)
class OwnerComputes(Ula):
    """`ula` under TP, but for where attention runs. On one device, and under DP, the same as `ula`.

    `Counters.peer_rows` is 0: what crosses are queries and partial outputs, as many for any selection."""

    buffer: ClassVar[int] = 0  # pyright: ignore[reportIncompatibleVariableOverride]
    name: ClassVar[str] = "owner_computes"
    exact: ClassVar[bool] = False

    def resolve(self, group: Group, selection: Selection) -> tuple[Readable, Group, Counters]:
        readable, group, counters = super().resolve(group, selection)
        return readable, group, counters._replace(peer_rows=jnp.int32(0))

    def attend(self, group: Group, layer: int, readable: Readable, query: Query) -> Attended:
        if self.striping.devices == 1:
            return super().attend(group, layer, readable, query)
        vectors = all_heads(query.vectors)
        return merged(own_heads(attend_slots(replace(query, vectors=vectors), group.device, layer, readable.locations)))


def all_heads(vectors: Float32[Array, "batch steps heads width"]) -> Float32[Array, "batch steps all_heads width"]:
    """Queries of all devices' heads, on each device."""
    return jax.lax.all_gather(vectors, TP, axis=2, tiled=True)


def own_heads(mine: Attended) -> Attended:
    """This device's parts [batch, steps, all heads, ...] -> of its own heads every device's [devices, batch, ...]."""
    parts = jnp.concatenate([mine.output, mine.lse[..., None]], axis=-1)
    devices = jax.lax.axis_size(TP)
    parts = jax.lax.all_to_all(parts, TP, split_axis=2, concat_axis=0, tiled=True)
    parts = parts.reshape(devices, -1, *parts.shape[1:])
    return Attended(parts[..., :-1], parts[..., -1])
