"""What is `resident_hot`'s own: rows are written back once, copies stay, and what fits stays on the device."""

from dataclasses import dataclass, replace

import jax
import numpy as np
import pytest

from tests.ula_jax.support import GROUPS, Harness, Want, World, harness
from ula_jax import verify
from ula_jax.placements import PLACEMENTS, ResidentHot
from ula_jax.placements.base import Counters
from ula_jax.verify import InvariantError

SMALL = dict(requests=1, topk=3, context=16, page=8)
"""Sixteen addresses, four device slots."""


def moved(counters):
    """Rows evicted, written back and fetched, alike in both groups."""
    found = [Counters(*row) for row in counters[0].tolist()]
    assert found[0] == found[1]
    return found[0].evictions, found[0].written_back, found[0].host_fetches


def read(world, *addresses):
    return moved(world.step([{0: Want.same(addresses)}]))


def store(world, *addresses):
    return np.sum([moved(world.step([{0: Want.same([a], new=[a])}])) for a in addresses], axis=0).tolist()


@pytest.fixture
def world():
    """Rows 0 to 3 have been on the host alone, 4 to 7 on the device alone."""
    world = World(harness("resident_hot", "lru", "dp", 1, "fp32", **SMALL))
    assert (world.h.capacity.device_slots, world.h.capacity.host_slots) == (4, 16)
    assert store(world, 0, 1, 2, 3) == [0, 0, 0]
    assert store(world, 4, 5, 6, 7) == [4, 4, 0]
    return world


def copies(world):
    return set(np.flatnonzero(world.on_host(world.groups[0])[0]).tolist())


def test_a_row_is_written_back_when_it_first_leaves(world):
    assert copies(world) == {0, 1, 2, 3}
    assert read(world, 0, 1, 2) == (3, 3, 3)  # 4, 5 and 6 leave for the first time
    assert copies(world) == {0, 1, 2, 3, 4, 5, 6}
    assert read(world, 4, 5, 6) == (3, 1, 3)  # 7 does, with two that came from the host
    assert copies(world) == set(range(8))
    for _ in range(3):
        assert read(world, 0, 1, 2) == (2, 0, 2)
        assert read(world, 4, 5, 6) == (2, 0, 2)


def test_a_copy_ends_with_the_row(world):
    """The same addresses again, with other rows: what the host still has of them is not taken for a copy."""
    read(world, 0, 1, 2)
    world.release([range(8)])
    assert copies(world) == set()
    assert world.resident() == set()
    store(world, 0, 1, 2, 3)
    assert store(world, 4, 5, 6, 7) == [4, 4, 0]
    assert read(world, 0, 1, 2) == (3, 3, 3)


def test_nothing_leaves_a_device_that_holds_as_much_as_the_host():
    world = World(harness("resident_hot", "lru", "dp", 1, "fp32", **{**SMALL, "topk": 15}))
    assert (world.h.capacity.device_slots, world.h.capacity.host_slots, world.h.capacity.working_set) == (16, 0, None)
    for address in range(16):
        assert moved(world.step([{0: Want.same([], new=[address])}])) == (0, 0, 0)
    assert read(world, *range(15)) == (0, 0, 0)


def stale(group):
    return replace(group, device=(group.device[0].at[0, 1].add(1), *group.device[1:]))


def copy_at(slot, address):
    """A host slot that names another address."""

    def change(group):
        mapping = jax.tree.map(lambda leaf: leaf[0], group.mapping)
        mapping = replace(mapping, host_address=mapping.host_address.at[slot].set(address))
        return replace(group, mapping=jax.tree.map(lambda leaf: leaf[None], mapping))

    return change


CORRUPTIONS = {
    "stale": (stale, "expected copies that equal the rows on the device"),
    "dead": (copy_at(12, 12), "expected copies of live rows alone"),
    "elsewhere": (copy_at(12, 0), "expected every copy at its address"),
    "lost": (copy_at(3, -1), r"host: expected address_of\(location\(a\)\) = a"),
}


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_verify_finds_broken_copies(world, name):
    """Rows 0, 1 and 2 are in both tiers, 3 to 6 on the host alone."""
    read(world, 0, 1, 2)
    change, message = CORRUPTIONS[name]
    world.groups = (world.groups[0], change(world.groups[1]))
    with pytest.raises(InvariantError, match=f"group 1, device 0: .*{message}"):
        world.check()


@dataclass(frozen=True)
class Forgetful(ResidentHot):
    """A copy outlives its row."""

    def release(self, group, addresses):
        after = super().release(group, addresses)
        return replace(after, mapping=replace(after.mapping, host_address=group.mapping.host_address))


@dataclass(frozen=True)
class Optimist(ResidentHot):
    """Every row that leaves is taken for one that has a copy."""

    def resolve(self, group, selection):
        readable, after, counters = super().resolve(group, selection)
        return readable, replace(after, host=group.host), counters


@pytest.mark.parametrize("broken", [Forgetful, Optimist])
def test_the_world_catches_broken_copies(broken, monkeypatch):
    monkeypatch.setitem(PLACEMENTS, "broken", broken)
    world = World(Harness("broken", "lru", "dp", 1, "fp32", **SMALL))

    def use():
        store(world, *range(8))
        read(world, 0, 1, 2)
        world.release([range(8)])

    with pytest.raises(AssertionError):
        use()


def test_residency_counts_copies(world):
    read(world, 0, 1, 2)
    found = verify.residency(world.h.placement, world.state, [np.arange(8)], world.h.spec)
    layers = sum(len(layers) for layers in GROUPS)
    assert (found.distinct, found.stored) == (8 * layers, (4 + 7) * layers)
