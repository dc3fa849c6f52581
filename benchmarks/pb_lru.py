"""Scheduling by bucketed LRU against exact LRU, in the same step: a round opens with the hits, finds slots for the
misses, and takes those into use. And its parts.

Every request selects 2048 rows of a shared pool with 6144 slots a request; some of the slots are popular. Exact LRU is
the policy as shipped (`lax.top_k` over all ages), and the two best that a few lines of jnp make of it: a sort, and
counting, because ages are whole rounds.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.case import Case
from pallas_kernels import pb_lru
from pallas_kernels.pb_lru import EMPTY
from ula_jax.policies import LRU
from ula_jax.policies.base import Touch
from ula_jax.policies.books import Books, put

SELECTED, HOT = 2048, 6144
"""Rows that a request selects, and slots that it brings to the pool."""
ROUNDS = 32
MISSES = {1: (0.15,), 8: (0.15,), 64: (0.15, 0.001)}
"""By batch size: shares of the selected rows."""
RATIOS = {1: 1.0, 8: 1.0, 64: 1.5}
"""How much faster than exact LRU it has to be, by batch size."""
CALLS = 10
AGES = 512
"""Rounds that counting tells apart. What is older is as old."""


class Both(NamedTuple):
    """The same rounds in both kinds of books."""

    exact: Books
    buckets: pb_lru.Buckets


class Rounds(NamedTuple):
    hits: list[np.ndarray]
    count: int
    slots: int


def cases(rng: np.random.Generator, small: bool) -> Iterator[Case]:
    forms = ("reference",) if small else ("reference", "triton")
    selected, hot, calls = (16, 48, 2) if small else (SELECTED, HOT, CALLS)
    for batch, shares in ({2: (0.2,)} if small else MISSES).items():
        for share in shares:
            count = max(1, int(share * selected * batch))
            rounds = draw(rng, calls + ROUNDS + 8, batch * selected - count, batch * selected, count, batch * hot)
            yield round_case(f"batch {batch}, {share:.1%} miss", rounds, calls, forms, RATIOS.get(batch))
    yield from parts(rng, small, forms)


def round_case(shape: str, rounds: Rounds, calls: int, ours: tuple[str, ...], ratio: float | None) -> Case:
    begin = steady(rounds, calls)
    limit = rounds.hits[0].size
    exact = {"exact_lru": shipped, "exact_lru_sort": by_sort, "exact_lru_count": by_counting}
    forms: dict[str, Callable[..., Any]] = {name: partial(exactly, play, limit) for name, play in exact.items()}
    forms |= {form: partial(bucketed, form, limit) for form in ours}
    return Case(
        kernel="pb_lru round",
        shape=shape,
        forms=forms,
        calls=[(jnp.asarray(hits), jnp.int32(rounds.count)) for hits in rounds.hits[-calls:]],
        state=lambda: jax.tree.map(jnp.array, begin),
        check=partial(wrong, begin, limit),
        device_bytes=12 * limit + 3 * limit,
        ratio=ratio,
        base="exact_lru",
    )


def draw(rng: np.random.Generator, rounds: int, hits: int, listed: int, count: int, slots: int) -> Rounds:
    """Hits of each round: the popular slots, and some that are only now, anywhere in a list with EMPTY for misses."""
    popular = rng.standard_normal(slots, np.float32)
    lists = []
    for _ in range(rounds):
        now = popular + 0.65 * rng.standard_normal(slots, np.float32)
        entries = np.full(listed, EMPTY, np.int32)
        entries[:hits] = np.argpartition(-now, hits - 1)[:hits]
        lists.append(rng.permutation(entries))
    return Rounds(lists, count, slots)


def steady(rounds: Rounds, calls: int) -> Both:
    """After the rounds that are not timed, every slot in use."""
    limit = rounds.hits[0].size
    every = jnp.arange(rounds.slots, dtype=jnp.int32)
    state = Both(
        Books.create(rounds.slots).touch(Touch(every)),
        pb_lru.touch(pb_lru.create(rounds.slots, ROUNDS), every, opens=True, implementation="reference"),
    )

    def play(state: Both, hits: jax.Array) -> tuple[Both, None]:
        state, _ = exactly(by_counting, limit, state, hits, jnp.int32(rounds.count))
        return bucketed("reference", limit, state, hits, jnp.int32(rounds.count))[0], None

    return jax.jit(partial(jax.lax.scan, play))(state, np.stack(rounds.hits[:-calls]))[0]


def bucketed(form: str, limit: int, state: Both, hits: jax.Array, count: jax.Array) -> tuple[Both, jax.Array]:
    buckets = pb_lru.touch(state.buckets, hits, opens=True, implementation=form)
    victims, buckets = pb_lru.evict(buckets, count, limit, implementation=form)
    return state._replace(buckets=pb_lru.touch(buckets, victims, implementation=form)), victims


def exactly(play: Callable[..., Any], limit: int, state: Both, hits: jax.Array, count: jax.Array) -> Any:
    books, victims = play(state.exact, hits, count, limit)
    return state._replace(exact=books), victims


def shipped(books: Books, hits: jax.Array, count: jax.Array, limit: int) -> tuple[Books, jax.Array]:
    policy = LRU()
    victims, books = policy.evict(policy.touch(books, Touch(hits)), count, limit)
    return policy.touch(books, Touch(victims, inserted=True)), victims


def by_sort(books: Books, hits: jax.Array, count: jax.Array, limit: int) -> tuple[Books, jax.Array]:
    books = books.touch(Touch(hits))
    oldest = jnp.argsort(books.stamp)[:limit]
    return _use(books, jnp.where(jnp.arange(limit) < count, oldest, EMPTY))


def by_counting(books: Books, hits: jax.Array, count: jax.Array, limit: int) -> tuple[Books, jax.Array]:
    """The age at which the count is reached, all that are older, and of those of that age the first."""
    books = books.touch(Touch(hits))
    age = jnp.minimum(books.round - books.stamp, AGES - 1)
    number = jnp.zeros(AGES, jnp.int32).at[age].add(1)
    as_old = jnp.cumsum(number[::-1])[::-1]
    last = jnp.sum(as_old >= count) - 1
    place = jnp.cumsum(age == last)
    taken = (age > last) | ((age == last) & (place <= count - as_old[last] + number[last]))
    at = jnp.where(taken, jnp.cumsum(taken) - 1, EMPTY)
    slots = jnp.arange(age.size, dtype=jnp.int32)
    return _use(books, put(jnp.full(limit, EMPTY, jnp.int32), at.astype(jnp.int32), slots))


def _use(books: Books, victims: jax.Array) -> tuple[Books, jax.Array]:
    return books.touch(Touch(victims, inserted=True)), victims


def wrong(begin: Both, limit: int, form: str, result: tuple[Both, jax.Array], call: tuple) -> str | None:
    """Exact LRU: as many as asked for, distinct, not hit, of the lowest stamps. Buckets: bit for bit the reference."""
    hits, count = np.asarray(call[0]), int(call[1])
    victims = np.asarray(result[1])
    given = victims[victims >= 0]
    distinct, hit = np.unique(given).size, np.isin(given, hits).sum()
    if not given.size == distinct == count or hit:
        return f"{given.size} victims of {count}, {distinct} distinct, {hit} just hit"
    if form.startswith("exact"):
        stamp = np.array(begin.exact.stamp)
        stamp[hits[hits >= 0]] = int(begin.exact.round) + 1
        return None if np.array_equal(np.sort(stamp[given]), np.sort(stamp)[:count]) else "victims are not the oldest"
    expected = jax.jit(partial(bucketed, "reference", limit))(jax.tree.map(jnp.array, begin), *call)
    return differing((result[0].buckets, result[1]), (expected[0].buckets, expected[1]))


def differing(found: Any, expected: Any) -> str | None:
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
    unequal = [number for number, (a, b) in enumerate(pairs) if not np.array_equal(a, b)]
    return f"leaves {unequal} are not those of the reference" if unequal else None


def parts(rng: np.random.Generator, small: bool, forms: tuple[str, ...]) -> Iterator[Case]:
    """One operation at a time: touching hits, finding victims of a larger pool, and reading a bitmap off."""
    selected, slots, calls = (32, 100, 2) if small else (64 * SELECTED, 64 * HOT, CALLS)
    rounds = draw(rng, calls + ROUNDS + 8, selected * 17 // 20, selected, selected * 3 // 20, slots)
    begin = steady(rounds, calls).buckets
    yield part("touch", f"{selected} of {slots}", forms, touching, rounds, begin, calls)
    yield part("evict", f"{rounds.count} of {slots}", forms, partial(evicting, selected), rounds, begin, calls)
    if not small:
        slots, selected = 2_900_000, 16384
        rounds = draw(rng, calls + ROUNDS + 8, selected * 17 // 20, selected, selected, slots)
        begin = steady(rounds, calls).buckets
        yield part("evict", f"{rounds.count} of {slots}", forms, partial(evicting, selected), rounds, begin, calls)

    bits, limit = (4096, 200) if small else (64 * 65536, 64 * SELECTED)
    bitmaps = [np.packbits(rng.random(bits) < 0.15 * limit / bits, bitorder="little").view("<u4") for _ in range(calls)]
    yield Case(
        kernel="pb_lru.find_set",
        shape=f"15% of {limit} in {bits} bits",
        forms={form: partial(finding, form, limit) for form in forms},
        calls=[(jnp.asarray(words), jnp.int32(limit)) for words in bitmaps],
        check=wrong_positions,
        device_bytes=bits // 8 + 4 * limit,
    )


def part(
    name: str, shape: str, forms: tuple[str, ...], run: Callable, rounds: Rounds, begin: pb_lru.Buckets, calls: int
) -> Case:
    def check(form: str, result: Any, call: tuple) -> str | None:
        return differing(result, jax.jit(partial(run, "reference"))(jax.tree.map(jnp.array, begin), *call))

    return Case(
        kernel=f"pb_lru.{name}",
        shape=shape,
        forms={form: partial(run, form) for form in forms},
        calls=[(jnp.asarray(hits), jnp.int32(rounds.count)) for hits in rounds.hits[-calls:]],
        state=lambda: jax.tree.map(jnp.array, begin),
        check=check,
        device_bytes=6 * rounds.hits[0].size,
    )


def touching(form: str, state: pb_lru.Buckets, hits: jax.Array, count: jax.Array) -> tuple[pb_lru.Buckets, jax.Array]:
    return pb_lru.touch(state, hits, opens=True, implementation=form), count


def evicting(
    limit: int, form: str, state: pb_lru.Buckets, hits: jax.Array, count: jax.Array
) -> tuple[pb_lru.Buckets, jax.Array]:
    """Each time from other words, because those taken are gone."""
    victims, state = pb_lru.evict(state, count, limit, implementation=form)
    return state, victims


def finding(form: str, limit: int, words: jax.Array, count: jax.Array) -> tuple[jax.Array, jax.Array]:
    return pb_lru.find_set(words, count, limit, implementation=form)


def wrong_positions(form: str, result: tuple[jax.Array, jax.Array], call: tuple) -> str | None:
    set_bits = np.flatnonzero(np.unpackbits(np.asarray(call[0]).view(np.uint8), bitorder="little"))
    expected = np.full(result[0].size, EMPTY)
    expected[: set_bits.size] = set_bits[: expected.size]
    right = np.array_equal(result[0], expected) and int(result[1]) == set_bits.size
    return None if right else "positions are not those of numpy"
