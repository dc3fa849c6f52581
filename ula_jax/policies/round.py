"""One round of a policy: what every placement and the replay do with it."""

from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ula_jax.policies.base import Policy, Ranking, Touch, prefetch
from ula_jax.policies.books import pick, put
from ula_jax.types import EMPTY, Array, Bool, Int32, Scalar, Slots


class Round(NamedTuple):
    """What a round decided. Rows go into slots that the policy gave; whoever was there leaves."""

    targets: Slots
    """For each entry of the opening touch that missed: its device slot; EMPTY for all others."""
    prefetched: Int32[Array, " ranked"]
    """For each entry of the ranking that is to be fetched ahead: its device slot; EMPTY for all others."""
    state: Any


def play(policy: Policy, state: Any, needed: Touch, ranking: Ranking | None, num_slots: int) -> Round:
    """Open a round for the rows `needed` (distinct addresses), and find room for those that miss.

    Where the policy prefetches, `ranking` also tells which rows to fetch ahead; they get only what the needed rows
    leave.
    """
    assert needed.addresses is not None
    state = begin(policy, state, needed, ranking)
    missing = (needed.addresses >= 0) & (needed.slots < 0)
    targets, state = place(policy, state, missing, num_slots)
    state = policy.touch(state, replace(needed, slots=targets, inserted=True))
    ahead, state = fetch_ahead(policy, state, needed.addresses, targets, ranking, num_slots)
    return Round(targets, ahead, state)


def begin(policy: Policy, state: Any, needed: Touch, ranking: Ranking | None) -> Any:
    """Open a round: the state after the policy has seen which rows the step needs, and their ranking."""
    state = same(policy, "touch", state, policy.touch(state, needed))
    if ranking is None or not hasattr(policy, "observe"):
        return state
    return same(policy, "observe", state, policy.observe(state, ranking))  # pyright: ignore[reportAttributeAccessIssue]


def fetch_ahead(
    policy: Policy,
    state: Any,
    needed: Int32[Array, " n"],
    filled: Int32[Array, " filled"],
    ranking: Ranking | None,
    num_slots: int,
) -> tuple[Int32[Array, " ranked"], Any]:
    """Slots for the rows of `ranking` to fetch ahead, in a round that needs these addresses and has filled these slots:
    EMPTY for all other entries."""
    share = prefetch(policy)
    if ranking is None or not share:
        return jnp.full(0 if ranking is None else ranking.slots.size, EMPTY, jnp.int32), state

    ahead = (ranking.ranks >= ranking.k) & (ranking.ranks < int((1 + share) * ranking.k)) & (ranking.addresses >= 0)
    ahead = ahead & ~jnp.isin(ranking.addresses, needed, method="binary_search")
    # Those already here count as used, so that they are not given up for their like; except where a needed row has
    # just taken the slot.
    taken = put(jnp.zeros(num_slots, bool), filled, True)
    here = ahead & (ranking.slots >= 0) & ~taken[jnp.maximum(ranking.slots, 0)]
    once_more = Touch(jnp.where(here, ranking.slots, EMPTY), ranking.addresses, ranking.requests, inserted=True)
    state = policy.touch(state, once_more)
    extra, state = place(policy, state, ahead & (ranking.slots < 0), num_slots)
    return extra, policy.touch(state, replace(once_more, slots=extra))


def place(policy: Policy, state: Any, wanted: Bool[Array, " n"], num_slots: int) -> tuple[Slots, Any]:
    """A slot for each wanted entry, EMPTY for the others and where the policy has none left."""
    limit = min(wanted.size, num_slots)
    count = jnp.sum(wanted, dtype=jnp.int32)
    given, state = victims(policy, state, count if limit == wanted.size else jnp.minimum(count, limit), limit)
    place = jnp.where(wanted, jnp.cumsum(wanted) - 1, EMPTY)
    return pick(given, place.astype(jnp.int32)), state


def victims(policy: Policy, state: Any, count: Scalar, limit: int) -> tuple[Slots, Any]:
    """What `policy.evict` gives. ValueError, naming the policy, if list or state have not the shapes that they must."""
    given, after = policy.evict(state, count, limit)
    shape, dtype = jnp.shape(given), jnp.result_type(given)
    if shape != (limit,) or dtype != jnp.int32:
        raise ValueError(
            f"policy {policy!r}: expected evict to return int32[{limit}] and a state, found {dtype}{list(shape)}; "
            f"correct it"
        )
    return given, same(policy, "evict", state, after)


def same(policy: Policy, method: str, before: Any, after: Any) -> Any:
    """`after`. ValueError, naming the policy, if it is no state of the shapes of `before`."""
    if _shapes(after) != _shapes(before):
        raise ValueError(
            f"policy {policy!r}: expected {method} to return a state of the shapes it was given, {_shapes(before)}, "
            f"found {_shapes(after)}; correct it"
        )
    return after


def _shapes(state: Any) -> str:
    return str(jax.tree.map(lambda leaf: f"{jnp.result_type(leaf)}{list(jnp.shape(leaf))}", state))
