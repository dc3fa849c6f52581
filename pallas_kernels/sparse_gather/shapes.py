"""Named shapes for tests and benchmarks: what real pools look like, and what trips a kernel."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Shape:
    """A pool lane and the length of one slot list."""

    layers: int
    slots: int
    words: int
    n: int


CARDS = {
    # GLM-5.x: four layers share a selection of 2048 rows; fp8 rows are 640 bytes and, apart, 16 bytes of
    # scales.
    "glm_fp8_rows": Shape(layers=4, slots=65536, words=160, n=2048),
    "glm_fp8_scales": Shape(layers=4, slots=65536, words=4, n=2048),
    "glm_bf16_rows": Shape(layers=4, slots=65536, words=288, n=2048),
    "glm_fp8_batch64": Shape(layers=4, slots=1 << 20, words=160, n=64 * 512),
}
"""On an accelerator."""

PAST_32_BITS = Shape(layers=1, slots=3_800_000, words=288, n=64)
"""Rows of 1152 bytes: those from 3,728,271 on lie 2^32 bytes and more into the pool."""

SMALL = {
    "one_slot": Shape(layers=1, slots=1, words=4, n=1),
    "odd": Shape(layers=2, slots=33, words=12, n=17),
    "list_longer_than_pool": Shape(layers=2, slots=5, words=20, n=19),
    "fp32_tiny": Shape(layers=3, slots=50, words=40, n=24),
    "fp8_rows": Shape(layers=2, slots=40, words=160, n=21),
    "bf16_rows": Shape(layers=2, slots=9, words=288, n=5),
}
"""On a CPU, interpreted."""
