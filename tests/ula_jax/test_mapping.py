"""The map of one device against a dictionary, under random moves."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ula_jax import mapping as maps

ADDRESSES, DEVICE, HOST, WIDTH = 24, 6, 10, 5
NOWHERE = -(2**31)


def ints(*values):
    return jnp.array(values, jnp.int32)


def padded(values, rng):
    """The values in WIDTH places, EMPTY anywhere among them."""
    found = np.full(WIDTH, -1, np.int32)
    found[np.sort(rng.permutation(WIDTH)[: len(values)])] = values
    return jnp.asarray(found)


def matches(mapping, device, host):
    """Whether the map holds exactly what two dictionaries address -> slot say, and its free stack the rest."""
    location = np.full(ADDRESSES, NOWHERE)
    slots, refuges = np.full(DEVICE, -1), np.full(HOST, -1)
    for address, slot in device.items():
        location[address], slots[slot] = slot, address
    for address, slot in host.items():
        location[address], refuges[slot] = -slot - 1, address
    np.testing.assert_array_equal(mapping.location, location)
    np.testing.assert_array_equal(mapping.device_address, slots)
    np.testing.assert_array_equal(mapping.host_address, refuges)
    count = int(mapping.host_free_count)
    assert sorted(np.asarray(mapping.host_free)[:count].tolist()) == sorted(set(range(HOST)) - set(host.values()))


@pytest.mark.parametrize("seed", range(4))
def test_random_moves_equal_a_dictionary(seed):
    rng = np.random.default_rng(seed)
    put_on_device, put_on_host = jax.jit(maps.put_on_device), jax.jit(maps.put_on_host)
    take_host, free_host, drop = jax.jit(maps.take_host), jax.jit(maps.free_host), jax.jit(maps.drop)
    mapping, device, host = maps.init(ADDRESSES, DEVICE, HOST), {}, {}
    moves = {"arrive": 0, "leave": 0, "return": 0, "drop": 0}
    for _ in range(60):
        move = rng.choice(list(moves))
        room = sorted(set(range(DEVICE)) - set(device.values()))
        if move == "arrive":
            unknown = sorted(set(range(ADDRESSES)) - set(device) - set(host))
            count = min(len(room), len(unknown), WIDTH, int(rng.integers(1, WIDTH + 1)))
            chosen = dict(zip(rng.permutation(unknown)[:count].tolist(), room, strict=False))
            at = padded(list(chosen), rng)
            target = jnp.array([chosen.get(a, -1) for a in at.tolist()], jnp.int32)
            mapping = put_on_device(mapping, at, target)
            device |= chosen
        elif move == "leave":  # device -> host
            leaving = rng.permutation(sorted(device))[:WIDTH].tolist()
            at = padded(leaving, rng)
            target, mapping = take_host(mapping, at >= 0)
            for address, slot in zip(at.tolist(), target.tolist(), strict=True):
                if slot >= 0:
                    assert slot not in host.values(), "handed out twice"
                    host[address] = slot
                    gone = jnp.where(ints(device.pop(address)) >= 0, ints(-1), 0)
                    mapping = replace(
                        mapping,
                        device_address=maps.store(mapping.device_address, mapping.location[ints(address)], gone),
                    )
                    mapping = put_on_host(mapping, ints(address), ints(slot))
        elif move == "return":  # host -> device
            coming = dict(zip(rng.permutation(sorted(host))[:WIDTH].tolist(), room, strict=False))
            at = padded(list(coming), rng)
            mapping = free_host(mapping, maps.host_slot(maps.locate(mapping, at)))
            mapping = put_on_device(mapping, at, jnp.array([coming.get(a, -1) for a in at.tolist()], jnp.int32))
            host = {a: s for a, s in host.items() if a not in coming}
            device |= coming
        else:
            every = sorted({**device, **host}) + sorted(set(range(ADDRESSES)) - set(device) - set(host))[:1]
            gone = rng.permutation(every)[: int(rng.integers(0, 3))].tolist()  # perhaps one that is nowhere
            at = padded(gone, rng)
            slots, mapping = drop(mapping, at)
            assert slots.tolist() == [device.get(a, -1) for a in at.tolist()]
            device = {a: s for a, s in device.items() if a not in gone}
            host = {a: s for a, s in host.items() if a not in gone}
        moves[str(move)] += 1
        matches(mapping, device, host)
    assert min(moves.values()) > 5


@pytest.mark.parametrize("seed", range(2))
def test_rounds_of_finding_and_moving_equal_a_dictionary(seed):
    """Rows are stored, selected by several requests at once and dropped, with both tiers full in between."""
    rng = np.random.default_rng(seed)
    find, move, drop = jax.jit(maps.find), jax.jit(maps.move), jax.jit(maps.drop)
    mapping, device, host, full, moved = maps.init(ADDRESSES, DEVICE, HOST), {}, {}, 0, 0
    for _ in range(80):
        unknown = sorted(set(range(ADDRESSES)) - set(device) - set(host))
        room = DEVICE + HOST - len(device) - len(host)
        new = rng.permutation(unknown)[: min(room, int(rng.integers(0, 3)))].tolist()
        needed = rng.permutation(sorted({**device, **host}))[: DEVICE - len(new)].tolist()
        selected = rng.permutation(needed + new + needed[:2] + [-1]).tolist()
        found = find(mapping, ints(*selected, *[-1] * (12 - len(selected))), padded(new, rng))
        assert found.slots.tolist() == padded_behind([device[a] for a in needed if a in device], found.slots, sort=True)
        arriving = new + sorted((a for a in needed if a in host), key=host.__getitem__)
        assert found.arriving.tolist() == padded_behind(arriving, found.arriving)

        free = sorted(set(range(DEVICE)) - set(device.values()))
        idle = [device[a] for a in rng.permutation(sorted(set(device) - set(needed)))]
        given = (free + idle)[: len(arriving)]
        slots = ints(*padded_behind(given, found.arriving))
        moves, mapping, _ = move(mapping, found.arriving, found.source, slots, found.counts)
        left = {slot: a for a, slot in device.items() if slot in given}
        device = {a: s for a, s in device.items() if a not in left.values()} | dict(zip(arriving, given, strict=True))
        host = {a: s for a, s in host.items() if a not in arriving}
        refuges = {v: r for v, r in zip(moves.victim.tolist(), moves.refuge.tolist(), strict=True) if v >= 0}
        assert set(refuges) == set(left)
        host |= {left[slot]: refuge for slot, refuge in refuges.items()}
        matches(mapping, device, host)
        full, moved = full + (len(host) == HOST), moved + len(left)

        if rng.random() < 0.1:
            gone = rng.permutation(sorted({**device, **host}))[:WIDTH].tolist()
            mapping = drop(mapping, padded(gone, rng))[1]
            device = {a: s for a, s in device.items() if a not in gone}
            host = {a: s for a, s in host.items() if a not in gone}
            matches(mapping, device, host)
        places, _ = maps.slots_of(mapping, ints(*range(-1, ADDRESSES)), ints(-1))
        assert places.tolist() == [-1, *(device.get(a, -1) for a in range(ADDRESSES))]
    assert full > 5
    assert moved > 50


def padded_behind(values, like, sort=False):
    return [*(sorted(values) if sort else values), *[-1] * (like.size - len(values))]


def test_the_free_stack_hands_out_ascending_slots_and_reuses_the_last_freed():
    mapping = maps.init(8, 2, 4)
    slots, mapping = maps.take_host(mapping, jnp.array([True, False, True, True]))
    assert slots.tolist() == [0, -1, 1, 2]
    mapping = maps.free_host(mapping, ints(-1, 2, 0))
    slots, mapping = maps.take_host(mapping, jnp.array([True, True, True, True]))
    assert slots.tolist() == [0, 2, 3, -1]  # the fourth finds nothing, and says so
    assert int(mapping.host_free_count) == 0
    slots, mapping = maps.take_host(mapping, jnp.array([True, False]))
    assert slots.tolist() == [-1, -1]


def test_empty_touches_nothing():
    """-1 must not stand for the last element of any table."""
    mapping = maps.put_on_device(maps.init(4, 2, 2), ints(3), ints(1))
    for same in (
        maps.put_on_device(mapping, ints(-1, -1), ints(-1, -1)),
        maps.put_on_host(mapping, ints(-1, -1), ints(-1, -1)),
        maps.free_host(mapping, ints(-1, -1)),
        maps.drop(mapping, ints(-1, -1))[1],
    ):
        jax.tree.map(np.testing.assert_array_equal, same, mapping)
    assert maps.locate(mapping, ints(-1, 3)).tolist() == [NOWHERE, 1]
    assert maps.lookup(mapping.device_address, ints(-1, 1), -7).tolist() == [-7, 3]
    assert maps.lookup(ints(), ints(-1, -1), -7).tolist() == [-7, -7]


def test_locations_are_slots_of_one_tier():
    location = ints(5, 0, ~0, ~7, NOWHERE)
    assert maps.device_slot(location).tolist() == [5, 0, -1, -1, -1]
    assert maps.host_slot(location).tolist() == [-1, -1, 0, 7, -1]


@pytest.mark.parametrize("seed", range(3))
def test_distinct_equals_a_sorted_set(seed):
    rng = np.random.default_rng(seed)
    for size in (1, 7, 40):
        values = rng.integers(-1, 20, size).astype(np.int32)
        expected = sorted(set(values.tolist()) - {-1})
        found = maps.distinct(jnp.asarray(values), 21).tolist()
        assert found == expected + [-1] * (21 - len(expected))
    assert maps.distinct(ints(-1, -1), 2).tolist() == [-1, -1]
    assert maps.distinct(ints(2**31 - 2, 0, 0), 3).tolist() == [0, 2**31 - 2, -1]
