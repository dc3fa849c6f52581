"""The interface of a replacement policy: which slot of a pool to give up next.

A policy owns `num_slots` slots of one layer group. One *round* is one step of that group, in this order (`play` in
`ula_jax.policies.round`): `touch` with the rows that the step needs, `observe` with the step's ranking (if the policy
has that method), `evict` for those that missed, `touch` again with `inserted=True` for the rows that were put into the
slots that `evict` gave. Rows fetched ahead are then treated alike in the same round, so `evict` may be called twice.
All are pure and safe under jit, scan and vmap.
"""

from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, runtime_checkable

import jax.numpy as jnp

from pallas_kernels.pytree import pytree
from ula_jax.types import EMPTY, Array, Float32, Int32, Scalar, Slots

S = TypeVar("S")


@pytree(meta=("inserted",))
@dataclass(frozen=True)
class Touch:
    """Rows used in this round; padding is EMPTY (-1) in `slots` and may stand anywhere. No slot stands twice.

    With `inserted=False` it opens a round and lists every row that the step needs: a hit has its slot, a miss has an
    address and no slot. With `inserted=True` it lists the rows that now fill slots that `evict` gave.
    """

    slots: Slots
    addresses: Int32[Array, " n"] | None = None
    """Logical addresses, parallel to `slots`; None where the caller has none."""
    requests: Int32[Array, " n"] | None = None
    """Number (within its rank, below n) of the request that needs the row, EMPTY where unknown."""
    next_use: Int32[Array, " n"] | None = None
    """Round of the next use, NEVER if there is none. Only a replay knows it; None in an engine."""
    inserted: bool = False


NEVER = 2**31 - 1
"""`next_use` of a row that is not used again."""


@pytree(meta=("k",))
@dataclass(frozen=True)
class Ranking:
    """The best-scored rows of each request in this round, selected ones and runners-up; EMPTY padded, none twice."""

    slots: Slots
    """Device slot of each row before this round's evictions, EMPTY for rows elsewhere and padding."""
    addresses: Int32[Array, " n"]
    requests: Int32[Array, " n"]
    ranks: Int32[Array, " n"]
    """0 is a request's best score; ranks below `k` are selected."""
    margins: Float32[Array, " n"]
    """Indexer score minus the lowest selected score of the same request: comparable between requests."""
    k: int = 1
    """Rows that one request selects."""

    @classmethod
    def of(
        cls,
        ranked: Int32[Array, "requests depth"],
        slots: Int32[Array, "requests depth"],
        requests: Int32[Array, " requests"],
        margins: Float32[Array, "requests depth"],
        k: int,
    ) -> "Ranking | None":
        """From each request's rows by rank, EMPTY padded, and their slots; None if there are none to show."""
        if not ranked.size:
            return None
        ranks = jnp.arange(ranked.shape[1], dtype=jnp.int32)
        return cls(
            slots=slots.reshape(-1),
            addresses=ranked.reshape(-1),
            requests=jnp.where(ranked >= 0, requests[:, None], EMPTY).reshape(-1),
            ranks=jnp.broadcast_to(ranks, ranked.shape).reshape(-1),
            margins=margins.reshape(-1),
            k=k,
        )


def margins(
    scores: Float32[Array, "requests depth"], ranked: Int32[Array, "requests depth"], k: int
) -> Float32[Array, "requests depth"]:
    """Scores by rank minus the request's lowest selected one (rank below `k`); -inf where `ranked` is EMPTY."""
    lowest = jnp.min(scores[:, :k], axis=1, where=ranked[:, :k] >= 0, initial=jnp.inf, keepdims=True)
    return jnp.where(ranked >= 0, scores - lowest, -jnp.inf)


@runtime_checkable
class Policy(Protocol[S]):
    """A frozen, hashable dataclass of parameters; all state is in the pytree `S`.

    Four things are optional. `observe(state, ranking)` returns the state after seeing this round's scores. `depth`
    (default 1.0) is how many times `k` ranks the ranking should hold. `prefetch` (default 0.0) asks for the rows of
    ranks k to (1 + prefetch) k to be fetched ahead. `audit(state, occupied)` is called by `ula_jax.verify` with numpy
    arrays and raises AssertionError if the policy's books disagree with themselves or with the occupied slots.
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


def depth(policy: Any) -> float:
    """Ranks that the policy wants to see, in units of k; 1 for one that does not look at scores."""
    return max(float(getattr(policy, "depth", 1.0)), 1.0 + prefetch(policy))


def prefetch(policy: Any) -> float:
    """Rows that the policy fetches ahead, in units of k."""
    return float(getattr(policy, "prefetch", 0.0))
