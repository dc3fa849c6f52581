"""Replacement policies by name. To add one: a file beside these, and a line in POLICIES."""

from ula_jax.plugins import make
from ula_jax.policies.base import Policy, Touch
from ula_jax.policies.lru import LRU
from ula_jax.policies.pb_lru import PBLRU

POLICIES: dict[str, type] = {"lru": LRU, "pb_lru": PBLRU}


def make_policy(spec: str) -> Policy:
    """A policy from `name`, `name:parameter=value,...` or `path.py:Class`, with or without parameters after it."""
    policy = make("policy", POLICIES, spec)
    if not isinstance(policy, Policy):
        raise TypeError(
            f"policy: {type(policy).__name__} in {spec!r} needs the methods init, touch, evict and forget; add them"
        )
    return policy


__all__ = ["LRU", "PBLRU", "POLICIES", "Policy", "Touch", "make_policy"]
