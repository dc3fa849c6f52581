"""Attention over selected rows against float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.sparse_mla import sparse_mla

HEADS, LATENT, WIDTH, SCALE = 3, 8, 12, 0.3
TILE = 16


def attend(query, rows, valid):
    found = jax.jit(sparse_mla, static_argnames=("scale", "latent"))(
        jnp.asarray(query), jnp.asarray(rows), jnp.asarray(valid), scale=SCALE, latent=LATENT
    )
    return [np.asarray(x) for x in found]


def dense64(query, rows):
    """One query [H, W] over rows [T, W], all of them: output [H, C], log-sum-exp [H]."""
    scores = SCALE * query.astype(np.float64) @ rows.astype(np.float64).T
    top = scores.max(-1, keepdims=True)
    weights = np.exp(scores - top)
    return weights @ rows[:, :LATENT] / weights.sum(-1, keepdims=True), np.log(weights.sum(-1)) + top[:, 0]


def inputs(batch, steps, selected, seed=0):
    rng = np.random.default_rng(seed)
    query = rng.standard_normal((batch, steps, HEADS, WIDTH)).astype(np.float32)
    return query, rng.standard_normal((batch, steps, selected, WIDTH)).astype(np.float32)


def test_f1_a_first_tile_of_padding_equals_dense_over_the_rest():
    query, rows = inputs(1, 1, 2 * TILE)
    valid = np.arange(2 * TILE)[None, None] >= TILE
    output, lse = attend(query, rows, valid)
    expected, expected_lse = dense64(query[0, 0], rows[0, 0, TILE:])
    np.testing.assert_allclose(output[0, 0], expected, atol=1e-6)
    np.testing.assert_allclose(lse[0, 0], expected_lse, atol=1e-6)


@pytest.mark.parametrize("poison", [np.inf, -np.inf, np.nan, 3e38])
def test_f2_a_row_of_padding_beside_a_valid_one(poison):
    """Rows that are not selected hold poison: output 0 where nothing is, the neighbour unchanged to the bit."""
    query, rows = inputs(2, 2, TILE)
    valid = np.random.default_rng(1).random((2, 2, TILE)) < 0.5
    valid[0, 1] = valid[1, 0] = False
    clean = attend(query, np.where(valid[..., None], rows, 0), valid)
    output, lse = attend(query, np.where(valid[..., None], rows, poison).astype(np.float32), valid)
    np.testing.assert_array_equal(output, clean[0])
    np.testing.assert_array_equal(lse, clean[1])
    for b, s in ((0, 1), (1, 0)):
        assert not output[b, s].any()
        assert np.isneginf(lse[b, s]).all()
    for b, s in ((0, 0), (1, 1)):
        expected, expected_lse = dense64(query[b, s], rows[b, s, valid[b, s]])
        np.testing.assert_allclose(output[b, s], expected, atol=1e-6)
        np.testing.assert_allclose(lse[b, s], expected_lse, atol=1e-6)


@pytest.mark.parametrize("size", [1.0, 30.0])
def test_softmax_survives_large_scores(size):
    """Scores in the hundreds: exp of them overflows float32."""
    query, rows = inputs(1, 2, 40)
    query *= size
    output, lse = attend(query, rows, np.ones((1, 2, 40), bool))
    for s in range(2):
        expected, expected_lse = dense64(query[0, s], rows[0, s])
        np.testing.assert_allclose(output[0, s], expected, atol=2e-5)
        np.testing.assert_allclose(lse[0, s], expected_lse, rtol=1e-6, atol=1e-6)


def test_one_row_is_read_as_it_is():
    query, rows = inputs(1, 1, 3)
    output, lse = attend(query, rows, np.array([[[False, True, False]]]))
    np.testing.assert_array_equal(output[0, 0], np.tile(rows[0, 0, 1, :LATENT], (HEADS, 1)))
    np.testing.assert_allclose(lse[0, 0], SCALE * query[0, 0].astype(np.float64) @ rows[0, 0, 1], atol=1e-6)


def test_f19_halves_merge_by_their_natural_log_sum_exp():
    """Two shards, one with scores near 0 and one with scores near 5; merged in float64 they equal the whole."""
    query, rows = inputs(1, 1, 20)
    rows[0, 0, 10:] += 5 / SCALE * query[0, 0, 0] / (query[0, 0, 0] ** 2).sum()
    every = np.ones((1, 1, 20), bool)
    parts = [attend(query, rows, every & (half == (np.arange(20) >= 10))) for half in (False, True)]
    weights = np.exp(np.stack([lse for _, lse in parts]).astype(np.float64))
    merged = sum(w[..., None] * output for w, (output, _) in zip(weights, parts, strict=True))
    whole, lse = attend(query, rows, every)
    np.testing.assert_allclose(merged / weights.sum(0)[..., None], whole, atol=1e-6)
    np.testing.assert_allclose(np.log(weights.sum(0)), lse, atol=1e-6)
    assert lse[0, 0, 0] - parts[0][1][0, 0, 0] > 3  # base-2 logarithms would weigh the halves otherwise
