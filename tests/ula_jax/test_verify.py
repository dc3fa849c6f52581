"""The checker and the counts can fail: each corruption of a sound state is found."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ula_jax import verify
from ula_jax.history import KVState
from ula_jax.mapping import put_on_device, put_on_host, take_host
from ula_jax.metrics import Residency, Totals
from ula_jax.parallel import Parallel
from ula_jax.placements import make_placement
from ula_jax.placements.base import Counters
from ula_jax.policies import make_policy
from ula_jax.policies.books import Books
from ula_jax.pool import Group, init
from ula_jax.rows import RowFormat
from ula_jax.spec import KVSpec

SPEC = KVSpec(((0,), (1, 2)), RowFormat("bf16", 8, 4), topk=4, index_dim=0, page_size=8, max_context=16)
NOWHERE = -(2**31)
LIVE = np.array([0, 1, 2, 5, 6], np.int32)


def ints(*values):
    return jnp.array(values, jnp.int32)


def sound(device=2, address=(0, 1, 2, 5, 6)):
    """One device: the first `device` of the addresses in device slots 2, 1, ..., the others on the host."""
    mapping = put_on_device(init(1, SPEC.row, 8, 4, 6).mapping, ints(*address[:device]), jnp.arange(2, 2 - device, -1))
    slots, mapping = take_host(mapping, jnp.ones(len(address) - device, bool))
    return put_on_host(mapping, ints(*address[device:]), slots)


def used(*slots):
    """A policy state that counts these of four slots as used."""
    return Books(jnp.full(4, -1, jnp.int32).at[ints(*slots)].set(1), jnp.int32(1))


def check(*mappings, mode="dp", live=(LIVE,), placement="ula", policy=None):
    """Both groups hold the same maps, one of each device; the policy agrees with the first unless given."""
    policy = policy or used(*np.flatnonzero(mappings[0].device_address != -1))
    if placement == "hisparse":  # one buffer, so one state
        policy = jax.tree.map(lambda leaf: leaf[None], policy)
    policies = jax.tree.map(lambda leaf: jnp.stack([leaf] * len(mappings)), policy)
    group = Group((), (), jax.tree.map(lambda *leaves: jnp.stack(leaves), *mappings), policies)
    made = make_placement(placement, Parallel.of(mode, len(mappings)), policy=make_policy("lru"))
    verify.check(made, KVState((group, group), ()), list(live))


def test_sound_states_pass():
    check(sound())
    check(init(1, SPEC.row, 8, 4, 6).mapping, live=[LIVE[:0]])
    check(sound(), sound(address=(3, 4, 7)), live=[LIVE, np.array([7, 3, 4])])
    even, odd = sound(address=(0, 1, 3)), sound(address=(0, 2, 3))  # numbers of addresses 0 2 6 and 1 5 7
    check(even, odd, mode="tp", live=[np.array([0, 1, 2, 5, 6, 7])])


def both_tiers(m):
    return replace(m, host_address=m.host_address.at[5].set(0), host_free_count=m.host_free_count - 1)


CORRUPTIONS = {
    "a lost row": lambda m: replace(m, location=m.location.at[2].set(NOWHERE)),
    "a row that nobody asked for": lambda m: replace(m, location=m.location.at[7].set(3)),
    "two addresses in one slot": lambda m: replace(m, location=m.location.at[1].set(2)),
    "a stale tag": lambda m: replace(m, device_address=m.device_address.at[3].set(0)),
    "a slot that holds another row": lambda m: replace(m, device_address=m.device_address.at[2].set(4)),
    "a host slot that holds another row": lambda m: replace(m, host_address=m.host_address.at[0].set(4)),
    "a row in both tiers": both_tiers,
    "a leaked host slot": lambda m: replace(m, host_free_count=m.host_free_count - 1),
    "a host slot freed twice": lambda m: replace(m, host_free=m.host_free.at[0].set(m.host_free[1])),
    "a free slot that is in use": lambda m: replace(m, host_free=m.host_free.at[0].set(0)),
}


@pytest.mark.parametrize("corruption", CORRUPTIONS)
def test_every_corruption_is_found(corruption):
    broken = CORRUPTIONS[corruption](sound())
    with pytest.raises(verify.InvariantError, match=r"group 0, device 0: .* expected"):
        check(broken)
    with pytest.raises(verify.InvariantError, match="group 0, device 1"):
        check(sound(), broken, live=[LIVE, LIVE])


@pytest.mark.parametrize("slots", [(), (2,), (0, 1, 2), (1, 3)])
def test_a_policy_that_disagrees_with_the_map_is_found(slots):
    """Device slots 1 and 2 hold rows: a leaked slot, or one that would be given away."""
    check(sound(), policy=used(1, 2))
    with pytest.raises(verify.InvariantError, match="group 0, device 0, pool part 0: policy: free slots are"):
        check(sound(), policy=used(*slots))
    absent = Books(used(1, 2).stamp.at[2].set(2**31 - 1), jnp.int32(1))
    with pytest.raises(verify.InvariantError, match="evicted and not used"):
        check(sound(), policy=absent)


def test_an_address_on_the_wrong_device_of_a_stripe_is_found():
    even, odd = sound(address=(0, 1, 3)), sound(address=(0, 2, 3))
    with pytest.raises(verify.InvariantError, match="group 0, device 0: location: expected exactly the live addresses"):
        check(odd, even, mode="tp", live=[np.array([0, 1, 2, 5, 6, 7])])


def test_an_inclusive_placement_keeps_every_row_on_the_host():
    mapping = put_on_host(init(1, SPEC.row, 8, 4, 8).mapping, ints(0, 1, 2), ints(0, 1, 2))
    mapping = put_on_device(mapping, ints(1), ints(3))
    check(mapping, placement="hisparse", live=[LIVE[:3]])
    without = replace(mapping, host_address=mapping.host_address.at[1].set(-1))
    with pytest.raises(verify.InvariantError, match="expected every live row"):
        check(without, placement="hisparse", live=[LIVE[:3]])


def test_totals_weigh_rows_by_the_layers_of_their_group():
    """Two devices, a group of one layer and one of two, 24 bytes a row."""
    totals = Totals(SPEC)
    assert totals.device_hit_rate == 1.0
    counters = np.zeros((2, 2, len(Counters._fields)), np.int32)
    for name, values in {
        "unique": [[10, 20], [30, 40]], "hits": [[9, 10], [20, 11]], "host_fetches": [[1, 10], [10, 29]],
        "written_back": [[1, 2], [3, 4]], "peer_rows": [[0, 5], [5, 0]],
    }.items():  # fmt: skip
        counters[..., Counters._fields.index(name)] = values
    totals.add(counters, tokens=3)
    totals.add(counters, tokens=1)
    assert (totals.steps, totals.tokens) == (2, 4)
    assert totals.count("unique") == 200
    assert totals.device_hit_rate == 0.5
    assert totals.h2d_bytes == 2 * 24 * (1 * (1 + 10) + 2 * (10 + 29))
    assert totals.d2h_bytes == 2 * 24 * (1 * (1 + 3) + 2 * (2 + 4))
    assert totals.peer_bytes == 2 * 24 * (5 + 2 * 5)


def test_totals_do_not_overflow():
    counters = np.full((1, 2, len(Counters._fields)), 2**31 - 1, np.int32)
    totals = Totals(SPEC)
    totals.add(counters, 1)
    totals.add(counters, 1)
    assert totals.count("hits") == 4 * (2**31 - 1)


def test_residency_shares():
    assert Residency(30, 40, 24).distinct_share == 0.75
    assert Residency(30, 40, 24).duplicate_bytes == 240
    assert Residency(0, 0, 24).distinct_share == 1.0
