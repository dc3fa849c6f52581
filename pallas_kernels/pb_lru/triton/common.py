"""What both halves share: where words lie, and the summaries above them."""

from typing import Any

import triton.language as tl

from pallas_kernels import triton_call
from pallas_kernels import triton_parts as parts
from pallas_kernels.pb_lru.buckets import Buckets, levels

ALL = tl.constexpr(0xFFFFFFFF)
"""To flip bits with: the interpreter has no `~` for unsigned numbers."""


def layout(state: Buckets) -> dict[str, Any]:
    found = levels(state.label.shape[0])
    return dict(ROUNDS=state.rounds, LEVELS=len(found), WIDTH=found[0].width, PITCH=state.words.shape[1])


@triton_call.kernel
def summarize(
    words, source, target, word, emptied, begun, LEVELS: tl.constexpr, WIDTH: tl.constexpr, PITCH: tl.constexpr
):
    """Words of one bucket have become zero, and words of another one are zero no more: what their summaries say."""
    start, width = 0, WIDTH
    for _ in tl.static_range(LEVELS - 1):  # pyright: ignore
        start, width = start + (width + 31) // 32 * 32, (width + 31) // 32
        word, bit = word >> 5, parts.bit(word & 31)
        gained = tl.atomic_or(words + target * PITCH + start + word, bit, mask=begun, sem="relaxed")
        before = tl.atomic_and(words + source * PITCH + start + word, bit ^ ALL, mask=emptied, sem="relaxed")
        emptied, begun = emptied & (before == bit), begun & (gained == 0)
