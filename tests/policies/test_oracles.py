"""Every policy against its rule in plain Python (`models.py`), in rounds of many accesses; and Belady against
all other choices.

All pools have slots that were taken away at the start, requests that end, and requests that are not in every round.
"""

from functools import cache
from itertools import combinations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.policies.models import MODELS, REQUESTS, SIZE
from tests.policies.rounds import hits
from ula_jax.policies import POLICIES
from ula_jax.policies.base import NEVER, Ranking, Touch
from ula_jax.policies.belady import Belady
from ula_jax.policies.lru import LRU
from ula_jax.policies.prefetch import Prefetch
from ula_jax.policies.quota_lru import QuotaLRU
from ula_jax.policies.random_ import Random
from ula_jax.policies.round import play
from ula_jax.types import EMPTY

LENGTH, K, RANKED = 40, 8, 32
ROUNDS = 100
RETIRED = (5, 15)  # the second leaves hardly more than what one round needs


@cache
def scores():
    """float32[rounds, requests, positions]: some positions are liked for long, some for a while."""
    rng = np.random.default_rng(2)
    lasting, passing = rng.standard_normal((2, REQUESTS, LENGTH))
    out = []
    for _ in range(ROUNDS):
        passing = 0.8 * passing + 0.6 * rng.standard_normal((REQUESTS, LENGTH))
        out.append(lasting + passing)
    return np.asarray(out, np.float32)


@pytest.mark.parametrize("name", sorted(MODELS))
def test_gives_up_what_its_rule_says(name):
    parameters = {"pb_lru_exp": {"buckets": 5, "width": 2}, "s3_fifo": {"small": 40}}.get(name, {})
    policy = POLICIES[name](**parameters)

    @jax.jit
    def step(state, gone, needed, ranking):
        return play(policy, policy.forget(state, gone), needed, ranking, SIZE)

    for retired in RETIRED:
        compare(policy, step, MODELS[name], retired)


def compare(policy, step, new_model, retired):
    rng = np.random.default_rng(retired)
    taken, state = policy.evict(policy.init(SIZE), jnp.int32(retired), SIZE)
    model = new_model(set(range(SIZE)) - set(np.asarray(taken).tolist()))
    slot_of = np.full(REQUESTS * LENGTH, EMPTY, np.int32)
    evicted = 0
    for t, score in enumerate(scores()):
        active = sorted(np.flatnonzero(rng.random(REQUESTS) < 0.85).tolist())
        gone = np.full(SIZE, EMPTY, np.int32)
        if t % 20 == 9:
            ended = int(rng.integers(REQUESTS))
            rows = slot_of[ended * LENGTH : (ended + 1) * LENGTH]
            gone[: np.sum(rows >= 0)] = rows[rows >= 0]
            rows[:] = EMPTY
        # Now and then, only rows that are here are liked, so that many are used again, or those that are not.
        score = score + rng.choice([0, 0, 10, -10]) * (slot_of.reshape(score.shape) >= 0).astype(np.float32)
        ranks = np.argsort(-score, axis=1)[:, :RANKED].astype(np.int32)
        margins = np.take_along_axis(score, ranks, 1)
        margins -= margins[:, K - 1 : K]
        ranked = ranks + LENGTH * np.arange(REQUESTS, dtype=np.int32)[:, None]
        ranked[[r not in active for r in range(REQUESTS)]] = EMPTY
        request = np.where(ranked >= 0, np.arange(REQUESTS)[:, None], EMPTY).astype(np.int32)
        slots = np.where(ranked >= 0, slot_of[ranked], EMPTY)
        # In no order, with padding among the others; the ranking too.
        shuffle = rng.permutation(REQUESTS * K + 2)
        needed = [np.append(x[:, :K], [EMPTY] * 2).astype(np.int32)[shuffle] for x in (slots, ranked, request)]
        rank = np.broadcast_to(np.arange(RANKED, dtype=np.int32), ranked.shape)
        strewn = rng.permutation(ranked.size)
        ranking = Ranking(*(jnp.asarray(x.reshape(-1)[strewn]) for x in (slots, ranked, request, rank, margins)), k=K)
        at, rows, owners = map(jnp.asarray, needed)
        result = step(state, jnp.asarray(gone), Touch(at, rows, owners), ranking)
        state = result.state

        miss = (needed[1] >= 0) & (needed[0] < 0)
        model.forget(gone[gone >= 0].tolist())
        model.open(needed[0][needed[0] >= 0].tolist(), needed[2][miss].tolist(), active)
        here = (slots >= 0) & (ranked >= 0)
        model.observe(list(zip(slots[here].tolist(), rank[here].tolist(), margins[here].tolist(), strict=True)))
        free, model.found = len(model.free), np.asarray(result.targets)[miss].tolist()
        expected = model.evict(int(miss.sum()))
        evicted += max(len(expected) - free, 0)
        assert model.found == expected, f"round {t}"
        assert np.all(np.asarray(result.targets)[~miss] == EMPTY)
        model.insert(expected, needed[1][miss].tolist(), needed[2][miss].tolist())
        slot_of[np.isin(slot_of, expected)] = EMPTY
        slot_of[needed[1][miss]] = expected
    assert evicted > 3 * ROUNDS


