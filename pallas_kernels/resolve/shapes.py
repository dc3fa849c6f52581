"""Named shapes for tests and benchmarks."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Shape:
    """Slots of the two tiers, and the entries of one step: selected and new."""

    device: int
    host: int
    selected: int
    new: int


CARDS = {
    # GLM-5.x: 64 requests select 2048 rows each. Pools of one layer group: 3 selections a request, and 2.75 GB of rows
    # of 656 bytes.
    "glm_batch64": Shape(device=64 * 6144, host=64 * 65536, selected=64 * 2048, new=64),
    "glm_batch1": Shape(device=6144, host=131072, selected=2048, new=1),
}
"""On an accelerator."""

SMALL = {
    "one_slot": Shape(device=1, host=1, selected=1, new=1),
    "just_past_a_word": Shape(device=33, host=65, selected=40, new=3),
    "two_programs": Shape(device=700, host=5000, selected=600, new=140),
    "more_than_fit": Shape(device=20, host=300, selected=90, new=8),
}
"""On a CPU, interpreted."""
