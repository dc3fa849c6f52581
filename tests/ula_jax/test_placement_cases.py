"""Small inputs on which placements elsewhere have failed, for every registered placement."""

from dataclasses import dataclass, replace

import jax.numpy as jnp
import numpy as np
import pytest

from tests.ula_jax.support import GROUPS, LATENT, LAYERS, ROPE, Harness, Want, World, harness, kinds
from ula_jax import pool, verify
from ula_jax.placements import PLACEMENTS, GpuOnly, Ula
from ula_jax.placements.base import Counters
from ula_jax.rows import RowFormat
from ula_jax.types import NOWHERE

every_placement = pytest.mark.parametrize("kind", kinds(), ids=lambda kind: kind[0])
SMALL = dict(requests=1, topk=3, context=16, page=8)


def small_world(kind):
    """One request of 16 tokens and four device slots, unless the placement keeps everything on the device."""
    hot = {"buffer": 4} if kind[0] == "hisparse" else {}
    world = World(harness(*kind, "dp", 1, "fp32", **SMALL, **hot))
    assert world.h.capacity.device_slots == (4 if world.h.capacity.host_slots else 16)
    return world


def store(world, addresses, **options):
    """One token a step, each reading itself alone; the counters of all steps."""
    return [world.step([{0: Want.same([a], new=[a])}], **options) for a in addresses]


def counted(counters, name, device=0, group=0):
    return int(counters[device, group, Counters._fields.index(name)])


@every_placement
def test_f3_empty_among_the_selected_fetches_exactly_the_others(kind):
    world = small_world(kind)
    store(world, range(8))
    world.step([{0: Want.same([1, 4])}])
    world.step([{0: Want.same([2, 5])}])
    two_tiers = world.h.capacity.host_slots > 0
    assert world.resident() == ({1, 2, 4, 5} if two_tiers else set(range(8)))
    counters = world.step([{0: Want.same([6, -1, 7])}])
    for group in range(len(GROUPS)):
        assert counted(counters, "host_fetches", group=group) == (2 if two_tiers else 0)
        assert counted(counters, "evictions", group=group) == (2 if two_tiers else 0)
        assert world.resident(group) == ({2, 5, 6, 7} if two_tiers else set(range(8)))


@every_placement
@pytest.mark.parametrize("layout", [("dp", 1, "fp32"), ("tp", 8, "fp32")], ids=["dp1", "tp8"])
def test_f8_contexts_around_topk_beside_a_request_without_rows(kind, layout):
    """Under TP on eight devices the first contexts leave most shards without a token."""
    world = World(harness(*kind, *layout))
    topk, steps = world.h.spec.topk, 2 if layout[0] == "tp" else 1
    nothing = Want.same([])
    world.step([{0: nothing, 1: nothing}], steps)
    for context in range(1, topk + 2):
        world.step([{0: Want.same(range(min(context, topk)), new=[context - 1]), 1: nothing}], steps)
    output, lse = world.outputs[-1][2]
    assert not output[:, 1].any()
    assert np.isneginf(lse[:, 1]).all()
    assert np.isfinite(lse[:, 0, 0]).all()


@every_placement
def test_f10_f20_layers_of_a_group_do_not_share_rows(kind):
    """Layer l writes the pattern l + address / 16; layer 2 is number 1 of its group."""

    def pattern(address):
        numbers = [np.full((1, LATENT + ROPE), layer + address / 16, np.float32) for layer in range(LAYERS)]
        return [((n.view(np.uint32),), n) for n in numbers]

    world = small_world(kind)
    for address in range(8):
        store(world, [address], rows=pattern(address))
    for chosen in ([0, 1, 2], [5, 6, 7], [0, 3, 4]):
        world.step([{0: Want.same(chosen)}])
        for layer, (output, _) in enumerate(world.outputs[-1]):
            assert (output >= layer + chosen[0] / 16 - 1e-5).all()
            assert (output <= layer + chosen[-1] / 16 + 1e-5).all()


@every_placement
def test_f11_one_compiled_step_writes_every_row_and_fills_the_capacity(kind):
    world = small_world(kind)
    steps = store(world, range(16))
    assert len(world.live[0]) == world.h.capacity.addresses == world.h.capacity.tokens == 16
    if world.h.capacity.host_slots:
        assert sum(counted(counters, "evictions") for counters in steps) == 12
        assert len(world.resident()) == 4
    for first in (0, 3, 6, 9, 12, 13):
        world.step([{0: Want.same(range(first, first + 3))}])
    assert world.h.traces == [1]
    world.release([range(16)])
    store(world, [9, 2, 15])
    assert world.resident() == {9, 2, 15}


