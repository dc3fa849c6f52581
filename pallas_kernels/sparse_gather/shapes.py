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
    "odd_words": Shape(layers=3, slots=7, words=5, n=5),
    "list_longer_than_pool": Shape(layers=2, slots=5, words=20, n=19),
    "fp32_tiny": Shape(layers=3, slots=50, words=40, n=24),
    "fp8_rows": Shape(layers=2, slots=40, words=160, n=21),
    "bf16_rows": Shape(layers=2, slots=9, words=288, n=5),
    "more_layers_than_a_tile": Shape(layers=30, slots=6, words=160, n=4),
}
"""On a CPU, interpreted."""


@dataclass(frozen=True)
class Tiers:
    """A device pool and a host pool of one or two lanes, and the length of the lists between them."""

    layers: int
    device: int
    host: int
    words: tuple[int, ...]
    n: int


MOVES = {
    "fp8": Tiers(layers=4, device=1000, host=3000, words=(160, 4), n=700),
    "bf16": Tiers(layers=2, device=500, host=900, words=(288,), n=300),
    "many_layers": Tiers(layers=30, device=64, host=200, words=(160, 4), n=50),
    "long_list": Tiers(layers=1, device=4096, host=20_000, words=(160, 4), n=100_000),
}
SMALL_MOVES = {
    "fp8": Tiers(layers=2, device=9, host=13, words=(160, 4), n=8),
    "one_lane": Tiers(layers=3, device=30, host=40, words=(40,), n=33),
    "odd_words": Tiers(layers=1, device=5, host=7, words=(5, 3), n=6),
    "many_layers": Tiers(layers=30, device=5, host=4, words=(160, 4), n=4),
    "longer_than_the_pools": Tiers(layers=2, device=4, host=6, words=(12, 1), n=29),
}
