"""Capturing from the shipped model, and what the replay of real selections must show."""

import json
from dataclasses import replace

import numpy as np
import pytest

from experiments import capture_trace
from models import TINY
from ula_jax.policies import make_policy
from ula_jax.replay import replay
from ula_jax.report import UserError
from ula_jax.traces import load


@pytest.fixture(scope="module")
def captured(tmp_path_factory):
    path = tmp_path_factory.mktemp("captured") / "trace.parquet"
    config = capture_trace.Config(requests=2, prompt=384, new_tokens=26, depth=2.0, trace=path)
    return capture_trace.run(config), load(path)


def test_the_file_holds_what_was_decoded(captured):
    result, trace = captured
    assert (trace.num_rounds, trace.seats, trace.k, trace.depth) == (25, 2, 128, 2.0)
    assert trace.stream_names == tuple(f"rank 0 group {group}" for group in range(4))
    assert trace.row_bytes == tuple(layers * 80 * 4 for layers in (1, 1, 4, 2)), "fp32 rows of 64 + 16 numbers"
    assert json.dumps(trace.meta)
    assert trace.meta["source"] == "selections of tiny"
    assert result["rounds"] == 25
    newest = np.arange(384, 409)
    assert np.all(trace.selected.max(axis=3) <= newest[:, None])
    assert np.all(np.sum(trace.selected >= 0, axis=3) == 128)
    assert result["overlap"] > 2 * 128 / 400, "a trained model's selections persist; random ones overlap by k / context"


def test_belady_is_never_worse_on_real_selections(captured):
    _, trace = captured
    sizes = [300, 400]
    misses = {name: replay(make_policy(name), trace, sizes)["misses"].to_numpy() for name in ("belady", "lru", "lrfu")}
    assert np.all(misses["belady"] <= misses["lru"])
    assert np.all(misses["belady"] <= misses["lrfu"])
    assert np.any(misses["belady"] < misses["lru"])


def test_too_few_tokens_are_refused():
    with pytest.raises(UserError, match=r"new_tokens: expected at least 3 \(two rounds\), found 2"):
        capture_trace.run(replace(capture_trace.Config(), new_tokens=2))
    assert TINY.is_dir()
