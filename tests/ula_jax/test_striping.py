"""Address -> (owner, local number) and back."""

import jax.numpy as jnp
import numpy as np
import pytest

from tests.ula_jax.support import Dealt
from ula_jax.striping import Striping


@pytest.mark.parametrize("devices", [1, 2, 4, 8])
def test_every_address_has_one_owner_and_comes_back(devices):
    striping, addresses = Striping(devices), jnp.arange(64, dtype=jnp.int32)
    owner = np.asarray(striping.owner(addresses))
    assert owner.tolist() == [a % devices for a in range(64)]
    locals_ = np.stack([np.asarray(striping.local(addresses, rank)) for rank in range(devices)])
    assert ((locals_ >= 0).sum(axis=0) == 1).all()
    for address in range(64):
        mine = locals_[owner[address], address]
        assert mine == address // devices
        assert int(striping.address(jnp.int32(mine), int(owner[address]))) == address
    for rank in range(devices):  # each device numbers its own from 0 without a gap
        assert sorted(locals_[rank][locals_[rank] >= 0].tolist()) == list(range(64 // devices))


def test_f17_boundaries():
    striping = Striping(2)
    addresses = jnp.array([63, 64, 127, 128, -1], jnp.int32)
    assert striping.local(addresses, 0).tolist() == [-1, 32, -1, 64, -1]
    assert striping.local(addresses, 1).tolist() == [31, -1, 63, -1, -1]
    assert striping.address(jnp.array([31, -1, 63], jnp.int32), 1).tolist() == [63, -1, 127]


def test_empty_belongs_to_nobody():
    """-1 mod 8 is 7: EMPTY must not land on the last device."""
    empty = jnp.full(3, -1, jnp.int32)
    for rank in range(8):
        assert Striping(8).local(empty, rank).tolist() == [-1, -1, -1]
        assert Striping(8).address(empty, rank).tolist() == [-1, -1, -1]


@pytest.mark.parametrize(("page", "nearest"), [(12, 16), (1, 8), (13, 16), (31, 32)])
def test_pages_must_divide_over_the_devices(page, nearest):
    with pytest.raises(ValueError, match=f"expected a multiple of the 8 addresses.*found {page}; use {nearest}$"):
        Striping(8).check_page(page)
    Striping(8).check_page(nearest)
    Striping(1).check_page(page)


@pytest.mark.parametrize(("devices", "width"), [(1, 1), (2, 3), (4, 2), (8, 1), (3, 4)])
def test_wide_stripes_against_dealing_out(devices, width):
    striping, dealt, count = Striping(devices, width), Dealt(devices, width), 4 * devices * width
    addresses = jnp.arange(count, dtype=jnp.int32)
    assert striping.owner(addresses).tolist() == dealt.owner(np.arange(count)).tolist()
    mine = [[a for a in hand if a < count] for hand in dealt.hands.tolist()]
    for rank, hand in enumerate(mine):
        local = striping.local(addresses, rank)
        assert local[jnp.asarray(hand)].tolist() == list(range(len(hand)))
        assert int((local >= 0).sum()) == len(hand)
        assert striping.address(jnp.arange(len(hand), dtype=jnp.int32), rank).tolist() == hand
    for length in range(count + 1):
        owned = [sum(a < length for a in hand) for hand in mine]
        found = [int(striping.owned(jnp.int32(length), rank)) for rank in range(devices)]
        assert (found, striping.share(length)) == (owned, max(owned))
    assert striping.in_order(jnp.asarray(mine).T[None]).tolist() == [list(range(count))]


def test_a_stripe_wider_than_a_page_names_the_nearest_that_fit():
    with pytest.raises(ValueError, match=r"page_size: .* the 16 addresses .* found 8; use 16, or a stripe 2 wide$"):
        Striping(4, 4).check_page(8)
    Striping(4, 2).check_page(8)
    with pytest.raises(ValueError, match="stripe: expected a width of at least 1 address, found 0"):
        Striping(4, 0)
