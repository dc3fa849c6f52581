"""What every registered policy promises, whatever it prefers to evict."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ula_jax.policies import POLICIES, Policy, Touch
from ula_jax.types import EMPTY

SIZES = (1, 33)


class Compiled:
    """A policy's operations, each compiled once for a shape."""

    def __init__(self, policy):
        self.policy = policy
        self.init = policy.init
        self.forget = jax.jit(policy.forget)
        self.evict = jax.jit(policy.evict, static_argnums=2)
        self._touch = jax.jit(
            lambda state, slots, inserted: policy.touch(state, Touch(slots, inserted=inserted)),
            static_argnums=2,
        )

    def touch(self, state, touch):
        return self._touch(state, touch.slots, touch.inserted)


COMPILED = {name: Compiled(cls()) for name, cls in POLICIES.items()}


@pytest.fixture(params=sorted(POLICIES))
def policy(request):
    return COMPILED[request.param]


@pytest.fixture
def rng():
    return np.random.default_rng(7)


def pad(slots, n, rng=None):
    """int32[n]: these slots and EMPTY, shuffled if a generator is given."""
    padded = np.full(n, EMPTY, np.int32)
    padded[: len(slots)] = list(slots)
    return jnp.asarray(padded if rng is None else rng.permutation(padded))


def full(policy, size):
    """State in which every slot holds a row that was used in the round before the current one."""
    state = policy.touch(policy.init(size), Touch(pad([], size)))
    slots, state = policy.evict(state, jnp.int32(size), size)
    state = policy.touch(state, Touch(slots, inserted=True))
    return policy.touch(state, Touch(pad([], size)))


def make_round(policy, limit):
    def one_round(state, gone, hits, count):
        state = policy.forget(state, gone)
        state = policy.touch(state, Touch(hits))
        victims, state = policy.evict(state, count, limit)
        return victims, policy.touch(state, Touch(victims, inserted=True))

    return one_round


