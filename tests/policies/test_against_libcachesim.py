"""With one access a round, the sequential algorithms as libCacheSim (the simulator of the S3-FIFO paper) has them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.policies.rounds import hits
from ula_jax.policies import POLICIES

libcachesim = pytest.importorskip("libcachesim")

THEIRS = {"lru": "LRU", "fifo": "FIFO", "clock": "Clock", "sieve": "Sieve", "s3_fifo": "S3FIFO"}
SIZES = (20, 45, 100)  # their S3-FIFO lets nothing in below 20
ADDRESSES = 400
ROUNDS = 2000


def zipf(rng, exponent):
    weights = 1 / np.arange(1, ADDRESSES + 1) ** exponent
    return rng.permutation(ADDRESSES)[rng.choice(ADDRESSES, ROUNDS, p=weights / weights.sum())].astype(np.int32)


def theirs(name, size, trace):
    cache = getattr(libcachesim, THEIRS[name])(cache_size=size, hashpower=12)
    requests = [libcachesim.Request(obj_id=int(address), obj_size=1) for address in trace]
    return np.asarray([cache.get(request) for request in requests])


@pytest.mark.parametrize("name", sorted(THEIRS))
def test_every_request_hits_or_misses_as_theirs(name):
    rng, policy = np.random.default_rng(11), POLICIES[name]()
    replay = jax.jit(jax.vmap(lambda size, trace: hits(policy, size, max(SIZES), ADDRESSES, trace), (0, None)))
    for exponent in (0.7, 1.1):
        trace = zipf(rng, exponent)
        ours = np.asarray(replay(jnp.asarray(SIZES, jnp.int32), jnp.asarray(trace)[:, None]))[..., 0]
        for hit, size in zip(ours, SIZES, strict=True):
            expected = theirs(name, size, trace)
            differ = np.flatnonzero(hit != expected)
            assert not differ.size, f"{name}, {size} slots, exponent {exponent}: from request {differ[:1]} on"
            assert 0.05 < expected.mean() < 0.95
