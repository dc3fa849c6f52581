"""Address -> (owner, local number) and back."""

import jax.numpy as jnp
import numpy as np
import pytest

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
    with pytest.raises(ValueError, match=f"expected a multiple of the 8 devices.*found {page}; use {nearest}$"):
        Striping(8).check_page(page)
    Striping(8).check_page(nearest)
    Striping(1).check_page(page)