def random_rounds(size, rounds, rng):
    """(gone, hits, count) of each round, and the slots that are then free and those that are protected."""
    occupied: set[int] = set()
    for _ in range(rounds):
        gone = set(rng.choice(size, rng.integers(0, size // 4 + 1), replace=False).tolist())
        occupied -= gone
        hits = {s for s in occupied if rng.random() < 0.4}
        count = int(rng.integers(0, size - len(hits) + 1))
        free = set(range(size)) - occupied
        victims = yield (pad(gone, size, rng), pad(hits, size, rng), jnp.int32(count)), free, hits
        occupied |= set(victims)


def same(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_array_equal(x, y)


def test_is_a_policy(policy):
    assert isinstance(policy.policy, Policy)
    assert policy.policy == type(policy.policy)(), "a frozen dataclass: jit may take it as static"
    assert hash(policy.policy) == hash(type(policy.policy)())


@pytest.mark.parametrize("size", [*SIZES, 100])
def test_victims_of_random_rounds(policy, size, rng):
    step, state = make_round(policy, size), policy.init(size)
    rounds = random_rounds(size, 60, rng)
    arguments, free, hits = next(rounds)
    while True:
        listed, state = step(state, *arguments)
        count = int(arguments[-1])
        listed = np.asarray(listed).tolist()
        victims = listed[:count]
        assert listed[count:] == [EMPTY] * (size - count)
        assert len(set(victims)) == count
        assert set(victims) <= set(range(size)) - hits
        assert set(victims[: len(free)]) <= free, "free slots go first"
        try:
            arguments, free, hits = rounds.send(victims)
        except StopIteration:
            break


@pytest.mark.parametrize("size", SIZES)
def test_nothing_asked_nothing_given(policy, size):
    state = full(policy, size)
    victims, after = policy.evict(state, jnp.int32(0), size)
    assert np.asarray(victims).tolist() == [EMPTY] * size
    same(state, after)


@pytest.mark.parametrize("size", SIZES)
def test_all_free_slots_can_be_had_at_once(policy, size):
    state = policy.touch(policy.init(size), Touch(pad([], size)))
    victims, state = policy.evict(state, jnp.int32(size), size)
    assert sorted(np.asarray(victims).tolist()) == list(range(size))
    victims, _ = policy.evict(state, jnp.int32(1), size)
    assert set(np.asarray(victims).tolist()) == {EMPTY}, "all slots have left the books"


@pytest.mark.parametrize("size", SIZES)
def test_a_touched_slot_is_never_given_however_many_are_asked_for(policy, size):
    hits = list(range(0, size, 2))
    state = policy.touch(full(policy, size), Touch(pad(hits, size)))
    victims, _ = policy.evict(state, jnp.int32(size), size)
    assert set(np.asarray(victims).tolist()) - {EMPTY} == set(range(size)) - set(hits)


def test_a_list_may_be_longer_than_the_pool(policy):
    victims, _ = policy.evict(full(policy, 5), jnp.int32(9), 9)
    assert sorted(np.asarray(victims).tolist()) == [EMPTY] * 4 + [0, 1, 2, 3, 4]


def test_forgotten_slots_are_free(policy, rng):
    state = full(policy, 33)
    victims, state = policy.evict(state, jnp.int32(3), 33)
    gone = {7, 31, 32, int(victims[0])}
    state = policy.forget(state, pad(gone, 33, rng))
    given, _ = policy.evict(state, jnp.int32(len(gone)), 33)
    assert set(np.asarray(given).tolist()) == gone | {EMPTY}


def test_a_round_without_use_still_protects_what_it_inserts(policy):
    state = full(policy, 33)
    victims, state = policy.evict(state, jnp.int32(10), 33)
    state = policy.touch(state, Touch(victims, inserted=True))
    rest, _ = policy.evict(state, jnp.int32(33), 33)
    assert not set(np.asarray(rest).tolist()) & (set(np.asarray(victims).tolist()) - {EMPTY})


def test_padding_may_stand_anywhere(policy):
    state = full(policy, 33)
    packed = policy.touch(state, Touch(pad([3, 32, 5], 9)))
    strewn = policy.touch(state, Touch(jnp.asarray([EMPTY, 32, EMPTY, EMPTY, 5, 3, EMPTY, EMPTY, EMPTY], jnp.int32)))
    same(packed, strewn)
    same(policy.forget(state, pad([2], 4)), policy.forget(state, jnp.asarray([EMPTY, 2], jnp.int32)))
    same(state, policy.forget(state, pad([], 4)))


def test_lists_may_have_no_entries(policy):
    state = full(policy, 33)
    none = jnp.zeros(0, jnp.int32)
    same(policy.touch(state, Touch(none)), policy.touch(state, Touch(pad([], 3))))
    same(policy.forget(state, none), state)
    victims, after = policy.evict(state, jnp.int32(0), 0)
    assert victims.shape == (0,)
    same(state, after)


def recorded(policy, size, rounds, rng):
    """Arguments of some rounds, stacked; victims and last state when they are run one by one."""
    source = random_rounds(size, rounds, rng)
    state, arguments, victims = policy.init(size), [], []
    now, _, _ = next(source)
    for _ in range(rounds):
        given, state = make_round(policy, size)(state, *now)
        arguments.append(now)
        victims.append(given)
        try:
            now, _, _ = source.send([v for v in np.asarray(given).tolist() if v != EMPTY])
        except StopIteration:
            break
    return jax.tree.map(lambda *x: jnp.stack(x), *arguments), jnp.stack(victims), state


def test_scan_gives_the_same(policy, rng):
    arguments, victims, state = recorded(policy, 33, 6, rng)

    def body(carry, now):
        given, carry = make_round(policy, 33)(carry, *now)
        return carry, given

    scanned = jax.jit(lambda s, a: jax.lax.scan(body, s, a))(policy.init(33), arguments)
    same(scanned, (state, victims))


def test_vmap_gives_the_same(policy, rng):
    runs = [recorded(policy, 33, 6, rng) for _ in range(3)]
    lanes = jax.tree.map(lambda *x: jnp.stack(x), *[arguments for arguments, _, _ in runs])
    step = jax.jit(jax.vmap(make_round(policy, 33)))
    states = jax.tree.map(lambda x: jnp.stack([x] * 3), policy.init(33))
    for t in range(6):
        victims, states = step(states, *jax.tree.map(lambda x, t=t: x[:, t], lanes))
        for lane, (_, expected, _) in enumerate(runs):
            np.testing.assert_array_equal(victims[lane], expected[t])
    for lane, (_, _, expected) in enumerate(runs):
        same(jax.tree.map(lambda x, lane=lane: x[lane], states), expected)


def test_rounds_share_one_trace(policy, rng):
    traced = []

    def counted(*arguments):
        traced.append(1)
        return make_round(policy, 33)(*arguments)

    step, state = jax.jit(counted), policy.init(33)
    for count in (0, 3, 17):
        _, state = step(state, pad([], 33), pad([], 33), jnp.int32(count))
    assert len(traced) == 1
