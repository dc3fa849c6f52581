"""Named shapes for tests and benchmarks."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Shape:
    """Tokens of one step, and what each selected from one layer of a pool; rows of 512 + 64 numbers."""

    batch: int
    steps: int
    heads: int
    selected: int
    slots: int
    layers: int = 1


CARDS = {
    # DeepSeek-V3.2 and GLM-5.x with all heads on one device (attention data-parallel), and a share of 8 of them (TP).
    "1_request": Shape(batch=1, steps=1, heads=64, selected=2048, slots=400_000),
    "32_requests": Shape(batch=32, steps=1, heads=64, selected=2048, slots=400_000),
    "64_requests": Shape(batch=64, steps=1, heads=64, selected=2048, slots=400_000),
    "64_requests_3_tokens": Shape(batch=64, steps=3, heads=64, selected=2048, slots=400_000),
    "64_requests_8_heads": Shape(batch=64, steps=1, heads=8, selected=2048, slots=400_000),
}
"""On an accelerator."""

PAST_32_BITS = Shape(batch=1, steps=1, heads=64, selected=64, slots=1_900_000, layers=2)
"""The second layer of bf16 rows lies 2^31 bytes into the pool, and its last rows 2^32."""

SMALL = {
    "one_row": Shape(batch=1, steps=1, heads=1, selected=1, slots=1),
    "one_block": Shape(batch=2, steps=1, heads=8, selected=30, slots=50, layers=2),
    "heads_of_two_programs": Shape(batch=1, steps=1, heads=65, selected=70, slots=40),
}
"""On a CPU, interpreted."""
