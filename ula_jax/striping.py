"""Striping: address t lives on device t mod P, where it is number t div P."""

from dataclasses import dataclass

import jax.numpy as jnp

from ula_jax.types import EMPTY, Addresses, Scalar


@dataclass(frozen=True)
class Striping:
    """Addresses dealt out one by one over `devices`; one device means no striping."""

    devices: int = 1

    def check_page(self, page_size: int) -> None:
        """Pages must hold the same number of rows on every device, so that pages balance the devices."""
        if page_size % self.devices:
            nearest = max(1, round(page_size / self.devices)) * self.devices
            raise ValueError(
                f"page_size: expected a multiple of the {self.devices} devices of a stripe, found {page_size}; "
                f"use {nearest}"
            )

    def owner(self, addresses: Addresses) -> Addresses:
        """Device that stores each address."""
        return addresses % self.devices

    def local(self, addresses: Addresses, rank: Scalar | int) -> Addresses:
        """Number of each address on device `rank`; EMPTY where another device owns it or it is EMPTY."""
        mine = (addresses >= 0) & (addresses % self.devices == rank)
        return jnp.where(mine, addresses // self.devices, EMPTY)

    def address(self, local: Addresses, rank: Scalar | int) -> Addresses:
        """The address of each local number; EMPTY stays EMPTY."""
        return jnp.where(local >= 0, local * self.devices + rank, EMPTY)
