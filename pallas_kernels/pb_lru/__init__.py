"""Bucketed LRU on bitmaps: `rotate` opens a round, `touch` records use, `evict` gives slots up, `forget`
frees them.

Recency is kept in whole rounds, without timestamps, order or sort: a ring of buckets for the last rounds, one
cold bucket for all before, one of free slots. The idea of limited-range buckets is SPIN's (arXiv 2604.26837);
ring, cold bucket and summary bitmaps follow the published description of UlaCache's PB-LRU.

Where the buckets stand for something else than rounds, `merge` and `assign` move whole buckets, and
`Buckets.order` says which to give up first. `first_set` is the search alone, for bitmaps of other kinds.

`implementation`: `auto`, `reference` (jnp, any platform), `triton` (CUDA) or `triton_interpret` (the same kernels in
Triton's CPU interpreter: slow, for tests). Under vmap every form is the reference.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
from jax.custom_batching import custom_vmap
from jaxtyping import Array, Int32, UInt32

from pallas_kernels import triton_call
from pallas_kernels.dispatch import choose
from pallas_kernels.pb_lru import reference
from pallas_kernels.pb_lru.buckets import EMPTY, MAX_ROUNDS, Buckets, audit, bucket_of, create, pack
from pallas_kernels.pb_lru.reference import assign, merge

PREFER = ("triton", "reference")


def rotate(state: Buckets, *, implementation: str = "auto") -> Buckets:
    """Open a round: the oldest ring bucket joins cold and becomes the current one, empty. No row moves."""
    return _form("rotate", implementation)(state)


def touch(state: Buckets, slots: Int32[Array, " n"], *, opens: bool = False, implementation: str = "auto") -> Buckets:
    """Move slots (EMPTY anywhere is padding, repeats are allowed) from wherever they are into the current bucket; with
    `opens`, of a round that is opened first."""
    return _form("touch", implementation, opens=opens)(state, slots)


def forget(state: Buckets, slots: Int32[Array, " n"], *, implementation: str = "auto") -> Buckets:
    """Move slots (EMPTY anywhere is padding, repeats are allowed) from wherever they are into free."""
    return _form("forget", implementation)(state, slots)


def evict(
    state: Buckets, count: Int32[Array, ""], limit: int, *, implementation: str = "auto"
) -> tuple[Int32[Array, " limit"], Buckets]:
    """The first `count` (<= limit) slots in victim order, then EMPTY; they leave their buckets.

    Victim order: free, cold, then the ring in its order (from the oldest bucket to the newest), never the current one.
    Within cold cyclically from the hand, which moves to one past the last cold victim; within any other bucket from the
    lowest slot. If fewer than `count` slots are outside the current bucket, the list is shorter.
    """
    return _form("evict", implementation, limit=limit)(state, count)


def find_set(
    words: UInt32[Array, " words"], count: Int32[Array, ""], limit: int, *, implementation: str = "auto"
) -> tuple[Int32[Array, " limit"], Int32[Array, ""]]:
    """Positions of the first `count` (<= limit) set bits of a bitmap, ascending, then EMPTY; and how many are set in
    all. Bit `i % 32` of word `i // 32` stands for `i`."""
    return _form("find_set", implementation, limit=limit)(words, count)


def first_set(
    words: UInt32[Array, " words"], count: Int32[Array, ""], limit: int, *, implementation: str = "auto"
) -> Int32[Array, " limit"]:
    """The positions that `find_set` gives."""
    return find_set(words, count, limit, implementation=implementation)[0]


def _form(name: str, implementation: str, **static: Any) -> Callable[..., Any]:
    meaning = partial(getattr(reference, name), **static)
    chosen = choose(f"pb_lru.{name}", implementation, {"reference": None, **triton_call.forms()}, PREFER)
    if chosen == "reference":
        return meaning
    from pallas_kernels.pb_lru import triton

    form = custom_vmap(partial(getattr(triton, name), **static, interpret=chosen == "triton_interpret"))

    @form.def_vmap
    def batched(size: int, is_batched: Any, *arguments: Any) -> tuple[Any, Any]:
        axes = jax.tree.map(lambda given: 0 if given else None, tuple(is_batched))
        result = jax.vmap(meaning, in_axes=axes, axis_size=size)(*arguments)
        return result, jax.tree.map(lambda _: True, result)

    return form


__all__ = [
    "EMPTY",
    "MAX_ROUNDS",
    "Buckets",
    "assign",
    "audit",
    "bucket_of",
    "create",
    "evict",
    "find_set",
    "first_set",
    "forget",
    "merge",
    "pack",
    "rotate",
    "touch",
]
