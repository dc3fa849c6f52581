"""Placements by name. To add one: a file beside these, and a line in PLACEMENTS."""

from typing import Any

from ula_jax.parallel import Parallel
from ula_jax.placements.base import Placement
from ula_jax.placements.gpu_only import GpuOnly
from ula_jax.placements.hisparse import HiSparse
from ula_jax.placements.ula import Ula
from ula_jax.plugins import make

PLACEMENTS: dict[str, type] = {"gpu_only": GpuOnly, "hisparse": HiSparse, "ula": Ula}


def make_placement(spec: str, parallel: Parallel, **given: Any) -> Placement:
    """A placement from `name`, `name:parameter=value,...` or `path.py:Class`, with or without parameters after it."""
    placement = make("placement", PLACEMENTS, spec, parallel=parallel, **given)
    if not isinstance(placement, Placement):
        missing = [name for name in dir(Placement) if not name.startswith("_") and not hasattr(placement, name)]
        raise TypeError(f"placement: {type(placement).__name__} in {spec!r} lacks {', '.join(missing)}; add them")
    return placement


__all__ = ["PLACEMENTS", "GpuOnly", "HiSparse", "Placement", "Ula", "make_placement"]
