"""What every registered policy promises, whatever it prefers to evict."""

from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ula_jax.policies import POLICIES, Policy
from ula_jax.policies.base import NEVER, Ranking, Touch, depth
from ula_jax.types import EMPTY

SIZE = 33
LIST = 40
"""Length of every list of slots, and `limit`: more than there are slots."""


class Operations:
    """A policy's operations on lists of LIST slots, each compiled once: most of the tests' time is compiling.

    `next_use` is given to those policies only that cannot do without it.
    """

    def __init__(self, policy, compiled=True):
        self.policy, self.traced = policy, Counter()

        def counted(name, function, **options):
            def traced(*arguments):
                self.traced[name] += 1
                return function(*arguments)

            return jax.jit(traced, **options) if compiled else function

        self.init = lambda: policy.init(SIZE)
        self.open = counted("open", lambda state, slots: policy.touch(state, self.use(slots)))
        self.insert = counted("insert", lambda state, slots: policy.touch(state, self.use(slots, inserted=True)))
        self.evict = counted("evict", lambda state, count: policy.evict(state, count, LIST))
        self.forget = counted("forget", policy.forget)
        self.observe = counted("observe", lambda state, ranking: policy.observe(state, ranking))

    def use(self, slots, inserted=False):
        future = jnp.where(slots % 3 == 0, NEVER, slots) if isinstance(self.policy, POLICIES["belady"]) else None
        return Touch(slots, next_use=future, inserted=inserted)

    def round(self, state, gone, hits, count):
        state = self.open(self.forget(state, gone), hits)
        victims, state = self.evict(state, count)
        return victims, self.insert(state, victims)


COMPILED = {name: Operations(cls()) for name, cls in POLICIES.items()}


@pytest.fixture(params=sorted(POLICIES))
def policy(request):
    return COMPILED[request.param]


@pytest.fixture
def rng():
    return np.random.default_rng(7)


def pad(slots, n=LIST, rng=None):
    """int32[n]: these slots and EMPTY, shuffled if a generator is given."""
    padded = np.full(n, EMPTY, np.int32)
    padded[: len(slots)] = list(slots)
    return jnp.asarray(padded if rng is None else rng.permutation(padded))


def listed(slots):
    """The slots of a padded list, which has its padding at the end."""
    slots = np.asarray(slots).tolist()
    given = [slot for slot in slots if slot != EMPTY]
    assert slots == given + [EMPTY] * (len(slots) - len(given))
    assert len(set(given)) == len(given)
    return given


def full(policy):
    """State in which every slot holds a row that was used in the round before the current one."""
    state = policy.open(policy.init(), pad([]))
    slots, state = policy.evict(state, jnp.int32(SIZE))
    return policy.open(policy.insert(state, slots), pad([]))


def retire(policy, count):
    """As a replay makes a smaller pool: the slots that are taken away, and the state without them."""
    victims, state = policy.evict(policy.init(), jnp.int32(count))
    return set(listed(victims)), state


def random_rounds(slots, rounds, rng):
    """(gone, hits, count) of each round, and the slots that are then free and those that are protected."""
    occupied: set[int] = set()
    for _ in range(rounds):
        gone = {s for s in slots if rng.random() < 0.1}
        occupied -= gone
        hits = {s for s in occupied if rng.random() < 0.4}
        count = int(rng.integers(0, len(slots) - len(hits) + 1))
        free = slots - occupied
        victims = yield (pad(gone, rng=rng), pad(hits, rng=rng), jnp.int32(count)), free, hits
        occupied |= set(victims)


def play(policy, state, slots, rounds, rng):
    """Random rounds, checked; arguments and victims of each, and the last state."""
    source = random_rounds(slots, rounds, rng)
    arguments, free, hits = next(source)
    record = []
    while True:
        victims, state = policy.round(state, *arguments)
        record.append((*arguments, victims))
        given = listed(victims)
        assert len(given) == int(arguments[-1])
        assert set(given) <= slots - hits
        assert set(given[: len(free)]) <= free, "free slots go first"
        if hasattr(policy.policy, "audit") and len(slots) == SIZE:
            occupied = np.isin(np.arange(SIZE), list((slots - free) | set(given)))
            policy.policy.audit(jax.tree.map(np.asarray, state), occupied)
        try:
            arguments, free, hits = source.send(given)
        except StopIteration:
            return record, state


