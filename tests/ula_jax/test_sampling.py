"""Tokens depend on logits, seed and position alone."""

import jax
import jax.numpy as jnp
import numpy as np

from ula_jax.sampling import Sampling, sample

ROWS, VOCAB = 4000, 50
run = jax.jit(sample)


def drawn(logits, temperature, seed, position):
    """One token a row; scalars go for every row. Padded to one shape, which is compiled once."""
    rows, vocab = np.shape(logits)
    padded = np.full((ROWS, VOCAB), -np.inf, np.float32)
    padded[:, 0] = 0.0
    padded[:rows, :vocab] = logits
    each = [np.zeros(ROWS, dtype) for dtype in (np.float32, np.int32, np.int32)]
    for array, value in zip(each, (temperature, seed, position), strict=True):
        array[:rows] = value
    temperature, seed, position = map(jnp.asarray, each)
    return np.asarray(run(jnp.asarray(padded), Sampling(temperature, seed), position))[:rows]


def test_greedy_takes_the_lowest_of_the_largest():
    logits = np.array([[0.0, 3.0, 3.0, 1.0], [-1.0, -2.0, -1.0, -5.0], [2.0, 2.0, 2.0, 2.0]], np.float32)
    for seed in (0, 1):
        assert drawn(logits, 0.0, seed, 5).tolist() == [1, 0, 0]


def test_draws_depend_on_seed_and_position_only():
    logits = np.random.default_rng(0).standard_normal((1, 50)).astype(np.float32)
    alone = drawn(logits, 1.0, 7, 13)[0]
    crowd = np.random.default_rng(1).standard_normal((6, 50)).astype(np.float32)
    for place in range(6):  # the company in the batch, and the place in it
        batch = crowd.copy()
        batch[place] = logits[0]
        seeds, positions = np.arange(6) + 100, np.arange(6) + 3
        seeds[place], positions[place] = 7, 13
        assert drawn(batch, 1.0, seeds, positions)[place] == alone
    many = np.repeat(logits, 64, axis=0)
    assert len(set(drawn(many, 1.0, np.arange(64), 13).tolist())) > 10
    assert len(set(drawn(many, 1.0, 7, np.arange(64)).tolist())) > 10
    assert set(drawn(many, 1.0, 7, 13).tolist()) == {alone}


def test_greedy_and_drawn_rows_share_a_batch():
    logits = np.zeros((40, 4), np.float32)
    logits[:, 2] = 0.1
    tokens = drawn(logits, np.tile([0.0, 1.0], 20), np.arange(40), 0)
    assert (tokens[0::2] == 2).all()
    assert set(tokens[1::2].tolist()) == {0, 1, 2, 3}


def test_frequencies_follow_the_softmax_at_each_temperature():
    """4000 draws: within four standard deviations of exp(logit / T) / sum."""
    logits = np.log(np.array([0.1, 0.2, 0.3, 0.4]))
    for temperature in (0.5, 1.0, 2.0):
        expected = np.exp(logits / temperature) / np.exp(logits / temperature).sum()
        tokens = drawn(np.tile(logits, (ROWS, 1)), temperature, np.arange(ROWS), 3)
        found = np.bincount(tokens, minlength=4) / ROWS
        assert (np.abs(found - expected) < 4 * np.sqrt(expected * (1 - expected) / ROWS)).all(), (found, expected)


def test_a_small_temperature_is_almost_greedy():
    logits = np.tile(np.array([1.0, 1.1, 0.0], np.float32), (100, 1))
    assert (drawn(logits, 1e-3, np.arange(100), 0) == 1).all()
