"""The interface of a replacement policy: which slot of a pool to give up next.

A policy owns `num_slots` slots of one layer group. One *round* is one step of that group, in this order:
`touch` with the slots that were hit, `evict` for the misses, `touch` again with `inserted=True` for the rows that
were put into the slots that `evict` gave. All are pure and safe under jit, scan and vmap.
"""

from dataclasses import dataclass
from typing import Protocol, TypeVar, runtime_checkable

from pallas_kernels.pytree import pytree
from ula_jax.types import Array, Float32, Int32, Scalar, Slots

S = TypeVar("S")


@pytree(meta=("inserted",))
@dataclass(frozen=True)
class Touch:
    """Slots used in this round; padding is EMPTY (-1) in `slots` and may stand anywhere.

    `addresses`, `scores` (indexer scores; NaN where unknown) and `next_use` (round of the next use; replay only) are
    parallel to `slots`, or None where the caller has none. `inserted` is False for the hits that open a round and
    True for the rows that missed and now fill the slots that `evict` gave. No slot stands twice in a round.
    """

    slots: Slots
    addresses: Int32[Array, " n"] | None = None
    scores: Float32[Array, " n"] | None = None
    next_use: Int32[Array, " n"] | None = None
    inserted: bool = False


@runtime_checkable
class Policy(Protocol[S]):
    """A frozen, hashable dataclass of parameters; all state is in the pytree `S`.

    A policy may also have `audit(state, occupied)`: `ula_jax.verify` then calls it with numpy arrays, and it raises
    AssertionError if its books disagree with themselves or with the occupied slots.
    """

    def init(self, num_slots: int) -> S:
        """State in which every slot is free."""
        ...

    def touch(self, state: S, touch: Touch) -> S:
        """Record use. `touch.inserted=False` opens a new round (also when it lists no slot)."""
        ...

    def evict(self, state: S, count: Scalar, limit: int) -> tuple[Int32[Array, " limit"], S]:
        """The first `count` (<= limit) slots to give up, free ones first, then EMPTY padding.

        Never a slot touched in this round. The slots leave the policy's books until they are touched or forgotten.
        If fewer than `count` can be given, the list is shorter: callers bound the working set so that it cannot be.
        """
        ...

    def forget(self, state: S, slots: Slots) -> S:
        """The rows in these slots (EMPTY padding ignored) are gone: the slots are free."""
        ...
