"""Ranks of several devices each: DP and TP at once, and stripes wider than one address."""

from functools import cache

import numpy as np
import pytest

from models.config import ModelConfig
from models.weights import init_model
from tests.ula_jax.engines import SMALL, Recorder, documents, greedy, make_engine
from ula_jax.parallel import Parallel, make_mesh
from ula_jax.placements import GpuOnly, OwnerComputes, Ula

TOPK, PROMPT, NEW = 16, 56, 8


@cache
def model_of(parallel):
    config = ModelConfig.from_hub(SMALL | dict(num_attention_heads=8, n_routed_experts=8))
    return init_model(config, make_mesh(parallel), parallel, seed=3)


@cache
def decode(placement, device_rows, gather="scores"):
    """Two requests on every rank and one that waits for a seat; invariants are checked after every step."""
    parallel = placement.parallel
    engine = make_engine(
        model_of(parallel), placement, device_rows, 100, max_requests=2, prefill_rows=2, prefill_chunk=2, trace=True,
        max_context=PROMPT + NEW, gather=gather,
    )  # fmt: skip
    recorder = Recorder(engine)
    ids = [engine.submit(prompt, greedy(NEW)) for prompt in documents(2 * parallel.dp + 1, PROMPT)]
    tokens = sorted((token[:2] for token in engine.run()), key=lambda token: token[0])
    assert {engine.requests[request].rank for request in ids} == set(range(parallel.dp))
    return [recorder.stacked(request) for request in ids], tokens, engine


@pytest.mark.parametrize(
    ("placement", "device_rows", "gather"),
    [
        (Ula(Parallel(4, 2), stripe=4), 40, "scores"),
        (Ula(Parallel(2, 4), stripe=2), 36, "candidates"),
        (Ula(Parallel(2, 4), buffer=TOPK + 1, stripe=2), 80, "scores"),
    ],
)
def test_logits_equal_gpu_only_bit_for_bit(placement, device_rows, gather):
    expected, tokens, _ = decode(GpuOnly(placement.parallel), 200)
    found, same, engine = decode(placement, device_rows, gather)
    assert same == tokens
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other)
    count = engine.totals["decode"].count
    assert count("peer_rows") > 0
    assert count("host_fetches") > 0 or placement.parallel.tp == 4
    assert count("buffer_hits") > 0 or not placement.buffer


def test_owners_compute_on_a_mesh_of_ranks():
    parallel = Parallel(4, 2)
    expected, tokens, _ = decode(GpuOnly(parallel), 200)
    found, same, _ = decode(OwnerComputes(parallel, stripe=2), 40)
    assert same == tokens
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


def test_a_mesh_of_ranks_computes_what_one_device_does():
    """Each request is some rank's; sums over devices differ by rounding alone."""
    alone, tokens, _ = decode(GpuOnly(Parallel()), 600)
    for parallel in (Parallel(4, 2), Parallel(2, 4)):
        found, mine, _ = decode(GpuOnly(parallel), 200)
        assert [token for token in mine if token[0] < len(alone)][: len(tokens)] == tokens
        for one, other in zip(found, alone, strict=False):
            np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)
