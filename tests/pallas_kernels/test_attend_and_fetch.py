"""Attention with a fetch riding along: the bits of attention alone, and rows as loops move them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.sparse_gather.shapes import MOVES, SMALL_MOVES, Tiers
from pallas_kernels.sparse_mla import EMPTY, sparse_mla, sparse_mla_and_fetch
from pallas_kernels.sparse_mla.shapes import CARDS, SMALL, Shape
from tests.pallas_kernels.test_sparse_gather import moved_by_loops, moves, of, on_host, pools
from tests.pallas_kernels.test_sparse_mla import WIDE, inputs, interpreted, on_card, wide

SCALE = 0.05
FORMS = ["reference", pytest.param("triton_interpret", marks=interpreted)]


def tiers(size: Tiers, seed=0):
    """Lanes on the device and on the host, and lists of sources and targets."""
    rng = np.random.default_rng(seed)
    return *pools(size, rng), *of("fetch", moves(size, rng))


def fetched(*moves):
    return moved_by_loops("fetch", *moves)


def run(query, lanes, slots, fmt, layer, device, host, source, target, form):
    @jax.jit
    def both(device, host):
        arguments = jnp.asarray(query), lanes, layer, jnp.asarray(slots), fmt
        pools = device, host, jnp.asarray(source), jnp.asarray(target)
        return sparse_mla_and_fetch(*arguments, *pools, scale=SCALE, implementation=form)

    return jax.tree.map(np.asarray, both(tuple(map(jnp.asarray, device)), tuple(host)))


def alone(query, lanes, slots, fmt, layer, form):
    attend = jax.jit(lambda q, pool, at: sparse_mla(q, pool, layer, at, fmt, scale=SCALE, implementation=form))
    return [np.asarray(x) for x in attend(jnp.asarray(query), lanes, jnp.asarray(slots))]


def assert_same(found, attended, expected, note=""):
    for a, b in zip((*found[0], *found[1]), (*attended, *expected), strict=True):
        np.testing.assert_array_equal(a, b, err_msg=note)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", SMALL_MOVES)
def test_attention_keeps_its_bits_and_rows_arrive(name, form):
    fmt, shape = WIDE[1], SMALL["one_block"]
    query, pool, slots = inputs(shape, fmt)
    lanes, rows = fmt.pack(jnp.asarray(pool)), tiers(SMALL_MOVES[name])
    found = run(query, lanes, slots, fmt, 1, *rows, form)
    assert_same(found, alone(query, lanes, slots, fmt, 1, form), fetched(*rows))


@pytest.mark.parametrize("form", FORMS)
@wide
def test_more_programs_attend_than_one_axis_had(fmt, form):
    """Three tokens, two tiles of heads, several shares of the rows: all find their place beside those that fetch."""
    query, pool, slots = inputs(Shape(3, 1, 65, 70, 40), fmt)
    lanes, rows = fmt.pack(jnp.asarray(pool)), tiers(SMALL_MOVES["fp8"])
    found = run(query, lanes, slots, fmt, 0, *rows, form)
    assert_same(found, alone(query, lanes, slots, fmt, 0, form), fetched(*rows))


@pytest.mark.parametrize("form", FORMS)
def test_nothing_to_fetch(form):
    query, pool, slots = inputs(SMALL["one_block"], WIDE[1])
    lanes = WIDE[1].pack(jnp.asarray(pool))
    device, host, source, target = tiers(SMALL_MOVES["fp8"])
    attended = alone(query, lanes, slots, WIDE[1], 0, form)
    for lists in ((source[:0], target[:0]), (np.full_like(source, EMPTY), target), (source, np.full_like(target, -7))):
        assert_same(run(query, lanes, slots, WIDE[1], 0, device, host, *lists, form), attended, device)


def test_a_pool_that_is_attended_to_is_read_as_it_was():
    query, pool, slots = inputs(SMALL["one_block"], WIDE[1])
    lanes = WIDE[1].pack(jnp.asarray(pool))
    host = [on_host(np.swapaxes(lane, 0, 1)[::-1]) for lane in map(np.asarray, lanes)]
    every = np.arange(pool.shape[1], dtype=np.int32)
    for form in ["reference"] + ["triton_interpret"] * (not interpreted.args[0]):
        found = run(query, lanes, slots, WIDE[1], 0, lanes, host, every, every, form)
        expected = [lane[:, ::-1] for lane in map(np.asarray, lanes)]
        assert_same(found, alone(query, lanes, slots, WIDE[1], 0, form), expected)


def test_bad_input_is_named():
    query, pool, slots = inputs(SMALL["one_block"], WIDE[1])
    lanes, rows = WIDE[1].pack(jnp.asarray(pool)), tiers(SMALL_MOVES["fp8"])
    with pytest.raises(IndexError, match="layer: expected 0 to 1, found 2"):
        run(query, lanes, slots, WIDE[1], 2, *rows, "reference")
    with pytest.raises(ValueError, match=r"expected fp8 lanes \[\(2, 50, 160\), \(2, 50, 4\)\]"):
        run(query, lanes[:1], slots, WIDE[1], 0, *rows, "reference")
    if not interpreted.args[0]:
        device, host, *lists = rows
        with pytest.raises(ValueError, match="lanes: expected one or two, found 3"):
            run(query, lanes, slots, WIDE[1], 0, (*device, device[1]), (*host, host[1]), *lists, "triton_interpret")


@pytest.mark.gpu
@wide
def test_triton_on_a_gpu(fmt):
    """Attention's bits are those of the kernel alone, whatever is fetched; the host pools are pinned."""
    shapes = {name: CARDS[name] for name in ("1_request", "32_requests")} | SMALL
    pairs = [("1_request", move) for move in MOVES] + [(shape, next(iter(MOVES))) for shape in shapes]
    for seed, (shape, move) in enumerate(dict.fromkeys(pairs)):
        rows, layer = tiers(MOVES[move], seed), shapes[shape].layers - 1
        query, lanes, slots = on_card(shapes[shape], fmt, seed)
        found = run(query, lanes, slots, fmt, layer, *rows, "triton")
        assert_same(found, alone(query, lanes, slots, fmt, layer, "triton"), fetched(*rows), f"{shape} {move}")
