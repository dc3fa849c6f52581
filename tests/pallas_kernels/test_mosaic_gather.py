"""The Pallas Mosaic form of rows by slot: interpreted, lowered and on a GPU, against the reference."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import sparse_gather as sg
from pallas_kernels.sparse_gather.mosaic import unsupported
from pallas_kernels.sparse_gather.shapes import CARDS, PAST_32_BITS, SMALL
from tests.pallas_kernels.cuda import lower_cuda
from tests.pallas_kernels.test_sparse_gather import DEVICE, assert_equal, inputs, run


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        (name, key)
        for name in DEVICE
        for key, shape in SMALL.items()
        if not unsupported(shape.words) and (name.endswith("layers") or key == "odd")
    ],
)
def test_interpreted_it_equals_the_reference(name, shape):
    arguments = inputs(name, SMALL[shape], seed=1)
    found = getattr(sg, name)(*arguments, implementation="mosaic_interpret")
    assert_equal(found, run(name, *arguments))


def test_rows_that_it_cannot_copy_are_refused():
    pool, slots = jnp.ones((2, 3, 6), jnp.uint32), jnp.asarray([1], jnp.int32)
    with pytest.raises(NotImplementedError, match="copies multiples of 16 bytes, and a row has 6 words"):
        sg.gather(pool, 0, slots, implementation="mosaic_interpret")
    with pytest.raises(NotImplementedError, match="needs platform 'gpu', found 'cpu'"):
        sg.gather(pool[:, :, :4], 0, slots, implementation="mosaic")
    long = jnp.ones((1, 2, 300), jnp.uint32)
    with pytest.raises(NotImplementedError, match=r"longer than 256 words must be multiples of 32"):
        sg.gather_layers(long, slots, implementation="mosaic_interpret")


@pytest.mark.parametrize("shape", [*CARDS, "past_32_bits"])
@pytest.mark.parametrize("name", DEVICE)
def test_it_lowers_for_cuda(name, shape):
    shape = {**CARDS, "past_32_bits": PAST_32_BITS}[shape]
    pool = jax.ShapeDtypeStruct((shape.layers, shape.slots, shape.words), jnp.uint32)
    slots, layer = jax.ShapeDtypeStruct((shape.n,), jnp.int32), jax.ShapeDtypeStruct((), jnp.int32)
    every = name.endswith("layers")
    rows = jax.ShapeDtypeStruct(((shape.layers,) if every else ()) + (shape.n, shape.words), jnp.uint32)
    writes = name.startswith("scatter")
    arguments = [pool, *([] if every else [layer]), slots, *([rows] if writes else [])]
    text = lower_cuda(
        lambda *a: getattr(sg, name)(*a, implementation="mosaic"), *arguments, donate_argnums=(0,) if writes else ()
    )
    assert text.count("custom_call @mosaic_gpu") == 1


@pytest.mark.gpu
@pytest.mark.parametrize("shape", CARDS)
@pytest.mark.parametrize("name", DEVICE)
def test_it_equals_the_reference_on_a_gpu(name, shape):
    arguments = inputs(name, CARDS[shape], seed=2)
    np.testing.assert_array_equal(run(name, *arguments, implementation="mosaic"), run(name, *arguments))
