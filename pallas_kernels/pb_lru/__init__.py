"""Bucketed LRU on bitmaps: `rotate` opens a round, `touch` records use, `evict` gives slots up, `forget`
frees them.

Recency is kept in whole rounds, without timestamps, order or sort: a ring of buckets for the last rounds, one
cold bucket for all before, one of free slots. The idea of limited-range buckets is SPIN's (arXiv 2604.26837);
ring, cold bucket and summary bitmaps follow the published description of UlaCache's PB-LRU.

Where the buckets stand for something else than rounds, `merge` and `assign` move whole buckets, and
`Buckets.order` says which to give up first. `first_set` is the search alone, for bitmaps of other kinds.

`implementation`: `auto`, `reference` (jnp, any platform), `triton` (Pallas Triton, CUDA) or
`triton_interpret` (the same kernel in the CPU interpreter: slow, for tests). Only `evict` searches, so only
it has a second form: the other operations are a few passes over bitmaps.
"""

from jaxtyping import Array, Int32

from pallas_kernels.dispatch import choose, needs
from pallas_kernels.pb_lru import reference, triton
from pallas_kernels.pb_lru.buckets import EMPTY, MAX_ROUNDS, Buckets, audit, bucket_of, create, pack
from pallas_kernels.pb_lru.reference import assign, first_set, forget, merge, rotate, touch

PREFER = ("reference",)
"""What `auto` may take. On an H200 with JAX 0.11.2, an `evict` with limit 2048 of 0.3 M slots takes the
reference 508 us and `triton` 211 us, with limit 16384 of 2.9 M slots 532 us and 12.5 ms: one block is too
little for so long a list."""


def evict(
    state: Buckets, count: Int32[Array, ""], limit: int, *, implementation: str = "auto"
) -> tuple[Int32[Array, " limit"], Buckets]:
    """The first `count` (<= limit) slots in victim order, then EMPTY; they leave their buckets.

    Victim order: free, cold, then the ring in its order (from the oldest bucket to the newest), never the
    current one. Within cold cyclically from the hand, which moves to one past the last cold victim; within any
    other bucket from the lowest slot. If fewer than `count` slots are outside the current bucket, the list is
    shorter.
    """
    forms = {"reference": None, "triton": needs("gpu"), "triton_interpret": needs("cpu")}
    chosen = choose("pb_lru.evict", implementation, forms, PREFER)
    if chosen == "reference":
        return reference.evict(state, count, limit)
    return triton.evict(state, count, limit, interpret=chosen == "triton_interpret")


__all__ = [
    "EMPTY",
    "MAX_ROUNDS",
    "Buckets",
    "assign",
    "audit",
    "bucket_of",
    "create",
    "evict",
    "first_set",
    "forget",
    "merge",
    "pack",
    "rotate",
    "touch",
]