def same(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_array_equal(x, y)


def test_is_a_policy(policy):
    assert isinstance(policy.policy, Policy)
    assert policy.policy == type(policy.policy)(), "a frozen dataclass: jit may take it as static"
    assert hash(policy.policy) == hash(type(policy.policy)())


def test_victims_of_random_rounds(policy, rng):
    play(policy, policy.init(), set(range(SIZE)), 60, rng)
    assert max(policy.traced.values()) == 1, "rounds share one trace"


def test_a_pool_of_one_slot_and_lists_without_entries(policy):
    own, none = policy.policy, jnp.zeros(0, jnp.int32)

    @jax.jit
    def everything():
        start = own.touch(own.init(1), policy.use(none))
        victims, state = own.evict(start, jnp.int32(2), 3)
        filled = own.forget(own.touch(state, policy.use(victims, inserted=True)), none)
        kept, filled = own.evict(filled, jnp.int32(1), 3)
        again, after = own.evict(own.touch(filled, policy.use(none)), jnp.int32(1), 3)
        nothing, after = own.evict(after, jnp.int32(0), 0)
        free, _ = own.evict(own.forget(own.touch(after, policy.use(none, inserted=True)), again), jnp.int32(1), 3)
        return victims, kept, again, nothing, free

    victims, kept, again, nothing, free = map(listed, everything())
    assert (victims, kept, again, nothing, free) == ([0], [], [0], [], [0])


def test_retired_slots_never_come_back(policy, rng):
    """A replay makes a smaller pool by an evict before any round, whose slots it never touches."""
    for size in (1, 20):
        gone, state = retire(policy, SIZE - size)
        play(policy, state, set(range(SIZE)) - gone, 12, rng)


def test_nothing_asked_nothing_given(policy):
    state = full(policy)
    victims, after = policy.evict(state, jnp.int32(0))
    assert listed(victims) == []
    same(state, after)


def test_all_free_slots_can_be_had_at_once(policy):
    state = policy.open(policy.init(), pad([]))
    victims, state = policy.evict(state, jnp.int32(SIZE))
    assert sorted(listed(victims)) == list(range(SIZE))
    victims, _ = policy.evict(state, jnp.int32(1))
    assert listed(victims) == [], "all slots have left the books"


def test_a_touched_slot_is_never_given_however_many_are_asked_for(policy):
    hits = list(range(0, SIZE, 2))
    state = policy.open(full(policy), pad(hits))
    victims, _ = policy.evict(state, jnp.int32(LIST))
    assert set(listed(victims)) == set(range(SIZE)) - set(hits)


def test_forgotten_slots_are_free(policy, rng):
    state = full(policy)
    victims, state = policy.evict(state, jnp.int32(3))
    gone = {7, 31, 32, int(victims[0])}
    state = policy.forget(state, pad(gone, rng=rng))
    given, _ = policy.evict(state, jnp.int32(len(gone)))
    assert set(listed(given)) == gone


def test_a_second_evict_in_a_round_spares_what_it_used_and_inserted(policy):
    """As when rows are fetched ahead; rows that are here already count as used by then."""
    hits, here = {1, 2, 3, 20}, {10, 32}
    state = policy.open(full(policy), pad(hits))
    victims, state = policy.evict(state, jnp.int32(5))
    inserted = set(listed(victims))
    here -= inserted
    state = policy.insert(policy.insert(state, victims), pad(here))
    more, state = policy.evict(state, jnp.int32(4))
    more = set(listed(more))
    assert len(more) == 4
    assert not more & (hits | inserted | here)
    rest, _ = policy.evict(policy.insert(state, pad(more)), jnp.int32(LIST))
    assert set(listed(rest)) == set(range(SIZE)) - hits - inserted - here - more


def test_padding_may_stand_anywhere(policy, rng):
    state = full(policy)
    same(policy.open(state, pad([3, 32, 5])), policy.open(state, pad([32, 5, 3], rng=rng)))
    same(policy.forget(state, pad([2])), policy.forget(state, pad([2], rng=rng)))
    same(state, policy.forget(state, pad([])))


def test_vmap_of_scan_gives_the_same(policy, rng):
    """Over pools of several sizes, as in a replay."""
    starts, records, ends = [], [], []
    for retired in (0, 10, 32):
        gone, state = retire(policy, retired)
        record, end = play(policy, state, set(range(SIZE)) - gone, 6, rng)
        starts.append(state)
        records.append(jax.tree.map(lambda *rounds: jnp.stack(rounds), *record))
        ends.append(end)

    def stack(trees):
        return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)

    def lane(state, rounds):
        def body(state, now):
            victims, state = Operations(policy.policy, compiled=False).round(state, *now)
            return state, victims

        return jax.lax.scan(body, state, rounds)

    *arguments, victims = stack(records)
    same(jax.jit(jax.vmap(lane))(stack(starts), tuple(arguments)), (stack(ends), victims))


SEES_SCORES = sorted(name for name, cls in POLICIES.items() if hasattr(cls, "observe"))


@pytest.mark.parametrize("name", SEES_SCORES)
def test_observing_breaks_no_promise(name, rng):
    """Ranked rows may be used ones, idle ones, or elsewhere; padding may stand anywhere."""
    policy = COMPILED[name]
    hits, free, given_up = {4, 8, 30}, {0, 9}, set()
    state = policy.open(policy.forget(full(policy), pad(free)), pad(hits))
    k, ranked = 10, 20
    assert depth(policy.policy) * k >= ranked
    slots = np.full(LIST, EMPTY, np.int32)
    slots[:ranked] = [*hits, *rng.permutation([s for s in range(SIZE) if s not in hits | free])[:12], *[EMPTY] * 5]
    real = np.arange(LIST) < ranked
    ranking = Ranking(
        slots=jnp.asarray(slots),
        addresses=jnp.asarray(np.where(real, 100 + np.arange(LIST), EMPTY), jnp.int32),
        requests=jnp.asarray(np.where(real, 0, EMPTY), jnp.int32),
        ranks=jnp.asarray(np.where(real, np.arange(LIST), EMPTY), jnp.int32),
        margins=jnp.asarray(np.where(real, 3.0 - 0.3 * np.arange(LIST), -np.inf), jnp.float32),
        k=k,
    )
    seen, order = policy.observe(state, ranking), rng.permutation(LIST)
    same(seen, policy.observe(state, jax.tree.map(lambda x: x[order], ranking)))
    victims, seen = policy.evict(seen, jnp.int32(12))
    given_up = set(listed(victims))
    assert len(given_up) == 12
    assert not given_up & hits
    assert free <= given_up
    idle = [s for s in range(SIZE) if s not in hits | free | set(slots.tolist())]
    assert len(idle) >= 10
    assert given_up - free <= set(idle), "rows below everything ranked go before ranked ones"
    rest, _ = policy.evict(policy.insert(seen, victims), jnp.int32(LIST))
    assert set(listed(rest)) == set(range(SIZE)) - hits - given_up
