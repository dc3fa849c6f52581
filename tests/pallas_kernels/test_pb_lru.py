"""The Triton forms of PB-LRU against their reference, and the reference's search against numpy."""

from functools import partial
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import pb_lru, triton_call
from pallas_kernels.pb_lru.buckets import levels, pack, summarize, unpack
from pallas_kernels.pb_lru.shapes import CARDS, SMALL, Shape

EMPTY = pb_lru.EMPTY
rotate = jax.jit(pb_lru.rotate, static_argnames="implementation")
touch = jax.jit(pb_lru.touch, static_argnames=("opens", "implementation"))
forget = jax.jit(pb_lru.forget, static_argnames="implementation")
evict = jax.jit(pb_lru.evict, static_argnums=2, static_argnames="implementation")
find_set = jax.jit(pb_lru.find_set, static_argnums=2, static_argnames="implementation")
needs_interpreter = pytest.mark.skipif(
    triton_call.forms()["triton_interpret"] is not None, reason="needs Triton's interpreter"
)


def equal(found, expected) -> None:
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(a, b)


def some(rng: np.random.Generator, most: int, slots: int) -> jax.Array:
    """Neighbours or slots from all over, one of them twice, and a number behind the last slot; ascending as they may
    be, or mixed, with padding anywhere."""
    entries, number = np.full(most + 2, EMPTY, np.int32), rng.integers(1, most + 1)
    first = rng.integers(0, slots)
    chosen = np.arange(first, min(first + number, slots)) if rng.random() < 0.5 else rng.permutation(slots)[:number]
    entries[: chosen.size] = chosen
    entries[-2:] = chosen[0], slots
    return jnp.asarray(entries if rng.random() < 0.5 else rng.permutation(entries))


def random_state(rng: np.random.Generator, shape: Shape) -> pb_lru.Buckets:
    """Runs of neighbours in one bucket, and between them every slot in another one: words and their summaries are
    empty, full and in between. Sometimes none is free. Labels of slots that have left the ring are arbitrary."""
    runs = rng.geometric(rng.choice([0.02, 0.2, 1.0], shape.slots))
    kinds = shape.rounds + rng.integers(1, 3)
    bucket = np.repeat(rng.integers(0, kinds, shape.slots), runs)[: shape.slots]
    words = summarize(pack(jnp.asarray(bucket == np.arange(shape.rounds + 2)[:, None])))
    label = np.where(bucket < shape.rounds, bucket, rng.integers(0, shape.rounds, shape.slots))
    order = np.roll(np.arange(shape.rounds), rng.integers(0, shape.rounds))
    hand = rng.integers(0, shape.slots)
    return pb_lru.Buckets(words, *map(jnp.asarray, (label.astype(np.uint8), np.int32(order), np.int32(hand))))


def check_operations(shape: Shape, seed: int, form: str) -> None:
    """Every operation in this form against the reference, in the course of a round."""
    rng = np.random.default_rng(seed)
    most = min(shape.slots, 4 * shape.limit)

    def both(operation, *arguments, **static):
        expected = operation(*arguments, **static, implementation="reference")
        equal(operation(*arguments, **static, implementation=form), expected)
        return expected

    state = random_state(rng, shape)
    both(rotate, state)
    for _ in range(3):  # in the midst of cold, where nothing is free
        both(evict, state, jnp.int32(rng.integers(0, shape.limit + 1)), shape.limit)
    state = both(touch, state, some(rng, most, shape.slots), opens=True)
    state = both(forget, state, some(rng, most, shape.slots))
    for count in (0, shape.limit, 2**31 - 1):
        both(evict, state, jnp.int32(count), shape.limit)
    victims, state = both(evict, state, jnp.int32(rng.integers(0, shape.limit + 1)), shape.limit)
    both(touch, state, victims)


@pytest.fixture
def small_programs(monkeypatch):
    """Several programs in every launch, and several units for each, though the shapes are small."""
    triton = pytest.importorskip("pallas_kernels.pb_lru.triton")
    for name, value in dict(SLOTS=64, POUR=32).items():
        monkeypatch.setattr(triton.moves, name, value)
    for name, value in dict(UNIT=4, UNITS=8, PROGRAMS=3).items():
        monkeypatch.setattr(triton.victims, name, value)
    jax.clear_caches()  # they are read when a kernel is traced
    yield triton.moves
    jax.clear_caches()


