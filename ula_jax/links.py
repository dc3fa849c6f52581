"""What the devices of a stripe send each other in one step: the collectives of a placement, and their bytes.

`tests/aot` compares them with the programs that XLA makes for eight H200s.
"""

from collections import Counter
from dataclasses import dataclass
from typing import Literal

from ula_jax.index_keys import Gather
from ula_jax.metrics import Totals
from ula_jax.placements.base import Counters, Placement
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
    if getattr(placement, "buffer", 0):
        kind: Kind = getattr(placement, "exchange", "all-gather")
        sizes = Counter(size for group in spec.groups for size in _round(spec, group, tokens, devices))
        return [*found, *(Collective("attend", kind, size, count) for size, count in sizes.items())]
    if getattr(placement, "exact", True):  # rows, from their owners
        return [*found, Collective("attend", "all-reduce", tokens * spec.topk * spec.row.nbytes, layers)]
    # Queries of all heads to all owners, and each head's parts of attention back.
    latent, rope = spec.row.latent, spec.row.rope
    return [
        *found,
        Collective("attend", "all-gather", tokens * heads * FLOAT * (latent + rope), layers),
        Collective("attend", "all-to-all", tokens * heads * FLOAT * (latent + 1), layers),
    ]


def received(
    placement: Placement, totals: Totals, devices: int, tokens: int, heads: int, gather: Gather = "scores"
) -> float:
    """Bytes that all `devices` together received in the steps of `totals`, to find and read the history: of each step
    what its program always sends, and of selected buffers the rounds that were counted.

    `tokens`: those for which each rank's step is compiled, padding included.
    """
    spec, each = totals.spec, placement.striping.devices
    always = collectives(placement, spec, tokens, heads, gather)
    if not getattr(placement, "buffer", 0):
        return sum(one.received(each) for one in always) * devices * totals.steps
    selecting = sum(one.received(each) for one in always if one.purpose == "select") * devices * totals.steps
    rounds = totals.rows[:, Counters._fields.index("rounds")].tolist()  # of all devices
    sizes = [sum(_round(spec, group, tokens, each)) for group in spec.groups]
    return selecting + sum(n * size for n, size in zip(rounds, sizes, strict=True)) * (each - 1) / each


def _round(spec: KVSpec, group: tuple[int, ...], tokens: int, devices: int) -> list[int]:
    """Bytes on one device, by row lane, of a round that fills a selected buffer with rows of all layers of a group."""
    rows = devices * round_rows(tokens * (spec.topk + 1), devices)
    return [FLOAT * len(group) * rows * words for words in spec.row.lanes]
