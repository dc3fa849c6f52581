"""A placement may not change one bit of the logits: a hundred decode steps under constant eviction."""

from dataclasses import dataclass

import numpy as np
import pytest

from tests.ula_jax.engines import Recorder, documents, greedy, make_engine, small_model
from ula_jax.metrics import Totals
from ula_jax.parallel import Parallel
from ula_jax.placements import GpuOnly, HiSparse, ResidentHot, Ula
from ula_jax.spec import Budget, Capacity, KVSpec

PROMPT, NEW, TOPK = 24, 112, 16
CONTEXT = PROMPT + NEW
PER_RANK = {"dp": 2, "tp": 6}
"""Requests. Under TP many, so that chance spreads their selections evenly over the owners."""


@dataclass(frozen=True)
class TightUla(Ula):
    """UlaCache with a device pool of a given size.

    The worst case that its own capacity provides for (all selected rows on one owner) would be a larger pool than this
    test wants. If this one is too small after all, the engine stops: "expected a place for every row".
    """

    device_slots: int = 0

    def capacity(self, spec: KVSpec, budget: Budget) -> Capacity:
        ranks = self.parallel.dp
        host = 1600 - (1600 + self.device_slots) % spec.page_size
        addresses = (self.device_slots + host) * self.striping.devices
        return Capacity(spec, ranks, addresses, self.device_slots, host, self.striping)


@dataclass(frozen=True)
class TightResidentHot(ResidentHot):
    """Likewise."""

    device_slots: int = 0

    def capacity(self, spec: KVSpec, budget: Budget) -> Capacity:
        return Capacity(spec, self.parallel.dp, 1600, self.device_slots, 1600)


def decode(mode: str, devices: int, rows: str, placement):
    """Logits of each request at every position, the engine and its record. One step shape for prompt and output."""
    model = small_model(mode, devices)
    per_rank, ranks = PER_RANK[mode], model.parallel.dp
    engine = make_engine(
        model, placement, 1800, 1800, rows=rows, max_context=CONTEXT, max_requests=per_rank,
        prefill_rows=per_rank, prefill_chunk=1, trace=True, verify=False,
    )  # fmt: skip
    recorder = Recorder(engine)
    ids = [engine.submit(prompt, greedy(NEW)) for prompt in documents(per_rank * ranks, PROMPT)]
    for step in range(CONTEXT):
        engine.step()
        if step % 32 == 0:
            engine.verify()
    assert not engine.busy
    assert engine.most_running == len(ids), "all requests were meant to run at once"
    return [recorder.stacked(request) for request in ids], engine, recorder


@pytest.mark.parametrize("rows", ["fp32", "bf16", "fp8"])
@pytest.mark.parametrize(("mode", "devices"), [("dp", 2), ("tp", 2), pytest.param("tp", 1, marks=pytest.mark.gpu)])
def test_logits_equal_gpu_only_bit_for_bit(mode, devices, rows):
    parallel = Parallel.of(mode, devices)
    expected, _, recorder = decode(mode, devices, rows, GpuOnly(parallel))
    last = CONTEXT - 2
    union = sum(len(recorder.selected[request][last][0]) for request in recorder.selected)
    assert union == len(recorder.selected) * TOPK

    slots = int(1.5 * union) // devices
    found, engine, _ = decode(mode, devices, rows, TightUla(parallel, device_slots=slots))
    assert engine.runner.capacity.device_slots * devices <= 1.5 * union
    _assert_evicts(engine.totals["decode"], NEW)
    _assert_same_bits(expected, found)

    if rows == "fp8" and (mode, devices) != ("tp", 2):  # there each device needs all that is selected, and not half
        found, engine, _ = decode(mode, devices, rows, TightResidentHot(parallel, device_slots=slots))
        _assert_evicts(engine.totals["decode"], NEW)
        _assert_same_bits(expected, found)

    found, engine, _ = decode(mode, devices, rows, HiSparse(parallel, buffer=23))
    assert 23 <= 1.5 * TOPK  # noqa: SIM300
    _assert_evicts(engine.totals["decode"], NEW)
    _assert_same_bits(expected, found)


def test_the_comparison_can_fail():
    """Another row format must show up in the bits."""
    one = decode("dp", 1, "fp32", GpuOnly(Parallel()))[0]
    other = decode("dp", 1, "bf16", GpuOnly(Parallel()))[0]
    with pytest.raises(AssertionError):
        _assert_same_bits(one, other)


def _assert_same_bits(expected: list[np.ndarray], found: list[np.ndarray]) -> None:
    for a, b in zip(expected, found, strict=True):
        np.testing.assert_array_equal(a.view(np.uint32), b.view(np.uint32))


def _assert_evicts(totals: Totals, steps: int) -> None:
    assert totals.steps >= 100
    assert totals.count("evictions") > 2 * totals.steps, "expected eviction in step after step"
    assert 0 < totals.device_hit_rate < 1
