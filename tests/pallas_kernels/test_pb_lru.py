"""The Triton form of PB-LRU's victim search against its reference."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import pb_lru
from pallas_kernels.pb_lru.buckets import pack, unpack
from pallas_kernels.pb_lru.shapes import CARDS, SMALL, Shape
from tests.pallas_kernels.cuda import lower_cuda


def states(shape: Shape, count: int, seed: int):
    """Buckets in the course of random use: hits (one slot named twice), evictions, ended requests."""
    rng = np.random.default_rng(seed)
    state, listed = pb_lru.create(shape.slots, shape.rounds), min(shape.slots, 4 * shape.limit)

    @jax.jit
    def use(state, hits, gone, evicted):
        state = pb_lru.touch(pb_lru.rotate(state), hits)
        state = pb_lru.forget(state, gone)
        victims, state = pb_lru.evict(state, evicted, shape.limit)
        return pb_lru.touch(state, victims)

    def some(most):
        slots = np.full(listed + 1, pb_lru.EMPTY, np.int32)
        chosen = rng.choice(shape.slots, rng.integers(0, most + 1), replace=False)
        slots[: chosen.size] = chosen
        slots[-1] = slots[0]
        return jnp.asarray(rng.permutation(slots))

    for _ in range(count):
        yield state
        state = use(state, some(listed), some(listed // 8), jnp.int32(rng.integers(0, shape.limit + 1)))


@pytest.mark.parametrize("name", SMALL)
def test_triton_interpreted_equals_reference(name):
    shape, rng = SMALL[name], np.random.default_rng(3)
    rotate = jax.jit(pb_lru.rotate)
    evict = jax.jit(pb_lru.evict, static_argnums=2, static_argnames="implementation")
    for state in states(shape, 6, seed=5):
        hand = jnp.int32(rng.integers(0, shape.slots))
        state = rotate(state)._replace(hand=hand)
        for count in (0, int(rng.integers(0, shape.limit + 1)), shape.limit):
            arguments = state, jnp.int32(count), shape.limit
            found = evict(*arguments, implementation="triton_interpret")
            expected = evict(*arguments, implementation="reference")
            for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
                np.testing.assert_array_equal(a, b)


def test_no_victims_wanted():
    state = pb_lru.create(40, 2)
    for implementation in ("reference", "triton_interpret"):
        evict = jax.jit(lambda s, form=implementation: pb_lru.evict(s, jnp.int32(0), 0, implementation=form))
        assert evict(state)[0].shape == (0,)


@pytest.mark.parametrize("n", [1, 31, 32, 33, 100, 1024, 1025])
def test_pack_and_unpack(n):
    mask = np.random.default_rng(n).random((3, n)) < 0.5
    words = pack(jnp.asarray(mask))
    assert words.shape == (3, -(-n // 32))
    np.testing.assert_array_equal(unpack(words, n), mask)
    octets = np.asarray(words).astype("<u4").view(np.uint8)
    np.testing.assert_array_equal(np.unpackbits(octets, axis=1, bitorder="little")[:, :n], mask)


def test_the_triton_form_needs_a_gpu():
    with pytest.raises(NotImplementedError, match="'triton' cannot run: it needs platform 'gpu', found 'cpu'"):
        pb_lru.evict(pb_lru.create(40, 2), jnp.int32(1), 4, implementation="triton")


@pytest.mark.parametrize("name", [*CARDS, *SMALL])
def test_triton_lowers_for_cuda(name):
    shape = {**CARDS, **SMALL}[name]
    state = jax.eval_shape(lambda: pb_lru.create(shape.slots, shape.rounds))
    count = jax.ShapeDtypeStruct((), jnp.int32)
    text = lower_cuda(lambda s, c: pb_lru.evict(s, c, shape.limit, implementation="triton"), state, count)
    assert text.count("triton") >= 1


@pytest.mark.gpu
@pytest.mark.parametrize("name", [*SMALL, *CARDS])
def test_triton_equals_reference_on_a_gpu(name):
    shape = {**CARDS, **SMALL}[name]
    rotate = jax.jit(pb_lru.rotate)
    evict = jax.jit(pb_lru.evict, static_argnums=2, static_argnames="implementation")
    for state in states(shape, 40, seed=6):
        arguments = rotate(state), jnp.int32(shape.limit), shape.limit
        found = evict(*arguments, implementation="triton")
        expected = evict(*arguments, implementation="reference")
        for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
            np.testing.assert_array_equal(a, b)
