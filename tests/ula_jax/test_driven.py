"""Selections from a trace: attention reads them and nothing else, while the indexers go on picking."""

from dataclasses import replace

import jax
import numpy as np
import pytest

from tests.ula_jax.engines import make_engine, small_model
from ula_jax.address import page_table
from ula_jax.history import Batch
from ula_jax.sampling import Sampling

LENGTH, BATCH, TOPK = 40, 2, 16
SAMPLING = Sampling(np.zeros((1, BATCH), np.float32), np.zeros((1, BATCH), np.int32))


def step_of(rng, tokens, start):
    """Both requests' next `tokens` tokens, at position `start`."""
    ids = rng.integers(0, 64, (1, BATCH, tokens)).astype(np.int32)
    pages = np.stack([page_table([6 * r + i for i in range(6)], 8) for r in range(BATCH)])
    counts, starts = (np.full((1, BATCH), number, np.int32) for number in (tokens, start))
    return Batch(ids, starts, counts, pages[None], np.arange(BATCH, dtype=np.int32)[None])


@pytest.fixture(scope="module", params=["gpu_only", "ula"])
def decode(request):
    """A function that runs one decode step after the same prefill, driven or not."""
    engine = make_engine(small_model("dp", 1), request.param, 100, 200, max_requests=BATCH, trace=True)
    runner, rng = engine.runner, np.random.default_rng(0)
    for start in range(0, LENGTH, 8):
        runner.step(step_of(rng, 8, start), SAMPLING)
    batch = step_of(rng, 1, LENGTH)
    leaves, tree = jax.tree.flatten(runner.state)
    stored = [(np.asarray(leaf), leaf.sharding) for leaf in leaves]

    def run(driven=None):
        runner.state = jax.tree.unflatten(tree, [jax.device_put(*leaf) for leaf in stored])
        return runner.step(replace(batch, driven=driven), SAMPLING)

    return run


def picks(output):
    """[ranks, groups, batch, steps, topk]."""
    return np.stack([np.asarray(group) for group in output.selected], axis=1)


def test_what_the_indexers_picked_gives_the_same_bits_when_it_is_driven(decode):
    own = decode()
    driven = decode(picks(own))
    assert np.array_equal(driven.logits, own.logits)
    assert np.array_equal(driven.counters, own.counters)
    assert [int(total[0]) for total in driven.overruled] == picks(own).sum(axis=(0, 2, 3, 4)).tolist()
    assert own.overruled == ()


def test_other_positions_are_read_instead(decode):
    rng = np.random.default_rng(2)
    chosen = np.full((1, 2, BATCH, 1, TOPK), -1, np.int32)
    for group, request in np.ndindex(2, BATCH):
        chosen[0, group, request, 0, : 5 + group] = [*sorted(rng.choice(LENGTH, 4 + group, replace=False)), LENGTH]
    own, driven = decode(), decode(chosen)
    assert np.array_equal(picks(driven), chosen)
    assert not np.array_equal(driven.logits, own.logits)
    assert int(driven.overruled[0][0]) == picks(own)[:, 0].sum(), "the first indexer sees what it saw"
