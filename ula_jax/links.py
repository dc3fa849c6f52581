"""What the devices of a stripe send each other in one step: the collectives of a placement, and their bytes.

`tests/aot` compares them with the programs that XLA makes for eight H200s.
"""

from collections import Counter
from dataclasses import dataclass
from typing import Literal

from ula_jax.index_keys import Gather
from ula_jax.placements.base import Placement
from ula_jax.placements.selected_buffer import round_rows
from ula_jax.spec import KVSpec

Kind = Literal["all-gather", "all-reduce", "all-to-all"]
FLOAT = 4


@dataclass(frozen=True)
class Collective:
    """Collectives of one purpose in a step."""

    purpose: Literal["select", "attend"]
    kind: Kind
    nbytes: int
    """Of one result on one device."""
    count: int

    def received(self, devices: int) -> float:
        """Bytes that one device receives in the step, by the algorithms that send least: each part once to everybody
        who needs it, and for an all-reduce each part once to be added up and once as a sum."""
        return self.nbytes * self.count * (2 if self.kind == "all-reduce" else 1) * (devices - 1) / devices


def collectives(
    placement: Placement, spec: KVSpec, tokens: int, heads: int, gather: Gather = "scores"
) -> list[Collective]:
    """Those that find and read the history in a step of `tokens` tokens, of a model with `heads` heads in all. Without
    striping there are none. With a selected buffer those that attend are of one round; a group needs as many rounds as
    rows miss, which may be none."""
    devices, layers = placement.striping.devices, spec.num_layers
    if devices == 1:
        return []
    found = []
    if spec.index_dim:
        numbers = spec.table_width * spec.page_size
        if gather == "candidates":  # of each device its best, with their positions
            numbers = 2 * devices * min(spec.topk, numbers // devices)
        found.append(Collective("select", "all-gather", tokens * FLOAT * numbers, len(spec.groups)))
    if getattr(placement, "buffer", 0):  # rows that miss, of all layers of a group
        rows = devices * round_rows(tokens * (spec.topk + 1), devices)
        sizes = Counter(FLOAT * len(group) * rows * words for group in spec.groups for words in spec.row.lanes)
        return [*found, *(Collective("attend", "all-gather", size, count) for size, count in sizes.items())]
    if getattr(placement, "exact", True):  # rows, from their owners
        return [*found, Collective("attend", "all-reduce", tokens * spec.topk * spec.row.nbytes, layers)]
    # Queries of all heads to all owners, and each head's parts of attention back.
    latent, rope = spec.row.latent, spec.row.rope
    return [
        *found,
        Collective("attend", "all-gather", tokens * heads * FLOAT * (latent + rope), layers),
        Collective("attend", "all-to-all", tokens * heads * FLOAT * (latent + 1), layers),
    ]
