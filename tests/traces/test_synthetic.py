"""The trace generator: shapes, rules and statistics."""

from dataclasses import replace

import numpy as np
import pytest

from ula_jax.traces import TraceConfig, fit_fluctuation, generate
from ula_jax.traces.statistics import overlap

SMALL = TraceConfig(requests=3, positions=400, rounds=50, k=20, overlap=None, churn=0.05, depth=2.0, seed=3)


def test_every_row_selects_k_positions_and_the_newest():
    trace = generate(SMALL)
    assert trace.positions.shape == (1, 50, 3, 40)
    assert trace.selected.shape == (1, 50, 3, 20)
    selected, finished = np.sort(trace.selected[0], axis=2), trace.finished[0]
    assert np.all(np.diff(selected, axis=2) > 0)
    assert selected.min() >= 0
    assert selected.max() < trace.length
    newest = selected[:, :, -1]
    grown = np.diff(newest, axis=0)
    assert np.all(grown[~finished[1:]] == 1), "a request grows by one token a round"
    assert finished.any()
    assert np.all(newest[finished] < 400)


def test_runners_up_follow_by_score():
    trace, bare = generate(SMALL), generate(replace(SMALL, depth=1.0))
    assert np.all(np.diff(trace.scores, axis=3) <= 0)
    assert all(np.unique(row).size == 40 for row in trace.positions.reshape(-1, 40))
    np.testing.assert_array_equal(bare.positions, trace.selected)


def test_addresses_of_requests_do_not_meet():
    addresses = generate(SMALL).addresses[0]
    assert all(np.unique(now).size == now.size for now in addresses)


def test_the_same_config_gives_the_same_trace():
    np.testing.assert_array_equal(generate(SMALL).positions, generate(SMALL).positions)


def test_fluctuation_lowers_the_overlap():
    assert fit_fluctuation(TraceConfig(2, 2000, k=64, overlap=0.5)) > fit_fluctuation(
        TraceConfig(2, 2000, k=64, overlap=0.8)
    )
    trace = generate(TraceConfig(4, 2000, rounds=80, k=64, overlap=0.6))
    assert overlap(trace)[0] == pytest.approx(0.6, abs=0.02)


def test_bad_configs_say_why():
    with pytest.raises(ValueError, match=r"k: expected 1 to 280 .* found 300"):
        TraceConfig(positions=400, k=300)
    with pytest.raises(ValueError, match=r"overlap: expected between 0 and 1, found 1\.5"):
        TraceConfig(overlap=1.5)
    with pytest.raises(ValueError, match=r"that is not negative, found .*rounds=-1"):
        TraceConfig(rounds=-1)
    with pytest.raises(ValueError, match=r"overlap: expected one that selections of 250 of 400 positions can have"):
        generate(TraceConfig(positions=400, k=250, overlap=0.2))
    with pytest.raises(ValueError, match=r"depth: expected 1 to 2\.8 .* found 3\.0"):
        TraceConfig(positions=400, k=100, depth=3.0)