@pytest.fixture
def rng():
    return np.random.default_rng(4)


def fewest_misses(rounds, size):
    """By trying every choice of victims, with every needed row resident in its round."""

    @cache
    def least(t, resident):
        if t == len(rounds):
            return 0
        needed = rounds[t]
        idle, missed = resident - needed, len(needed - resident)
        leave = max(len(resident | needed) - size, 0)
        return missed + min(
            least(t + 1, (resident | needed) - set(victims)) for victims in combinations(sorted(idle), leave)
        )

    return least(0, frozenset())


def test_belady_misses_as_little_as_any_choice_of_victims(rng):
    size, addresses, rounds, width, traces = 4, 7, 9, 2, 60
    trace = np.stack([[rng.permutation(addresses)[:width] for _ in range(rounds)] for _ in range(traces)])
    trace = trace.astype(np.int32)
    uses = np.full(trace.shape, NEVER, np.int32)
    for i, t, j in np.ndindex(trace.shape):
        later = [u for u in range(t + 1, rounds) if trace[i, t, j] in trace[i, u]]
        uses[i, t, j] = min(later, default=NEVER)

    def misses(policy):
        def one(accesses, next_use):
            return jnp.sum(~hits(policy, size, size, addresses, accesses, None, next_use))

        return np.asarray(jax.jit(jax.vmap(one))(trace, uses)).tolist()

    least = [fewest_misses([frozenset(now.tolist()) for now in one], size) for one in trace]
    assert misses(Belady()) == least
    assert sum(misses(LRU())) > sum(least) + 30


def test_belady_needs_the_future():
    policy = Belady()
    with pytest.raises(ValueError, match="belady: expected next_use, found none; only a replay knows the future"):
        policy.touch(policy.init(4), Touch(jnp.asarray([1], jnp.int32)))
    policy.touch(policy.init(4), Touch(jnp.zeros(0, jnp.int32)))


def test_quotas_are_separate_lru_pools_once_the_pool_is_full(rng):
    """With one access of each request a round, so that no two rows of a request are equally old."""
    requests, length, quota, rounds = 4, 30, 8, 400
    weights = 1 / np.arange(1, length + 1)
    own = rng.choice(length, (rounds, requests), p=weights / weights.sum()).astype(np.int32)
    number = np.arange(requests, dtype=np.int32)
    shared = hits(
        QuotaLRU(),
        jnp.int32(requests * quota),
        requests * quota + 3,  # some of them taken away
        requests * length,
        jnp.asarray(own + number * length),
        jnp.broadcast_to(number, own.shape),
    )
    separate = jax.vmap(lambda trace: hits(LRU(), jnp.int32(quota), quota, length, trace[:, None]))(own.T)
    np.testing.assert_array_equal(np.asarray(shared)[100:], np.asarray(separate)[:, 100:, 0].T)
    assert 0.3 < np.mean(shared) < 0.8


def test_random_has_no_favourites(rng):
    size, count, rounds = 12, 3, 400

    def run(policy):
        def one_round(state, _):
            state = policy.touch(state, Touch(jnp.asarray([2], jnp.int32)))
            victims, state = policy.evict(state, jnp.int32(count), count)
            return policy.touch(state, Touch(victims, inserted=True)), victims

        start = policy.touch(policy.init(size), Touch(jnp.arange(size, dtype=jnp.int32)))
        return np.asarray(jax.jit(lambda: jax.lax.scan(one_round, start, None, rounds)[1])())

    victims = run(Random())
    share = np.bincount(victims.reshape(-1), minlength=size) / rounds
    assert share[2] == 0
    np.testing.assert_allclose(np.delete(share, 2), count / (size - 1), atol=0.08)
    assert not np.array_equal(victims, run(Random(seed=1)))


def test_prefetch_is_its_policy_and_a_share():
    policy = Prefetch("pb_score:depth=3", share=0.5)
    assert policy.inner == POLICIES["pb_score"](depth=3.0)
    assert (policy.prefetch, policy.depth) == (0.5, 3.0)
    assert Prefetch(LRU()).inner == LRU()
    state = Prefetch("lru").init(3)
    ranking = Ranking(*[jnp.zeros(0, jnp.int32)] * 4, margins=jnp.zeros(0, jnp.float32))
    assert Prefetch("lru").observe(state, ranking) is state
