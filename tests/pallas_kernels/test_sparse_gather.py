"""Gather and scatter of rows: the reference against loops, the Mosaic form against the reference, and in
place."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import sparse_gather as sg
from pallas_kernels.sparse_gather import EMPTY, reference
from pallas_kernels.sparse_gather.shapes import CARDS, PAST_32_BITS, SMALL, Shape
from tests.pallas_kernels.cuda import lower_cuda

FUNCTIONS = ("gather", "gather_layers", "scatter", "scatter_layers")


def random_words(rng, *shape):
    return rng.integers(0, 2**32, shape, dtype=np.uint32)


def inputs(name: str, shape: Shape, seed: int = 0):
    """Random pool, slots (repeated only in reads, some EMPTY) and rows, as arguments of the function
    `name`."""
    rng = np.random.default_rng(seed)
    pool = random_words(rng, shape.layers, shape.slots, shape.words)
    if name.startswith("gather"):
        slots = rng.integers(EMPTY, shape.slots, shape.n, dtype=np.int32)
    else:
        slots = np.full(max(shape.n, shape.slots), EMPTY, np.int32)
        slots[: shape.slots] = np.where(rng.random(shape.slots) < 0.7, np.arange(shape.slots), EMPTY)
        slots = rng.permutation(slots)[: shape.n]
    layers = (shape.layers,) if name.endswith("layers") else ()
    layer = () if layers else (shape.layers - 1,)
    rows = (random_words(rng, *layers, shape.n, shape.words),) if name.startswith("scatter") else ()
    return jax.tree.map(lambda x: jnp.asarray(x) if np.ndim(x) else x, (pool, *layer, slots, *rows))


def by_loops(name: str, pool, *rest):
    """The meaning, row by row, in numpy."""
    pool = np.array(pool)
    one = not name.endswith("layers")
    layers, rest = ([rest[0]], rest[1:]) if one else (range(len(pool)), rest)
    slots = np.asarray(rest[0])
    out = np.zeros((len(layers), len(slots), pool.shape[2]), np.uint32)
    for at, layer in enumerate(layers):
        for i, slot in enumerate(slots):
            if slot == EMPTY:
                continue
            if name.startswith("gather"):
                out[at, i] = pool[layer, slot]
            else:
                pool[layer, slot] = np.asarray(rest[1])[i] if one else np.asarray(rest[1])[layer, i]
    return pool if name.startswith("scatter") else out[0] if one else out


@pytest.mark.parametrize("shape", SMALL)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_reference_equals_loops(name, shape):
    arguments = inputs(name, SMALL[shape])
    np.testing.assert_array_equal(getattr(sg, name)(*arguments), by_loops(name, *arguments))


@pytest.mark.parametrize(
    ("name", "shape"),
    [(name, shape) for name in FUNCTIONS for shape in SMALL if name.endswith("layers") or shape == "odd"],
)
def test_mosaic_interpreted_equals_reference(name, shape):
    arguments = inputs(name, SMALL[shape], seed=1)
    found = getattr(sg, name)(*arguments, implementation="mosaic_interpret")
    np.testing.assert_array_equal(found, getattr(reference, name)(*arguments))


@pytest.mark.parametrize("implementation", ["reference", "mosaic_interpret"])
def test_the_layer_may_be_traced_and_layers_do_not_share_rows(implementation):
    """Distinct patterns in two layers, written one after the other by one compiled function, then both
    read."""
    slots = jnp.asarray([6, EMPTY, 2], jnp.int32)
    patterns = [jnp.full((3, 32), value, jnp.uint32) for value in (0xAAAAAAAA, 0x55555555)]

    @jax.jit
    def write(pool, layer, rows):
        return sg.scatter(pool, layer, slots, rows, implementation=implementation)

    @jax.jit
    def read(pool, layer):
        return sg.gather(pool, layer, slots, implementation=implementation)

    pool = jnp.zeros((2, 7, 32), jnp.uint32)
    for layer, rows in enumerate(patterns):
        pool = write(pool, jnp.int32(layer), rows)
    for layer, rows in enumerate(patterns):
        expected = np.asarray(rows) * np.asarray([[1], [0], [1]], np.uint32)
        np.testing.assert_array_equal(read(pool, jnp.int32(layer)), expected)
    untouched = np.setdiff1d(np.arange(7), [6, 2])
    assert not np.asarray(pool)[:, untouched].any()


@pytest.mark.parametrize("implementation", ["reference", "mosaic_interpret"])
def test_an_empty_list_reads_and_writes_nothing(implementation):
    pool, none = jnp.ones((2, 3, 4), jnp.uint32), jnp.zeros(0, jnp.int32)
    assert sg.gather(pool, 0, none, implementation=implementation).shape == (0, 4)
    assert sg.gather_layers(pool, none, implementation=implementation).shape == (2, 0, 4)
    rows = jnp.zeros((0, 4), jnp.uint32)
    np.testing.assert_array_equal(sg.scatter(pool, 1, none, rows, implementation=implementation), pool)


def test_what_cannot_run_says_why():
    pool, slots = jnp.ones((2, 3, 6), jnp.uint32), jnp.asarray([1], jnp.int32)
    with pytest.raises(NotImplementedError, match="copies multiples of 16 bytes, and a row has 6 words"):
        sg.gather(pool, 0, slots, implementation="mosaic_interpret")
    with pytest.raises(NotImplementedError, match="needs platform 'gpu', found 'cpu'"):
        sg.gather(pool[:, :, :4], 0, slots, implementation="mosaic")
    with pytest.raises(ValueError, match="found 'cuda'"):
        sg.gather(pool, 0, slots, implementation="cuda")
    with pytest.raises(IndexError, match="layer: expected 0 to 1, found 2"):
        sg.gather(pool, 2, slots)
    long = jnp.ones((1, 2, 300), jnp.uint32)
    with pytest.raises(NotImplementedError, match="longer than 256 words must be multiples of 32"):
        sg.gather_layers(long, slots, implementation="mosaic_interpret")


def abstract(name: str, shape: Shape):
    pool = jax.ShapeDtypeStruct((shape.layers, shape.slots, shape.words), jnp.uint32)
    slots = jax.ShapeDtypeStruct((shape.n,), jnp.int32)
    layers = (shape.layers,) if name.endswith("layers") else ()
    rows = jax.ShapeDtypeStruct((*layers, shape.n, shape.words), jnp.uint32)
    layer = () if layers else (jax.ShapeDtypeStruct((), jnp.int32),)
    return (pool, *layer, slots, rows) if name.startswith("scatter") else (pool, *layer, slots)


@pytest.mark.parametrize("shape", [*CARDS, "past_32_bits"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_mosaic_lowers_for_cuda(name, shape):
    shape = {**CARDS, "past_32_bits": PAST_32_BITS}[shape]
    text = lower_cuda(
        lambda *a: getattr(sg, name)(*a, implementation="mosaic"),
        *abstract(name, shape),
        donate_argnums=(0,) if name.startswith("scatter") else (),
    )
    assert text.count("custom_call @mosaic_gpu") == 1


@pytest.mark.parametrize("name", FUNCTIONS)
def test_reference_computes_no_offsets(name):
    """A pool of 2^32 bytes and more is indexed by (layer, slot): no 32-bit product can overflow."""
    text = lower_cuda(getattr(reference, name), *abstract(name, PAST_32_BITS))
    assert "multiply" not in text
    assert re.search(r"stablehlo\.(gather|scatter)", text)


def pool_sized(text: str, shape: Shape) -> list[str]:
    """Lines of compiled HLO that make a new array of the size of the pool or of a whole layer of it."""
    sizes = (
        rf"u32\[{shape.layers},{shape.slots},{shape.words}\]",
        rf"u32\[(1,)?{shape.slots},{shape.words}\]",
    )
    made = re.compile(rf"= ({'|'.join(sizes)})\S* (copy|copy-start|slice|dynamic-slice|broadcast|transpose)\(")
    return [line.strip() for line in text.splitlines() if made.search(line)]


def read_then_write_what_was_read(pool, source, target):
    """The written rows come from the read ones."""
    return sg.scatter(pool, 1, target, sg.gather(pool, 1, source) + jnp.uint32(1))


def read_then_write_other_rows(pool, source, target):
    """Nothing but the barrier orders the two."""
    read = sg.gather_layers(pool, source)
    pool, read = jax.lax.optimization_barrier((pool, read))
    rows = jnp.broadcast_to(target.astype(jnp.uint32)[None, :, None], read.shape)
    return sg.scatter_layers(pool, target, rows), read


def steps_in_a_scan(pool, source, target):
    def step(pool, turn):
        rows = sg.gather_layers(pool, source + turn)
        return sg.scatter_layers(pool, target + turn, rows), rows.sum()

    return jax.lax.scan(step, pool, jnp.arange(4, dtype=jnp.int32))


STEPS = [read_then_write_what_was_read, steps_in_a_scan]
if jax.__version_info__ >= (0, 11):  # XLA:CPU of JAX 0.10 drops the barrier before it decides what to copy
    STEPS.append(read_then_write_other_rows)


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.__name__)
def test_a_donated_step_copies_no_pool(step):
    shape = Shape(layers=3, slots=4099, words=40, n=16)
    pool = jax.ShapeDtypeStruct((shape.layers, shape.slots, shape.words), jnp.uint32)
    slots = jax.ShapeDtypeStruct((shape.n,), jnp.int32)
    compiled = jax.jit(step, donate_argnums=0).trace(pool, slots, slots).lower().compile()
    text = compiled.as_text()
    assert not pool_sized(text, shape)
    assert "input_output_alias={" in text
    memory = compiled.memory_analysis()
    assert memory is not None
    assert memory.temp_size_in_bytes < 4 * shape.slots * shape.words, "no temporary of a layer's size"


def test_the_copy_that_the_test_looks_for_is_found():
    """Without donation the pool must be copied, and `pool_sized` must see it."""
    shape = Shape(layers=3, slots=4099, words=40, n=16)
    pool = jax.ShapeDtypeStruct((shape.layers, shape.slots, shape.words), jnp.uint32)
    slots = jax.ShapeDtypeStruct((shape.n,), jnp.int32)
    compiled = jax.jit(read_then_write_what_was_read).trace(pool, slots, slots).lower().compile()
    assert pool_sized(compiled.as_text(), shape)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", CARDS)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_mosaic_equals_reference_on_a_gpu(name, shape):
    arguments = inputs(name, CARDS[shape], seed=2)
    found = jax.jit(getattr(sg, name), static_argnames="implementation")(*arguments, implementation="mosaic")
    np.testing.assert_array_equal(found, getattr(reference, name)(*arguments))


@pytest.mark.gpu
@pytest.mark.parametrize("implementation", ["reference", "mosaic"])
def test_rows_past_2_to_the_32_bytes(implementation):
    """The same bytes at row 100,000 and on both sides of row 3,728,271."""
    shape = PAST_32_BITS
    slots = jnp.asarray([100_000, EMPTY, 3_728_270, 3_728_271, 3_728_272, shape.slots - 1], jnp.int32)
    rng = np.random.default_rng(0)
    rows = jnp.asarray(random_words(rng, slots.size, shape.words))
    pool = jnp.zeros((shape.layers, shape.slots, shape.words), jnp.uint32)
    write = jax.jit(sg.scatter, static_argnames="implementation", donate_argnums=0)
    pool = write(pool, jnp.int32(0), slots, rows, implementation=implementation)
    found = sg.gather(pool, 0, slots, implementation=implementation)
    expected = np.where(np.asarray(slots)[:, None] == EMPTY, 0, np.asarray(rows))
    np.testing.assert_array_equal(found, expected)
    assert int(jnp.sum(jnp.any(pool[0] != 0, axis=1))) == 5, "no other row was written"
