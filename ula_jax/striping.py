"""Striping: blocks of `width` addresses are dealt out over `devices`, block b to device b mod P."""

from dataclasses import dataclass

import jax.numpy as jnp

from ula_jax.types import EMPTY, Addresses, Array, Scalar


@dataclass(frozen=True)
class Striping:
    """Addresses dealt out in blocks over `devices`; one device means no striping."""

    devices: int = 1
    width: int = 1
    """Addresses of a block."""

    def __post_init__(self):
        if self.width < 1:
            raise ValueError(f"stripe: expected a width of at least 1 address, found {self.width}; 1 is the usual one")

    @property
    def period(self) -> int:
        """Addresses of one round over the devices."""
        return self.devices * self.width

    def check_page(self, page_size: int) -> None:
        """Pages must hold the same number of rows on every device, so that pages balance the devices."""
        if page_size % self.period:
            nearest = max(1, round(page_size / self.period)) * self.period
            narrower = [n for n in range(1, self.width) if page_size % (n * self.devices) == 0]
            raise ValueError(
                f"page_size: expected a multiple of the {self.period} addresses that a stripe deals out over "
                f"{self.devices} devices, found {page_size}; use {nearest}"
                + (f", or a stripe {narrower[-1]} wide" if narrower else "")
            )

    def owner(self, addresses: Addresses) -> Addresses:
        """Device that stores each address."""
        return addresses // self.width % self.devices

    def local(self, addresses: Addresses, rank: Scalar | int) -> Addresses:
        """Number of each address on device `rank`; EMPTY where another device owns it or it is EMPTY."""
        mine = (addresses >= 0) & (self.owner(addresses) == rank)
        return jnp.where(mine, addresses // self.period * self.width + addresses % self.width, EMPTY)

    def address(self, local: Addresses, rank: Scalar | int) -> Addresses:
        """The address of each local number; EMPTY stays EMPTY."""
        there = local // self.width * self.period + rank * self.width + local % self.width
        return jnp.where(local >= 0, there, EMPTY)

    def owned(self, length: Array, rank: Scalar | int) -> Array:
        """How many of the first `length` positions of a request device `rank` owns. Pages start at device 0."""
        return length // self.period * self.width + jnp.clip(length % self.period - rank * self.width, 0, self.width)

    def share(self, length: int) -> int:
        """The most that any device owns of them."""
        return length // self.period * self.width + min(length % self.period, self.width)

    def in_order(self, parts: Array) -> Array:
        """What the devices have of a run of positions, [..., own positions, devices] -> [..., positions]."""
        blocks = parts.reshape(*parts.shape[:-2], -1, self.width, self.devices)
        return blocks.swapaxes(-1, -2).reshape(*parts.shape[:-2], -1)


UNSTRIPED = Striping()
