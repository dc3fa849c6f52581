"""Named shapes for tests and benchmarks."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Shape:
    """A step's requests and their tokens, the indexer's size, and pages: `pages` is the width of the page table."""

    batch: int
    steps: int
    heads: int
    dim: int
    page_size: int
    pages: int
    keys: Literal["fp32", "bf16", "fp8"] = "fp8"

    @property
    def length(self) -> int:
        return self.pages * self.page_size


CARDS = {
    # GLM-5.x: 32 heads of 128 numbers; SGLang fixes pages of 64 for such models.
    "decode_1": Shape(1, 1, 32, 128, 64, 2048),
    "decode_8": Shape(8, 1, 32, 128, 64, 2048),
    "decode_32": Shape(32, 1, 32, 128, 64, 2048),
    "decode_32_page_16": Shape(32, 1, 32, 128, 16, 8192),
    "decode_32_bf16": Shape(32, 1, 32, 128, 64, 2048, "bf16"),
    "verify_8x4": Shape(8, 4, 32, 128, 64, 2048),
    "prefill_512": Shape(1, 512, 32, 128, 64, 512),
    # DeepSeek-V3.2 has 64 heads; eight devices hold an eighth of each page of 64.
    "striped_heads_64": Shape(8, 1, 64, 128, 8, 2048),
}
"""On an accelerator."""

SMALL = {
    "one": Shape(1, 1, 1, 32, 1, 1),
    "odd_heads": Shape(2, 1, 3, 16, 8, 9),
    "three_tokens": Shape(2, 3, 5, 32, 2, 40),
    "five_tokens_wide": Shape(1, 5, 32, 64, 16, 41),
    "whole_pages": Shape(2, 1, 8, 128, 64, 10),
    "bf16": Shape(2, 2, 8, 32, 4, 33, "bf16"),
}
"""On a CPU, interpreted."""
