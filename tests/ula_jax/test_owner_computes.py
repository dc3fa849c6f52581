"""Attention where the rows are: parts of attention merged, and a model's logits beside those of `gpu_only`."""

import numpy as np
import pytest

from models import ModelConfig, init_model
from tests.ula_jax.engines import SMALL, Recorder, documents, greedy, make_engine
from tests.ula_jax.support import attention64
from ula_jax.parallel import Parallel, make_mesh
from ula_jax.placements import GpuOnly, OwnerComputes
from ula_jax.placements.base import Attended, merged


@pytest.mark.parametrize("parts", [1, 2, 5])
def test_parts_of_attention_merge_to_the_whole(parts):
    """Beside softmax over all rows at once, in float64; some parts, and one query's rows, are empty."""
    rng = np.random.default_rng(parts)
    query, rows = rng.standard_normal((3, 2, 12)) * 4, rng.standard_normal((3, 40, 12))
    valid = rng.random((3, 40)) < 0.7
    part = rng.integers(0, parts, (3, 40))
    part[1], valid[2] = parts - 1, False
    one_by_one = [attention64(query, rows, valid & (part == number), 0.5, 8) for number in range(parts)]
    found = merged(Attended(*(np.stack(arrays).astype(np.float32) for arrays in zip(*one_by_one, strict=True))))
    output, lse = attention64(query, rows, valid, 0.5, 8)
    np.testing.assert_allclose(found.output, output, rtol=2e-6, atol=1e-6)
    np.testing.assert_allclose(found.lse, lse, rtol=2e-6, atol=1e-6)
    assert np.isneginf(found.lse[2]).all()


def test_f19_two_shards_with_scores_0_and_5_merge_by_their_natural_log_sum_exp():
    output, lse = np.array([1, 3], np.float32), np.array([0, 5], np.float32)
    found = merged(Attended(output.reshape(2, 1, 1, 1, 1), lse.reshape(2, 1, 1, 1)))
    weight = np.exp(5) / (1 + np.exp(5))
    np.testing.assert_allclose(found.output, np.full((1, 1, 1, 1), 1 + 2 * weight), rtol=1e-6)
    np.testing.assert_allclose(found.lse, np.full((1, 1, 1), np.log(1 + np.exp(5))), rtol=1e-6)


def decode(devices, placement, device_rows):
    parallel = Parallel(tp=devices)
    config = ModelConfig.from_hub(SMALL | dict(num_attention_heads=8, n_routed_experts=8))
    engine = make_engine(
        init_model(config, make_mesh(parallel), parallel, seed=3), placement(parallel), device_rows, 200,
        max_context=80, max_requests=2, prefill_rows=2, prefill_chunk=1, trace=True,
    )  # fmt: skip
    recorder = Recorder(engine)
    ids = [engine.submit(prompt, greedy(16)) for prompt in documents(2, 64)]
    tokens = sorted((token[:2] for token in engine.run()), key=lambda token: token[0])
    return [recorder.stacked(request) for request in ids], tokens, engine


@pytest.mark.parametrize("devices", [1, 2, 4, 8])
def test_logits_are_those_of_gpu_only_up_to_rounding(devices):
    """And tokens the same. Rows come from the host as far as devices do not hold all of them, and none from another
    device."""
    expected, tokens, _ = decode(devices, GpuOnly, 160)
    found, same, engine = decode(devices, OwnerComputes, max(36, 72 // devices))
    assert same == tokens
    for one, other in zip(found, expected, strict=True):
        assert np.max(np.abs(one - other)) <= 1e-5 * np.max(np.abs(other))
    assert engine.totals["decode"].peer_bytes == 0
    assert (engine.totals["decode"].h2d_bytes > 0) == (devices < 8)
