"""Exact top-k against a numpy sort."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.topk import top_k

run = jax.jit(top_k, static_argnums=1)


def best(scores, k):
    """Positions by descending score, ties to the lowest; NaN just above -inf."""
    ranked = np.where(np.isnan(scores), np.finfo(np.float32).min, scores)
    return np.argsort(-ranked.astype(np.float64), axis=-1, kind="stable")[..., :k]


def test_f7_nan_never_displaces_a_number():
    """3000 of 4096 scores are NaN; then a shorter step, which may show nothing of the one before."""
    rng = np.random.default_rng(0)
    scores = rng.standard_normal((2, 4096)).astype(np.float32)
    scores[0, rng.permutation(4096)[:3000]] = np.nan
    found = np.asarray(run(jnp.asarray(scores), 1024))
    np.testing.assert_array_equal(found, best(scores, 1024))
    assert not np.isnan(scores[0, found[0]]).any()
    assert len(set(found[0].tolist())) == 1024
    short = scores[:, :1200]
    again = np.asarray(run(jnp.asarray(short), 1024))
    np.testing.assert_array_equal(again, best(short, 1024))
    assert again.max() < 1200


def test_f7_nan_goes_before_the_masked_future():
    scores = jnp.array([-jnp.inf, jnp.nan, -3e38, -jnp.inf, 1.0])
    assert run(scores, 5).tolist() == [4, 2, 1, 0, 3]


def test_f5_a_crowded_threshold_loses_nobody():
    """5000 of 8192 scores lie in [1.000, 1.001]: the multiset of the best 2048 is that of a sort."""
    rng = np.random.default_rng(1)
    scores = rng.standard_normal(8192).astype(np.float32) - 4
    scores[rng.permutation(8192)[:5000]] = 1 + rng.random(5000, np.float32) / 1000
    found = np.asarray(run(jnp.asarray(scores), 2048))
    np.testing.assert_array_equal(np.sort(scores[found]), np.sort(scores)[-2048:])
    assert len(set(found.tolist())) == 2048


def test_f5_a_million_normal_scores():
    scores = np.random.default_rng(2).standard_normal(1_000_000).astype(np.float32)
    found = np.asarray(run(jnp.asarray(scores), 2048))
    np.testing.assert_array_equal(np.sort(scores[found]), np.sort(np.partition(scores, -2048)[-2048:]))


def test_ties_go_to_the_lowest_position():
    assert run(jnp.array([1.0, 2.0, 2.0, 1.0, 2.0, 2.0]), 3).tolist() == [1, 2, 4]
    assert run(jnp.zeros(64), 5).tolist() == [0, 1, 2, 3, 4]
    assert run(jnp.array([0.0, -0.0, 0.0]), 3)[0] == 0


@pytest.mark.parametrize("length", [4, 5, 7])
def test_f8_any_length_from_k(length):
    scores = np.random.default_rng(3).standard_normal((3, 2, length)).astype(np.float32)
    np.testing.assert_array_equal(run(jnp.asarray(scores), 4), best(scores, 4))


@pytest.mark.parametrize(("length", "k"), [(3, 4), (3, 0), (0, 1)])
def test_f8_k_beyond_the_scores_is_an_error(length, k):
    with pytest.raises(ValueError, match=f"expected k from 1 to the {length} scores, found {k}"):
        top_k(jnp.zeros((2, length)), k)