@needs_interpreter
@pytest.mark.parametrize(("name", "few"), list(zip(SMALL, (0, 4096, 4096, 0), strict=True)))
def test_interpreted_equals_reference(name, few, small_programs, monkeypatch):
    """`few`: whether one program opens a round and moves the slots, or two launches do."""
    monkeypatch.setattr(small_programs, "FEW", few)
    for seed in range(3):
        check_operations(SMALL[name], seed, "triton_interpret")


@needs_interpreter
def test_under_vmap_it_is_the_reference():
    states = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), pb_lru.create(40, 2))
    slots, counts = jnp.asarray([[3, 5, EMPTY], [EMPTY, 39, 0]], jnp.int32), jnp.asarray([4, 2], jnp.int32)

    def use(form, state, slots, count):
        return pb_lru.evict(pb_lru.touch(state, slots, implementation=form), count, 5, implementation=form)

    found, expected = (
        jax.vmap(partial(use, form))(states, slots, counts) for form in ("triton_interpret", "reference")
    )
    equal(found, expected)
    assert np.asarray(found[0]).tolist() == [[0, 1, 2, 4, EMPTY], [1, 2, EMPTY, EMPTY, EMPTY]]


@pytest.mark.parametrize("form", ["reference", pytest.param("triton_interpret", marks=needs_interpreter)])
def test_nothing_to_do(form):
    state = pb_lru.create(40, 2)
    victims, after = evict(state, jnp.int32(0), 0, implementation=form)
    assert victims.shape == (0,)
    equal(after, state)
    nothing = jnp.zeros(0, jnp.int32)
    equal(touch(state, nothing, implementation=form), state)
    equal(forget(state, nothing, implementation=form), state)
    equal(touch(state, nothing, opens=True, implementation=form), rotate(state, implementation="reference"))


def bitmaps():
    rng = np.random.default_rng(0)
    for bits, share in ((1, 1.0), (31, 0.5), (32, 1.0), (33, 0.0), (1000, 0.02), (1025, 0.5), (5000, 0.7)):
        yield rng.random(bits) < share


@pytest.mark.parametrize("form", ["reference", pytest.param("triton_interpret", marks=needs_interpreter)])
def test_set_bits_are_found(form, small_programs):
    for members in bitmaps():
        at = np.flatnonzero(members)
        for count, limit in ((members.size, members.size), (at.size // 2, at.size // 2 + 3), (5, 2)):
            found, number = find_set(pack(jnp.asarray(members)), jnp.int32(count), limit, implementation=form)
            expected = np.full(limit, EMPTY)
            expected[: min(count, limit, at.size)] = at[: min(count, limit)]
            np.testing.assert_array_equal(found, expected)
            assert int(number) == at.size


@pytest.mark.parametrize("n", [1, 31, 32, 33, 100, 1024, 1025])
def test_pack_and_unpack(n):
    mask = np.random.default_rng(n).random((3, n)) < 0.5
    words = pack(jnp.asarray(mask))
    assert words.shape == (3, -(-n // 32))
    np.testing.assert_array_equal(unpack(words, n), mask)
    octets = np.asarray(words).astype("<u4").view(np.uint8)
    np.testing.assert_array_equal(np.unpackbits(octets, axis=1, bitorder="little")[:, :n], mask)


@pytest.mark.parametrize("n", [1, 32, 33, 1024, 1025, 32769])
def test_each_level_starts_a_line(n):
    found = levels(n)
    assert found[0] == (0, -(-n // 32))
    assert found[-1].width == 1
    for below, above in pairwise(found):
        assert above.width == -(-below.width // 32)
        assert above.start % 32 == 0
        assert 0 <= above.start - below.start - below.width < 32


def test_the_triton_form_needs_a_gpu():
    with pytest.raises(NotImplementedError, match="'triton' cannot run: it needs platform 'gpu', found 'cpu'"):
        pb_lru.evict(pb_lru.create(40, 2), jnp.int32(1), 4, implementation="triton")


@pytest.mark.gpu
@pytest.mark.parametrize("name", [*SMALL, *CARDS])
def test_triton_equals_reference_on_a_gpu(name):
    shape = {**CARDS, **SMALL}[name]
    for seed in range(8):
        check_operations(shape, seed, "triton")


@pytest.mark.gpu
@pytest.mark.parametrize("share", [0.0, 1e-4, 0.03, 1.0])
def test_triton_finds_set_bits_on_a_gpu(share):
    words = pack(jnp.asarray(np.random.default_rng(0).random(4_200_001) <= share))
    for count, limit in ((131072, 131072), (1000, 40000), (2**31 - 1, 4_200_001)):
        arguments = words, jnp.int32(count), limit
        equal(*(find_set(*arguments, implementation=form) for form in ("triton", "reference")))