@every_placement
@pytest.mark.parametrize("layout", [("dp", 2, "fp8"), ("tp", 2, "fp8")], ids=["dp2", "tp2"])
def test_residency_counts_every_copy_of_a_row(kind, layout):
    """Eight tokens on every rank: UlaCache stores each row once, the others once or, if the host always has a copy,
    twice on each device."""
    world = World(harness(*kind, *layout))
    for address in range(8):
        world.step([{0: Want.same([address], new=[address])}] * world.h.ranks, steps=1 if layout[0] == "tp" else 2)
    live = [np.arange(8, dtype=np.int32)] * world.h.ranks
    found = verify.residency(world.h.placement, world.state, live, world.h.spec)
    copies = 2 if kind[0] == "hisparse" else 1
    if layout[0] == "tp" and world.h.placement.striping.devices == 1:
        copies *= 2
    assert found.distinct == 8 * world.h.ranks * LAYERS
    assert found.stored == copies * found.distinct
    assert found.duplicate_bytes == (copies - 1) * found.distinct * world.h.spec.row.nbytes
    assert found.distinct_share == 1 / copies


@dataclass(frozen=True)
class BaseOffset(GpuOnly):
    """F10: every layer writes where the first does."""

    def append(self, group, layer, readable, rows):
        return super().append(group, 0, readable, rows)


@dataclass(frozen=True)
class NoWriteBack(Ula):
    """F11: evicted rows never reach the host."""

    def resolve(self, group, selection):
        readable, after, counters = super().resolve(group, selection)
        return readable, replace(after, host=group.host), counters


@dataclass(frozen=True)
class StaleMap(Ula):
    """F3: victims keep their place in the map."""

    def resolve(self, group, selection):
        readable, after, counters = super().resolve(group, selection)
        return readable, replace(after, mapping=replace(after.mapping, location=group.mapping.location)), counters


@dataclass(frozen=True)
class Shuffled(GpuOnly):
    """Reads the right rows in another order."""

    def attend(self, group, layer, readable, query):
        readable = replace(readable, locations=readable.locations[..., ::-1], valid=readable.valid[..., ::-1])
        return super().attend(group, layer, readable, query)


@dataclass(frozen=True)
class Leaky(GpuOnly):
    """Forgets nothing."""

    def release(self, group, addresses):
        return group


@pytest.mark.parametrize("broken", [BaseOffset, NoWriteBack, StaleMap, Shuffled, Leaky])
def test_the_world_catches_broken_placements(broken, monkeypatch):
    monkeypatch.setitem(PLACEMENTS, "broken", broken)
    world = World(Harness("broken", None, "dp", 1, "fp32", **SMALL))

    def use():
        for address in range(16):
            world.step([{0: Want.same(range(max(0, address - 2), address + 1), new=[address])}])
            if address > 8:
                world.step([{0: Want.same(range(3))}])
        world.release([range(16)])

    with pytest.raises(AssertionError):
        use()


@pytest.mark.parametrize("name", ["ula", "owner_computes"])
def test_f17_rows_on_both_sides_of_a_wide_stripe(name):
    """Positions 63 | 64 and 127 | 128 of two devices with stripes of 64: attention over both parts is that over all."""
    world = World(harness(name, None, "tp", 2, "fp32", requests=1, topk=4, context=256, page=128, stripe=64))
    for address in range(130):
        world.step([{0: Want.same([address], new=[address])}])
    for chosen in ([63, 64, 127, 128], [62, 63], [64, 127], [0, 128, 129]):
        world.step([{0: Want.same(chosen)}])
    owners = [set(np.flatnonzero(world.locations(world.groups[0])[device] != NOWHERE)) for device in range(2)]
    assert owners == [set(range(66)), set(range(64))]


def test_f20_layers_are_numbered_within_their_group():
    """The model's layer 2 is number 1 of a group of two."""
    group = pool.init(2, RowFormat("fp32", LATENT, ROPE), 4, 4, 0)
    slots = jnp.zeros(1, jnp.int32)
    assert pool.read(group, 1, slots)[0].shape == (1, LATENT + ROPE)
    with pytest.raises(IndexError, match="layer: expected 0 to 1"):
        pool.read(group, 2, slots)
