"""PB-LRU against sets, against exact LRU, and its constructor."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import pb_lru, triton_call
from tests.policies.set_buckets import SetBuckets, check
from ula_jax.policies import LRU, PBLRU, Touch
from ula_jax.types import EMPTY

ROUNDS = 220

needs_interpreter = pytest.mark.skipif(
    triton_call.forms()["triton_interpret"] is not None, reason="needs Triton's interpreter"
)


def pad(slots, n):
    padded = np.full(n, EMPTY, np.int32)
    padded[: len(slots)] = list(slots)
    return jnp.asarray(padded)


def skewed(rng, size, k):
    weights = 1 / (1 + np.arange(size))
    return rng.choice(size, k, replace=False, p=weights / weights.sum())


@pytest.mark.parametrize(("size", "limit"), [(33, 12), (1100, 90)])
@pytest.mark.parametrize("rounds", [1, 2, 3, 8])
def test_equals_sets(rounds, size, limit):
    """A pool under a skewed load of twice its size, with requests that end."""
    _play_against_sets(PBLRU(rounds), size, limit, turns=ROUNDS)


@needs_interpreter
@pytest.mark.parametrize(("rounds", "size", "limit"), [(1, 33, 12), (3, 1100, 90)])
def test_the_triton_form_equals_sets(rounds, size, limit):
    _play_against_sets(PBLRU(rounds, "triton_interpret"), size, limit, turns=20)


def _play_against_sets(policy, size, limit, turns):
    rounds = policy.rounds
    model, rng = SetBuckets(size, rounds), np.random.default_rng(rounds)

    @jax.jit
    def use(state, gone, hits, count):
        state = policy.touch(policy.forget(state, gone), Touch(hits))
        return policy.evict(state, count, limit)

    insert = jax.jit(lambda state, slots: policy.touch(state, Touch(slots, inserted=True)))
    state = policy.init(size)
    slot_of: dict[int, int] = {}
    for t in range(turns):
        gone = []
        if t % 17 == 5:
            ended = rng.choice(sorted(slot_of), len(slot_of) // 5, replace=False).tolist()
            gone = [slot_of.pop(address) for address in ended]
        wanted = skewed(rng, 2 * size, limit).tolist()
        hits = [slot_of[address] for address in wanted if address in slot_of]
        missed = [address for address in wanted if address not in slot_of]

        model.forget(gone)
        model.rotate()
        model.touch(hits)
        expected = model.evict(len(missed))
        victims, state = use(state, pad(gone, size), pad(hits, limit), jnp.int32(len(missed)))
        assert np.asarray(victims).tolist() == expected + [EMPTY] * (limit - len(missed))

        slot_of = {address: slot for address, slot in slot_of.items() if slot not in set(expected)}
        slot_of |= dict(zip(missed, expected, strict=True))
        model.touch(expected)
        state = insert(state, victims)
        check(state, model)
        policy.audit(state, np.isin(np.arange(size), list(slot_of.values())))
        assert model.ring[model.cursor] == {slot_of[address] for address in wanted}
        assert sum(map(len, model.buckets())) == size
    ring = dict(zip(range(rounds + 2), model.buckets(), strict=True))
    found = np.asarray(pb_lru.bucket_of(state, jnp.arange(size, dtype=jnp.int32)))
    assert all(slot in ring[bucket] for slot, bucket in enumerate(found.tolist()))


def test_a_ring_longer_than_the_run_is_exact_lru():
    """No bucket ever turns cold, and both break ties of one round by the lowest slot."""
    size, limit, rng = 100, 40, np.random.default_rng(0)
    policies = (LRU(), PBLRU(rounds=101))
    states = [policy.init(size) for policy in policies]

    def one_round(policy, state, gone, hits, count):
        state = policy.touch(policy.forget(state, gone), Touch(hits))
        victims, state = policy.evict(state, count, limit)
        return victims, policy.touch(state, Touch(victims, inserted=True))

    steps = [jax.jit(lambda *a, policy=policy: one_round(policy, *a)) for policy in policies]
    for _ in range(100):
        hits = rng.permutation(size)[: rng.integers(0, 50)]
        gone = rng.permutation(size)[: rng.integers(0, 4)]
        arguments = pad(gone, size), pad(hits, size), jnp.int32(rng.integers(0, limit + 1))
        (exact, states[0]), (bucketed, states[1]) = (
            step(state, *arguments) for step, state in zip(steps, states, strict=True)
        )
        np.testing.assert_array_equal(exact, bucketed)


@pytest.mark.parametrize("form", ["reference", pytest.param("triton_interpret", marks=needs_interpreter)])
def test_the_hand_goes_on_where_it_stopped(form):
    """Cold slots 0..39; asked for 10 at a time they go round, though 0..9 turn cold again meanwhile."""
    policy = PBLRU(1, form)

    @jax.jit
    def one_round(state):
        victims, state = policy.evict(policy.touch(state, Touch(pad([], 1))), jnp.int32(10), 10)
        return victims, policy.touch(state, Touch(victims, inserted=True))

    state = jax.jit(policy.touch)(policy.init(40), Touch(jnp.arange(40, dtype=jnp.int32)))
    for expected in (range(0, 10), range(10, 20), range(20, 30), range(30, 40), range(0, 10)):
        victims, state = one_round(state)
        assert np.asarray(victims).tolist() == list(expected)


def test_labels_are_decoded_lazily():
    """A slot that fell off the ring is cold although its label still names a ring bucket."""
    rotate, bucket_of = jax.jit(pb_lru.rotate), jax.jit(pb_lru.bucket_of)
    state = jax.jit(pb_lru.touch)(rotate(pb_lru.create(5, 2)), jnp.asarray([3], jnp.int32))
    slots = jnp.asarray([3, 0, EMPTY, 9], jnp.int32)
    assert np.asarray(bucket_of(state, slots)).tolist() == [1, 3, EMPTY, EMPTY]
    state = rotate(rotate(state))
    assert int(state.label[3]) == 1
    assert np.asarray(bucket_of(state, slots)).tolist() == [2, 3, EMPTY, EMPTY]


@pytest.mark.parametrize("rounds", [0, -1, 255])
def test_a_ring_has_1_to_254_buckets(rounds):
    with pytest.raises(ValueError, match="rounds: expected 1 to 254"):
        PBLRU(rounds)


def test_a_pool_has_a_slot():
    with pytest.raises(ValueError, match="num_slots: expected at least 1"):
        PBLRU().init(0)
