"""Bucketed LRU over bitmaps: `rotate` opens a round, `touch` records use, `evict` gives slots up, `forget` frees them.

After SPIN's bucketed LRU (arXiv 2604.26837) with UlaCache's ring, cold bucket and summary bitmaps. Work a round is
independent of how the slots are used: no timestamps, no sort, no scan of slots.

`implementation`: `auto`, `reference` (jnp, any platform), `triton` (Pallas Triton, CUDA) or `triton_interpret` (the
same kernel in the CPU interpreter: slow, for tests). Only the search for victims has a second form.
"""

from jaxtyping import Array, Int32

from pallas_kernels.dispatch import choose
from pallas_kernels.pb_lru import reference
from pallas_kernels.pb_lru.buckets import MAX_ROUNDS, Buckets, bucket_of, create
from pallas_kernels.pb_lru.reference import forget, rotate, touch


def evict(
    state: Buckets, count: Int32[Array, ""], limit: int, *, implementation: str = "auto"
) -> tuple[Int32[Array, " limit"], Buckets]:
    """The first `count` (<= limit) slots in victim order, then EMPTY; they leave their buckets.

    Victim order: free, cold, then the ring from the oldest bucket to the newest, never the current one. Within cold
    cyclically from the hand, which moves to one past the last cold victim; within any other bucket from the lowest
    slot. If fewer than `count` slots are outside the current bucket, the list is shorter.
    """
    choose("pb_lru.evict", implementation, {"reference": None})
    return reference.evict(state, count, limit)


__all__ = ["MAX_ROUNDS", "Buckets", "bucket_of", "create", "evict", "forget", "rotate", "touch"]
