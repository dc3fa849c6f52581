"""Named shapes for tests and benchmarks."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Shape:
    """Rows of scores, their length, and how many of each are selected."""

    rows: int
    length: int
    k: int


CARDS = {
    # GLM-5.x selects 2048 positions.
    "decode_1": Shape(1, 131072, 2048),
    "decode_32": Shape(32, 131072, 2048),
    "decode_64": Shape(64, 131072, 2048),
    "decode_8_million": Shape(8, 1_000_000, 2048),
    "prefill_512": Shape(512, 32768, 2048),
}
"""On an accelerator."""

SMALL = {
    "one_score": Shape(1, 1, 1),
    "shorter_than_k": Shape(3, 7, 10),
    "odd": Shape(4, 301, 33),
    "a_tile": Shape(2, 4096, 64),
    "two_tiles": Shape(2, 4500, 4300),
    "sampled": Shape(2, 17000, 20),
}
"""On a CPU, interpreted."""
