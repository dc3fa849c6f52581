"""Named shapes for tests and benchmarks."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Shape:
    """Pool size in slots, ring length in rounds, and the most victims of one round."""

    slots: int
    rounds: int
    limit: int


CARDS = {
    # One layer group of GLM-5.x: an H200 holds about 0.3 M rows beside the weights, a B300 2.9 M.
    "h200": Shape(slots=300_000, rounds=32, limit=2048),
    "b300": Shape(slots=2_900_000, rounds=32, limit=16384),
}
"""On an accelerator."""

SMALL = {
    "one_slot": Shape(slots=1, rounds=1, limit=1),
    "just_past_a_word": Shape(slots=33, rounds=3, limit=40),
    "two_levels": Shape(slots=1000, rounds=2, limit=64),
    "three_levels": Shape(slots=1100, rounds=3, limit=30),
}
"""On a CPU, interpreted."""
