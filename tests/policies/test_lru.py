"""Exact LRU against a list of rounds."""

import jax
import jax.numpy as jnp
import numpy as np

from ula_jax.policies import LRU, Touch
from ula_jax.types import EMPTY


def pad(slots, n):
    return jnp.asarray(np.concatenate([slots, np.full(n - len(slots), EMPTY)]), jnp.int32)


def test_equals_a_sort_by_last_round():
    size, limit, rng = 70, 30, np.random.default_rng(0)
    policy = LRU()

    @jax.jit
    def one_round(state, gone, hits, count):
        state = policy.touch(policy.forget(state, gone), Touch(hits))
        victims, state = policy.evict(state, count, limit)
        return victims, policy.touch(state, Touch(victims, inserted=True))

    state, used = policy.init(size), np.full(size, -1)
    for t in range(200):
        gone = rng.permutation(size)[: rng.integers(0, 3)]
        hits = rng.permutation(size)[: rng.integers(0, 30)]
        count = int(rng.integers(0, limit + 1))
        used[gone] = -1
        used[hits] = t
        by_age = [slot for _, slot in sorted((used[s], s) for s in range(size)) if used[slot] < t]
        expected = by_age[:count]
        victims, state = one_round(state, pad(gone, size), pad(hits, size), jnp.int32(count))
        assert np.asarray(victims).tolist() == expected + [EMPTY] * (limit - len(expected))
        used[expected] = t
