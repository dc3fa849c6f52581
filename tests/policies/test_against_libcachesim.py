"""With one access a round, the sequential algorithms as libCacheSim (the simulator of the S3-FIFO paper) has them."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ula_jax.policies import POLICIES
from ula_jax.policies.base import Touch
from ula_jax.policies.round import play
from ula_jax.types import EMPTY

libcachesim = pytest.importorskip("libcachesim")

THEIRS = {"lru": "LRU", "fifo": "FIFO", "clock": "Clock", "sieve": "Sieve", "s3_fifo": "S3FIFO"}
SIZES = (20, 45, 100)
ADDRESSES = 400
ROUNDS = 2000


def zipf(rng, rounds, exponent):
    weights = 1 / np.arange(1, ADDRESSES + 1) ** exponent
    return rng.permutation(ADDRESSES)[rng.choice(ADDRESSES, rounds, p=weights / weights.sum())].astype(np.int32)


def theirs(name, size, trace):
    cache = getattr(libcachesim, THEIRS[name])(cache_size=size, hashpower=12)
    requests = [libcachesim.Request(obj_id=int(address), obj_size=1) for address in trace]
    return np.asarray([cache.get(request) for request in requests])


@partial(jax.jit, static_argnums=(0, 2))
def ours(policy, sizes, largest, trace):
    """Hits [rounds, sizes]; smaller pools are the largest one with slots taken away."""

    def start(size):
        gone, state = policy.evict(policy.init(largest), largest - size, largest)
        del gone
        return state, jnp.full(ADDRESSES, EMPTY, jnp.int32), jnp.full(largest, EMPTY, jnp.int32)

    def access(carry, address):
        state, slot_of, held = carry
        slot = slot_of[address]
        target, _, state = play(policy, state, Touch(slot[None], address[None]), None, largest)
        left = held.at[target].get(mode="fill", fill_value=EMPTY, wrap_negative_indices=False)
        slot_of = slot_of.at[left].set(EMPTY, mode="drop", wrap_negative_indices=False)
        slot_of = slot_of.at[address].set(jnp.maximum(slot, target[0]))
        held = held.at[target].set(address, mode="drop", wrap_negative_indices=False)
        return (state, slot_of, held), slot >= 0

    carry = jax.vmap(start)(sizes)
    return jax.lax.scan(lambda carry, address: jax.vmap(access, (0, None))(carry, address), carry, trace)[1]


@pytest.mark.parametrize("name", sorted(THEIRS))
def test_every_request_hits_or_misses_as_theirs(name):
    rng = np.random.default_rng(11)
    for exponent in (0.7, 1.1):
        trace = zipf(rng, ROUNDS, exponent)
        hits = np.asarray(ours(POLICIES[name](), jnp.asarray(SIZES, jnp.int32), max(SIZES), jnp.asarray(trace)))
        for i, size in enumerate(SIZES):
            expected = theirs(name, size, trace)
            differ = np.flatnonzero(hits[:, i] != expected)
            assert not differ.size, f"{name}, {size} slots, exponent {exponent}: from request {differ[:1]} on"
            assert 0.05 < expected.mean() < 0.95
