"""Any policy, with the rows fetched ahead that were ranked just below the selection."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from ula_jax.policies.base import Policy, Ranking, Touch, depth
from ula_jax.types import Array, Int32, Scalar, Slots


@dataclass(frozen=True)
class Prefetch:
    """Everything is up to `policy` (an object or a spec, as for `make_policy`); what is fetched ahead is `share` k.

    Belady cannot be wrapped: nobody knows the next use of a row that was not asked for.
    """

    policy: str | Policy[Any] = "score_now"
    share: float = 0.25

    def __post_init__(self):
        from ula_jax.policies import make_policy  # which needs this module

        if self.share < 0:
            raise ValueError(f"prefetch share: expected at least 0, found {self.share}; give a share of k")
        if isinstance(self.policy, str):  # an object from now on, or a changed file would compare equal
            object.__setattr__(self, "policy", make_policy(self.policy))

    @property
    def inner(self) -> Any:
        return self.policy

    @property
    def prefetch(self) -> float:
        return self.share

    @property
    def depth(self) -> float:
        return depth(self.inner)

    def init(self, num_slots: int) -> Any:
        return self.inner.init(num_slots)

    def touch(self, state: Any, touch: Touch) -> Any:
        return self.inner.touch(state, touch)

    def observe(self, state: Any, ranking: Ranking) -> Any:
        return self.inner.observe(state, ranking) if hasattr(self.inner, "observe") else state

    def evict(self, state: Any, count: Scalar, limit: int) -> tuple[Int32[Array, " limit"], Any]:
        return self.inner.evict(state, count, limit)

    def forget(self, state: Any, slots: Slots) -> Any:
        return self.inner.forget(state, slots)

    def audit(self, state: Any, occupied: np.ndarray) -> None:
        if hasattr(self.inner, "audit"):
            self.inner.audit(state, occupied)
