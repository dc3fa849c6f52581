"""Replacement policies by name. To add one: a file beside these, and a line in POLICIES."""

from ula_jax.plugins import make
from ula_jax.policies.base import Policy, Touch
from ula_jax.policies.belady import Belady
from ula_jax.policies.clock import CLOCK
from ula_jax.policies.fifo import FIFO
from ula_jax.policies.lrfu import LRFU
from ula_jax.policies.lru import LRU
from ula_jax.policies.pb_lru import PBLRU
from ula_jax.policies.pb_lru_exp import PBLRUExp
from ula_jax.policies.pb_score import PBScore
from ula_jax.policies.prefetch import Prefetch
from ula_jax.policies.quota_lru import QuotaLRU
from ula_jax.policies.random_ import Random
from ula_jax.policies.s3_fifo import S3FIFO
from ula_jax.policies.score_now import ScoreNow
from ula_jax.policies.sieve import SIEVE

POLICIES: dict[str, type] = {
    "lru": LRU,
    "pb_lru": PBLRU,
    "pb_lru_exp": PBLRUExp,
    "clock": CLOCK,
    "fifo": FIFO,
    "random": Random,
    "sieve": SIEVE,
    "s3_fifo": S3FIFO,
    "lrfu": LRFU,
    "belady": Belady,
    "score_now": ScoreNow,
    "pb_score": PBScore,
    "quota_lru": QuotaLRU,
    "prefetch": Prefetch,
}


def make_policy(spec: str) -> Policy:
    """A policy from `name`, `name:parameter=value,...` or `path.py:Class`, with or without parameters after it."""
    policy = make("policy", POLICIES, spec)
    if not isinstance(policy, Policy):
        raise ValueError(
            f"policy: {type(policy).__name__} in {spec!r} needs the methods init, touch, evict and forget; add them"
        )
    return policy


__all__ = ["LRU", "PBLRU", "POLICIES", "Policy", "Touch", "make_policy"]
