"""Every registered placement, in every layout: what attention reads is what was stored, wherever it was kept."""

import functools

import numpy as np
import pytest

from tests.ula_jax.story import Story
from tests.ula_jax.support import World, harness, kinds
from ula_jax.policies import POLICIES

# Prefill chunks have a compiled step of their own in two layouts (HiSparse then reads the host in place).
LAYOUTS = {
    ("dp", 1, "fp32"): 4,
    ("tp", 1, "bf16"): 2,
    ("dp", 2, "fp8"): 2,
    ("tp", 2, "fp8"): 4,
    ("dp", 8, "bf16"): 2,
    ("tp", 8, "fp32"): 2,
}
CASES = [(kind, layout) for layout in LAYOUTS for kind in kinds()]
CASES += [(kind, layout) for layout in (("tp", 2, "fp8"), ("dp", 8, "bf16")) for kind in kinds(("lru", "pb_lru"))]
CASES = [case for case in CASES if case[0] != ("resident_hot", "lru")]  # one round serves it and `ula`
# Every policy in a compiled step; Belady knows the future, which no step does, and PB-LRU is the default.
CASES += [(("ula", policy), ("dp", 1, "fp32")) for policy in POLICIES if policy not in ("belady", "pb_lru")]
CASES += [(("hisparse", "prefetch"), ("dp", 1, "fp32")), (("ula", "prefetch"), ("tp", 2, "fp8"))]
CASES = list(dict.fromkeys(CASES))


def name_of(kind, layout):
    return "-".join([*filter(None, kind), f"{layout[0]}{layout[1]}", layout[2]])


@functools.cache
def told(kind, layout):
    return Story(World(harness(*kind, *layout)), LAYOUTS[layout]).tell()


@pytest.mark.parametrize(("kind", "layout"), CASES, ids=[name_of(*case) for case in CASES])
def test_a_random_story_reads_back_what_it_stored(kind, layout):
    """The world checks rows, attention, counters and invariants; the outputs are those of `gpu_only` to the bit, or to
    rounding where the placement promises no more."""
    equal = np.testing.assert_array_equal
    if harness(*kind, *layout).split:
        equal = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6)
    for outputs, reference in zip(told(kind, layout), told(("gpu_only", None), layout), strict=True):
        for one, other in zip(outputs, reference, strict=True):
            equal(one[0], other[0])
            equal(one[1], other[1])


MESHES = [
    ("gpu_only", "2x2", 4, {}),
    ("ula", "2x2", 4, {"stripe": 2}),
    ("hisparse", "2x4", 8, {}),
    ("resident_hot", "4x2", 8, {}),
    ("ula", "2x4", 8, {}),
    ("owner_computes", "4x2", 8, {"stripe": 4}),
    ("ula", "tp", 4, {"stripe": 2}),
]


@pytest.mark.parametrize(("name", "mode", "devices", "options"), MESHES)
def test_a_random_story_on_meshes_of_ranks_and_with_wide_stripes(name, mode, devices, options):
    world = World(harness(name, None, mode, devices, "fp8", **options))
    Story(world).tell()
    assert world.h.ranks == {"2x2": 2, "2x4": 2, "4x2": 4, "tp": 1}[mode]


SHARING = [case for case in CASES if case[1] in (("dp", 2, "fp8"), ("tp", 2, "fp8")) and not case[0][1]]


@pytest.mark.parametrize(("kind", "layout"), SHARING, ids=[name_of(*case) for case in SHARING])
def test_requests_may_select_the_same_rows(kind, layout):
    """Except where each request has a private buffer."""
    world = World(harness(*kind, *layout))
    if world.h.capacity.quotas is None:
        story = Story(world, LAYOUTS[layout], share=True)
        story.tell()
        assert story.shared > 50
