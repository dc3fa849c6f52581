"""Attention over selected rows against float64, the Triton form against the reference."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import triton_call
from pallas_kernels.sparse_mla import EMPTY, sparse_mla
from pallas_kernels.sparse_mla.shapes import CARDS, PAST_32_BITS, SMALL, Shape
from ula_jax.rows import RowFormat

HEADS, SCALE = 3, 0.3
NARROW = RowFormat("fp32", 8, 4)
TILE = 16

interpreted = pytest.mark.skipif(
    triton_call.forms()["triton_interpret"] is not None, reason=str(triton_call.forms()["triton_interpret"])
)


def attend(query, pool, slots, fmt=NARROW, layer=0, scale=SCALE, implementation="reference"):
    """Output and log-sum-exp over a pool of numbers [layers, slots, width]."""
    run = jax.jit(lambda q, lanes, s: sparse_mla(q, lanes, layer, s, fmt, scale=scale, implementation=implementation))
    found = run(jnp.asarray(query), fmt.pack(jnp.asarray(pool)), jnp.asarray(slots))
    return [np.asarray(x) for x in found]


def attend64(query, pool, slots, fmt=NARROW, layer=0, scale=SCALE):
    """The same token by token, over what the format keeps of the rows."""
    kept = np.asarray(fmt.unpack(fmt.pack(jnp.asarray(pool[layer]))), np.float64)
    output, lse = np.zeros((*query.shape[:3], fmt.latent)), np.full(query.shape[:3], -np.inf)
    for b, s in np.ndindex(*query.shape[:2]):
        rows = kept[slots[b, s][slots[b, s] >= 0]]
        if len(rows):
            scores = scale * query[b, s].astype(np.float64) @ rows.T
            top = scores.max(-1, keepdims=True)
            weights = np.exp(scores - top)
            output[b, s] = weights @ rows[:, : fmt.latent] / weights.sum(-1, keepdims=True)
            lse[b, s] = np.log(weights.sum(-1)) + top[:, 0]
    return output, lse


def inputs(shape: Shape, fmt=NARROW, seed=0):
    """Queries, a pool whose rows differ in size, and slots of which some are EMPTY and some occur twice."""
    rng = np.random.default_rng(seed)
    query = rng.standard_normal((shape.batch, shape.steps, shape.heads, fmt.width)).astype(np.float32)
    pool = rng.standard_normal((shape.layers, shape.slots, fmt.width)).astype(np.float32)
    pool *= np.exp2(rng.uniform(-3, 0, (shape.layers, shape.slots, 1))).astype(np.float32)
    slots = rng.integers(EMPTY, shape.slots, (shape.batch, shape.steps, shape.selected), dtype=np.int32)
    slots[0, 0, 0] = shape.slots - 1
    return query, pool, slots


def error(found, expected):
    return np.linalg.norm(found - expected) / np.linalg.norm(expected)


def assert_close(found, expected, tolerance):
    """Relative in norm; tokens that have no row must agree exactly."""
    some = np.isfinite(expected[1])
    np.testing.assert_array_equal(np.isneginf(found[1]), ~some)
    assert not found[0][~some].any()
    assert error(found[0], expected[0]) < tolerance
    np.testing.assert_allclose(found[1][some], expected[1][some], atol=tolerance)


@pytest.mark.parametrize("fmt", [NARROW, RowFormat("bf16", 8, 4), RowFormat("fp8", 256, 6)], ids=lambda fmt: fmt.name)
def test_reference_equals_loops(fmt):
    arguments = inputs(Shape(batch=3, steps=2, heads=HEADS, selected=20, slots=9, layers=2), fmt)
    arguments[2][1, 1] = EMPTY
    for layer in (0, 1):
        expected = attend64(*arguments, fmt, layer, scale=0.1)
        assert_close(attend(*arguments, fmt, layer, scale=0.1), expected, 1e-5)


def test_f1_a_first_tile_of_padding_equals_dense_over_the_rest():
    query, pool, _ = inputs(Shape(1, 1, HEADS, 1, TILE))
    slots = np.concatenate([np.full(TILE, EMPTY), np.arange(TILE)]).astype(np.int32)[None, None]
    assert_close(attend(query, pool, slots), attend64(query, pool, slots), 1e-6)


@pytest.mark.parametrize("poison", [np.inf, -np.inf, np.nan, 3e38])
def test_f2_rows_that_are_not_selected_hold_poison(poison):
    """Output 0 where no row is selected; beside it, no bit changes."""
    query, pool, slots = inputs(Shape(2, 2, HEADS, TILE, 40))
    slots[0, 1] = slots[1, 0] = EMPTY
    clean = attend(query, pool, slots)
    unread = np.setdiff1d(np.arange(40), slots)
    assert unread.size
    pool[0, unread] = poison
    found = attend(query, pool, slots)
    for a, b in zip(clean, found, strict=True):
        np.testing.assert_array_equal(a, b)
    assert_close(found, clean, 1e-6)


@pytest.mark.parametrize("size", [1.0, 30.0])
def test_softmax_survives_large_scores(size):
    """Scores in the hundreds: exp of them overflows float32."""
    query, pool, slots = inputs(Shape(1, 2, HEADS, 40, 40))
    output, lse = attend(query * size, pool * 2, slots)
    expected, expected_lse = attend64(query * size, pool * 2, slots)
    np.testing.assert_allclose(output, expected, atol=2e-5)
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-6, atol=1e-6)


def test_one_row_is_read_as_it_is():
    query, pool, _ = inputs(Shape(1, 1, HEADS, 1, 3))
    output, lse = attend(query, pool, np.array([[[EMPTY, 1, EMPTY]]], np.int32))
    np.testing.assert_array_equal(output[0, 0], np.tile(pool[0, 1, : NARROW.latent], (HEADS, 1)))
    np.testing.assert_allclose(lse[0, 0], SCALE * query[0, 0].astype(np.float64) @ pool[0, 1], atol=1e-6)


def test_f19_halves_merge_by_their_natural_log_sum_exp():
    """Two shards, one with scores near 0 and one with scores near 5; merged in float64 they equal the whole."""
    query, pool, _ = inputs(Shape(1, 1, HEADS, 1, 20))
    pool[0, 10:] += 5 / SCALE * query[0, 0, 0] / (query[0, 0, 0] ** 2).sum()
    every = np.arange(20, dtype=np.int32)
    parts = [attend(query, pool, np.where(half == (every >= 10), every, EMPTY)[None, None]) for half in (False, True)]
    weights = np.exp(np.stack([lse for _, lse in parts]).astype(np.float64))
    merged = sum(w[..., None] * output for w, (output, _) in zip(weights, parts, strict=True))
    whole, lse = attend(query, pool, every[None, None])
    np.testing.assert_allclose(merged / weights.sum(0)[..., None], whole, atol=1e-6)
    np.testing.assert_allclose(np.log(weights.sum(0)), lse, atol=1e-6)
    assert lse[0, 0, 0] - parts[0][1][0, 0, 0] > 3  # base-2 logarithms would weigh the halves otherwise


def test_bits_do_not_depend_on_where_rows_lie():
    query, pool, slots = inputs(Shape(2, 2, HEADS, TILE, 40, layers=2))
    gathered = np.where(slots[..., None] >= 0, pool[1, slots], np.nan).reshape(1, -1, NARROW.width).astype(np.float32)
    own = np.where(slots >= 0, np.arange(slots.size).reshape(slots.shape), EMPTY).astype(np.int32)
    for a, b in zip(attend(query, pool, slots, layer=1), attend(query, gathered, own), strict=True):
        np.testing.assert_array_equal(a, b)


def test_bad_input_is_named():
    query, pool, slots = inputs(Shape(1, 1, HEADS, 4, 9, layers=2))
    with pytest.raises(ValueError, match=r"expected queries of 8 \+ 4 numbers, found 11"):
        attend(query[..., 1:], pool, slots)
    with pytest.raises(ValueError, match=r"expected fp32 lanes \[\(2, 9, 12\)\], found \[\(2, 9, 13\)\]"):
        sparse_mla(jnp.asarray(query), (jnp.zeros((2, 9, 13), jnp.uint32),), 0, jnp.asarray(slots), NARROW, scale=1.0)
    with pytest.raises(IndexError, match="layer: expected 0 to 1, found 2"):
        attend(query, pool, slots, layer=2)
    with pytest.raises(NotImplementedError, match="the rows are fp32"):
        attend(query, pool, slots, implementation="triton")
    with pytest.raises(NotImplementedError, match=r"it needs rows of 512 \+ 64 numbers, found 8 \+ 4"):
        attend(query, pool, slots, RowFormat("bf16", 8, 4), implementation="triton_interpret")


WIDE = [RowFormat("bf16", 512, 64), RowFormat("fp8", 512, 64)]
wide = pytest.mark.parametrize("fmt", WIDE, ids=lambda fmt: fmt.name)


@interpreted
@pytest.mark.parametrize("name", SMALL)
@wide
def test_triton_interpreted_equals_float64(fmt, name):
    shape = SMALL[name]
    arguments = *inputs(shape, fmt), fmt, shape.layers - 1, 0.05
    assert_close(attend(*arguments, implementation="triton_interpret"), attend64(*arguments), 1e-3)


@interpreted
@pytest.mark.parametrize("shares", [2, 5])
def test_triton_interpreted_past_the_end_of_the_list(shares, monkeypatch):
    """Three blocks of rows: the second of two shares has one block too many, the last two of five have none at all."""
    from pallas_kernels.sparse_mla import triton

    monkeypatch.setattr(triton, "_shares", lambda programs, blocks: shares)
    arguments = *inputs(Shape(1, 1, 4, 150, 90), WIDE[1]), WIDE[1], 0, 0.05
    assert_close(attend(*arguments, implementation="triton_interpret"), attend64(*arguments), 1e-3)


@interpreted
@wide
def test_triton_interpreted_without_rows_and_with_poison(fmt):
    query, pool, slots = inputs(Shape(2, 1, 2, 70, 90), fmt)
    slots[1] = EMPTY
    clean = attend(query, pool, slots, fmt, scale=0.05, implementation="triton_interpret")
    pool[0, np.setdiff1d(np.arange(90), slots)] = np.nan
    found = attend(query, pool, slots, fmt, scale=0.05, implementation="triton_interpret")
    assert_close(found, attend64(query, np.nan_to_num(pool), slots, fmt, scale=0.05), 1e-3)
    for a, b in zip(clean, found, strict=True):
        np.testing.assert_array_equal(a, b)


@interpreted
def test_triton_interpreted_survives_any_size():
    """Scales of fp8 rows from 2^-30 to 2^30, within one token and within one row; scores from 0 to the hundreds."""
    fmt, rng = WIDE[1], np.random.default_rng(2)
    query, pool, slots = inputs(Shape(1, 3, 2, 70, 90), fmt)
    pool[..., :512] *= np.exp2(rng.integers(-30, -25, (1, 90, 1)))
    pool[:, :30, :512] *= np.float32(2) ** 56
    pool[:, :30, 128:256] *= np.float32(2) ** -20
    for token, size in enumerate((1e-12, 1e-7, 1.0)):
        query[0, token, :, :512] *= size
    slots[0, 2] = np.where(slots[0, 2] < 30, EMPTY, slots[0, 2])
    found = attend(query, pool, slots, fmt, scale=0.05, implementation="triton_interpret")
    expected = attend64(query, pool, slots, fmt, scale=0.05)
    for token in range(3):
        assert error(found[0][0, token], expected[0][0, token]) < 2e-3, token
        np.testing.assert_allclose(found[1][0, token], expected[1][0, token], rtol=1e-3, atol=1e-3)


def on_card(shape: Shape, fmt, seed: int):
    """Inputs made on the device: pools are large."""
    keys = jax.random.split(jax.random.key(seed), 4)
    query = jax.random.normal(keys[0], (shape.batch, shape.steps, shape.heads, fmt.width))
    sizes = 2 ** jax.random.uniform(keys[1], (shape.layers, shape.slots, 1), minval=-3, maxval=0)
    pack = jax.jit(lambda key, sizes: fmt.pack(jax.random.normal(key, (*sizes.shape[:2], fmt.width)) * sizes))
    lanes = pack(keys[2], sizes)
    slots = jax.random.randint(keys[3], (shape.batch, shape.steps, shape.selected), EMPTY, shape.slots)
    last = jnp.array([EMPTY, EMPTY, shape.slots - 1])[-shape.selected :]
    slots = slots.at[0, 0, -last.size :].set(last)
    return query, lanes, slots.at[-1, -1, : shape.selected // 2].set(EMPTY)


@pytest.mark.gpu
@wide
def test_triton_equals_reference_on_a_gpu(fmt):
    cases = {**SMALL, "past_32_bits": PAST_32_BITS, "1_request": CARDS["1_request"]}
    cases["3_tokens"] = Shape(batch=5, steps=3, heads=64, selected=2048, slots=5000, layers=2)
    for seed, (name, shape) in enumerate(cases.items()):
        query, lanes, slots = on_card(shape, fmt, seed)
        if shape.batch > 1:
            slots = slots.at[0].set(EMPTY)

        def run(form, query=query, lanes=lanes, slots=slots, layer=shape.layers - 1):
            attend = jax.jit(lambda q, pool, at: sparse_mla(q, pool, layer, at, fmt, scale=0.05, implementation=form))
            return [np.asarray(x) for x in attend(query, lanes, slots)]

        found = run("triton")
        assert_close(found, run("reference"), 1e-3)
        rows = tuple(lane[shape.layers - 1, jnp.maximum(slots.reshape(-1), 0)][None] for lane in lanes)
        own = jnp.where(slots >= 0, jnp.arange(slots.size, dtype=jnp.int32).reshape(slots.shape), EMPTY)
        for again in (run("triton"), run("triton", lanes=rows, slots=own, layer=0)):
            for a, b in zip(found, again, strict=True):
                np.testing.assert_array_equal(a, b, err_msg=name)
