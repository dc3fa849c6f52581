"""Rows by slot: the reference against loops, the Triton form against the reference, in place, and in order."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import sparse_gather as sg
from pallas_kernels import triton_call
from pallas_kernels.sparse_gather import EMPTY, reference
from pallas_kernels.sparse_gather.shapes import (
    CARDS,
    MOVES,
    PAST_32_BITS,
    SMALL,
    SMALL_MOVES,
    Shape,
    Tiers,
)
from tests.pallas_kernels.cuda import lower_cuda
from ula_jax import memory
from ula_jax.parallel import make_mesh

DEVICE = ("gather", "gather_layers", "scatter", "scatter_layers")
HOST = ("read_host", "write_host")
BETWEEN = ("fetch", "write_back", "exchange")

interpreted = pytest.mark.skipif(
    triton_call.forms()["triton_interpret"] is not None, reason=str(triton_call.forms()["triton_interpret"])
)
FORMS = ["reference", pytest.param("triton_interpret", marks=interpreted)]


def random_words(rng, *shape):
    return rng.integers(0, 2**32, shape, dtype=np.uint32)


def on_host(array):
    return jax.device_put(array, memory.sharding(make_mesh(), jax.P(), host=True))


def run(name, *arguments, implementation="reference", donate=()):
    """The function, jitted; a layer (an int, first behind the pool) stays one."""
    static = 1 if isinstance(arguments[1], int) else ()
    function = jax.jit(
        lambda *a: getattr(sg, name)(*a, implementation=implementation), static_argnums=static, donate_argnums=donate
    )
    return function(*arguments)


def kinds(tree):
    return [leaf.sharding.memory_kind for leaf in jax.tree.leaves(tree)]


def assert_equal(found, expected):
    assert kinds(found) == kinds(expected)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(a, b)


def inputs(name: str, shape: Shape, seed: int = 0):
    """Random pool, slots (repeated only in reads, some EMPTY) and rows, as arguments of the function `name`."""
    rng = np.random.default_rng(seed)
    pool = random_words(rng, shape.layers, shape.slots, shape.words)
    if name in HOST:
        pool = on_host(np.ascontiguousarray(pool.swapaxes(0, 1)))
    if name.startswith(("gather", "read")):
        slots = rng.integers(EMPTY, shape.slots, shape.n, dtype=np.int32)
    else:
        slots = np.full(max(shape.n, shape.slots), EMPTY, np.int32)
        slots[: shape.slots] = np.where(rng.random(shape.slots) < 0.7, np.arange(shape.slots), EMPTY)
        slots = rng.permutation(slots)[: shape.n]
    layers = (shape.layers,) if name.endswith("layers") else ()
    layer = () if layers else (shape.layers - 1,)
    rows = (random_words(rng, *layers, shape.n, shape.words),) if name.startswith(("scatter", "write")) else ()
    return jax.tree.map(lambda x: jnp.asarray(x) if isinstance(x, np.ndarray) else x, (pool, *layer, slots, *rows))


def by_loops(name: str, pool, *rest):
    """The meaning, row by row, in numpy."""
    pool = np.array(pool).swapaxes(0, 1) if name in HOST else np.array(pool)
    one = not name.endswith("layers")
    layers, rest = ([rest[0]], rest[1:]) if one else (range(len(pool)), rest)
    slots = np.asarray(rest[0])
    out = np.zeros((len(layers), len(slots), pool.shape[2]), np.uint32)
    for at, layer in enumerate(layers):
        for i, slot in enumerate(slots):
            if slot == EMPTY:
                continue
            if name.startswith(("gather", "read")):
                out[at, i] = pool[layer, slot]
            else:
                pool[layer, slot] = np.asarray(rest[1])[i] if one else np.asarray(rest[1])[layer, i]
    if name in HOST:
        pool = pool.swapaxes(0, 1)
    return pool if name.startswith(("scatter", "write")) else out[0] if one else out


@pytest.mark.parametrize("shape", SMALL)
@pytest.mark.parametrize("name", [*DEVICE, *HOST])
def test_reference_equals_loops(name, shape):
    arguments = inputs(name, SMALL[shape])
    found = run(name, *arguments)
    np.testing.assert_array_equal(found, by_loops(name, *arguments))
    assert kinds(found) == ["pinned_host" if name == "write_host" else "device"]


@interpreted
@pytest.mark.parametrize("shape", SMALL)
@pytest.mark.parametrize("name", [*DEVICE, *HOST])
def test_triton_interpreted_equals_reference(name, shape):
    arguments = inputs(name, SMALL[shape], seed=1)
    assert_equal(run(name, *arguments, implementation="triton_interpret"), run(name, *arguments))


def pools(tiers: Tiers, rng):
    device = tuple(jnp.asarray(random_words(rng, tiers.layers, tiers.device, words)) for words in tiers.words)
    host = tuple(on_host(random_words(rng, tiers.host, tiers.layers, words)) for words in tiers.words)
    return device, host


def moves(tiers: Tiers, rng, paired=True):
    """Source, target, victim, refuge: real entries and EMPTY ones in any order. Most fill what they empty; if `paired`,
    none fills what another empties."""
    most = min(tiers.n, tiers.device // 2, tiers.host // 2)
    lists = np.full((4, tiers.n), EMPTY, np.int32)
    lists[0, :most] = rng.choice(tiers.host // 2, most, replace=False)
    lists[1, :most] = rng.choice(tiers.device // 2, most, replace=False)
    lists[2], lists[3] = lists[1], lists[0]
    if paired:  # some leave for slots that nobody left
        lists[3, : most // 2] += np.where(rng.random(most // 2) < 0.5, tiers.host // 2, 0).astype(np.int32)
    else:
        lists[2], lists[3] = rng.permuted(lists[2]), rng.permuted(lists[3])
    lists = lists[:, rng.permutation(tiers.n)]
    lists[rng.random(lists.shape) < 0.15] = EMPTY
    return [jnp.asarray(x) for x in lists]


def moved_by_loops(name, device, host, *lists):
    """All rows are read before the first is written."""
    device, host = [np.array(x) for x in device], [np.array(x) for x in host]
    before = [x.copy() for x in device], [x.copy() for x in host]
    lists = [np.asarray(x) for x in lists]
    up = lists[:2] if name != "write_back" else []
    down = lists[-2:] if name != "fetch" else []
    for lane in range(len(device)):
        for source, target in zip(*up, strict=True) if up else ():
            if source != EMPTY and target != EMPTY:
                device[lane][:, target] = before[1][lane][source]
        for victim, refuge in zip(*down, strict=True) if down else ():
            if victim != EMPTY and refuge != EMPTY:
                host[lane][refuge] = before[0][lane][:, victim]
    return {"fetch": device, "write_back": host, "exchange": (device, host)}[name]


def of(name, lists):
    return {"fetch": lists[:2], "write_back": lists[2:], "exchange": lists}[name]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("tiers", SMALL_MOVES)
@pytest.mark.parametrize("name", BETWEEN)
def test_moves_equal_loops(name, tiers, form):
    tiers, rng = SMALL_MOVES[tiers], np.random.default_rng(2)
    device, host = pools(tiers, rng)
    for _ in range(3):
        lists = of(name, moves(tiers, rng))
        found = run(name, device, host, *lists, implementation=form)
        expected = moved_by_loops(name, device, host, *lists)
        jax.tree.map(np.testing.assert_array_equal, jax.tree.leaves(found), jax.tree.leaves(expected))
        places = {"fetch": ["device"], "write_back": ["pinned_host"], "exchange": ["device", "pinned_host"]}[name]
        assert kinds(found) == [place for place in places for _ in tiers.words]


@pytest.mark.parametrize("tiers", SMALL_MOVES)
def test_the_reference_exchanges_any_permutation(tiers):
    tiers, rng = SMALL_MOVES[tiers], np.random.default_rng(3)
    device, host = pools(tiers, rng)
    lists = moves(tiers, rng, paired=False)
    found = run("exchange", device, host, *lists)
    expected = moved_by_loops("exchange", device, host, *lists)
    jax.tree.map(np.testing.assert_array_equal, jax.tree.leaves(found), jax.tree.leaves(expected))


@pytest.mark.parametrize("form", FORMS)
def test_f25_a_row_takes_its_scales_along_and_leaves_its_neighbours_alone(form):
    """Row 5 to row 9 with both lanes; every other row, NaN in each word, stays what it is."""
    nan = np.float32(np.nan).view(np.uint32)
    device = tuple(jnp.full((2, 12, words), nan, jnp.uint32) for words in (32, 4))
    values = [np.arange(2 * words, dtype=np.uint32).reshape(2, words) for words in (32, 4)]
    host = []
    for value in values:
        lane = np.full((7, *value.shape), nan, np.uint32)
        lane[5] = value
        host.append(on_host(lane))
    source, target = jnp.asarray([EMPTY, 5, 3], jnp.int32), jnp.asarray([1, 9, EMPTY], jnp.int32)
    for lane, value in zip(run("fetch", device, tuple(host), source, target, implementation=form), values, strict=True):
        np.testing.assert_array_equal(lane[:, 9], value)
        assert (np.delete(np.asarray(lane), 9, axis=1) == nan).all()


@pytest.mark.parametrize("form", FORMS)
def test_the_layer_may_be_traced_and_layers_do_not_share_rows(form):
    """Distinct patterns in two layers, written one after the other by one compiled function, then both read."""
    slots = jnp.asarray([6, EMPTY, 2], jnp.int32)
    patterns = [jnp.full((3, 32), value, jnp.uint32) for value in (0xAAAAAAAA, 0x55555555)]
    device, host = jnp.zeros((2, 7, 32), jnp.uint32), on_host(np.zeros((7, 2, 32), np.uint32))
    write = jax.jit(
        lambda d, h, layer, rows: (
            sg.scatter(d, layer, slots, rows, implementation=form),
            sg.write_host(h, layer, slots, rows, implementation=form),
        )
    )
    read = jax.jit(
        lambda d, h, layer: (
            sg.gather(d, layer, slots, implementation=form),
            sg.read_host(h, layer, slots, implementation=form),
        )
    )
    for layer, rows in enumerate(patterns):
        device, host = write(device, host, jnp.int32(layer), rows)
    for layer, rows in enumerate(patterns):
        expected = np.asarray(rows) * np.asarray([[1], [0], [1]], np.uint32)
        for found in read(device, host, jnp.int32(layer)):
            np.testing.assert_array_equal(found, expected)
    untouched = np.setdiff1d(np.arange(7), [6, 2])
    assert not np.asarray(device)[:, untouched].any()
    assert not np.asarray(host)[untouched].any()


@pytest.mark.parametrize("form", FORMS)
def test_an_empty_list_reads_and_writes_nothing(form):
    pool, none = jnp.ones((2, 3, 4), jnp.uint32), jnp.zeros(0, jnp.int32)
    host = on_host(np.ones((3, 2, 4), np.uint32))
    assert sg.gather(pool, 0, none, implementation=form).shape == (0, 4)
    assert sg.gather_layers(pool, none, implementation=form).shape == (2, 0, 4)
    np.testing.assert_array_equal(sg.scatter(pool, 1, none, jnp.zeros((0, 4), jnp.uint32), implementation=form), pool)
    if form != "reference":  # XLA cannot gather from nothing on the host
        assert run("read_host", host, 0, none, implementation=form).shape == (0, 4)
        assert_equal(run("exchange", (pool,), (host,), *[none] * 4, implementation=form), ((pool,), (host,)))


@pytest.mark.parametrize("form", FORMS)
def test_nothing_but_empty_changes_nothing(form):
    rng = np.random.default_rng(4)
    device, host = pools(SMALL_MOVES["fp8"], rng)
    nothing = jnp.full(5, EMPTY, jnp.int32)
    assert_equal(run("exchange", device, host, *[nothing] * 4, implementation=form), (device, host))
    assert not np.asarray(run("read_host", host[0], 0, nothing, implementation=form)).any()


def test_what_cannot_run_says_why():
    pool, slots = jnp.ones((2, 3, 6), jnp.uint32), jnp.asarray([1], jnp.int32)
    with pytest.raises(NotImplementedError, match="needs platform 'gpu', found 'cpu'"):
        sg.gather(pool, 0, slots, implementation="triton")
    with pytest.raises(ValueError, match="found 'cuda'"):
        sg.gather(pool, 0, slots, implementation="cuda")
    with pytest.raises(IndexError, match="layer: expected 0 to 1, found 2"):
        sg.gather(pool, 2, slots)
    with pytest.raises(IndexError, match="layer: expected 0 to 2, found 3"):
        sg.read_host(pool, 3, slots)


@interpreted
def test_more_lanes_than_two_are_refused():
    device, host = (jnp.ones((1, 2, 4), jnp.uint32),) * 3, (jnp.ones((2, 1, 4), jnp.uint32),) * 3
    with pytest.raises(ValueError, match="expected one or two, found 3"):
        sg.fetch(device, host, *[jnp.zeros(1, jnp.int32)] * 2, implementation="triton_interpret")


def abstract(name: str, shape: Shape):
    pool = jax.ShapeDtypeStruct((shape.layers, shape.slots, shape.words), jnp.uint32)
    slots = jax.ShapeDtypeStruct((shape.n,), jnp.int32)
    layers = (shape.layers,) if name.endswith("layers") else ()
    rows = jax.ShapeDtypeStruct((*layers, shape.n, shape.words), jnp.uint32)
    layer = () if layers else (jax.ShapeDtypeStruct((), jnp.int32),)
    return (pool, *layer, slots, rows) if name.startswith("scatter") else (pool, *layer, slots)


@pytest.mark.parametrize("name", DEVICE)
def test_reference_computes_no_offsets_on_the_device(name):
    """A pool of 2^32 bytes and more is indexed by (layer, slot): no 32-bit product can overflow."""
    text = lower_cuda(getattr(reference, name), *abstract(name, PAST_32_BITS))
    assert "multiply" not in text
    assert re.search(r"stablehlo\.(gather|scatter)", text)


def pool_sized(text: str, *lanes) -> list[str]:
    """Lines of compiled HLO that make a new array of the size of a lane or of a whole layer of it."""
    sizes = {size for lane in lanes for size in (lane.size, lane.size // min(lane.shape[:2]))}
    made = re.compile(r"= u32\[([\d,]*)\]\S* (copy|copy-start|slice|dynamic-slice|broadcast|transpose)\(")
    return [
        line.strip()
        for line in text.splitlines()
        if (found := made.search(line)) and np.prod([int(n) for n in found[1].split(",") if n]) in sizes
    ]


def compiled(step, *arguments, donate):
    """Its text, and the bytes of its temporaries."""
    program = jax.jit(step, donate_argnums=donate).trace(*arguments).lower().compile()
    used = program.memory_analysis()
    assert used is not None
    return program.as_text(), used.temp_size_in_bytes


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

LARGE = Shape(layers=3, slots=4099, words=40, n=16)
POOL = jax.ShapeDtypeStruct((LARGE.layers, LARGE.slots, LARGE.words), jnp.uint32)
SLOTS = jax.ShapeDtypeStruct((LARGE.n,), jnp.int32)


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.__name__)
def test_a_donated_step_copies_no_pool(step):
    text, temporary = compiled(step, POOL, SLOTS, SLOTS, donate=0)
    assert not pool_sized(text, POOL)
    assert "input_output_alias={" in text
    assert temporary < 4 * LARGE.slots * LARGE.words, "no temporary of a layer's size"


def test_the_copy_that_the_test_looks_for_is_found():
    """Without donation the pool must be copied, and `pool_sized` must see it."""
    text, _ = compiled(read_then_write_what_was_read, POOL, SLOTS, SLOTS, donate=())
    assert pool_sized(text, POOL)


def write_one_layer(host, device, slots):
    return sg.write_host(host, 1, slots, device[1, :2])


def write_all_layers(host, device, slots):
    return sg.write_back((device,), (host,), jnp.asarray([7, 8], jnp.int32), slots)[0]


def read_one_layer(host, device, slots):
    return sg.read_host(host, 1, slots)


def read_all_layers(host, device, slots):
    return sg.fetch((device,), (host,), slots, jnp.asarray([7, 8], jnp.int32))


def of_host():
    """A host pool, a small device pool and slots."""
    rng = np.random.default_rng(5)
    device = jnp.asarray(random_words(rng, 3, 20, 40))
    return on_host(random_words(rng, 4099, 3, 40)), device, np.array([3, EMPTY], np.int32)


@pytest.mark.parametrize("write", [write_one_layer, write_all_layers], ids=lambda write: write.__name__)
def test_a_donated_host_pool_is_written_in_place(write):
    host, device, slots = of_host()
    text, _ = compiled(write, host, device, slots, donate=0)
    assert not pool_sized(text, host)
    assert "input_output_alias={" in text
    assert pool_sized(compiled(write, host, device, slots, donate=())[0], host)
    own = jax.jit(write)(host, device, slots)  # a buffer of JAX's own
    before = own.unsafe_buffer_pointer()
    assert jax.jit(write, donate_argnums=0)(own, device, slots).unsafe_buffer_pointer() == before


@pytest.mark.parametrize("read", [read_one_layer, read_all_layers], ids=lambda read: read.__name__)
def test_a_read_on_the_host_copies_rows_and_not_the_pool(read):
    host, device, slots = of_host()
    text, temporary = compiled(read, host, device, slots, donate=())
    assert not pool_sized(text, host)
    assert temporary < host.nbytes // 100


def tiers_of(tiers: Tiers, seed=0):
    rng = np.random.default_rng(seed)
    return *pools(tiers, rng), rng


@pytest.mark.gpu
@pytest.mark.parametrize("shape", CARDS)
@pytest.mark.parametrize("name", [*DEVICE, *HOST])
def test_triton_equals_reference_on_a_gpu(name, shape):
    arguments = inputs(name, CARDS[shape], seed=2)
    assert_equal(run(name, *arguments, implementation="triton"), run(name, *arguments))


@pytest.mark.gpu
@pytest.mark.parametrize("tiers", MOVES)
def test_moves_on_a_gpu(tiers):
    """Three exchanges by one compiled function, each from what the last one left: no byte is lost on the way out and
    back."""
    tiers = MOVES[tiers]
    device, host, rng = tiers_of(tiers)
    kept = device, host
    step = jax.jit(lambda *a: sg.exchange(*a, implementation="triton"))
    expected = [np.asarray(x) for x in device], [np.asarray(x) for x in host]
    for _ in range(3):
        lists = moves(tiers, rng)
        (device, host), expected = step(device, host, *lists), moved_by_loops("exchange", *expected, *lists)
    jax.tree.map(np.testing.assert_array_equal, jax.tree.leaves((device, host)), jax.tree.leaves(expected))
    assert kinds((device, host)) == ["device"] * len(tiers.words) + ["pinned_host"] * len(tiers.words)
    for name in ("fetch", "write_back"):
        arguments = *kept, *of(name, moves(tiers, rng))
        assert_equal(run(name, *arguments, implementation="triton"), run(name, *arguments))
    again = tiers_of(tiers)[:2]
    assert_equal(kept, again)  # pools that were not donated are as they were


@pytest.mark.gpu
def test_an_exchange_on_a_gpu_copies_no_pool_and_moves_no_buffer():
    device, host, rng = tiers_of(Tiers(layers=2, device=3001, host=5003, words=(160, 4), n=64))
    lists = moves(Tiers(2, 3001, 5003, (160, 4), 64), rng)
    step = jax.jit(lambda *a: sg.exchange(*a, implementation="triton"), donate_argnums=(0, 1))
    device, host = step(device, host, *lists)  # buffers of JAX's own
    before = [leaf.unsafe_buffer_pointer() for leaf in (*device, *host)]
    text = step.lower(device, host, *lists).compile().as_text()
    assert not pool_sized(text, *device, *host)
    device, host = step(device, host, *lists)
    assert [leaf.unsafe_buffer_pointer() for leaf in (*device, *host)] == before


@pytest.mark.gpu
@pytest.mark.parametrize("implementation", ["reference", "triton"])
def test_f9_rows_past_2_to_the_32_bytes(implementation):
    """The same bytes at row 100,000 and on both sides of row 3,728,271, on the device and then on the host."""
    shape = PAST_32_BITS
    slots = jnp.asarray([100_000, EMPTY, 3_728_270, 3_728_271, 3_728_272, shape.slots - 1], jnp.int32)
    rng = np.random.default_rng(0)
    rows = jnp.asarray(random_words(rng, slots.size, shape.words))
    pool = jnp.zeros((shape.layers, shape.slots, shape.words), jnp.uint32)
    pool = run("scatter", pool, 0, slots, rows, implementation=implementation, donate=0)
    expected = np.where(np.asarray(slots)[:, None] == EMPTY, 0, np.asarray(rows))
    np.testing.assert_array_equal(run("gather", pool, 0, slots, implementation=implementation), expected)
    assert int(jnp.sum(jnp.any(pool[0] != 0, axis=1))) == 5, "no other row was written"
    place = memory.sharding(make_mesh(), jax.P(), host=True)
    host = memory.zeros_on_host((shape.slots, shape.layers, shape.words), jnp.uint32, place)
    (host,) = run("write_back", (pool,), (host,), slots, slots, implementation=implementation, donate=1)
    np.testing.assert_array_equal(run("read_host", host, 0, slots, implementation=implementation), expected)
    lower = jnp.asarray([3, 4, 5, 6, 7, 8], jnp.int32)
    (pool,) = run("fetch", (pool,), (host,), slots, lower, implementation=implementation, donate=0)
    np.testing.assert_array_equal(pool[0, 3:9], expected)
