"""Steps for which the caller says that everything is on the device: nothing is prepared that cannot be needed."""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import pytest

from tests.ula_jax.support import GROUPS, Harness, Want, World, harness
from ula_jax.placements import PLACEMENTS, ResidentHot, Ula
from ula_jax.placements.base import Counters, Selection

SMALL = dict(requests=1, topk=3, context=16, page=8)
"""Sixteen addresses, four device slots; eight of each stripe with two devices."""


@dataclass(frozen=True)
class ResidentUla(Ula):
    def resolve(self, group, selection):
        return super().resolve(group, replace(selection, resident=True))


@dataclass(frozen=True)
class ResidentResidentHot(ResidentHot):
    def resolve(self, group, selection):
        return super().resolve(group, replace(selection, resident=True))


RESIDENT = {"ula": ResidentUla, "resident_hot": ResidentResidentHot}


def lives(monkeypatch, name, policy="pb_lru", layout=("dp", 1, "fp32")):
    """A world in which steps are resident, and the harness for steps that are not."""
    monkeypatch.setitem(PLACEMENTS, "resident", RESIDENT[name])
    return World(Harness("resident", policy, *layout, **SMALL)), harness(name, policy, *layout, **SMALL)


def counted(counters, group=0):
    return Counters(*counters[0, group].tolist())


@pytest.mark.parametrize("policy", ["pb_lru", "lru", "s3_fifo", "quota_lru"])
@pytest.mark.parametrize("name", RESIDENT)
def test_rows_stay_until_the_device_is_full_and_leave_from_then_on(name, policy, monkeypatch):
    world, moving = lives(monkeypatch, name, policy)
    for address in range(4):
        counters = world.step([{0: Want.same(range(address), new=[address])}])
        for group in range(len(GROUPS)):
            found = counted(counters, group)
            assert (found.hits, found.host_fetches, found.evictions, found.dropped) == (address, 0, 0, 0)
    assert world.resident() == {0, 1, 2, 3}

    world.h = moving
    world.step([{0: Want.same([2, 3], new=[4])}])
    assert world.resident() >= {2, 3, 4}
    for first in (0, 2, 0, 2):
        found = counted(world.step([{0: Want.same(range(first, first + 3))}]))
        assert world.resident() >= set(range(first, first + 3))
        assert found.evictions == found.host_fetches > 0


def test_what_was_used_in_resident_steps_is_forgotten(monkeypatch):
    """Every row counts as used just before the first step that may move rows: the lowest slot goes."""
    world, moving = lives(monkeypatch, "ula")
    for address in range(4):
        world.step([{0: Want.same([], new=[address])}])
    world.step([{0: Want.same([0])}])
    world.h = moving
    world.step([{0: Want.same([3], new=[4])}])
    assert world.resident() == {1, 2, 3, 4}


def test_striped_rows_stay_with_their_owner(monkeypatch):
    world, moving = lives(monkeypatch, "ula", layout=("tp", 2, "fp32"))
    for address in range(6):
        counters = world.step([{0: Want.same(range(max(0, address - 3), address), new=[address])}])
        assert counted(counters).peer_rows == len([a for a in range(max(0, address - 3), address) if a % 2])
    assert [world.resident(device=device) for device in range(2)] == [{0, 2, 4}, {1, 3, 5}]
    world.h = moving
    for address in range(6, 16):
        world.step([{0: Want.same(range(address - 3, address), new=[address])}])


@pytest.mark.parametrize("name", RESIDENT)
def test_a_caller_who_is_wrong_is_told(name, monkeypatch):
    """Row 0 is on the host and not read; a sixth row takes the slot of another."""
    world, moving = lives(monkeypatch, name)
    for address in range(4):
        world.step([{0: Want.same([], new=[address])}])
    world.h = moving
    world.step([{0: Want.same([1, 2, 3], new=[4])}])
    assert world.resident() == {1, 2, 3, 4}
    group = jax.tree.map(lambda leaf: leaf[0], world.groups[0])

    def dropped(selected, new):
        addresses = jnp.full((1, 1, 3), -1, jnp.int32).at[0, 0, : len(selected)].set(jnp.asarray(selected, jnp.int32))
        unseen = jnp.zeros((1, 0), jnp.int32)
        selection = Selection(
            addresses, jnp.asarray([[new]]), jnp.zeros(1, jnp.int32), unseen, unseen.astype(jnp.float32), resident=True
        )
        return int(moving.placement.resolve(group, selection)[2].dropped)

    assert dropped([1, 2], -1) == 0
    assert dropped([1, 0], -1) == 1
    assert dropped([1, 2], 5) == 1
