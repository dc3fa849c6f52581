"""The trace generator: shapes, rules and statistics."""

import numpy as np
import pytest

from ula_jax.traces import TraceConfig, fit_fluctuation, generate

SMALL = TraceConfig(requests=3, positions=400, rounds=50, k=20, overlap=None, churn=0.05, seed=3)


def test_every_row_selects_k_positions_and_the_newest():
    trace = generate(SMALL)
    assert trace.selected.shape == (50, 3, 20)
    assert trace.selected.dtype == np.int32
    assert np.all(np.diff(trace.selected, axis=2) > 0)
    assert trace.selected.min() >= 0
    assert trace.selected.max() < trace.positions
    newest = trace.selected[:, :, -1]
    grown = np.diff(newest, axis=0)
    assert np.all(grown[~trace.finished[1:]] == 1), "a request grows by one token a round"
    assert trace.finished.any()
    assert np.all(newest[trace.finished] < 400)


def test_addresses_of_requests_do_not_meet():
    addresses = generate(SMALL).addresses()
    assert all(np.unique(now).size == now.size for now in addresses)


def test_the_same_config_gives_the_same_trace():
    np.testing.assert_array_equal(generate(SMALL).selected, generate(SMALL).selected)


def test_fluctuation_lowers_the_overlap():
    assert fit_fluctuation(TraceConfig(2, 2000, k=64, overlap=0.5)) > fit_fluctuation(
        TraceConfig(2, 2000, k=64, overlap=0.8)
    )
    trace = generate(TraceConfig(4, 2000, rounds=80, k=64, overlap=0.6))
    assert trace.overlap() == pytest.approx(0.6, abs=0.02)


def test_bad_configs_say_why():
    with pytest.raises(ValueError, match=r"k: expected 1 to 280 .* found 300"):
        TraceConfig(positions=400, k=300)
    with pytest.raises(ValueError, match=r"overlap: expected between 0 and 1, found 1\.5"):
        TraceConfig(overlap=1.5)
