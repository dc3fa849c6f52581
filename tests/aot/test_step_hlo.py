"""What XLA makes of whole steps on eight H200s: stored rows are never copied, never leave their device in bulk, and
those on the host stay there. `test_controls.py` shows that each of these findings can be made."""

import pytest

from pallas_kernels import triton_call
from pallas_kernels.dispatch import assume_platform
from tests.aot.hlo import collectives, host_programs, large_buffers, triton_calls, unaliased
from tests.aot.steps import compiled, compiled_release

pytestmark = pytest.mark.aot
with assume_platform("gpu"):
    WHY_NOT = triton_call.forms()["triton"]

STEPS = [
    ("ula", "tp", "decode"),
    ("ula", "tp", "prefill"),
    ("ula", "dp", "decode"),
    ("resident_hot", "dp", "decode"),
    ("gpu_only", "tp", "decode"),
    ("hisparse", "tp", "decode"),
    ("hisparse", "tp", "prefill"),
    ("ula:buffer=64", "tp", "decode"),
    ("ula:buffer=64", "tp", "prefill"),
    ("owner_computes", "tp", "decode"),
    ("owner_computes", "tp", "prefill"),
    ("ula", "2x4", "decode"),
    ("ula:buffer=64,exchange=all-to-all", "tp", "decode"),
]
TWO_LANES = ("ula", "tp", "decode", "fp8")
CANDIDATES = ("ula", "tp", "decode", "fp32", "candidates")
every_step = pytest.mark.parametrize("case", [*STEPS, TWO_LANES, CANDIDATES], ids="-".join)


@every_step
def test_pools_are_rewritten_in_place(case):
    step = compiled(*case)
    assert large_buffers(step.program, step.sizes, step.limit) == []
    assert unaliased(step.program, step.pools) == []


@pytest.mark.parametrize("case", STEPS, ids="-".join)
def test_no_temporary_memory_can_hold_a_layer_of_a_pool(case):
    """Kernels may copy a buffer without a word in the HLO, but not without a place for the copy."""
    step = compiled(*case)
    assert step.temporary < step.limit


@every_step
def test_devices_exchange_what_they_must_and_no_history(case):
    step = compiled(*case)
    assert collectives(step.program) == step.expected_collectives
    assert max(nbytes for _, nbytes in step.expected_collectives) < step.limit / 10


@every_step
def test_host_pools_stay_on_the_host_and_no_step_runs_on_the_cpu(case):
    step = compiled(*case)
    host = [shape for shape in step.pools if shape.host]
    groups = len(step.spec.groups) * len(step.spec.row.lanes)
    assert len(host) == (0 if case[0] == "gpu_only" else groups)
    for leaves in (step.program.parameters, step.program.results):
        assert sorted(shape for shape in leaves if shape.host) == sorted(host)
    assert host_programs(step.program) == []


@pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))
@pytest.mark.parametrize("name", ["ula", "resident_hot"])
def test_rows_are_chosen_found_and_moved_by_the_kernels_that_are_tested_here(name):
    calls = triton_calls(compiled(name, "dp", "decode").program)
    scopes = {word for call in calls for word in call.text.partition("metadata")[2].split("/")}
    assert {"top_k", "resolve", "exchange"} <= scopes


def test_release_touches_no_row():
    step = compiled_release("ula", "tp")
    assert large_buffers(step.program, step.sizes, step.limit) == []
    assert unaliased(step.program, step.pools) == []
    assert not collectives(step.program)
    assert step.temporary < step.limit
