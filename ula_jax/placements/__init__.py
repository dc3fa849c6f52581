"""Registered placements: one system a file, one line here."""

from ula_jax.parallel import Parallel
from ula_jax.placements.base import Placement
from ula_jax.placements.gpu_only import GpuOnly
from ula_jax.placements.hisparse import HiSparse
from ula_jax.placements.ula import Ula
from ula_jax.plugins import load

PLACEMENTS = {"gpu_only": GpuOnly, "hisparse": HiSparse, "ula": Ula}


def make_placement(name: str, parallel: Parallel, **parameters) -> Placement:
    """A registered placement by name, or `path.py:Class` from outside the tree."""
    return load("placement", PLACEMENTS, name)(parallel=parallel, **parameters)


__all__ = ["PLACEMENTS", "GpuOnly", "HiSparse", "Placement", "Ula", "make_placement"]
